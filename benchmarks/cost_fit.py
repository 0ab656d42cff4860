"""The constants of a network, fitted to all-reduces that were timed.

Pure functions. Each all-reduce, with the agreement of the ranks before it, is an equation in the
constants of benchmarks/cost_model.py; `fit` takes those that leave the least error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from benchmarks.cost_model import agreement, all_reduce, without_memory

# By operations: see Network.algorithms and .controller. With NCCL ranks agree over Gloo.
ALGORITHMS = {"nccl": ("ring", "tree"), "gloo": ("shared",), "mpi": ("ring", "tree")}
CONTROLLERS = {"nccl": "dissemination", "gloo": "dissemination", "mpi": "tree"}
SINCE = 94  # the patches of `make install` with which ranks agree and sum as they do now


class Link(NamedTuple):
    """What joins ranks inside a host, or hosts: latency in seconds, bandwidth in bytes per second,
    and where these are from."""

    latency: float
    bandwidth: float
    source: str = "as described"


@dataclass(frozen=True)
class Measurement:
    """An all-reduce that was timed, on links of unknown latency and bandwidth.

    Attributes:
        ranks: of the ring that is on these links.
        hops: how often it pays their latency.
        sent: bytes of it that go over the slowest of them.
        rate: bytes per second of that link, where it is known.
        known: seconds that other links take, such as those inside hosts.
    """

    ranks: int
    seconds: float
    hops: float
    sent: float
    rate: float = 1.0
    known: float = 0.0


@dataclass(frozen=True)
class Fit:
    """`share` is that of the links' rate which the bytes get; without a known rate the bandwidth.

    `error` is the median of |fitted / measured - 1|.
    """

    fixed: float
    latency: float
    share: float
    error: float


def tells_fixed(measurements: Sequence[Measurement]) -> bool:
    """Whether they tell `fixed` from alpha: see `fit`."""
    several = len({measurement.ranks for measurement in measurements}) > 1
    return several or not any(measurement.hops for measurement in measurements)


def fit(measurements: Sequence[Measurement], burst: float = 0.0) -> Fit:
    """The least squares of relative errors, over constants that are not negative, of

        seconds - known = fixed + hops alpha + (sent - burst) / (share rate)

    `burst` is for rested links with a known token bucket. Measurements on one number of ranks
    cannot separate `fixed` from alpha: then fixed is 0, and alpha an upper bound, unless no hop is
    among them.

    Raises:
        ValueError: with fewer than two sizes, or times that do not grow with them.
    """
    if len({m.sent for m in measurements}) < 2:
        raise ValueError("a fit needs all-reduces of two sizes at least")
    intercept = float(tells_fixed(measurements))
    matrix = np.array(
        [[intercept, m.hops, max(0.0, m.sent - burst) / m.rate] for m in measurements]
    )
    seconds = np.array([m.seconds for m in measurements])
    matrix /= seconds[:, None]
    target = 1 - np.array([m.known for m in measurements]) / seconds
    scale = np.maximum(matrix.max(axis=0), 1e-30)  # so that all columns are of like size
    constants = nnls(matrix / scale, target)[0] / scale
    fixed, latency, inverse = (float(value) for value in constants)
    if inverse == 0:
        raise ValueError("times do not grow with bytes: no bandwidth can be fitted")
    error = float(np.median(np.abs(matrix @ constants - target)))
    return Fit(fixed, latency, 1 / inverse, error)


def patches_of(result: dict[str, Any]) -> int:
    """The number of the patches of the Horovod that a file was measured with; 0 without any."""
    version = result.get("versions", {}).get("horovod", "")
    patches = re.search(r"\.p(\d+)\b", version)
    return int(patches[1]) if patches else 0


def measurements_of(
    result: dict[str, Any], times: str, inside: Link | None = None
) -> list[Measurement]:
    """The all-reduces of a file of benchmarks/allreduce.py.

    Args:
        times: key of the times that count.
        inside: what joins the ranks of its hosts, if it is known; None: as between hosts.

    Raises:
        ValueError: for a Horovod that summed and agreed otherwise than that of `make install` now.
    """
    if patches_of(result) < SINCE:
        raise ValueError(
            f"its Horovod summed or agreed in other ways than since wheel p{SINCE}: make "
            "bench-allreduce again"
        )
    operations = result["operations"].lower()
    algorithms, controller = ALGORITHMS[operations], CONTROLLERS[operations]
    off = result.get("environment", {}).get("HOROVOD_SHARED_MEMORY") == "0"
    if off or len({*Counter(result["ranks"]).values()}) > 1:  # not equally many on each host
        algorithms, controller = without_memory(algorithms, controller)
    ranks, hosts = len(result["ranks"]), len(result["hosts"])
    agreed = agreement(ranks, hosts, controller)
    measurements = []
    for row in result["sizes"]:
        # The one with the fewest hops: how long these take is not known yet.
        terms = min(all_reduce(row["bytes"], ranks, hosts, each) for each in algorithms)
        hops, inside_hops = terms.hops + agreed.hops, terms.inside_hops + agreed.inside_hops
        sent, known = terms.sent, 0.0
        if hosts == 1:  # all links are inside
            hops, sent = inside_hops, sent + terms.summed
        elif inside is None:
            hops += inside_hops
        else:
            known = inside_hops * inside.latency + terms.summed / inside.bandwidth
        # Ranks of a host that share memory are one in the ring between hosts.
        ring = hosts if terms.summed and hosts > 1 else ranks
        measurements.append(Measurement(ring, row[times], hops, sent, known=known))
    return measurements
