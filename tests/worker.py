"""One rank of a test: calls a function of a test module and saves what it returns.

    horovodrun -np 2 python tests/worker.py FOLDER tests.test_strategy train '{"steps": 20}'

Rank r leaves {"size": hvd.size(), "result": ...} in FOLDER/r.pt; see the fixture `launch`.
"""

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import horovod.torch as hvd
import torch

folder, module, function, arguments = sys.argv[1:]
result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
hvd.init()
torch.save({"size": hvd.size(), "result": result}, Path(folder) / f"{hvd.rank()}.pt")
