"""The files that `make predict` reads: a run's summary, which becomes a job, and all-reduces."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

from benchmarks.cost_fit import SINCE, patches_of
from benchmarks.cost_model import Job, as_many_buckets, median_wait, wire_bytes
from cluster.environment import ROOT
from cluster.hosts import Refusal

UNNAMED = ("network", "loopback")  # what bench-allreduce calls a network that nobody named


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
    newest = {}
    for _, several, file, result in sorted(found, key=lambda each: each[0]):
        newest[several] = (file, result)
    return dict(newest.values())


def job_of(summary: dict[str, Any]) -> Job:
    """The job that a run was.

    Raises:
        ValueError: when the cost model is not for such a run.
    """
    anatomy = summary["anatomy"]
    if summary.get("strategy") != "horovod":
        raise ValueError(f"strategy {summary.get('strategy')}: the model is of horovod's")
    if not anatomy or not anatomy.get("wire"):
        raise ValueError("no all-reduce of gradients was seen in it: make train NP=2")
    if (windows := summary.get("accumulate_grad_batches", 1)) != 1:
        setting = f"trainer.accumulate_grad_batches={windows}"
        raise ValueError(f"{setting}: the model is of an all-reduce in each batch")
    ranks = summary["world_size"]
    return job_of_anatomy(anatomy, ranks, buckets_of(anatomy["wire"], ranks))


def buckets_of(wire: dict[str, Any], ranks: int) -> list[float]:
    """Bytes of the buckets that so many ranks sent: in 16 bits half as many as gradients have.

    Raises:
        ValueError: when gradients were not summed once a batch.
    """
    if (exchanges := wire.get("exchanges", 1)) != 1:
        raise ValueError(
            f"{exchanges:g} all-reduces of gradients a batch, as several backwards make: the model "
            "is of an all-reduce in each batch"
        )
    gradients = wire["payload_bytes"]
    if ranks > 1:
        sent = wire["bytes"] / wire_bytes(1, ranks)
        if not wire.get("compressible", True) and sent > 0.51 * gradients:
            raise ValueError("strategy.op=adasum: the model is of sums on a ring")
        gradients = sent
    return as_many_buckets(gradients, round(wire["calls"]))


def job_of_anatomy(anatomy: dict[str, Any], ranks: int, buckets: list[float]) -> Job:
    """The job of ranks whose step and phases were timed."""
    step_ms = anatomy["step_ms"]
    # The medians of the phases need not add up to the median step: they are scaled to do so.
    scale = step_ms["median"] / 1e3 / sum(anatomy["phases_ms"].values())
    phases = {name: scale * value for name, value in anatomy["phases_ms"].items()}
    deviation = slowest = 0.0
    if anatomy.get("straggler"):
        slowest = phases["straggler"]
    elif ranks > 1:  # a phase is the median over steps
        deviation = phases["straggler"] / median_wait(ranks)
    else:  # from p10 to p90 of its own steps
        deviation = (step_ms["p90"] - step_ms["p10"]) / (2e3 * NormalDist().inv_cdf(0.9))
    rest = phases["data"] + phases["optimizer"] + phases["rest"]
    return Job(
        phases["forward"], phases["backward"], rest, tuple(buckets), deviation, slowest=slowest
    )
