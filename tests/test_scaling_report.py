"""Tables, plots, the prediction and the README's block, of made-up results."""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import files, scaling, scaling_plot, scaling_report
from benchmarks.efficiency import Results, rows
from benchmarks.scaling_predicted import predicted
from runs.bottleneck import PHASES
from tests.conftest import ROOT
from tests.scaling_source import MACHINE, Source, by_size, measured, results

CASES = ("seconds", "seconds_p10", "seconds_p90")


def both(tmp_path: Path) -> tuple[Results, Path]:
    times = {1: 10.0, 2: 11.0, 4: 14.0}
    benchmark = results(mode="both", modes=["weak", "strong"], strategies=["horovod", "ddp"])
    benchmark["oversubscribed"] = [4]
    source = Source(lambda job, repeat: times[job.np] * (1 + 0.01 * repeat), samples=1024)
    file, benchmark = scaling.open_file(measured(source, benchmark), tmp_path)
    benchmark["predicted"] = [
        {
            "mode": "weak",
            "strategy": "horovod",
            "np": np,
            "step_ms": 11,
            "low_ms": 10,
            "high_ms": 12,
        }
        for np in (1, 2, 4)
    ]
    benchmark["finished"] = True
    files.write_json(benchmark, file)
    return benchmark, file


def test_tables_and_plots_are_written(tmp_path: Path) -> None:
    benchmark, file = both(tmp_path)
    assert "scaling_toy_test-cpu-4-cores_2026-01-02" in scaling_report.write(benchmark, file)
    text = file.with_suffix(".md").read_text()
    assert (
        "| weak | horovod | 2 | 32 | 11.11 (11.00 to 11.22) | 11.00 (10.00 to 12.00) "
        "| 5,761 (5,704 to 5,818) | 0.1778 (0.1760 to 0.1795) | 1.82 (1.82 to 1.82) |" in text
    )
    assert "their range; predicted (at best to at worst) from the smallest size and" in text
    assert "commit abc" in text and "Test CPU, 4 cores" in text
    with file.with_suffix(".csv").open() as lines:
        table = list(csv.DictReader(lines))
    assert len(table) == 12 and table[1]["mode"] == "weak" and float(table[1]["step_ms_min"]) == 11
    assert table[2]["speedup_median"] == "" and float(table[2]["over_alone_median"]) == 1
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    drawn = file.with_suffix(".svg").read_text()
    scaling_report.write(benchmark, file)
    assert file.with_suffix(".svg").read_text() == drawn


@pytest.mark.parametrize("sizes", [[1, 2, 4], list(range(1, 13)), [2**i for i in range(12)]])
def test_a_plot_has_room_for_its_words(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(scaling_plot, "save", lambda figure, name: drawn.append(figure))
    benchmark = measured(Source(lambda job, _: 10.0), results(sizes=sizes, repeats=1))
    scaling_plot.draw(
        benchmark, "Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz, 56 cores " * 2, Path()
    )
    (figure,) = drawn
    figure.draw_without_rendering()
    title = figure._suptitle.get_window_extent()
    assert figure.bbox.x0 <= title.x0 and title.x1 <= figure.bbox.x1
    cautions = figure._supxlabel.get_window_extent()
    assert figure.bbox.x0 <= cautions.x0 and cautions.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= cautions.y0
    assert cautions.y1 <= min(a.xaxis.label.get_window_extent().y0 for a in figure.axes)
    text = figure._supxlabel.get_text().replace("\n", " ")
    assert text.startswith("take care: ") and text.count(": 1 repeat") == len(rows(benchmark))
    left, right = figure.axes
    for axis, ends in ((left.xaxis, "x0 x1"), (right.xaxis, "x0 x1"), (left.yaxis, "y0 y1")):
        boxes = [tick.label1.get_window_extent() for tick in axis.get_major_ticks()]
        assert len(boxes) >= 3
        near, far = ends.split()
        assert all(getattr(a, far) <= getattr(b, near) for a, b in pairwise(boxes))


def test_the_legends_are_within_their_panels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with all that they can name: strategies, a prediction, oversubscribed sizes."""
    drawn: list[Any] = []
    benchmark, _ = both(tmp_path)
    monkeypatch.setattr(scaling_plot, "save", lambda figure, name: drawn.append(figure))
    scaling_plot.draw(benchmark, "a machine", Path())
    (figure,) = drawn
    figure.draw_without_rendering()
    for axes in figure.axes:
        legend, panel = axes.get_legend().get_window_extent(), axes.bbox
        assert panel.x0 <= legend.x0 and legend.x1 <= panel.x1
        assert panel.y0 <= legend.y0 and legend.y1 <= panel.y1
    texts = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert texts[:4] == [
        "ideal",
        "horovod, predicted",
        "oversubscribed: a step without /\nwith communication",
        "horovod",
    ]


def test_the_plot_shows_the_figures_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against 2 processes; 8 share cores, and take 10 ms alone; 11.25 are predicted for 4."""
    drawn: list[Any] = []
    monkeypatch.setattr(scaling_plot, "save", lambda figure, name: drawn.append(figure))
    benchmark = results(sizes=[2, 4, 8], repeats=1) | {"oversubscribed": [8]}
    times = {2: 10.0, 4: 12.5, 8: 20.0}
    measured(Source(lambda job, _: 10.0 if job.alone else times[job.np]), benchmark)
    steps = dict.fromkeys(("step_ms", "low_ms", "high_ms"), 11.25)
    benchmark["predicted"] = [{"mode": "weak", "strategy": "horovod", "np": 4, **steps}]
    scaling_plot.draw(benchmark, "a machine", Path())
    speedup, efficiency = (
        {(round(x), round(float(y), 2)) for line in axes.lines for x, y in zip(*line.get_data())}
        for axes in drawn[0].axes
    )
    assert {(2, 1), (4, 1.6), (4, 1.78)} <= speedup
    assert {(2, 100), (4, 80), (4, 88.89), (8, 50)} <= efficiency


def test_slow_jobs_have_as_many_digits_as_fast_ones() -> None:
    benchmark = measured(Source(lambda job, _: 12345.6 * job.np), results(batch_size=4, sizes=[2]))
    (row,) = rows(benchmark)
    row.predicted_ms = [24691.2] * 3
    shown = {name: show(row) for name, show in scaling_report.COLUMNS.items()}
    assert shown["ms a step"] == shown["predicted"] == "24,691"
    assert shown["samples/s"] == "0.3240"


def all_reduce(folder: Path, name: str, date: str = "2026-01-01", **changed: Any) -> Path:
    """2 ranks, 100 MB/s, and 1 ms that no bytes explain: twice the latency."""
    sizes = []
    for size in (2**12, 2**20, 2**24):
        seconds = 1e-3 + size / 1e8
        sizes.append({"bytes": size} | dict.fromkeys(CASES, seconds))
    content = {
        "sizes": sizes, "hosts": [{"name": "localhost", "slots": 4}], "ranks": ["a", "a"],
        "operations": "Gloo", "date": date, "cpu": MACHINE["cpu"], "cores": MACHINE["cores"],
        "versions": {"horovod": "0.28.1+torch2.11.0.cpu.p94"},
        "environment": {"HOROVOD_SHARED_MEMORY": "0"},
    }  # fmt: skip
    file = folder / f"allreduce_{name}.json"
    files.write_json(content | changed, file)
    return file


def test_the_curve_is_predicted_from_the_smallest_size_and_all_reduces(tmp_path: Path) -> None:
    """A step of 10 ms that ends with an all-reduce of 1 MB, 2 MB in 16 bits: 10 and 15 ms on 2 and
    4 ranks for its bytes; half of the 1 ms is taken for messages, which ranks that share memory do
    not need."""
    benchmark = measured(Source(lambda job, _: 10.0), results(sizes=[1, 2, 4, 8]))
    benchmark["oversubscribed"] = [8]
    for each in benchmark["runs"]:
        each["phases_ms"] = {"forward": 4.0, "backward": 4.0, "data": 0.0, "all_reduce": 0.0}
        each["phases_ms"] |= {"optimizer": 1.0, "rest": 1.0, "straggler": 0.0}
        each["quantiles_ms"] = {"p10": 10.0, "p90": 10.0}
        sent = 2 * (each["np"] - 1) / each["np"] * 1e6
        wire = {"payload_bytes": 2e6, "bytes": sent, "calls": 1.0}
        each["wire"] = wire if each["np"] > 1 else None
    right = all_reduce(tmp_path, "right")
    wrong = [
        all_reduce(tmp_path, "older", "2025-01-01", sizes=[]),
        all_reduce(tmp_path, "elsewhere", "2026-02-01", cpu="another"),
        all_reduce(tmp_path, "others", "2026-02-01", ranks=["b", "b"]),
        all_reduce(tmp_path, "mpi", "2026-02-01", operations="MPI"),
        all_reduce(tmp_path, "one", "2026-02-01", sizes=[{"bytes": 8, "seconds": [1e-3]}]),
    ]
    curve, sources = predicted(benchmark, [*wrong, right])
    assert sources == [right.name]
    assert [each["np"] for each in curve] == [1, 2, 4]
    assert [each["step_ms"] for each in curve] == pytest.approx([10, 20.5, 25.5])
    assert curve[2]["low_ms"] < 25.5 < curve[2]["high_ms"]
    assert by_size(benchmark | {"predicted": curve})[4].predicted_ms[0] == pytest.approx(25.5)
    assert predicted(benchmark, wrong[1:]) == ([], [])
    host = benchmark["hosts"]["localhost"]
    for node, expected in (("a", True), ("b", False)):  # another host that is a localhost to itself
        of_node = benchmark | {"hosts": {"localhost": host | {"node": node}}}
        assert bool(predicted(of_node, [right])[0]) == expected
    settings = benchmark["settings"]
    named = benchmark | {"settings": settings | {"network": "10gbit"}}
    slow = all_reduce(tmp_path, "slow", network="100mbit")
    assert not predicted(named, [slow])[0] and predicted(benchmark, [slow])[0]
    for unnamed in ("loopback", "network", "10gbit"):
        assert predicted(named, [all_reduce(tmp_path, "same", network=unnamed)])[0]
    benchmark["config"]["trainer"] = {"accumulate_grad_batches": 2}
    assert not predicted(benchmark, [right])[0]
    del benchmark["config"]["trainer"]
    for exchanges in (2, 1):  # as of a GAN
        for each in benchmark["runs"]:
            each["wire"] = each["wire"] and each["wire"] | {"exchanges": exchanges}
        assert bool(predicted(benchmark, [right])[0]) == (exchanges == 1)
    for alone in ([4], [4, 8]):  # nothing is predicted from itself
        assert predicted(benchmark | {"settings": settings | {"sizes": alone}}, [right]) == ([], [])
    two_hosts = {name: {"slots": 2} for name in ("localhost", "b")}
    apart = benchmark | {"settings": benchmark["settings"] | {"hosts": two_hosts}}
    assert not predicted(apart, [right])[0]  # nothing was measured between them
    apart["hosts"] = {"localhost": host, "b": host | {"node": "b"}}
    hosts = [{"name": name} for name in two_hosts]
    between = all_reduce(tmp_path, "between", hosts=hosts, ranks=["a", "b"])
    assert [each["np"] for each in predicted(apart, [between, right])[0]] == [1, 2, 4]
    # Two ranks fit on one host, of which nothing was measured.
    assert [each["np"] for each in predicted(apart, [between])[0]] == [1, 4]
    # Clones may call themselves alike, and be unlike.
    apart["hosts"] = {"localhost": host, "b": host | {"cores": 9}}
    assert predicted(apart, [all_reduce(tmp_path, "clones", hosts=hosts)])[0]
    # A half and a fourth of the batch: 8 of the 10 ms are forward and backward.
    both = benchmark | {"settings": settings | {"modes": ["weak", "strong"]}}
    curve, _ = predicted(both, [right])
    assert [(each["mode"], each["np"]) for each in curve[2:4]] == [("weak", 4), ("strong", 1)]
    assert [each["step_ms"] for each in curve[3:]] == pytest.approx([10, 16.5, 19.5])
    assert "in proportion to the batch" in scaling_report.description(both | {"predicted": curve})
    strong = both | {"settings": settings | {"modes": ["strong"], "sizes": [2, 4]}}
    assert predicted(strong, [right]) == ([], [])  # whose smallest size has half of the batch
    for each in benchmark["runs"]:  # as if steps differed: those of smaller batches do by less
        each["quantiles_ms"] = {"p10": 9.5, "p90": 10.5}
    waits = [
        each["step_ms"] - ms for each, ms in zip(predicted(both, [right])[0][2::3], (25.5, 19.5))
    ]
    assert waits[0] > 0 and waits[1] == pytest.approx(waits[0] / 4)


def test_a_prediction_begins_at_the_median_of_an_even_number_of_repeats(tmp_path: Path) -> None:
    benchmark = measured(
        Source(lambda job, repeat: [10.0, 30.0][repeat]), results(sizes=[1, 2], repeats=2)
    )
    for each in benchmark["runs"]:
        each["phases_ms"] = dict.fromkeys([*PHASES, "straggler"], 0.0) | {"forward": 4.0}
        each["quantiles_ms"] = {"p10": each["step_ms"], "p90": each["step_ms"]}
        sent = {"payload_bytes": 1e6, "bytes": 1e6, "calls": 1.0}
        each["wire"] = sent if each["np"] > 1 else None
    curve, _ = predicted(benchmark, [all_reduce(tmp_path, "right")])
    assert curve[0]["step_ms"] == pytest.approx(statistics.median(by_size(benchmark)[1].step_ms))
    # The range has the repeats of the smallest size in it.
    assert curve[1]["low_ms"] < curve[1]["step_ms"] / 1.9 < 1.4 * curve[1]["step_ms"]
    assert curve[1]["high_ms"] > 1.4 * curve[1]["step_ms"]


def test_a_prediction_has_the_phases_of_the_run_nearest_to_the_median(tmp_path: Path) -> None:
    """In the others nothing but the reading of data, which is not hidden, took time."""
    times = [30.0, 9.0, 10.2]
    benchmark = measured(Source(lambda job, repeat: times[repeat]), results(sizes=[1, 2]))
    for each in benchmark["runs"]:
        phase = "backward" if each["step_ms"] == 10.2 else "data"
        each["phases_ms"] = dict.fromkeys([*PHASES, "straggler"], 0.0) | {phase: 4.0}
        each["quantiles_ms"] = dict.fromkeys(("p10", "p90"), each["step_ms"])
        sent = {"payload_bytes": 8e6, "bytes": 8e6, "calls": 4.0}
        each["wire"] = sent if each["np"] > 1 else None
    right = all_reduce(tmp_path, "right")
    usual, _ = predicted(benchmark, [right])
    (nearest,) = [run for run in benchmark["runs"] if (run["np"], run["step_ms"]) == (1, 10.2)]
    for each in benchmark["runs"]:  # as if all had been like it
        each |= {key: nearest[key] for key in ("step_ms", "phases_ms", "quantiles_ms")}
    assert usual[1]["step_ms"] == pytest.approx(predicted(benchmark, [right])[0][1]["step_ms"])


def test_the_readme_has_the_newest_result() -> None:
    """Of those that git has: whoever measures something need not put it there."""
    listed = ["git", "ls-files", "benchmarks/results/scaling_*.json"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    readme = (ROOT / "README.md").read_text()
    newest = scaling_report.newest(ROOT / name for name in tracked.split())
    block = scaling_report.readme_block(newest)
    assert scaling_report.with_block(readme, block) == readme, "make bench-readme writes it"


def test_only_the_block_of_the_readme_changes(tmp_path: Path) -> None:
    assert scaling_report.newest([]) is None
    benchmark, file = both(tmp_path)
    unfinished = {**benchmark, "finished": False, "date": "2027-01-01T00:00:00"}
    (tmp_path / "scaling_later.json").write_text(json.dumps(unfinished))
    for name, text in (("half", json.dumps(benchmark)[:-300]), ("list", "[]"), ("empty", "")):
        (tmp_path / f"scaling_{name}.json").write_text(text)
    older = {"finished": True, "date": "2027-01-02T00:00:00"}  # of another form
    (tmp_path / "scaling_older.json").write_text(json.dumps(older))
    assert scaling_report.newest(tmp_path.glob("*.json")) == file
    readme = f"before\n{scaling_report.BEGIN}\nold \\1\n{scaling_report.END}\nafter\n"
    changed = scaling_report.with_block(readme, "new \\1")
    assert changed == f"before\n{scaling_report.BEGIN}\n\nnew \\1\n\n{scaling_report.END}\nafter\n"
