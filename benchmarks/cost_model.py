"""How long a training step takes on p ranks.

Pure functions; benchmarks/predict.py feeds them with measurements, to which benchmarks/cost_fit.py
fits the constants. All times are in seconds, all sizes in bytes. Each rank keeps its batch size
(weak scaling): efficiency is step(1) / step(p).

Communication. A message of m bytes takes alpha + m beta (Hockney 1994, Parallel Computing 20). An
all-reduce of m bytes on p ranks takes

    ring    2 (p - 1) alpha + 2 (p - 1) / p m beta        Patarasuk & Yuan 2009, JPDC 69
    tree    2 log2(p) alpha + 2 (p - 1) / p m beta        halving and doubling: Thakur, Rabenseifner
                                                          & Gropp 2005, IJHPCA 19

MPI and NCCL take the faster of the two (NCCL's double binary trees, Sanders, Speck & Traeff 2009,
have the terms of the tree). On h hosts with L ranks each, alpha' and beta' are those inside a host.
A ring's alpha is the mean over its links, a tree has log2(h) alpha + log2(L) alpha' in place of
log2(p) alpha, and the slowest link sets beta.

Gloo has only the ring. In Horovod's own builds it is one over all ranks, also where hosts have
several. In ours (cluster/shared_memory.h) L ranks of a host sum in memory that they share, and each
sums its part with its like of the other hosts:

    shared  2 (h - 1) alpha + 2 (h - 1) / h m beta + 2 (L - 1) / L m beta'

where 1 / beta' is the bus bandwidth inside a host. Its barriers are in what depends on neither p
nor m. Every 8 MiB take the latencies anew. Where a host has fewer ranks it is the ring.

Negotiation. Before a round of operations all ranks agree on what is ready. With Horovod's cache
warm that is one tiny all-reduce, over MPI by a tree. Over Gloo ranks of a host agree in memory in
our builds (cluster/patches.py; others are not modelled), and then h hosts take

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
cores or memory bandwidth more than they did when measured, and the reading of data. Where gradients
are summed by cores that also compute, that is no part of computing without communication: by how
much a measured step is longer than all of this is then kept for any number of ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
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
        burden: seconds by which a step of several ranks is longer than all of this explains.
    """

    forward: float
    backward: float
    rest: float
    buckets: tuple[float, ...]
    deviation: float = 0.0
    ready: tuple[float, ...] | None = None
    slowest: float = 0.0
    burden: float = 0.0

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


class Terms(NamedTuple):
    """How often an operation pays each constant of a network. It takes

        hops alpha + inside_hops alpha' + sent beta + summed beta'

    seconds, with the beta of the slowest link that its messages go over.
    """

    hops: float
    inside_hops: float
    sent: float = 0.0
    summed: float = 0.0


# ---------------------------------------------------------------------------- the formulas


def wire_bytes(bytes_: float, ranks: int) -> float:
    """What each rank sends in an all-reduce."""
    return 2 * (ranks - 1) / ranks * bytes_


def rounds(count: int) -> int:
    """log2, rounded up where the count is no power of two."""
    return math.ceil(math.log2(count))


def all_reduce(bytes_: float, ranks: int, hosts: int, algorithm: str) -> Terms:
    """By "ring", "tree" or, on hosts with equally many ranks, "shared"."""
    if algorithm == "shared":
        slots = max(1, math.ceil(bytes_ / SLOT))
        summed = wire_bytes(bytes_, ranks // hosts)
        return Terms(slots * 2 * (hosts - 1), 0, wire_bytes(bytes_, hosts), summed)
    sent = wire_bytes(bytes_, ranks)
    if algorithm == "tree":
        return Terms(2 * rounds(hosts), 2 * rounds(math.ceil(ranks / hosts)), sent)
    between = hosts if hosts > 1 else 0  # of the links, which are as many as ranks
    steps = 2 * (ranks - 1)
    return Terms(steps * between / ranks, steps * (ranks - between) / ranks, sent)


def agreement(ranks: int, hosts: int, controller: str) -> Terms:
    """By "tree", "dissemination" (on hosts with equally many ranks) or "dissemination of ranks"."""
    if controller == "tree":
        return all_reduce(0, ranks, hosts, "tree")
    if controller == "dissemination":
        return Terms(rounds(hosts), 0)
    if hosts == 1:
        return Terms(0, rounds(ranks))
    # Messages from the last ranks of a host leave it in each round, but of those that follow one
    # another only one of the rounds within a host, and all later ones.
    between = min(rounds(hosts) + (ranks > hosts), rounds(ranks))
    return Terms(between, rounds(ranks) - between)


def without_memory(algorithms: tuple[str, ...], controller: str) -> tuple[tuple[str, ...], str]:
    """What takes their place where ranks of a host share no memory."""
    rings = tuple("ring" if each == "shared" else each for each in algorithms)
    return rings, "dissemination of ranks" if controller == "dissemination" else controller


# ---------------------------------------------------------------------------- on a network


def ways(ranks: int, network: Network) -> tuple[int, tuple[str, ...], str]:
    """The hosts of so many ranks, and their algorithms and controller."""
    inside = min(ranks, network.ranks_per_host)
    hosts = math.ceil(ranks / inside)
    algorithms, controller = network.algorithms, network.controller
    if ranks != hosts * inside:  # the last host has fewer
        algorithms, controller = without_memory(algorithms, controller)
    return hosts, algorithms, controller


def slowest_bandwidth(ranks: int, network: Network) -> float:
    """Of the links that an all-reduce goes over."""
    hosts, algorithms, _ = ways(ranks, network)
    if hosts == 1:
        return network.inside_bandwidth
    if hosts == ranks or "shared" in algorithms:
        return network.bandwidth
    return min(network.bandwidth, network.inside_bandwidth)


def transfer(bytes_: float, ranks: int, network: Network) -> tuple[float, float]:
    """Of the fastest all-reduce: seconds besides those on the slowest link, and bytes on that."""
    hosts, algorithms, _ = ways(ranks, network)
    ends = []
    for terms in (all_reduce(bytes_, ranks, hosts, each) for each in algorithms):
        latency = terms.hops * network.latency + terms.inside_hops * network.inside_latency
        ends.append((latency + terms.summed / network.inside_bandwidth, terms.sent))
    return min(ends)


def agreement_seconds(ranks: int, network: Network) -> float:
    """With all else of a round that depends on no bytes."""
    hosts, _, controller = ways(ranks, network)
    terms, least = agreement(ranks, hosts, controller), network.agreement_latency
    between = terms.hops * max(least, network.latency)
    return network.fixed + (between + terms.inside_hops * max(least, network.inside_latency))


# ---------------------------------------------------------------------------- the step


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
    backward_begins = straggler + job.forward
    backward_ends = backward_begins + job.backward
    ready = [backward_begins + share * job.backward for share in job.shares]
    agreeing = agreement_seconds(ranks, network)
    bandwidth = slowest_bandwidth(ranks, network)
    thread_free = wire_free = 0.0
    credit, credit_time = network.burst, 0.0  # bytes in the token bucket, and when that was
    done = 0  # buckets
    while done < len(ready):
        begins = max(thread_free, ready[done])
        agreed = begins + agreeing
        wire_free = max(wire_free, agreed)
        while done < len(ready) and ready[done] <= begins:
            latency, sent = transfer(job.buckets[done], ranks, network)
            if network.burst:
                refilled = credit + (wire_free - credit_time) * bandwidth
                credit = min(network.burst, refilled)
            wire_free += latency + max(0.0, sent - credit) / bandwidth
            credit, credit_time = max(0.0, credit - sent), wire_free
            done += 1
        thread_free = max(agreed if network.asynchronous else wire_free, begins + network.cycle)
    ends = max(wire_free, backward_ends)
    seconds = ends + job.rest + job.burden
    return Step(seconds, straggler, ends - backward_ends + job.burden, job.compute / seconds)


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
