"""A *_worker.py on some ranks: what it prints meanwhile is shown, its last line of JSON read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.launching import Failed, say
from cluster.environment import ROOT
from cluster.hosts import Refusal


def launched(
    module: str,
    options: dict[str, Any],
    where: list[str],
    prefix: list[str] | None = None,
    each: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """Run `module` on some ranks; the last line of JSON that rank 0 prints.

    Args:
        where: -np, -H and --hostfile of cluster.horovodrun.
        prefix: a command that runs the launcher elsewhere, as on another host.
        each: called with each line of JSON when it comes.

    Raises:
        Refusal: with the "error" in such a line.
        Failed: when there is no such line.
    """
    command = [sys.executable, "-m", "cluster.horovodrun", *where]
    command += [sys.executable, "-m", module, json.dumps(options)]
    process = subprocess.Popen(
        [*(prefix or []), *command], cwd=ROOT, text=True, bufsize=1,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    result: dict[str, Any] | None = None
    try:
        for line in process.stdout:
            text = line.rstrip("\n").removeprefix("[0]<stdout>:")
            if text.startswith("{"):
                result = json.loads(text)
                if "error" not in result:
                    each(result)
            else:
                say(f"  {text}")
        process.wait()
    except BaseException:
        process.terminate()  # the launcher ends what it started
        process.wait()
        raise
    if result and "error" in result:
        raise Refusal(result["error"])
    if result is None or process.returncode:
        raise Failed(f"error: the ranks ended with exit code {process.returncode}, see above")
    return result
