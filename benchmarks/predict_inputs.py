"""What `make predict` reads from files: all-reduces, and the form of what predict_runs.py finds in
a run and predict_steps.py in a result of bench-step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cost_fit import SINCE, patches_of
from benchmarks.cost_model import Job
from cluster.hosts import Refusal

UNNAMED = ("network", "loopback")  # what bench-allreduce calls a network that nobody named


class Measured(NamedTuple):
    """A job, and what is known of the ranks that it was measured on.

    Attributes:
        slots: ranks of a host.
        seconds: of their step, with communication; None where that was not measured.
        head: all of it in words, and what to take care of.
        machines: their hosts, as for `newest_all_reduces`.
        network: what they called it; "": no name.
    """

    model: str
    job: Job
    ranks: int
    slots: int
    seconds: float | None
    head: list[str]
    machines: dict[str, Any]
    operations: str
    network: str = ""


def told(name: str, job: Job, file: Path) -> str:
    """A job in words."""
    return (
        f"job       {name}: {job.compute * 1e3:.1f} ms of compute a step, "
        f"{sum(job.buckets) / 1e6:.2f} MB of gradients, buckets: {len(job.buckets)}, ranks differ "
        f"by {job.deviation * 1e3:.2f} ms ({file})"
    )


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
