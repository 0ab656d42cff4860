"""What a run was made with: the packages, and the commit of this repository."""

from __future__ import annotations

import contextlib
import importlib.metadata
import subprocess

from runs.folders import ROOT

PACKAGES = ["torch", "torchvision", "pytorch-lightning", "torchmetrics", "horovod", "hydra-core"]


def versions() -> dict[str, str]:
    """The versions of those packages that are installed."""
    installed = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def commit() -> str | None:
    """The commit, with -dirty behind it if files differ from it; None outside a repository."""
    # safe.directory: in a container the checkout may be another user's.
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "describe", "--always"]
    command += ["--dirty", "--abbrev=40", "--exclude=*"]  # a tag would take the commit's place
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() or None
