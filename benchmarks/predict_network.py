"""The network that `make predict` is for: described in words, else fitted, else assumed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.cost_fit import ALGORITHMS, CONTROLLERS, Link, fit, measurements_of, tells_fixed
from benchmarks.cost_model import Network
from cluster.hosts import Refusal

UNITS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "ns": 1e-9, "us": 1e-6, "ms": 1e-3}
RATES, TIMES = ("kbit", "mbit", "gbit"), ("ns", "us", "ms")
# A PCIe 3 x16 slot carries 12.8 GB/s of payload, NVLink between V100s about 120 GB/s of an
# all-reduce; newer ones more, which seldom matters here.
INSIDE = {"pcie": Link(5e-6, 10e9), "nvlink": Link(3e-6, 120e9)}
NOT_MEASURED = "rate=25gbit latency=20us"  # between hosts, where nothing is known of them
ASSUMED, PARTED = "NOT MEASURED, taken as", "fitted, the latency in part assumed"
TCP = 20e-6  # seconds of a small message over TCP, where the latency described is NCCL's
MEMORY = 3e9  # bytes per second of an all-reduce in a host's memory, where none was measured
FIXED = 1e-4  # seconds of a round, where no all-reduce was measured


class Case(NamedTuple):
    """How good the network is taken to be."""

    times: str  # key of the measured times that count
    share: float  # of a described link's rate that is reached
    slower: float  # factor of a described latency
    part: float  # of the time that no bytes explain, taken as latency where nothing tells


CASES = (  # at best, likely, at worst
    Case("seconds_p10", share=0.95, slower=0.5, part=0.25),
    Case("seconds", share=0.85, slower=1.0, part=0.5),
    Case("seconds_p90", share=0.70, slower=2.0, part=1.0),
)

Results = list[dict[str, Any]]  # of benchmarks/allreduce.py
Options = dict[str, Any]  # of NETWORK
KEYS = ("rate", "latency", "gpus_per_host", "inside", "operations", "controller_latency")


# ---------------------------------------------------------------------------- in words


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
    if text not in ALGORITHMS:
        raise Refusal(f"NETWORK: {key}={text}: there are {', '.join(ALGORITHMS)}")
    return text


# ---------------------------------------------------------------------------- fitted


def fitted(
    results: Results, case: Case, inside: Link | None = None, fixed: float | None = None
) -> tuple[Link, float]:
    """The link that these files measured, and the seconds of a round that are fixed.

    On one number of ranks, latency and fixed time cannot be told apart: then `fixed` is believed
    or, where it is not known, the case says which part is latency.

    Args:
        inside: the link inside their hosts, where they have several and it is known.
        fixed: as measured inside a host.
    """
    measurements = [m for result in results for m in measurements_of(result, case.times, inside)]
    if tells_fixed(measurements):
        found = fit(measurements)
        return Link(found.latency, found.share, "fitted"), found.fixed
    if fixed is not None:
        found = fit([replace(m, known=m.known + fixed) for m in measurements])
        return Link(found.latency, found.share, "fitted"), fixed
    found = fit(measurements)
    latency, rest = case.part * found.latency, (1 - case.part) * found.latency
    return Link(latency, found.share, PARTED), measurements[0].hops * rest


def links(
    one_host: Results, several: Results, options: Options, case: Case, operations: str
) -> tuple[Link, Link, float]:
    """Between hosts, inside them, and the fixed seconds of a round."""
    inside: Link | None = options.get("inside")
    fixed: float | None = None
    if one_host and not inside:
        inside, fixed = fitted(one_host, case)
    if several and "rate" not in options:
        between, fixed_between = fitted(several, case)  # as if all links were alike
        if inside and (fixed is not None or inside.latency < between.latency):
            # A fitted latency that is higher than between hosts has fixed time in it.
            inside = inside._replace(latency=min(inside.latency, between.latency))
            between, fixed_between = fitted(several, case, inside, fixed)
        fixed = max(fixed_between, fixed or 0.0)
    else:
        source = "as described" if "rate" in options else f"{ASSUMED} {NOT_MEASURED}"
        link = described(NOT_MEASURED) | options
        between = Link(case.slower * link["latency"], case.share * link["rate"], source)
    if not inside:
        bandwidth = MEMORY if operations == "gloo" else between.bandwidth
        inside = Link(between.latency, bandwidth, ASSUMED)
    return between, inside, case.slower * FIXED if fixed is None else fixed


def networks(results: Results, options: Options, slots: int) -> tuple[list[Network], list[str]]:
    """The network at best, likely, and at worst; and where its constants come from, in lines. Its
    ranks agree as with the Horovod that `make install` builds now.

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
    found = [links(one_host, several, options, case, operations) for case in CASES]
    cases = [
        Network(
            between.latency, between.bandwidth, options.get("gpus_per_host", slots),
            inside.latency, inside.bandwidth, fixed,
            algorithms=ALGORITHMS[operations], controller=CONTROLLERS[operations],
            agreement_latency=hop if "controller_latency" in options else case.slower * hop,
            asynchronous=operations == "nccl",
        )
        for case, (between, inside, fixed) in zip(CASES, found)
    ]  # fmt: skip
    over = "mpi" if operations == "mpi" else "gloo"
    least = f", at least {hop * 1e6:g} µs a hop" if hop else ""
    lines = [f"operations {operations}, agreement over {over}{least}"]
    between, inside, _ = found[1]
    for where, link in (("between hosts", between), ("inside a host", inside)):
        speed = f"{link.bandwidth / 1e6:,.0f} MB/s, latency {link.latency * 1e6:.0f} µs a hop"
        lines.append(f"{where}: {link.source}: {speed}")
    if PARTED in (between.source, inside.source):
        lines.append(
            "one number of ranks does not tell latency from fixed time: a quarter, half, all of it "
            'is taken as latency; more files (ALLREDUCE="a b") tell'
        )
    return cases, lines
