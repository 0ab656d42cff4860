"""Moments that cost nothing to note, on CPUs and in the streams of GPUs.

A GPU runs behind the program, so the program's clock does not measure it. There a moment is an
event in the stream, whose time is asked for only when the GPU has passed it.
"""

from __future__ import annotations

import time

import torch

Moment = float | torch.cuda.Event


def moment(device: torch.device) -> Moment:
    """Now, in seconds; for a GPU, when it will have done what was queued until now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(first: Moment, second: Moment) -> float:
    """From one moment to a later one; waits for a GPU that has not reached the later one."""
    if isinstance(first, float) or isinstance(second, float):
        assert isinstance(first, float) and isinstance(second, float)
        return second - first
    second.synchronize()
    return first.elapsed_time(second) / 1e3
