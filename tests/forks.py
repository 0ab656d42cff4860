"""template.py with several command lines, each in a fork of one process that has made the imports.

    python tests/forks.py '[["train=false"], ["run_dir=conf"]]'

Prints a JSON list: the exit status of each and what it printed.
"""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import datamodules.digits  # noqa: F401
import models.classifier  # noqa: F401
import template
from cluster.preload import freeze


def started(arguments: list[str]) -> tuple[int, IO[str]]:
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115
    if (pid := os.fork()) == 0:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    return pid, output


def ended(pid: int, output: IO[str]) -> tuple[int, str]:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output.seek(0)
    return status, output.read()


freeze()
script, ends, before = str(template.__file__), [], None
for arguments in json.loads(sys.argv[1]):  # two at a time
    now = started(arguments)
    ends += [ended(*before)] if before else []
    before = now
print(json.dumps([*ends, ended(*before)] if before else []))
