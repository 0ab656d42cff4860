"""The cost model, what it is fed with, and the all-reduces that it is fitted to."""

from __future__ import annotations

import csv
import json
import math
import re
import runpy
import socket
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import horovod.torch as hvd
import pytest
import torch

from benchmarks import (
    allreduce,
    allreduce_worker,
    figures,
    hardware,
    predict_proof,
    predict_runs,
    predict_steps,
    published,
    workers,
)
from benchmarks import predict as command
from benchmarks.cost_fit import Link, Measurement, fit, measurements_of
from benchmarks.cost_model import (
    Job,
    Network,
    agreement,
    agreement_seconds,
    all_reduce,
    as_many_buckets,
    bucket_sizes,
    expected_maximum,
    predict,
    slowest_bandwidth,
    transfer,
)  # fmt: skip
from benchmarks.files import unused
from benchmarks.launching import Failed
from benchmarks.predict_network import MEMORY, TCP, described, networks
from benchmarks.predict_proof import measurement
from benchmarks.predict_runs import job_of, measured_run
from benchmarks.predict_steps import job_of_steps
from benchmarks.step_report import ALONE, RAW, TRAINER
from benchmarks.step_report import OURS as STRATEGY
from cluster.hosts import Host, Refusal
from runs.bottleneck import PHASES, phases
from strategies.environment import initialize
from tests.conftest import run

TRUTH = Network(latency=5e-5, bandwidth=3e9, fixed=1e-3)
OURS = {"versions": {"horovod": "0.28.1+torch2.11.0.cpu.p94"}}
JOB = Job(0.1, 0.2, 0.01, (2e6, 8e6, 8e6, 8e6), deviation=0.004)
SIZES = [4**power for power in range(6, 14)]


def all_reduce_seconds(bytes_: float, ranks: int, network: Network) -> float:
    seconds, sent = transfer(bytes_, ranks, network)
    return seconds + sent / slowest_bandwidth(ranks, network)


def measured(network: Network, ranks: list[int], rate: float = 1.0) -> list[Measurement]:
    """What a network of known constants would show."""
    return [
        measurement(n, size, seconds, rate) for n in ranks for size, seconds in times(network, n)
    ]


def times(network: Network, ranks: int) -> list[tuple[int, float]]:
    """Bytes, and the seconds of an all-reduce with the agreement before it."""
    agreed = agreement_seconds(ranks, network)
    return [(size, agreed + all_reduce_seconds(size, ranks, network)) for size in SIZES]


# ---------------------------------------------------------------------- fits


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    fitted = fit(measured(TRUTH, [2, 4]))
    constants = [fitted.fixed, fitted.latency, fitted.share]
    assert constants == pytest.approx([TRUTH.fixed, TRUTH.latency, TRUTH.bandwidth], rel=1e-6)
    assert fitted.error < 1e-9


def test_links_of_known_rates_share_one_fit() -> None:
    slow, fast = (replace(TRUTH, bandwidth=0.9 * rate) for rate in (1e7, 1e8))
    fitted = fit(measured(slow, [2, 4], 1e7) + measured(fast, [2, 4], 1e8))
    assert (fitted.share, fitted.latency) == pytest.approx((0.9, TRUTH.latency), rel=1e-6)


def test_one_number_of_ranks_leaves_the_fixed_time_to_the_latency() -> None:
    fitted = fit(measured(TRUTH, [2]))
    assert fitted.fixed == 0
    assert fitted.latency == pytest.approx(TRUTH.latency + TRUTH.fixed / 3, rel=1e-6)


def test_constants_are_never_negative() -> None:
    """Times with a negative latency, as a token bucket makes them."""
    fitted = fit(
        [measurement(n, s, s * 2 * (n - 1) / n / 1e8 - 1e-5) for n in (2, 4) for s in SIZES[2:]]
    )
    assert min(fitted.fixed, fitted.latency) >= 0 < fitted.share


def test_a_burst_that_is_known_does_not_pass_for_bandwidth() -> None:
    burst, ranks, bandwidth = 262144, 2, 1e7
    timed = [measurement(ranks, s, 1e-3 + max(0, s - burst) / bandwidth) for s in SIZES]
    assert fit(timed, burst).share == pytest.approx(bandwidth, rel=1e-6)
    assert fit(timed).share > 1.05 * bandwidth


@pytest.mark.parametrize(
    ("operations", "horovod", "shared", "controller"),
    [
        ("Gloo", "0.28.1+torch2.11.0.cpu.p94", "1", "dissemination"),
        ("Gloo", "0.28.1+torch2.11.0.cpu.p94", "0", "dissemination of ranks"),
        ("NCCL", "0.28.1+torch2.11.0.cu130.nccl2.28.9.p94.sm90", "1", "dissemination"),
        ("MPI", "0.28.1+torch2.11.0.cpu.p94.mpi", "1", "tree"),
    ],
)
def test_latencies_between_and_inside_hosts_are_told_apart(
    operations: str, horovod: str, shared: str, controller: str
) -> None:
    """Of 2 hosts with 4 ranks and of 4 with 8, and of one of them alone: what made the times."""
    ways = ("ring", "tree")
    if operations == "Gloo":
        ways = ("shared",) if controller == "dissemination" else ("ring",)
    truth = Network(
        5e-5, 3e9, 4, 2e-6, 1e10, fixed=1e-3, algorithms=ways, controller=controller
    )  # fmt: skip

    def file(hosts: int, slots: int) -> dict[str, Any]:
        network, ranks = replace(truth, ranks_per_host=slots), hosts * slots
        rows = [
            {
                "bytes": size,
                **dict.fromkeys(("seconds", "seconds_p10", "seconds_p90"), seconds),
            }
            for size, seconds in times(network, ranks)
        ]
        return {
            "operations": operations, "hosts": [{"name": f"node{n}"} for n in range(hosts)],
            "ranks": [f"node{rank // slots}" for rank in range(ranks)], "sizes": rows,
            "versions": {"horovod": horovod}, "environment": {"HOROVOD_SHARED_MEMORY": shared},
        }  # fmt: skip

    files = [file(1, 2), file(1, 4), file(2, 4), file(4, 8)]
    cases, sources = networks(files, {}, slots=4)
    for network in cases:
        assert network.latency == pytest.approx(truth.latency, rel=1e-6)
        in_memory = ways == ("shared",)  # without messages
        inside = 0.0 if in_memory else truth.inside_latency
        assert network.inside_latency == pytest.approx(inside, rel=1e-6)
        assert network.fixed == pytest.approx(truth.fixed, rel=1e-6)
    assert not any("does not tell latency" in line for line in sources)
    # Of one size of each kind the fixed time is not known; what was measured comes out as it was,
    # if ranks still agree so.
    cases, sources = networks([files[1], files[2]], {}, slots=4)
    for words in ("does not tell latency", "a host: fitted, the latency in part assumed: "):
        assert any(words in line for line in sources) == (ways != ("shared",))
    for network in cases:
        network = replace(network, controller=controller, algorithms=ways)
        predicted, true = (
            agreement_seconds(8, each) + all_reduce_seconds(4096, 8, each)
            for each in (network, truth)
        )
        assert predicted == pytest.approx(true, rel=0.1)


def test_what_takes_no_hops_has_a_fixed_time() -> None:
    """As sums and agreements in memory: one number of ranks tells it from the latency."""
    rows = [
        {"bytes": size}
        | dict.fromkeys(("seconds", "seconds_p10", "seconds_p90"), 2e-3 + size / 3e9)
        for size in SIZES
    ]
    result = {"operations": "Gloo", "hosts": [{}], "ranks": ["a", "a"], "sizes": rows}
    result["versions"] = {"horovod": "0.28.1+torch2.11.0.cpu.p94"}
    cases, sources = networks([result], {}, slots=2)
    for network in cases:
        assert (network.fixed, network.inside_latency) == (pytest.approx(2e-3), 0)
        assert network.inside_bandwidth == pytest.approx(3e9)
    assert not any("does not tell latency" in line for line in sources)


def test_no_latency_inside_hosts_is_known_too() -> None:
    """As a fit says of times that grow faster than bytes: hops inside are not taken for others."""
    truth = Network(5e-5, 3e9, 4, 0.0, 1e10, controller="dissemination of ranks")
    rows = [{"bytes": size, "seconds": seconds} for size, seconds in times(truth, 8)]
    result = {"operations": "Gloo", "hosts": [{}, {}], "ranks": [0] * 8, "sizes": rows}
    result |= {**OURS, "environment": {"HOROVOD_SHARED_MEMORY": "0"}}
    fitted = fit(measurements_of(result, "seconds", inside=Link(0.0, 1e10)))
    assert fitted.latency == pytest.approx(truth.latency, rel=1e-6)


def test_hosts_with_other_numbers_of_ranks_share_no_memory() -> None:
    """A ring of 3 ranks; of 4 on two hosts, what is summed inside is known, and no part of it."""
    result: dict[str, Any] = {"operations": "Gloo", "hosts": [{}, {}], "ranks": ["a", "a", "b"]}
    result["versions"] = {"horovod": "0.28.1+torch2.11.0.cpu.p94"}
    result["sizes"] = [{"bytes": 8e6, "seconds": 1.0}]
    inside = Link(0.0, 1e9)
    (uneven,) = measurements_of(result, "seconds", inside)
    assert (uneven.ranks, uneven.sent, uneven.known) == (3, 2 * 2 / 3 * 8e6, 0.0)
    result["ranks"].append("b")
    (even,) = measurements_of(result, "seconds", inside)
    assert (even.ranks, even.hops, even.known) == (2, 2 + 1, 8e6 / 1e9)
    result["sizes"][0]["bytes"] = 20 * 2**20
    assert measurements_of(result, "seconds", inside)[0].hops == 3 * 2 + 1
    result["environment"] = {"HOROVOD_SHARED_MEMORY": "0"}
    assert measurements_of(result, "seconds", inside)[0].ranks == 4


def test_times_without_bandwidth_are_refused() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit([measurement(2, 4096, 1e-3)])
    for last in (1e-3, 0.9e-3):
        with pytest.raises(ValueError, match="do not grow"):
            fit([measurement(2, 4096, 1e-3), measurement(2, 2**20, last)])


# ---------------------------------------------------------------------- the step


def test_one_rank_only_computes() -> None:
    step = predict(JOB, 1, TRUTH)
    assert step.seconds == JOB.compute
    assert (step.efficiency, step.exposed, step.straggler) == (1.0, 0.0, 0.0)


def test_a_faster_link_is_never_less_efficient() -> None:
    for ranks in (2, 8, 512):
        efficiencies = [
            predict(JOB, ranks, replace(TRUTH, bandwidth=rate)).efficiency
            for rate in (1e7, 1e8, 1e9, 1e10, 1e11)
        ]
        assert efficiencies == sorted(efficiencies) and efficiencies[0] < efficiencies[-1] < 1


def test_a_link_that_outlasts_backward_shows_all_of_its_bytes_but_the_hidden() -> None:
    """By hand: 26 MB between 2 ranks at 10 MB/s begin when the first 2 MB are there."""
    network, job = Network(0.0, 1e7, cycle=0.0), replace(JOB, deviation=0.0)
    step = predict(job, 2, network)
    assert step.seconds == pytest.approx(0.1 + 0.2 * 2 / 26 + 26e6 / 1e7 + 0.01)
    assert step.exposed == pytest.approx(step.seconds - job.compute)


def test_only_the_last_bucket_shows_on_a_link_that_keeps_up() -> None:
    network, job = Network(0.0, 1e9, cycle=0.0), replace(JOB, deviation=0.0)
    assert predict(job, 2, network).exposed == pytest.approx(8e6 / 1e9)


def test_what_backward_hides_costs_nothing() -> None:
    """Full long before backward ends: the step is that of the slowest rank by itself."""
    job = replace(JOB, ready=(0.1, 0.2, 0.3, 0.4))
    step = predict(job, 8, Network(0.0, 1e12))
    assert (step.exposed, step.straggler) == (0.0, job.deviation * expected_maximum(8))
    assert step.seconds == pytest.approx(job.compute + step.straggler)


def test_a_rested_token_bucket_is_used_once() -> None:
    network, job = Network(0.0, 1e7, cycle=0.0), replace(JOB, deviation=0.0)
    saved = predict(job, 2, network).seconds - predict(job, 2, replace(network, burst=1e6)).seconds
    assert saved == pytest.approx(0.1)


def test_a_ring_in_one_host_after_the_other_crosses_each_link_once() -> None:
    """8 ranks on 2 hosts or on 8: the same bytes on a host's link, fewer slow hops."""
    hosts = Network(1e-3, 1e8, ranks_per_host=4, inside_latency=0.0, inside_bandwidth=1e10)
    flat = replace(hosts, ranks_per_host=1)
    latency = all_reduce_seconds(0, 8, hosts), all_reduce_seconds(0, 8, flat)
    assert latency == pytest.approx((14 / 8 * 2e-3, 14e-3))
    assert all_reduce(0, 8, 2, "ring") == (14 / 8 * 2, 14 / 8 * 6, 0, 0)
    slow_inside = replace(flat, inside_bandwidth=1.0)  # of which a rank alone sees nothing
    assert all_reduce_seconds(8e6, 8, slow_inside) == all_reduce_seconds(8e6, 8, flat)
    wire = [all_reduce_seconds(8e6, 8, n) - all_reduce_seconds(0, 8, n) for n in (hosts, flat)]
    assert wire == pytest.approx([14e6 / 1e8] * 2)
    assert all_reduce_seconds(8e6, 4, hosts) == pytest.approx(12e6 / 1e10)


def test_ranks_that_share_memory_send_once_a_host() -> None:
    """By hand: 8 MB of 8 ranks on 2 hosts, and of 4 on one."""
    hosts = Network(
        1e-3, 1e8, ranks_per_host=4, inside_latency=1.0, inside_bandwidth=1e9,
        algorithms=("shared",),
    )  # fmt: skip
    assert all_reduce_seconds(8e6, 8, hosts) == pytest.approx(2e-3 + 8e6 / 1e8 + 12e6 / 1e9)
    assert all_reduce_seconds(8e6, 4, hosts) == pytest.approx(12e6 / 1e9)
    assert all_reduce_seconds(80e6, 8, hosts) == pytest.approx(10 * 2e-3 + 80e6 / 1e8 + 120e6 / 1e9)
    ring = replace(hosts, algorithms=("ring",))
    assert all_reduce_seconds(8e6, 7, hosts) == all_reduce_seconds(8e6, 7, ring)
    slow = replace(hosts, inside_bandwidth=1e7)
    assert all_reduce_seconds(8e6, 8, slow) == pytest.approx(2e-3 + 8e6 / 1e8 + 12e6 / 1e7)
    job = replace(JOB, deviation=0.0)
    free = Network(0.0, 1e8, 4, algorithms=("shared",), cycle=0.0, burst=1e6)
    flat = replace(free, ranks_per_host=1, algorithms=("ring",))
    assert predict(job, 8, free).seconds == pytest.approx(predict(job, 2, flat).seconds)


def test_a_tree_has_logarithmic_latency_and_the_faster_algorithm_counts() -> None:
    tree, ring = replace(TRUTH, algorithms=("tree",)), TRUTH
    assert all_reduce_seconds(0, 1024, tree) == pytest.approx(2 * 10 * TRUTH.latency)
    assert all_reduce_seconds(0, 1024, ring) == pytest.approx(2 * 1023 * TRUTH.latency)
    assert agreement_seconds(1024, replace(TRUTH, fixed=0.0)) == pytest.approx(10 * TRUTH.latency)
    assert all_reduce(0, 8, 2, "tree") == (2, 4, 0, 0)  # and 4 inside a host
    assert all_reduce(8, 1, 1, "ring") == all_reduce(8, 1, 1, "tree") == (0, 0, 0, 0)
    assert agreement(1, 1, "dissemination") == (0, 0, 0, 0)
    both = replace(TRUTH, algorithms=("ring", "tree"))
    assert all_reduce_seconds(1e6, 1024, both) == all_reduce_seconds(1e6, 1024, tree)


@pytest.mark.parametrize(
    ("ranks", "hosts"),
    [
        (2, 2),
        (8, 2),
        (64, 8),
        (512, 64),
        (16, 16),
        (8, 1),
        (4, 3),
        (6, 5),
        (20, 5),
        (24, 3),
        (40, 5),
    ],
)
def test_the_hops_of_an_agreement_are_those_of_its_longest_chain(ranks: int, hosts: int) -> None:
    """Of messages as cluster/rounds.h sends them: 1 between hosts, 1e-3 inside one."""

    def hop(source: int, target: int) -> float:
        return 1.0 if source * hosts // ranks != target * hosts // ranks else 1e-3

    knows, distance = [0.0] * ranks, 1
    while distance < ranks:
        come = [knows[r - distance] + hop((r - distance) % ranks, r) for r in range(ranks)]
        knows = [max(pair) for pair in zip(knows, come)]
        distance *= 2
    between, inside, *_ = agreement(ranks, hosts, "dissemination of ranks")
    assert max(knows) == pytest.approx(between + 1e-3 * inside)


def test_ranks_of_a_host_agree_in_memory_where_hosts_have_equally_many() -> None:
    network = replace(TRUTH, ranks_per_host=4, inside_latency=1e-5, fixed=0.0)
    agreed = [agreement_seconds(ranks, network) for ranks in (4, 8, 64)]
    assert agreed == pytest.approx([0, TRUTH.latency, 4 * TRUTH.latency])
    without_memory = replace(network, controller="dissemination of ranks")
    for ranks in (7, 65):
        assert agreement_seconds(ranks, network) == agreement_seconds(ranks, without_memory)


def test_rounds_of_nccl_are_agreed_on_while_others_are_on_the_wire() -> None:
    network = replace(TRUTH, bandwidth=5e7, fixed=0.03)
    asynchronous = replace(network, asynchronous=True)
    assert predict(JOB, 2, asynchronous).seconds < predict(JOB, 2, network).seconds


def test_ranks_agree_over_tcp_though_nccl_is_faster() -> None:
    """8 ranks on 2 hosts: a round."""
    words = "rate=100gbit latency=5us gpus_per_host=4 inside=nvlink operations=nccl"
    cases = [
        (networks([], described(f"{words}{more}"), 4)[0][1], hop)
        for more, hop in (
            ("", TCP), (" controller_latency=90us", 90e-6), (" controller_latency=1ns", None),
        )
    ]  # fmt: skip
    for network, hop in cases:
        expected = hop or network.latency  # 2 hosts agree in a hop
        assert agreement_seconds(8, network) == pytest.approx(network.fixed + expected)
        alone = [replace(network, algorithms=(each,)) for each in ("ring", "tree")]
        fastest = min(all_reduce_seconds(0, 8, each) for each in alone)
        assert all_reduce_seconds(0, 8, network) == fastest
    for other in ("gloo", "mpi"):
        network = networks([], described(words.replace("nccl", other)), 4)[0][1]
        assert network.agreement_latency == 0


def test_the_expected_maximum_is_exact() -> None:
    """Of 8: Harter 1961, Expected Values of Normal Order Statistics."""
    exact = {1: 0.0, 2: math.pi**-0.5, 3: 1.5 * math.pi**-0.5, 8: 1.42360}
    assert {count: expected_maximum(count) for count in exact} == pytest.approx(exact, abs=1e-5)
    assert expected_maximum(4096) == pytest.approx(3.6261, abs=1e-3)


@pytest.mark.parametrize(
    "layers", [[0.625] * 16, [0.625] * 40, [0.5], [9.0, 9.0, 0.25, 4.5, 2.5, 0.5, 0.25]]
)
def test_buckets_are_cut_as_the_strategy_cuts_them(layers: list[float]) -> None:
    from strategies.buckets import split

    parameters = [torch.empty(int(layer * 2**18), device="meta") for layer in layers]
    groups = split([(torch.nn.Parameter(p), 0) for p in parameters])
    bytes_ = [layer * 2**20 for layer in layers]
    assert bucket_sizes(bytes_) == [sum(4 * p.numel() for p in group) for group in groups]


def test_as_many_buckets_as_a_run_had() -> None:
    for count in (1, 2, 6, 11, 12):
        buckets = as_many_buckets(44e6, count)
        assert len(buckets) == count
        assert sum(buckets) == pytest.approx(44e6)
    assert len(as_many_buckets(44e6, 99)) == len(bucket_sizes([44e3] * 1000)) == 12


# ---------------------------------------------------------------------- published figures


def test_the_back_test_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models with the numbers of parameters that their papers give; and of what is assumed."""
    for name, millions in (("inception_v3", 23.8), ("resnet101", 44.5), ("vgg16", 138.4)):
        assert sum(p for p, _ in published.layers(name)) == pytest.approx(millions * 1e6, rel=0.01)
    work = {name: sum(work for _, work in published.layers(name))
            for name in ("resnet50", "resnet101", "resnet152")}  # fmt: skip
    share = (work["resnet101"] - work["resnet50"]) / (work["resnet152"] - work["resnet50"])
    between = 1 / ((1 - share) / 219.0 + share / 91.8)
    assert published.P100["resnet101"] == pytest.approx(between, rel=1e-3)
    rows = published.rows()
    assert [row["published"] for row in rows[:3]] == pytest.approx([0.90, 0.90, 0.68])
    assert all(row["worst"] < row["predicted"] < row["best"] <= 1 for row in rows)
    assert rows[2]["off_points"] == pytest.approx(100 * (rows[2]["predicted"] - 0.68))
    text = published.table(rows)
    within = sum(row["worst"] <= row["published"] <= row["best"] for row in rows)
    assert f"{within} of {len(rows)} lie within" in text
    monkeypatch.setattr(published, "ASSUMED", ((1e6, 0.0, 0.0),) * 3)
    assert all(row["predicted"] > 0.97 for row in published.rows())  # no network, no stragglers


# ---------------------------------------------------------------------- the proof's table


def steps(seconds: list[float]) -> dict[str, list[float]]:
    return {
        "step": seconds, "forward": [0.08] * len(seconds), "backward": [0.16] * len(seconds),
        "rest": [0.01] * len(seconds),
    }  # fmt: skip


def test_the_proof_compares_what_was_held_out() -> None:
    """Times of a network of known constants; the rows that are fitted do not count as held out."""
    burst = predict_proof.BURST_BYTES
    truth = {
        rate: Network(1e-4, 0.95 * rate * 125e3, fixed=1e-3, burst=burst) for rate in (100, 300)
    }
    job = predict_proof.job_of(steps([0.25] * 4), predict_proof.STUB)
    runs = [{"ranks": 1, "rate_mbit": None, "held_out": False, "steps": [steps([0.25] * 4)]}]
    for ranks, rate, factor in ((2, 100, 1.0), (4, 100, 1.0), (8, 300, 1.1), (2, 300, 0.9)):
        seconds = factor * predict(job, ranks, truth[rate]).seconds
        row: dict[str, Any] = {
            "ranks": ranks, "rate_mbit": rate, "held_out": rate == 300,
            "steps": [steps([seconds] * 4)] * ranks,
        }  # fmt: skip
        if rate == 100:
            network, row["all_reduce"] = truth[rate], []
            for size in predict_proof.SIZES:
                latency, sent = transfer(size, ranks, network)
                wire = max(0.0, sent - burst) / network.bandwidth
                timed = agreement_seconds(ranks, network) + latency + wire
                row["all_reduce"].append({"bytes": size, "seconds": timed})
        runs.append(row)
    results = predict_proof.compare(runs, predict_proof.STUB)
    errors = [row["error"] for row in results["rows"]]
    assert errors == pytest.approx([0, 0, 0, 1 / 1.1 - 1, 1 / 0.9 - 1], abs=1e-6)
    assert results["held_out_largest_error"] == pytest.approx(1 / 0.9 - 1)
    assert results["held_out_median_error"] == pytest.approx((1 - 1 / 1.1 + 1 / 0.9 - 1) / 2)
    lines = predict_proof.table(results).splitlines()
    assert lines[5].startswith("| 8 | 300 | held out |") and lines[5].endswith("| -9.1% |")
    assert "largest 11.1%" in lines[-1]


def test_a_proof_that_was_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int | None]] = []

    def measure(ranks: int, rate: int | None, options: dict[str, Any]) -> dict[str, Any]:
        asked.append((ranks, rate))
        if len(asked) == 6:
            raise KeyboardInterrupt
        seconds = [1e-3 + size / 1e7 for size in options["sizes"]]
        return {"steps": [steps([0.25] * 4)] * ranks, "seconds": [[each] * 2 for each in seconds]}

    monkeypatch.setattr(predict_proof, "run", measure)
    monkeypatch.setattr(predict_proof, "missing", str)
    monkeypatch.setattr(predict_proof, "plot", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["predict_proof", "--out", str(tmp_path)])
    assert (predict_proof.main(), predict_proof.main()) == (130, 0)
    assert len(asked) == 14 and asked[5] == asked[6] and len({*asked}) == 13
    (file,) = tmp_path.glob("predict_*.json")
    assert len(json.loads(file.read_text())["rows"]) == 13 and file.with_suffix(".md").exists()


# ---------------------------------------------------------------------- what predict is told


def summary(**changes: Any) -> dict[str, Any]:
    anatomy = {
        "steps": 100, "step_ms": {"median": 125.0, "mean": 126.0, "p10": 128.0, "p90": 140.0},
        "phases_ms": {
            "data": 1.0, "forward": 35.0, "backward": 60.0, "all_reduce": 20.0,
            "straggler": 3.0, "optimizer": 5.0, "rest": 1.0,
        },
        "wire": {"calls": 3.0, "bytes": 9e6, "payload_bytes": 9e6, "bus_bandwidth_mb_s": 400.0},
    }  # fmt: skip
    return {
        "world_size": 2, "hosts": {"laptop": 2}, "strategy": "horovod", "model": "classifier",
        "data": "digits", "anatomy": anatomy, "operations": "Gloo", **changes,
    }  # fmt: skip


ADASUM = summary()
ADASUM["anatomy"]["wire"]["compressible"] = False
GAN = summary()
GAN["anatomy"]["wire"]["exchanges"] = 2
NO_PHASES, NO_CALLS = summary(), summary()
del NO_PHASES["anatomy"]["phases_ms"], NO_CALLS["anatomy"]["wire"]["calls"]


def all_reduces(ranks: int = 2, hosts: int = 1) -> dict[str, Any]:
    seconds = [[each] * 3 for _, each in times(TRUTH, ranks)]
    names = [f"node{number}" for number in range(hosts)]
    return {
        "hosts": [{"name": name, "slots": ranks // hosts} for name in names],
        "ranks": sorted(names * (ranks // hosts)), "operations": "Gloo", "date": "2026-11-21",
        # On several hosts by a ring of all ranks.
        **OURS, "environment": {"HOROVOD_SHARED_MEMORY": "1" if hosts == 1 else "0"},
        "sizes": allreduce.bandwidths(SIZES, seconds, ranks),
    }  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    contents = {"run": summary(), "one": all_reduces(), "two": all_reduces(4, 2)}
    paths = {name: tmp_path / f"{name}.json" for name in contents}
    for name, content in contents.items():
        paths[name].write_text(json.dumps(content))
    return paths


def said(monkeypatch: pytest.MonkeyPatch, *arguments: str, plots: bool = False) -> int:
    monkeypatch.setattr(sys, "argv", ["predict", *arguments])
    if not plots:  # as each takes a second
        monkeypatch.setattr(command, "plot", lambda *_: None)
    return command.main()


def test_a_run_becomes_a_job() -> None:
    job = job_of(summary())
    assert (job.forward, job.backward, job.rest) == pytest.approx((0.035, 0.060, 0.007))
    assert sum(job.buckets) == pytest.approx(9e6) and len(job.buckets) == 3
    assert job.deviation == pytest.approx(
        0.003 / statistics.NormalDist(0, 2**-0.5).inv_cdf(0.75), 0.01
    )
    noisy = summary()
    noisy["anatomy"]["phases_ms"]["all_reduce"] -= 25  # then they add up to 100 of 125 ms
    job = job_of(noisy)
    assert job.forward == pytest.approx(0.035 * 1.25)
    halved = summary(world_size=4)  # a rank of 4 sends 1.5 times what there is: here half of it
    halved["anatomy"]["wire"] |= {"bytes": 6.75e6, "compressible": False}
    assert sum(job_of(halved).buckets) == pytest.approx(4.5e6)
    # One rank waits for nobody: from p10 to p90 of its steps, 12 ms, are 2.56 standard deviations.
    alone = job_of(summary(world_size=1))
    assert alone.deviation == pytest.approx(0.012 / 2.563, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_ranks_that_differ_by_chance_have_the_deviation_that_was_planted(ranks: int) -> None:
    """Of 20 ms; each waits for the slowest one."""
    torch.manual_seed(0)
    work = 0.2 + 0.02 * torch.randn(ranks, 4000)
    seconds = torch.zeros(ranks, 4000, len(PHASES))
    seconds[:, :, PHASES.index("forward")] = work
    seconds[:, :, PHASES.index("all_reduce")] = work.max(0).values - work
    medians = {name: 1e3 * float(spent.median()) for name, spent in phases(seconds).items()}
    content = summary(world_size=ranks)
    content["anatomy"] |= {"phases_ms": medians, "step_ms": {"median": sum(medians.values())}}
    assert job_of(content).deviation == pytest.approx(0.02, rel=0.05)


def straggling() -> dict[str, Any]:
    """The second of two ranks is always the slower one: the other waits for it."""
    content = summary()
    content["anatomy"]["straggler"] = {"rank": 1, "times": 1.5, "phase": "forward"}
    content["anatomy"]["phases_ms"] |= {"straggler": 20.0, "all_reduce": 3.0}
    return content


def test_a_rank_that_is_always_the_slowest_is_no_deviation() -> None:
    job = job_of(straggling())
    assert (job.slowest, job.deviation) == (pytest.approx(0.020), 0.0)
    assert job_of(summary()).slowest == 0


def test_a_rank_that_is_always_the_slowest_is_told_and_kept(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 ms on any number of ranks; by chance the slowest of 4,096 would lose more than of 2."""
    options = ["--run", str(files["run"]), "--allreduce", str(files["one"]), "--ranks"]
    lost = {}
    for name, content in (("always", straggling()), ("by chance", summary())):
        files["run"].write_text(json.dumps(content))
        assert said(monkeypatch, *options, "2", "8", "4096") == 0
        lines = capsys.readouterr().out.splitlines()
        cells = [line.split(" | ") for line in lines if line.startswith("| ")][1:]
        lost[name] = [row[4].partition(",")[0] for row in cells if row[0] != "| ---"]
        cautions = [line for line in lines if line.startswith("take care rank")]
        assert len(cautions) == (name == "always")
        for line in cautions:
            assert line.startswith("take care rank 1 takes 1.5 times as long as the others")
            assert "20.0 ms are kept as they are for any number of ranks" in line
    assert lost["always"] == ["20.0"] * 3
    assert float(lost["by chance"][0]) < float(lost["by chance"][2])


@pytest.mark.parametrize(
    ("crowded", "waits", "told"),
    [
        ("4 ranks share the 2 cores of laptop", 0.5, "4 ranks share the 2 cores of laptop, and"),
        (None, 0.5, "a rank waited 50% of its time for a core, which others had"),
        (None, 0.1, ""),
    ],
)
def test_a_run_of_ranks_that_shared_cores_is_told(
    crowded: str | None, waits: float, told: str, files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    content = summary()
    content["anatomy"]["crowded"] = crowded
    content["anatomy"]["ranks"] = [{"waits_for_core": 0.0}, {"waits_for_core": waits}]
    files["run"].write_text(json.dumps(content))
    options = ["--run", str(files["run"]), "--allreduce", str(files["one"]), "--ranks", "2"]
    assert said(monkeypatch, *options) == 0
    cautions = re.findall("^take care in this run (.*)$", capsys.readouterr().out, re.M)
    assert len(cautions) == bool(told)
    assert all(caution.startswith(told) for caution in cautions)


def test_any_word_of_the_network_makes_it_another_one(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time of the run is not that of its hosts under NCCL, though they are the same."""
    options = ["--run", str(files["run"]), "--allreduce", str(files["one"]), "--ranks", "2"]
    assert said(monkeypatch, *options) == 0
    assert "measured, ms" in (output := capsys.readouterr().out) and "| 125.0 |" in output
    assert f"measured  {files['one']}" in output
    named = files["one"].rename(files["one"].with_name("all reduces.json"))
    assert said(monkeypatch, *options[:2], "--allreduce", str(named), *options[4:]) == 0
    assert f"measured  {named}" in capsys.readouterr().out
    named.rename(files["one"])
    assert said(monkeypatch, *options, "--network", "operations=nccl") == 0
    assert "measured, ms" not in (output := capsys.readouterr().out) and "operations nccl" in output
    assert "125.0" not in output
    assert "measured  " not in output and "NOT MEASURED" in output  # the file is Gloo's
    words = "rate=1gbit latency=20us gpus_per_host=8 operations=nccl"
    assert said(monkeypatch, *options, "--network", words) == 2
    assert "NETWORK: add inside=pcie or inside=nvlink" in capsys.readouterr().err
    link = "rate=1gbit latency=20us inside=nvlink"
    assert said(monkeypatch, *options, "--network", link) == 0
    assert "measured  " not in capsys.readouterr().out  # nothing of it is in the table


def test_predict_writes_a_table_and_a_plot(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--run", str(files["run"]), "--allreduce", f"{files['one']} {files['two']}"]
    assert said(monkeypatch, *options, "--ranks", "8", "4096", plots=True) == 0
    printed = capsys.readouterr().out
    assert "between hosts: fitted: 3,000 MB/s" in printed and "NOT MEASURED" not in printed
    assert re.search(r"take care 2 ranks took 125.0 ms, \d\d% more than predicted: ", printed)
    rows = [line for line in printed.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == ["| 2", "| 8", "| 4,096"]
    assert rows[0].endswith("| 125.0 |")  # the run's own ranks, measured
    for name in ("prediction.md", "prediction.csv", "prediction.png", "prediction.svg"):
        assert files["run"].with_name(name).stat().st_size > 0
    told = files["run"].with_name("prediction.md").read_text()
    assert "assumed   batch and compute" in told and "benchmarks/cost_model.py" in told
    # A network in words is another one: the run's own time does not belong beside it.
    words = "rate=100gbit latency=5us gpus_per_host=8 inside=nvlink operations=nccl"
    assert said(monkeypatch, *options, "--ranks", "16", "--network", words, plots=True) == 0
    printed = capsys.readouterr().out
    assert "operations nccl" in printed and "125.0" not in printed
    # Beside the first, not in its place.
    first, second = (
        list(csv.DictReader(files["run"].with_name(f"{name}.csv").open()))
        for name in ("prediction", "prediction_2")
    )
    assert [row["ranks"] for row in first] == ["2", "8", "4096"]
    assert [row["ranks"] for row in second] == ["16"]
    best, likely, worst = (float(second[0][f"{n}_ms"]) for n in ("best", "step", "worst"))
    assert best <= likely <= worst
    files["run"].rename(files["run"].with_name("summary.json"))
    folder = ["--run", str(files["run"].parent), "--allreduce", str(files["one"])]
    captions: list[str] = []
    monkeypatch.setattr(command, "plot", lambda *arguments: captions.append(arguments[-2]))
    for more in ([], ["--network", "rate=1gbit latency=20us"]):
        assert said(monkeypatch, *folder, "--ranks", "8", *more, plots=True) == 0
        measured = "between hosts: NOT MEASURED" not in capsys.readouterr().out
        assert measured == bool(more) == ("(NOT MEASURED)" not in captions[-1])


MB = 10**6


def bench_step(**changes: Any) -> dict[str, Any]:
    """Of bench-step: 3 MB of gradients come at 30 %, 6 MB at 70 % and 1 MB at 90 % of 100 ms."""
    variants = {
        ALONE: {"block_medians_ms": [98.0, 100.0, 300.0], "deviation_ms": 3.0},
        STRATEGY: {"block_medians_ms": [120.0, 160.0, 130.0]},
    }
    arrivals = [[0.3, 3 * MB], [0.7, 6 * MB], [0.9, MB]]
    return {
        "hosts": "localhost:2", "network": "loopback", "cpu": "ours", "cores": 2,
        "device": "cpu", "busy_before": 0.0, "date": "2026-11-21",
        "models": {"resnet18": {"arrivals": arrivals, "ranks": 2, "variants": variants}},
    } | changes  # fmt: skip


def test_steps_without_communication_become_a_job() -> None:
    """The first bucket is full with the first gradients, as it is of 1 MiB."""
    job = job_of_steps(bench_step(), "resnet18")
    assert (job.forward, job.backward, job.rest) == pytest.approx((0.03, 0.06, 0.01))
    assert job.buckets == (3 * MB, 6 * MB, MB) and job.deviation == 0.003
    assert job.shares == pytest.approx((0, 2 / 3, 1))
    # One that takes gradients of several moments is full at the last of them.
    content = bench_step()
    content["models"]["resnet18"]["arrivals"][:1] = [[0.2, MB // 2], [0.3, 5 * MB // 2]]
    job = job_of_steps(content, "resnet18")
    assert job.buckets == (3 * MB, 6 * MB, MB)
    assert job.shares == pytest.approx((1 / 7, 5 / 7, 1))
    # With what a Trainer adds in neighbouring blocks, if it was measured and is not noise.
    variants = content["models"]["resnet18"]["variants"]
    variants[TRAINER] = {"block_medians_ms": [99.0, 104.0, 302.0]}
    assert job_of_steps(content, "resnet18").rest == pytest.approx(0.012)
    variants[TRAINER] = {"block_medians_ms": [90.0, 99.0, 302.0]}
    assert job_of_steps(content, "resnet18").rest == pytest.approx(0.010)
    # All at once, as of a single layer.
    content["models"]["resnet18"]["arrivals"] = [[0.6, MB]]
    job = job_of_steps(content, "resnet18")
    assert (job.forward, job.backward, job.rest) == pytest.approx((0.06, 0, 0.04))
    assert predict(job, 4, TRUTH).seconds > predict(job, 1, TRUTH).seconds


def test_a_model_of_bench_step_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the newest result of this machine, beside the step that was measured."""
    for module in (command, predict_steps):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(predict_steps, "machine", lambda: {"cpu": "ours", "cores": 2, "gpus": []})
    monkeypatch.setattr(predict_steps.os, "uname", lambda: SimpleNamespace(nodename="node0"))
    contents = {
        "step_older": bench_step(date="2026-11-20"), "step_newest": bench_step(),
        "step_theirs": bench_step(date="2026-11-22", cpu="theirs"),
        "step_gpu": bench_step(date="2026-11-22", models={"resnet18": {"arrivals": []}}),
        "step_other": bench_step(date="2026-11-22", models={"mlp": {}}),
        "allreduce_ours": {**all_reduces(), "cpu": "ours", "cores": 2},
        "allreduce_theirs": {**all_reduces(), "cpu": "theirs", "cores": 2, "date": "2026-11-22"},
    }  # fmt: skip
    before = bench_step(date="2026-11-22")  # the deviation was noted
    del before["models"]["resnet18"]["variants"][ALONE]["deviation_ms"]
    for name, content in {**contents, "step_before": before}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert said(monkeypatch, "--model", "resnet18", "--ranks", "2", "8") == 0
    printed = capsys.readouterr().out
    assert "job       resnet18 of make bench-step: 100.0 ms of compute" in printed
    assert "step_newest.json" in printed and "allreduce_ours.json" in printed
    assert "allreduce_theirs" not in printed and "take care" not in printed
    rows = [line for line in printed.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == ["| 2", "| 8"]
    # What the strategy took, and the model does not explain, is kept for any number of ranks.
    assert rows[0].endswith("| 130.0 |") and rows[0].split(" | ")[2].startswith("130.0 ")
    kept = float(re.findall("^kept      ([0-9.]+) ms, which 2 ranks", printed, re.M)[0])
    assert 10 < kept < 30
    waits, exposed = (float(part) for part in rows[0].split(" | ")[4].split(", "))
    assert exposed > kept and 100 + waits + exposed == pytest.approx(130, abs=0.2)
    assert (tmp_path / "prediction_resnet18.csv").stat().st_size > 0
    options = ("--model", "resnet18", "--ranks", "8", "--network")
    link = "rate=10gbit latency=20us"
    assert said(monkeypatch, *options, link) == 0  # on it, too
    assert f"kept      {kept:.1f} ms" in capsys.readouterr().out
    assert said(monkeypatch, *options, f"{link} operations=nccl inside=pcie") == 0
    assert "kept" not in capsys.readouterr().out  # GPUs sum
    on_gpus = bench_step(device="cuda", hosts="localhost:8")
    variants = on_gpus["models"]["resnet18"]["variants"]
    variants |= {RAW: variants.pop(ALONE), TRAINER: {"block_medians_ms": [99.0, 102.0, 301.0]}}
    on_gpus["models"]["resnet18"]["ranks"] = 8  # of one host, so that a host has as many
    (tmp_path / "gpus.json").write_text(json.dumps(on_gpus))
    named = ("--run", str(tmp_path / "gpus.json"), "--model", "resnet18", "--ranks", "8", "64")
    assert said(monkeypatch, *named, "--network", f"{link} inside=nvlink") == 0
    printed = capsys.readouterr().out
    assert "operations nccl" in printed and "resnet18 of make bench-step: 101.0 ms" in printed
    assert "| 64 | 8 |" in printed and "allreduce_ours" not in printed
    assert "kept" not in printed and "shared 2 cores" not in printed
    faster = bench_step(date="2026-11-23")
    faster["models"]["resnet18"]["variants"][STRATEGY] = {"block_medians_ms": [90.0]}
    single = bench_step(date="2026-11-24", hosts="localhost:1")  # nobody to communicate with
    single["models"]["resnet18"]["ranks"] = 1
    for name, content in (("faster", faster), ("single", single)):
        (tmp_path / f"step_{name}.json").write_text(json.dumps(content))
        assert said(monkeypatch, "--model", "resnet18", "--ranks", "2") == 0
        printed = capsys.readouterr().out
        assert f"step_{name}.json" in printed
        assert "kept" not in printed and "take care" not in printed
    for file in tmp_path.glob("allreduce_*"):
        file.unlink()
    options = ("--run", str(tmp_path / "step_newest.json"), "--model", "resnet18", "--ranks", "8")
    assert said(monkeypatch, *options) == 0
    assert "kept" not in capsys.readouterr().out  # more than what? no network was measured
    # Named, and of four ranks on two cores beside other programs.
    crowded = bench_step(hosts="node0:4", busy_before=0.5)
    crowded["models"]["resnet18"]["ranks"] = 4
    del crowded["models"]["resnet18"]["variants"][STRATEGY]
    (tmp_path / "step_named.json").write_text(json.dumps(crowded))
    named = ("--run", str(tmp_path / "step_named.json"))
    assert said(monkeypatch, *named, "--model", "resnet18", "--ranks", "8") == 0
    printed = capsys.readouterr().out
    assert "take care 4 ranks shared 2 cores" in printed and "other load of 50%" in printed
    assert "measured, ms" not in printed and "| 8 | 2 |" in printed and "kept" not in printed
    assert said(monkeypatch, *named) == 2
    assert "MODEL=: there are resnet18" in capsys.readouterr().err
    assert said(monkeypatch, "--model", "vgg11") == 2
    assert "make bench-step ARGS='--models vgg11' first" in capsys.readouterr().err


def test_the_labels_of_a_plot_do_not_lie_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps from 0.1 s to some."""
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda figure, file: drawn.append(figure))
    cases, _ = networks([all_reduces()], {}, 1)
    command.plot(command.predictions(JOB, command.RANKS, cases), {}, JOB, "", Path())
    (figure,) = drawn
    figure.draw_without_rendering()
    axis = figure.axes[1].yaxis
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    ends = sorted((box.y0, box.y1) for box in (tick.label1.get_window_extent() for tick in ticks))
    assert len(ends) > 3 and all(below[1] <= above[0] for below, above in pairwise(ends))


def test_only_all_reduces_of_the_runs_own_hosts_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, run = tmp_path / "results", tmp_path / "summary.json"
    results.mkdir()
    monkeypatch.setattr(command, "RESULTS", results)
    for name, content in (("one", all_reduces()), ("two", all_reduces(4, 2) | OURS)):
        (results / f"allreduce_{name}.json").write_text(json.dumps(content))
    one, both = {"node0": 4}, {"node0": 4, "node1": 4}
    for hosts, operations, names in ((one, "Gloo", ["one"]), (both, "Gloo", ["one", "two"]),
                                     (both, "NCCL", []), ({"gpu1": 4}, "Gloo", [])):  # fmt: skip
        run.write_text(json.dumps(summary(hosts=hosts, operations=operations)))
        assert said(monkeypatch, "--run", str(run), "--ranks", "8") == 0
        printed = capsys.readouterr().out
        assert [name for name in ("one", "two") if f"allreduce_{name}" in printed] == names
        assert f"operations {operations.lower()}" in printed
        assert ("NOT MEASURED" in printed) == ("two" not in names)
        (row,) = [line for line in printed.splitlines() if line.startswith("| 8 |")]
        assert row.split(" | ")[1] == "2"  # hosts: of 4 ranks each, as in the run


def test_all_reduces_of_another_machine_of_this_name_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(predict_runs, "machine", lambda: {"cpu": "ours", "cores": 2})
    monkeypatch.setattr(predict_runs.os, "uname", lambda: SimpleNamespace(nodename="node0"))
    for cpu in ("ours", "theirs"):
        content = {**all_reduces(), "cpu": cpu, "cores": 2}
        (tmp_path / f"allreduce_{cpu}.json").write_text(json.dumps(content))
    other_form = {**all_reduces(), "ranks": None, "date": "2027-01-01"}
    one_size = {**all_reduces(), "cpu": "ours", "cores": 2, "date": "2027-01-01"}
    one_size["sizes"] = one_size["sizes"][:1]
    before = {**all_reduces(), "cpu": "ours", "cores": 2, "date": "2027-01-01"}
    before["versions"] = {"horovod": "0.28.1+torch2.11.0.cpu.p90"}  # whose ranks agreed otherwise
    for name, text in (("half", json.dumps(content)[:-40]), ("list", "[]"), ("empty", ""),
                       ("older", json.dumps(other_form)),
                       ("one", json.dumps(one_size)),
                       ("before", json.dumps(before))):  # fmt: skip
        (tmp_path / f"allreduce_{name}.json").write_text(text)
    paths = command.all_reduces_of(measured_run(summary(hosts={"node0": 4}), Path()))
    assert list(paths) == [tmp_path / "allreduce_ours.json"]


def test_all_reduces_that_another_host_of_the_run_made_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts may differ: what counts is that this one was as it is now."""
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(predict_runs, "machine", lambda: {"cpu": "ours", "cores": 2})
    monkeypatch.setattr(predict_runs.os, "uname", lambda: SimpleNamespace(nodename="node1"))
    facts = {"theirs": {"cpu": "theirs", "cores": 8}, "ours": {"cpu": "ours", "cores": 2}}
    for name, machines in (("a", ["theirs", "ours"]), ("b", ["theirs", "theirs"])):
        content = {**all_reduces(4, 2), **OURS, **facts["theirs"]}
        content["machines"] = [facts[m] for m in machines]
        (tmp_path / f"allreduce_{name}.json").write_text(json.dumps(content))
    paths = command.all_reduces_of(measured_run(summary(hosts={"node0": 4, "node1": 4}), Path()))
    assert list(paths) == [tmp_path / "allreduce_a.json"]


def test_the_newest_run_is_one_that_no_profiler_made_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict_runs, "ROOT", tmp_path)
    asked = ["model.lr=1", "profiler=simple", "profiler=advanced", "debug=profiler"]
    for number, override in enumerate(asked):
        run = tmp_path / "logs" / "m" / "runs" / str(number)
        (run / ".hydra").mkdir(parents=True)
        (run / ".hydra" / "overrides.yaml").write_text(f"- seed=1\n- {override}\n")
        (run / "summary.json").write_text(json.dumps(summary()))
    assert predict_runs.newest_run().parent.name == "1"
    # One that is named is predicted, with a warning.
    runs = [tmp_path / "logs" / "m" / "runs" / str(n) / "summary.json" for n in range(len(asked))]
    told = ["a profiler made the steps" in "".join(measured_run(summary(), r).head) for r in runs]
    assert told == [False, False, True, True]


def test_a_band_holds_what_is_likely() -> None:
    job = job_of(summary())
    cases, _ = networks([all_reduces()], {}, 1)
    for row in command.predictions(job, command.RANKS, cases):
        assert row.best.seconds <= row.step.seconds <= row.worst.seconds
    assert row.best.seconds < row.step.seconds < row.worst.seconds


def test_a_network_in_words_replaces_what_was_measured() -> None:
    asked = described("rate=10gbit latency=20us")
    cases, _ = networks([all_reduces(), all_reduces(4, 2)], asked, 1)
    assert [case.bandwidth for case in cases] == pytest.approx([0.95e9 * 1.25, 1.0625e9, 0.875e9])
    assert [case.latency for case in cases] == pytest.approx([1e-5, 2e-5, 4e-5])
    assert cases[1].inside_bandwidth == pytest.approx(TRUTH.bandwidth)  # of the single host
    for operations, inside in (("gloo", MEMORY), ("mpi", 1.0625e9)):  # nothing is known of it
        cases, _ = networks([], asked | {"operations": operations}, 2)
        assert cases[1].inside_bandwidth == pytest.approx(inside)


def test_the_longer_of_two_fixed_times_counts() -> None:
    slower = [all_reduces(2), all_reduces(4)]
    for row in (row for result in slower for row in result["sizes"]):
        row |= {key: row[key] + 1e-3 for key in ("seconds", "seconds_p10", "seconds_p90")}
    for case in networks([*slower, all_reduces(4, 2), all_reduces(8, 2)], {}, 1)[0]:
        assert case.fixed > 1.9e-3 > TRUTH.fixed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("rate=25 latency=20us", "rate=25: write a number and kbit or mbit or gbit"),
        ("rate=25gbit", "rate and latency belong together"),
        ("rate=25gbit rate=1gbit latency=1us", "rate=25gbit and rate=1gbit: give one of them"),
        ("rate=25gbit latency=1.2.3us", "latency=1.2.3us: write a number"),
        ("rate=.gbit latency=5us", "rate=.gbit: write a number"),
        ("speed=25gbit", "'speed=25gbit' is unknown; there are rate, latency"),
        ("gpus_per_host=0", "gpus_per_host=0: write how many"),
        ("inside=copper", "inside=copper: write a number"),
        ("operations=smoke", "operations=smoke: there are nccl, gloo, mpi"),
    ],
)
def test_a_network_in_wrong_words_is_refused(words: str, told: str) -> None:
    with pytest.raises(Refusal, match=told):
        described(words)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "this is not JSON"),
        ("[]", "nothing can be predicted from it: TypeError("),
        (json.dumps(summary(strategy="ddp")), "strategy ddp: the model is of horovod's"),
        (json.dumps(summary(strategy="ddp", operations=None)), "strategy ddp"),
        (json.dumps(summary(anatomy=None)), "make train NP=2"),
        (json.dumps(summary(accumulate_grad_batches=4)), "an all-reduce in each batch"),
        (json.dumps(GAN), "2 all-reduces of gradients a batch, as several backwards make: the"),
        (json.dumps(ADASUM), "op=adasum: the model is of sums on a ring"),
        (json.dumps(NO_PHASES), "nothing can be predicted from it: KeyError('phases_ms'): is it"),
        (json.dumps(NO_CALLS), "nothing can be predicted from it: KeyError('calls'): is it"),
        (json.dumps(summary(hosts={})), "it lacks what a run writes: no hosts"),
    ],
)
def test_a_run_that_tells_too_little_is_refused(
    content: str, told: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    files["run"].write_text(content)
    assert said(monkeypatch, "--run", str(files["run"]), "--allreduce", str(files["one"])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: RUN={files['run']}") and told in line


def test_a_run_that_takes_no_files_is_predicted_all_the_same(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files["run"].with_name("prediction.png").mkdir()
    options = ["--run", str(files["run"]), "--allreduce", str(files["one"])]
    with pytest.raises(SystemExit, match="^error: .*prediction.png: Is a directory;"):
        said(monkeypatch, *options, plots=True)
    printed = capsys.readouterr().out
    assert "| 4,096 | " in printed and "written to" not in printed


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(predict_runs, "newest_run", interrupted)
    monkeypatch.setattr(sys, "argv", ["predict"])
    with pytest.warns(RuntimeWarning, match="benchmarks.predict"), pytest.raises(SystemExit) as end:
        runpy.run_module("benchmarks.predict", run_name="__main__")
    assert end.value.code == 130


def test_files_of_another_form_are_told_in_a_line(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = files["run"].read_text()
    for run_text, change in (
        (json.dumps(summary(hosts=["vm", "vm"])), {}),
        (json.dumps(summary(anatomy=[1])), {}),
        (good, {"operations": 3}),
        (good, {"sizes": []}),
        (good, {"sizes": [{"bytes": 4096}]}),
        (good, {"versions": {"horovod": "0.28.1"}}),  # whose ranks agree in other ways
    ):
        files["run"].write_text(run_text)
        other = files["run"].with_name("other.json")
        other.write_text(json.dumps(json.loads(files["one"].read_text()) | change))
        assert said(monkeypatch, "--run", str(files["run"]), "--allreduce", str(other)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        named = f"ALLREDUCE={other}" if change else f"RUN={files['run']}"
        assert line.startswith(f"error: {named}: nothing can be predicted from it: ")


def test_a_summary_of_another_form_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict_runs, "ROOT", tmp_path)
    for name, text in (("1", json.dumps(summary())), ("2", "[]"), ("3", '{"anatomy": [1]}')):
        folder = tmp_path / "logs" / "task" / "runs" / name
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(text)
    assert predict_runs.newest_run().parent.name == "1"


@pytest.mark.parametrize("number", ["0", "8192"])
def test_wrong_numbers_of_ranks_are_refused(
    number: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, "--ranks", "2", number) == 2
    assert "the model is for 1 to 4,096 ranks" in capsys.readouterr().err


# ---------------------------------------------------------------------- make bench-allreduce


def test_bandwidths_of_known_times() -> None:
    """4 MB in 10 ms on 4 ranks: 400 MB/s, of which a link of the ring carries 1.5 times."""
    (row,) = allreduce.bandwidths([4_000_000], [[0.009, 0.010, 0.011]], 4)
    assert (row["seconds"], row["algorithm_mb_s"], row["bus_mb_s"]) == (0.010, 400.0, 600.0)
    assert (row["seconds_p10"], row["seconds_p90"]) == pytest.approx((0.0092, 0.0108))


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (4, "4 B"), (1020, "1020 B"), (1024, "1 KiB"), (5184, "5.06 KiB"), (102300, "99.9 KiB"),
        (1047552, "1023 KiB"), (2**20, "1 MiB"), (3 * 2**19, "1.5 MiB"), (2**31, "2048 MiB"),
    ],
)  # fmt: skip
def test_sizes_are_told_as_they_are(size: int, told: str) -> None:
    assert allreduce.readable(size) == told


def test_the_hosts_that_take_part_tell_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the one that make bench-allreduce was started on."""
    kinds = {"node1": ("CPU A", 8), "node2": ("CPU B", 4), "node3": ("not used", 1)}

    def ask(hosts: list[Host], module: str) -> dict[str, dict[str, Any]]:
        if module == "benchmarks.load":
            idle = {host.name: {"busy": 0.02, "gpu_busy": None} for host in hosts}
            return idle | {"node2": {"busy": 0.02, "gpu_busy": 0.98}}
        assert module == "benchmarks.hardware"
        return {
            host.name: dict(zip(("cpu", "cores"), kinds[host.name]))
            | {"memory_gib": 8, "gpus": [], "nics": {}, "boot": host.name}
            for host in hosts
        }

    def launched(*_: Any, each: Callable) -> None:
        told = {"ranks": ["node1", "node2"], "operations": "Gloo", "device": None}
        for seconds in (0.01, 0.02):
            each({**told, "seconds": [seconds] * 2})

    monkeypatch.setattr(allreduce, "ask", ask)
    monkeypatch.setattr(allreduce, "launched", launched)
    options = ["-np", "2", "-H", "node1:1,node2:1,node3:1", "--out", str(tmp_path)]
    sizes = ["--largest", "16384", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", ["allreduce", *options, *sizes])
    assert allreduce.main() == 0
    output = capsys.readouterr().out
    assert "CPU A, 8 cores + CPU B, 4 cores; Python" in output
    assert "of its slowest rank. Take care: other load 98%." in " ".join(output.split())
    (file,) = tmp_path.glob("allreduce_2-hosts-2-ranks_network_cpu-a_*.json")
    results = json.loads(file.read_text())
    assert (results["cpu"], results["cores"], results["gpus"]) == ("CPU A", 8, [])
    assert [machine["cpu"] for machine in results["machines"]] == ["CPU A", "CPU B"]
    assert command.disturbed(results) == ", take care: beside other load of 98%"
    assert command.disturbed(results | {"busy_before": 0.02}) == ""
    assert {"busy_before", "memory_gib", "python", "versions", "commit", "date"} <= set(results)


def test_all_reduces_are_timed_on_all_ranks(tmp_path: Path) -> None:
    options = ["--largest", "65536", "--repeats", "3"]
    line = [sys.executable, "-m", "benchmarks.allreduce", "-np", "2", "-H", "localhost:2"]
    done = run([*line, *options, "--out", str(tmp_path)])
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("allreduce_2-ranks_loopback_*.json")
    results = json.loads(file.read_text())
    assert results["ranks"] == [socket.gethostname()] * 2
    assert results["hosts"] == [{"name": "localhost", "slots": 2}]
    assert [row["bytes"] for row in results["sizes"]] == [4096, 16384, 65536]
    assert all(0 < row["seconds_p10"] <= row["seconds_p90"] for row in results["sizes"])
    assert all(math.isclose(row["bus_mb_s"], row["algorithm_mb_s"]) for row in results["sizes"])
    assert {"operations", "cpu", "cores", "versions", "commit", "repeats"} <= set(results)
    for suffix in (".md", ".csv", ".png", ".svg"):
        assert file.with_suffix(suffix).stat().st_size > 0
    assert "repetition 3 of 3" in done.stdout


def test_ranks_that_fail_tell_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Failed, match="^error: the ranks ended with exit code 1, see above$"):
        workers.launched("benchmarks.no_such_worker", {}, ["-np", "1"])
    assert "No module named benchmarks.no_such_worker" in capsys.readouterr().err


def times_of_ranks() -> list[list[float]]:
    """Of two sizes whose all-reduce takes a rank its number + 1, and the warm-up more."""
    initialize()
    rounds = iter([100.0, 100.0] + 6 * [0.0])
    with patch.object(allreduce_worker, "once", lambda *_: hvd.rank() + 1.0 + next(rounds)):
        return list(allreduce_worker.measure([4, 8], 3, "cpu"))


def test_the_slowest_rank_counts_and_no_warm_up(launch: Callable) -> None:
    for times in launch(times_of_ranks, 2):
        assert times == [[2.0] * 2] * 3


def test_all_reduces_that_were_interrupted_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    seconds = iter([1.0, 2.0, None, 4.0])  # Ctrl-C in the third

    def launched(module: str, options: dict[str, Any], where: list[str], each: Callable) -> None:
        asked.append(options["repeats"])
        for _ in range(options["repeats"]):
            if (one := next(seconds)) is None:
                raise KeyboardInterrupt
            times = [one] * len(options["sizes"])
            each({"ranks": ["a", "a"], "operations": "Gloo", "device": None, "seconds": times})

    monkeypatch.setattr(allreduce, "launched", launched)
    loads = iter([0.0, 0.3])
    facts = {"cpu": "one", "cores": 2, "machines": [{"cpu": "one", "cores": 2, "device": None}]}
    monkeypatch.setattr(
        allreduce, "facts",
        lambda _: {**hardware.hardware(), **facts, "busy_before": next(loads)},
    )  # fmt: skip
    options = ["-np", "2", "-H", "localhost:2", "--largest", "16384", "--repeats", "3"]
    monkeypatch.setattr(sys, "argv", ["allreduce", *options, "--out", str(tmp_path)])
    assert allreduce.main() == 130
    assert "is kept: the same command goes on" in capsys.readouterr().err
    (part,) = tmp_path.glob("*.json")
    assert not part.match("allreduce_*")  # nobody predicts from it
    assert allreduce.main() == 0
    assert asked == [3, 1] and not part.exists()
    (file,) = tmp_path.glob("allreduce_*.json")
    results = json.loads(file.read_text())
    assert [(row["bytes"], row["seconds"]) for row in results["sizes"]] == [(4096, 2), (16384, 2)]
    assert results["ranks"] == ["a", "a"] and results["finished"]
    assert "Take care: other load 30%." in file.with_suffix(".md").read_text()


def test_a_result_is_not_written_over(tmp_path: Path) -> None:
    results = {"hosts": [{"name": "a"}], "ranks": ["a", "a"], "device": None, "cpu": "Test CPU",
               "network": "loopback", "date": "2026-01-02T03:04:05"}  # fmt: skip
    name = f"{allreduce.file_name(results)}.json"
    assert unused(tmp_path / name) == tmp_path / name
    (tmp_path / name).write_text("{}")
    second = unused(tmp_path / name)
    assert second.name == "allreduce_2-ranks_loopback_test-cpu_2026-01-02_2.json"


def test_numbers_that_memory_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank of a host may have is too much for four."""
    half = 2048 << 20
    monkeypatch.setattr(allreduce_worker, "memory", lambda: 4096)
    monkeypatch.setattr(allreduce_worker, "PROCESS_BYTES", 0)
    monkeypatch.setattr(allreduce_worker.hvd, "local_size", lambda: 1)
    assert allreduce_worker.lacking_memory(half, "cpu") == ""
    monkeypatch.setattr(allreduce_worker.hvd, "local_size", lambda: 4)
    assert allreduce_worker.lacking_memory(half, "cpu").startswith("4 ranks need ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-np", "1", "-H", "localhost:1"], "one rank: there is nobody"),
        (["-np", "4", "-H", "localhost:2"], "NP=4 processes on 2 slots"),
        (["-H", "localhost:2", "--largest", "16"], "take 4096 bytes or more"),
        (["-H", "no-such-host:2"], "no-such-host: no such host"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["allreduce", *arguments, "--out", str(tmp_path)])
    monkeypatch.setattr(allreduce, "launched", lambda *_: pytest.fail("refused too late"))
    assert allreduce.main() == 2
    (line,) = "".join(capsys.readouterr()).splitlines()
    assert line.startswith("error: ") and told in line
