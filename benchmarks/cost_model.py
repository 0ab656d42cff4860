"""How long a training step takes on p ranks: formulas, and how their constants are fitted.

Pure functions; benchmarks/predict.py feeds them with measurements. All times are in seconds, all
sizes in bytes. Each rank keeps its batch size (weak scaling): efficiency is step(1) / step(p).

Communication. A message of m bytes takes alpha + m beta (Hockney 1994, Parallel Computing 20). An
all-reduce of m bytes on p ranks takes

    ring    2 (p - 1) alpha + 2 (p - 1) / p m beta        Patarasuk & Yuan 2009, JPDC 69
    tree    2 log2(p) alpha + 2 (p - 1) / p m beta        halving and doubling: Thakur, Rabenseifner
                                                          & Gropp 2005, IJHPCA 19

MPI and NCCL take the faster of the two (NCCL's double binary trees, Sanders, Speck & Traeff 2009,
have the terms of the tree). One over all ranks has several on a host: the slowest of its links sets
beta, and a ring's alpha is the mean over its links.

Gloo has only the ring. In Horovod's own builds it is one over all ranks, also where hosts have
several. In ours (cluster/shared_memory.h) L ranks of a host sum in memory that they share, and each
sums its part with its like of the other hosts, of which there are h:

    shared  2 (h - 1) alpha + 2 (h - 1) / h m beta + 2 (L - 1) / L m beta'

where 1 / beta' is the bus bandwidth inside a host. Its barriers are in what depends on neither p
nor m. Every 8 MiB take the latencies anew. Where a host has fewer ranks it is the ring.

Negotiation. Before a round of operations all ranks agree on what is ready. With Horovod's cache
warm that is one tiny all-reduce. Over Gloo ranks of a host agree in memory in our builds
(cluster/patches.py; others are not modelled), and then h hosts take

    dissemination    log2(h) alpha    Hensgen, Finkel & Manber 1988, IJPP 17

or, where hosts have not equally many ranks, all p ranks take log2(p) rounds. Rounds of operations
begin at least a cycle (HOROVOD_CYCLE_TIME) apart.

Overlap. Backward fills buckets (strategies/buckets.py), each ready after its share of backward.
Horovod's thread takes those that are ready, agrees on them, and sends them one after the other.
Over Gloo the next round waits for their end; over NCCL it is agreed on meanwhile. The optimizer
follows when backward and the last bucket have ended.

Stragglers. A bucket is ready when the slowest rank has it. The times of ranks are normally
distributed, with standard deviation sigma from step to step; the slowest of p, whose distribution
is Phi^p, takes sigma times the integral of x dPhi(x)^p more than the mean. A rank that is always
the slowest costs the same on any number of ranks.

Left out: congestion between hosts (full bisection bandwidth is assumed), ranks that compete for
cores or memory bandwidth more than they did when measured, and the reading of data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls
from scipy.special import ndtr

MIB = 2**20
CYCLE = 1e-3  # Horovod's default of HOROVOD_CYCLE_TIME
SLOT = 8 * MIB  # bytes that ranks which share memory sum between hosts at once


@dataclass(frozen=True)
class Network:
    """What joins the ranks.

    Attributes:
        latency, bandwidth: alpha, and 1 / beta, of the link from one host to another.
        ranks_per_host: ranks on one host, joined by inside_latency and inside_bandwidth.
        fixed: seconds of a round that depend on neither ranks nor bytes.
        algorithms: "ring", "tree", "shared"; the faster of those given is used.
        controller: how ranks agree, by "dissemination" (Gloo; "dissemination of ranks" where those
            of a host share no memory) or "tree" (MPI).
        agreement_latency: the least that a hop of an agreement takes: it is over TCP even where
            NCCL moves the gradients.
        asynchronous: whether a round is agreed on while another is on the wire (NCCL).
        cycle: least seconds between the beginnings of two rounds.
        burst: bytes that pass at once after a rest on a link limited by a token bucket
            (cluster/testbed.py, rented machines); it refills at the link's bandwidth.
    """

    latency: float
    bandwidth: float
    ranks_per_host: int = 1
    inside_latency: float = 0.0
    inside_bandwidth: float = math.inf
    fixed: float = 0.0
    algorithms: tuple[str, ...] = ("ring",)
    controller: str = "dissemination"
    agreement_latency: float = 0.0
    asynchronous: bool = False
    cycle: float = CYCLE
    burst: float = 0.0


@dataclass(frozen=True)
class Job:
    """What a rank does in a step.

    Attributes:
        forward, backward, rest: seconds; `rest` is the optimizer, data and what else is not hidden.
        buckets: bytes of each, in the order in which backward fills them.
        deviation: standard deviation of forward + backward from step to step, in seconds.
        ready: share of backward after which each bucket is full; None: in proportion to bytes.
        slowest: seconds by which one rank, always the same, is slower than the mean.
    """

    forward: float
    backward: float
    rest: float
    buckets: tuple[float, ...]
    deviation: float = 0.0
    ready: tuple[float, ...] | None = None
    slowest: float = 0.0

    @property
    def shares(self) -> tuple[float, ...]:
        if self.ready is not None:
            return self.ready
        total = sum(self.buckets)
        return tuple(sum(self.buckets[: i + 1]) / total for i in range(len(self.buckets)))

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.rest


@dataclass(frozen=True)
class Step:
    """A predicted step: `seconds` = compute + straggler + exposed."""

    seconds: float
    straggler: float
    exposed: float
    efficiency: float


@dataclass(frozen=True)
class Measurement:
    """An all-reduce that was timed.

    Attributes:
        rate: bytes per second of its links, where it is known.
        hops: how often it and the agreement before it pay the latency that is fitted; None: as
            often as over Gloo, on hosts of one rank.
        known: seconds of latency that are not fitted, such as that inside hosts.
    """

    ranks: int
    bytes: float
    seconds: float
    rate: float = 1.0
    hops: float | None = None
    known: float = 0.0

    @property
    def hop_count(self) -> float:
        if self.hops is not None:
            return self.hops
        return sum(hops(self.ranks, self.ranks, each)[0] for each in ("ring", "dissemination"))


@dataclass(frozen=True)
class Fit:
    """`share` is that of the links' rate which the bytes get; without a known rate the bandwidth.

    `error` is the median of |fitted / measured - 1|.
    """

    fixed: float
    latency: float
    share: float
    error: float


def wire_bytes(bytes_: float, ranks: int) -> float:
    """What each rank sends in an all-reduce."""
    return 2 * (ranks - 1) / ranks * bytes_


def hops(ranks: int, hosts: int, algorithm: str) -> tuple[float, float]:
    """How often an all-reduce pays the latency between hosts, and how often that inside a host.

    "shared" and "dissemination" are for hosts with equally many ranks."""
    if algorithm == "shared":
        return 2 * (hosts - 1), 0
    if algorithm == "tree":
        inside = math.ceil(ranks / hosts)
        return 2 * math.ceil(math.log2(hosts)), 2 * math.ceil(math.log2(inside))
    if algorithm == "dissemination":
        return math.ceil(math.log2(hosts)), 0
    if algorithm == "dissemination of ranks":
        rounds = math.ceil(math.log2(ranks))
        if hosts == 1:
            return 0, rounds
        # Messages from the last ranks of a host leave it in each round, but of those that follow
        # one another only one of the rounds within a host, and all later ones.
        between = min(math.ceil(math.log2(hosts)) + (ranks > hosts), rounds)
        return between, rounds - between
    if hosts == 1:
        return 0, 2 * (ranks - 1)
    return 2 * (ranks - 1) / ranks * hosts, 2 * (ranks - 1) / ranks * (ranks - hosts)


def places(ranks: int, network: Network) -> tuple[int, int]:
    """The hosts of so many ranks, and the ranks of each."""
    inside = min(ranks, network.ranks_per_host)
    return math.ceil(ranks / inside), inside


def latencies(network: Network, ranks: int, algorithm: str) -> float:
    """The alpha term of an all-reduce; of each SLOT, where ranks share memory."""
    hosts, inside = places(ranks, network)
    if ranks != hosts * inside:  # those of a host share no memory
        alone = {"shared": "ring", "dissemination": "dissemination of ranks"}
        algorithm = alone.get(algorithm, algorithm)
    between, within = hops(ranks, hosts, algorithm)
    return between * network.latency + within * network.inside_latency


def shares_memory(ranks: int, network: Network) -> bool:
    """Whether ranks sum inside hosts first, and then between them."""
    hosts, inside = places(ranks, network)
    return "shared" in network.algorithms and hosts > 1 and ranks == hosts * inside


def slot_count(bytes_: float) -> int:
    return max(1, math.ceil(bytes_ / SLOT))


def slowest_bandwidth(ranks: int, network: Network) -> float:
    """The least bandwidth of the links of a ring, or that between hosts."""
    hosts, inside = places(ranks, network)
    if shares_memory(ranks, network):
        return network.bandwidth
    links = [network.bandwidth] if hosts > 1 else []
    return min(links + ([network.inside_bandwidth] if inside > 1 else []), default=math.inf)


def limited_bytes(bytes_: float, ranks: int, network: Network) -> float:
    """What an all-reduce sends over that link."""
    hosts, _ = places(ranks, network)
    return wire_bytes(bytes_, hosts if shares_memory(ranks, network) else ranks)


def all_reduce_seconds(bytes_: float, ranks: int, network: Network, free: float = 0.0) -> float:
    """An all-reduce without the agreement before it; its first `free` bytes pass at once."""
    seconds = min(latencies(network, ranks, algorithm) for algorithm in network.algorithms)
    if shares_memory(ranks, network):
        _, inside = places(ranks, network)
        seconds = (
            slot_count(bytes_) * seconds + wire_bytes(bytes_, inside) / network.inside_bandwidth
        )
    limited = max(0.0, limited_bytes(bytes_, ranks, network) - free)
    return seconds + limited / slowest_bandwidth(ranks, network)


def agreement_seconds(ranks: int, network: Network) -> float:
    least = network.agreement_latency
    between, inside = max(least, network.latency), max(least, network.inside_latency)
    over_tcp = replace(network, latency=between, inside_latency=inside)
    return network.fixed + latencies(over_tcp, ranks, network.controller)


def expected_maximum(count: int) -> float:
    """Of `count` independent standard normal variables; the integral, summed over small steps."""
    edges = np.linspace(-9, 9, 2001)
    return float(np.diff(ndtr(edges) ** count) @ (edges[1:] + edges[:-1]) / 2)


def median_wait(count: int) -> float:
    """The median, over steps, of how much the slowest of `count` ranks exceeds their mean, in
    standard deviations.

    The form is that of Blom (1958, Statistical Estimates and Transformed Beta-Variables), fitted to
    simulated steps within 1 %. For 2 ranks it is Phi^-1(3/4) / sqrt(2), a sixth less than the
    expected excess, as few steps wait long.
    """
    return statistics.NormalDist().inv_cdf((count - 0.455) / (count + 0.262))


def predict(job: Job, ranks: int, network: Network) -> Step:
    if ranks == 1:
        return Step(job.compute, 0.0, 0.0, 1.0)
    straggler = job.slowest + job.deviation * expected_maximum(ranks)
    backward_start = straggler + job.forward
    ready = [backward_start + share * job.backward for share in job.shares]
    agreement = agreement_seconds(ranks, network)
    bandwidth = slowest_bandwidth(ranks, network)
    thread = wire = 0.0  # when each is free
    credit, credit_time = network.burst, 0.0  # bytes in the token bucket, and when it was looked at
    sent = 0  # buckets
    while sent < len(ready):
        round_begins = max(thread, ready[sent])
        agreed = round_begins + agreement
        wire = max(wire, agreed)
        while sent < len(ready) and ready[sent] <= round_begins:
            if network.burst:
                credit = min(network.burst, credit + (wire - credit_time) * bandwidth)
            wire += all_reduce_seconds(job.buckets[sent], ranks, network, credit)
            credit = max(0.0, credit - limited_bytes(job.buckets[sent], ranks, network))
            credit_time = wire
            sent += 1
        thread = max(agreed if network.asynchronous else wire, round_begins + network.cycle)
    end = max(wire, backward_start + job.backward)
    seconds = end + job.rest
    return Step(seconds, straggler, end - backward_start - job.backward, job.compute / seconds)


def bucket_sizes(layers: Sequence[float]) -> list[float]:
    """Bytes of the buckets into which strategies/layout.py puts layers, in backward's order."""
    most = min(max(MIB, sum(layers) / 6), 4 * MIB)
    sizes, size, limit = [], 0.0, float(MIB)
    for layer in layers:
        size += layer
        if size >= limit:
            sizes.append(size)
            size, limit = 0.0, min(2 * limit, most)
    return sizes + ([size] if size else [])


def as_many_buckets(bytes_: float, count: int) -> list[float]:
    """Bytes of the buckets of as many equal layers as make no more than `count` buckets."""
    layers = 1000
    while layers > 1 and len(bucket_sizes([bytes_ / layers] * layers)) > count:
        layers -= 1
    return bucket_sizes([bytes_ / layers] * layers)


def tells_fixed(measurements: Sequence[Measurement]) -> bool:
    """Whether they tell `fixed` from alpha: see `fit`."""
    several = len({measurement.ranks for measurement in measurements}) > 1
    return several or not any(measurement.hop_count for measurement in measurements)


def fit(measurements: Sequence[Measurement], burst: float = 0.0) -> Fit:
    """The least squares of relative errors, over constants that are not negative, of

        seconds - known = fixed + hops alpha + (2 (p - 1) / p bytes - burst) / (share rate)

    which is one operation: agreement and transfer. `burst` is for rested links with a known token
    bucket. Measurements on one number of ranks cannot separate `fixed` from alpha: then fixed is 0,
    and alpha an upper bound, unless no hop is among them.

    Raises:
        ValueError: with fewer than two sizes, or times that do not grow with them.
    """
    if len({m.bytes for m in measurements}) < 2:
        raise ValueError("a fit needs all-reduces of two sizes at least")
    intercept = float(tells_fixed(measurements))
    matrix = np.array([
        [intercept, m.hop_count, max(0.0, wire_bytes(m.bytes, m.ranks) - burst) / m.rate]
        for m in measurements
    ])  # fmt: skip
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
