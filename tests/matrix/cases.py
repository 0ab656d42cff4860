"""What a case is, and the numbers of all of them with one strategy."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from lightning_fabric.utilities import move_data_to_device

from tests.matrix import trainings
from tests.matrix.trainings import SIZE, make

CASES: dict[str, Callable[[str], dict[str, Any]]] = {}
WITHOUT_DDP: dict[str, str] = {}  # why DDP has no such case
TOLERANCES: dict[str, float] = {}


def case(without_ddp: str = "", tolerance: float = 1e-6) -> Callable:
    """List a function as a case; the tolerance is relative, and absolute for numbers below 1."""

    def listed(function: Callable) -> Callable:
        name = function.__name__
        CASES[name], TOLERANCES[name] = function, tolerance
        if without_ddp:
            WITHOUT_DDP[name] = without_ddp
        return function

    return listed


def run_cases(
    strategy: str, names: list[str], device: str = "cpu", buckets_alone: bool = False
) -> dict[str, Any]:
    """The named cases; where one fails, the traceback takes the place of its numbers."""
    trainings.DEVICE, trainings.BUCKETS_ALONE = device, buckets_alone
    torch.backends.cudnn.allow_tf32 = False  # 10 bits would hide what is compared
    results: dict[str, Any] = {"size": SIZE, "strategy": type(make(strategy)).__name__}
    for name in names:
        if strategy == "ddp" and name in WITHOUT_DDP:
            continue
        try:
            results[name] = move_data_to_device(CASES[name](strategy), "cpu")
        except Exception:
            results[name] = traceback.format_exc()
            if SIZE > 1:  # the others may wait for this rank
                raise
    return results
