"""The inputs of `make predict`: a run's summary, results of all-reduces, a network in words.

They are read, checked, and made the `Job` and the `Network` of the formulas, which are in
benchmarks/cost_model.py.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from benchmarks.cost_model import (
    Job,
    Measurement,
    Network,
    as_many_buckets,
    fit,
    hops,
    median_wait,
    slot_count,
    tells_fixed,
    wire_bytes,
)
from cluster.environment import ROOT
from cluster.hosts import Refusal

UNITS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "ns": 1e-9, "us": 1e-6, "ms": 1e-3}
RATES, TIMES = ("kbit", "mbit", "gbit"), ("ns", "us", "ms")


class Link(NamedTuple):
    """What joins ranks inside a host, or hosts: latency in seconds, bandwidth in bytes per second,
    and seconds that each round takes, where they are fitted."""

    latency: float
    bandwidth: float
    fixed: float | None = None


# A PCIe 3 x16 slot carries 12.8 GB/s of payload, NVLink between V100s about 120 GB/s of an
# all-reduce; newer ones more, which seldom matters here.
INSIDE = {"pcie": Link(5e-6, 10e9), "nvlink": Link(3e-6, 120e9)}
NOT_MEASURED = "rate=25gbit latency=20us"  # between hosts, where nothing is known of them
TCP = 20e-6  # seconds of a small message over TCP, where the latency described is NCCL's
MEMORY = 3e9  # bytes per second of an all-reduce in a host's memory, where none was measured
FIXED = 1e-4  # seconds of a round, where no all-reduce was measured


class Case(NamedTuple):
    """How good the network is taken to be."""

    times: str  # key of the measured times that count
    share: float  # of a described link's rate that is reached
    slower: float  # factor of a described latency
    part: float  # of the time that no bytes explain, taken as latency; see `fits`


CASES = (  # at best, likely, at worst
    Case("seconds_p10", share=0.95, slower=0.5, part=0.25),
    Case("seconds", share=0.85, slower=1.0, part=0.5),
    Case("seconds_p90", share=0.70, slower=2.0, part=1.0),
)
Results = list[dict[str, Any]]
Options = dict[str, Any]  # of NETWORK
UNNAMED = ("network", "loopback")  # what bench-allreduce calls a network that nobody named
SINCE = 94  # the patches of `make install` with which ranks agree and sum as they do now
KEYS = ("rate", "latency", "gpus_per_host", "inside", "operations", "controller_latency")


def quantity(text: str, what: str, units: Sequence[str]) -> float:
    """25gbit in bytes per second, 20us in seconds.

    Raises:
        Refusal: when it is none.
    """
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([a-z]+)", text)
    if not match or match[2] not in units or not float(match[1]) > 0:
        raise Refusal(f"NETWORK: {what}={text}: write a number and {' or '.join(units)}")
    return float(match[1]) * UNITS[match[2]]


def described(text: str) -> Options:
    """The keys and values of NETWORK, in bytes per second and seconds.

    Raises:
        Refusal: for keys and values that are unknown.
    """
    words: dict[str, str] = {}
    for entry in text.split():
        key, _, value = entry.partition("=")
        if key not in KEYS or not value:
            raise Refusal(
                f"NETWORK: '{entry}' is unknown; there are {', '.join(KEYS)}, as key=value"
            )
        if key in words:
            raise Refusal(f"NETWORK: {key}={words[key]} and {key}={value}: give one of them")
        words[key] = value
    options = {key: _value(key, value) for key, value in words.items()}
    if ("rate" in options) != ("latency" in options):
        raise Refusal("NETWORK: rate and latency belong together, as rate=25gbit latency=20us")
    return options


def _value(key: str, text: str) -> Any:
    if key == "rate":
        return quantity(text, key, RATES)
    if key in ("latency", "controller_latency"):
        return quantity(text, key, TIMES)
    if key == "inside":
        return INSIDE.get(text) or Link(INSIDE["pcie"].latency, quantity(text, key, RATES[1:]))
    if key == "gpus_per_host":
        if not re.fullmatch("[1-9][0-9]{0,3}", text):
            raise Refusal(f"NETWORK: gpus_per_host={text}: write how many, as 8")
        return int(text)
    if text not in (choices := ("nccl", "gloo", "mpi")):
        raise Refusal(f"NETWORK: {key}={text}: there are {', '.join(choices)}")
    return text


def read(file: Path, what: str) -> Any:
    """A JSON file.

    Raises:
        Refusal: naming it as `what`, when it cannot be read.
    """
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise Refusal(f"{what}={file}: {error.strerror}") from None
    except ValueError:
        raise Refusal(f"{what}={file}: this is not JSON") from None


@contextlib.contextmanager
def of_our_form(name: str) -> Iterator[None]:
    """Refuses a file by its name where it lacks what is looked up here."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        why = error if isinstance(error, ValueError) else f"{error!r}: is it the right file?"
        raise Refusal(f"{name}: nothing can be predicted from it: {why}") from None


def newest_run() -> Path:
    """The summary of the newest run of several ranks, without those that a profiler made slower.

    Raises:
        Refusal: where there is none.
    """
    files = sorted(ROOT.glob("logs/*/runs/*/summary.json"), key=lambda f: (f.parent.name, f))
    for file in reversed(files):
        try:
            summary = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        overrides = file.parent / ".hydra" / "overrides.yaml"
        text = overrides.read_text() if overrides.is_file() else ""
        profiled = re.search(r"^- (debug=profiler|profiler=(advanced|pytorch|trace))$", text, re.M)
        anatomy = isinstance(summary, dict) and summary.get("anatomy")
        if isinstance(anatomy, dict) and anatomy.get("wire") and not profiled:
            return file
    raise Refusal("no run in logs/ tells of all-reduces: make train NP=2 first, or give RUN=")


def newest_all_reduces(
    files: Iterable[Path], machines: dict[str, Any], operations: str | None, network: str = ""
) -> dict[Path, dict[str, Any]]:
    """The newest results of all-reduces inside one of these hosts and between several, where there
    are any. Files that are half copied or of another form are passed over.

    Args:
        machines: the hosts, by what they call themselves, each with its "cpu" and "cores", as
            another machine may have had the name; None where they are not known.
        network: if it has a name, results of networks with other names are left out.
    """

    def suits(result: dict[str, Any]) -> bool:
        nodes = dict.fromkeys(result["ranks"])
        pairs = [(machines[n], m) for n, m in zip(nodes, result.get("machines", [result]))]
        return (
            nodes.keys() <= machines.keys()
            and all(m[key] == own[key] for own, m in pairs if own for key in ("cpu", "cores"))
            and result["operations"] == operations
            and (not network or result["network"] in (network, *UNNAMED))
            and len(result["sizes"]) > 1  # a line needs two
            and patches_of(result) >= SINCE
        )

    found = []
    for file in files:
        with contextlib.suppress(Refusal), of_our_form(str(file)):
            result = read(file, "ALLREDUCE")
            if suits(result):
                found.append((result["date"], len(result["hosts"]) > 1, file, result))
    by_date = sorted(found, key=lambda each: each[0])
    return dict({several: (file, result) for _, several, file, result in by_date}.values())


def job_of(summary: dict[str, Any], file: Path) -> Job:
    """The job that a run was.

    Raises:
        Refusal: when the cost model is not for such a run.
    """
    anatomy = summary["anatomy"]
    if summary.get("strategy") != "horovod":
        raise Refusal(f"RUN={file}: strategy {summary.get('strategy')}: the model is of horovod's")
    if not anatomy or not anatomy.get("wire"):
        raise Refusal(f"RUN={file}: no all-reduce of gradients was seen in it: make train NP=2")
    if (windows := summary.get("accumulate_grad_batches", 1)) != 1:
        raise Refusal(
            f"RUN={file}: trainer.accumulate_grad_batches={windows}: the model is of an all-reduce "
            "in each batch"
        )
    if (exchanges := anatomy["wire"].get("exchanges", 1)) != 1:
        raise Refusal(
            f"RUN={file}: {exchanges:g} all-reduces of gradients a batch, as several "
            "backwards make: the model is of an all-reduce in each batch"
        )
    ranks = summary["world_size"]
    # The medians of the phases need not add up to the median step: they are scaled to do so.
    scale = anatomy["step_ms"]["median"] / 1e3 / sum(anatomy["phases_ms"].values())
    phases = {name: scale * value for name, value in anatomy["phases_ms"].items()}
    wire = anatomy["wire"]
    buckets = as_many_buckets(_on_a_ring(wire, ranks, file), round(wire["calls"]))
    slowest = phases["straggler"] if anatomy.get("straggler") else 0.0
    if slowest:
        deviation = 0.0
    elif ranks > 1:  # a phase is the median over steps
        deviation = phases["straggler"] / median_wait(ranks)
    else:  # from p10 to p90 of its own steps
        tail = NormalDist().inv_cdf(0.9)
        deviation = (anatomy["step_ms"]["p90"] - anatomy["step_ms"]["p10"]) / (2e3 * tail)
    rest = phases["data"] + phases["optimizer"] + phases["rest"]
    return Job(
        phases["forward"], phases["backward"], rest, tuple(buckets), deviation, slowest=slowest
    )


def _on_a_ring(wire: dict[str, Any], ranks: int, file: Path) -> float:
    """The bytes of gradients as they were sent: in 16 bits half as many as the gradients have."""
    ranks = wire.get("ranks", ranks)
    if ranks == 1:  # sends nothing
        return wire["payload_bytes"]
    sent = wire["bytes"] / (2 * (ranks - 1) / ranks)
    if not wire.get("compressible", True) and sent > 0.51 * wire["payload_bytes"]:
        raise Refusal(f"RUN={file}: strategy.op=adasum: the model is of sums on a ring")
    return sent


def algorithms(operations: str, shared: bool = True) -> tuple[str, ...]:
    """The algorithms that "gloo", "nccl" or "mpi" has for all-reduces: see `Network`.

    Args:
        shared: whether ranks of a host share memory.
    """
    if operations != "gloo":
        return ("ring", "tree")
    return ("shared",) if shared else ("ring",)


def controller_of(operations: str, shared: bool = True) -> str:
    """How ranks agree: see `Network`."""
    if operations == "mpi":
        return "tree"
    return "dissemination" if shared else "dissemination of ranks"


def patches_of(result: dict[str, Any]) -> int:
    """The number of the patches of the Horovod that a file was measured with; 0 without any."""
    version = result.get("versions", {}).get("horovod", "")
    patches = re.search(r"\.p(\d+)\b", version)
    return int(patches[1]) if patches else 0


def measurements_of(
    result: dict[str, Any], times: str, inside: Link | None = None
) -> list[Measurement]:
    """The all-reduces of a file; their times contain the agreement of the ranks before each.

    Args:
        times: see `Case`.
        inside: what joins the ranks of its hosts, if it is known; None: as between hosts.

    Raises:
        ValueError: for a Horovod that summed and agreed otherwise than that of `make install` now.
    """
    count, hosts = len(result["ranks"]), len(result["hosts"])
    operations = result["operations"].lower()
    if patches_of(result) < SINCE:
        raise ValueError(
            f"its Horovod summed or agreed in other ways than since wheel p{SINCE}: make "
            "bench-allreduce again"
        )
    alike = len({*Counter(result["ranks"]).values()}) == 1
    off = result.get("environment", {}).get("HOROVOD_SHARED_MEMORY") == "0"
    shared = alike and not off
    ways = algorithms(operations, shared)
    transfer = min(hops(count, hosts, algorithm) for algorithm in ways)
    agreed = hops(count, hosts, controller_of(operations, shared))
    shared = "shared" in ways and hosts > 1
    measurements = []
    for row in result["sizes"]:
        size, known = row["bytes"], 0.0
        rounds = slot_count(size) if shared else 1
        between, within = (rounds * once + agreeing for once, agreeing in zip(transfer, agreed))
        if inside is None or hosts == 1:
            between += within
        else:  # also where its latency is 0, which a fit may find
            known = within * inside.latency
            known += shared * wire_bytes(size, count // hosts) / inside.bandwidth
        ring = hosts if shared else count
        measurements.append(Measurement(ring, size, row[times], hops=between, known=known))
    return measurements


def fits(results: Results, case: Case, inside: Link | None = None) -> Link | None:
    """The constants of what these files measured; None without any.

    Args:
        inside: what joins the ranks of their hosts, where it is known, and the time that is fixed.
    """
    if not results:
        return None
    measurements = [m for result in results for m in measurements_of(result, case.times, inside)]
    if tells_fixed(measurements):
        fitted = fit(measurements)
        return Link(fitted.latency, fitted.share, fitted.fixed)
    if inside and inside.fixed is not None:
        fitted = fit([replace(m, known=m.known + inside.fixed) for m in measurements])
        return Link(fitted.latency, fitted.share)
    fitted = fit(measurements)
    fixed = (1 - case.part) * measurements[0].hop_count * fitted.latency
    return Link(case.part * fitted.latency, fitted.share, fixed)


def networks(results: Results, options: Options, slots: int) -> tuple[list[Network], list[str]]:
    """The network at best, likely, and at worst; and where its constants come from. Its ranks agree
    as with the Horovod that `make install` builds now.

    Args:
        options: of `described`.
        slots: ranks of a host in the run, unless the options have gpus_per_host.

    Raises:
        Refusal: when nothing says how the GPUs of a host are joined.
    """
    operations = options.get("operations", results[0]["operations"].lower() if results else "gloo")
    one_host = [result for result in results if len(result["hosts"]) == 1]
    several = [result for result in results if len(result["hosts"]) > 1]
    joined = one_host or "inside" in options or options.get("gpus_per_host", slots) == 1
    if operations == "nccl" and "rate" in options and not joined:
        raise Refusal(
            "NETWORK: add inside=pcie or inside=nvlink, by which GPUs of a host are joined: it is "
            "not measured"
        )
    # Measured times contain the agreement already.
    unknown = operations == "nccl" and ("rate" in options or not several)
    hop = options.get("controller_latency", TCP if unknown else 0.0)
    cases = [
        replace(
            _constants(one_host, several, options, case, operations),
            ranks_per_host=options.get("gpus_per_host") or slots,
            algorithms=algorithms(operations),
            controller=controller_of(operations),
            agreement_latency=hop if "controller_latency" in options else case.slower * hop,
            asynchronous=operations == "nccl",
        )
        for case in CASES
    ]
    over = "mpi" if operations == "mpi" else "gloo"
    agreement = f"operations {operations}, agreement over {over}"
    agreement += f", at least {hop * 1e6:g} µs a hop" if hop else ""
    return cases, [agreement, *_sources(cases[1], one_host, several, options)]


def _constants(
    one_host: Results, several: Results, options: Options, case: Case, operations: str
) -> Network:
    """Latencies, bandwidths and fixed time: described, else fitted, else assumed."""
    inside: Link | None = options.get("inside") or fits(one_host, case)
    between = None if "rate" in options else fits(several, case)
    if between and inside and (inside.latency < between.latency or inside.fixed is not None):
        # Where it was the higher one, of one number of ranks, fixed time passed for latency.
        inside = inside._replace(latency=min(inside.latency, between.latency))
        between = fits(several, case, inside)
    if not between:
        link = described(NOT_MEASURED) | options
        between = Link(case.slower * link["latency"], case.share * link["rate"])
    inside = inside or Link(between.latency, MEMORY if operations == "gloo" else between.bandwidth)
    fixed = [link.fixed for link in (inside, between) if link.fixed is not None]
    return Network(
        between.latency, between.bandwidth, inside_latency=inside.latency,
        inside_bandwidth=inside.bandwidth, fixed=max(fixed, default=case.slower * FIXED),
    )  # fmt: skip


def _sources(likely: Network, one_host: Results, several: Results, options: Options) -> list[str]:
    """Where the constants come from, a line each."""
    lines = []
    for where, key, results, otherwise, latency, bandwidth in (
        ("between hosts", "rate", several, f"NOT MEASURED, taken as {NOT_MEASURED}",
         likely.latency, likely.bandwidth),
        ("inside a host", "inside", one_host, "NOT MEASURED, taken as",
         likely.inside_latency, likely.inside_bandwidth),
    ):  # fmt: skip
        source = "as described" if key in options else "fitted" if results else otherwise
        lines.append(
            f"{where}: {source}: {bandwidth / 1e6:,.0f} MB/s, latency {latency * 1e6:.0f} µs a hop"
        )
    kinds = (("inside", one_host), ("rate", several))
    fitted = [results for key, results in kinds if results and key not in options]
    told_by = fitted[0] if fitted else []  # the fixed time of both: see `fits`
    if not tells_fixed([m for each in told_by for m in measurements_of(each, "seconds")]):
        lines.append(
            "one number of ranks does not tell latency from fixed time: a quarter, half, all of it "
            'is taken as latency; more files (ALLREDUCE="a b") tell'
        )
    return lines
