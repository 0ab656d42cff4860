"""One rank of tests: calls functions of test modules and saves what they return.

    horovodrun -np 2 python tests/worker.py FOLDER

The n-th order is FOLDER/n.json, {"module": ..., "function": ..., "arguments": {...}}. Rank r
answers with {"size": hvd.size(), "result": ...} in FOLDER/n.r.pt. An order of null ends it, and
so does an hour without any: who ordered may be gone. The orders are those of conftest.py.
"""

import faulthandler
import importlib
import itertools
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import horovod.torch as hvd
import pytorch_lightning  # noqa: F401  by most functions
import torch

# preload: above this line only imports, which ranks that our launcher starts share.


def main() -> None:
    faulthandler.enable()  # where a crash of torch's or Horovod's own code was
    folder = Path(sys.argv[1])
    for number in itertools.count(1):
        file, began = folder / f"{number}.json", time.monotonic()
        while not file.exists():
            if time.monotonic() > began + 3600:
                sys.exit("no order for an hour")
            time.sleep(0.02)
        if (order := json.loads(file.read_text())) is None:
            break
        function = getattr(importlib.import_module(order["module"]), order["function"])
        faulthandler.dump_traceback_later(500)  # where it hangs: conftest.py waits for 540 s
        result = function(**order["arguments"])
        faulthandler.cancel_dump_traceback_later()
        hvd.init()
        answer = folder / f"{number}.{hvd.rank()}.pt"
        torch.save({"size": hvd.size(), "result": result}, answer.with_suffix(".part"))
        answer.with_suffix(".part").rename(answer)


if __name__ == "__main__":  # workers of loaders that are not forked import this file again
    main()
