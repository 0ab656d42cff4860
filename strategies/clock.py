"""Moments that cost nothing to note, on CPUs and in the streams of GPUs.

A GPU runs behind the program: what the program's clock says between two lines is not what the GPU
took. There a moment is an event in the stream, and asked for its time only when it has passed.
"""

from __future__ import annotations

import time

import torch

Moment = float | torch.cuda.Event


def moment(device: torch.device) -> Moment:
    """Now: in seconds, or on a GPU when it has done what was asked of it until here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(first: Moment, second: Moment) -> float:
    """From one moment to a later one; waits for it on a GPU that has not reached it."""
    if isinstance(first, float) or isinstance(second, float):
        assert isinstance(first, float) and isinstance(second, float)
        return second - first
    second.synchronize()
    return first.elapsed_time(second) / 1e3
