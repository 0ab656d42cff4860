"""Proof of value: the losses of one process, of Horovod and of DDP, at the same global batches.

    make bench-losses                                   the jobs below, on 1, 2 and 4 ranks
    make bench-losses NP=2 ARGS="model=mine model.dropout=0"    a job of yours; its data.batch_size
                                                        is that of all ranks together

Each job is trained by Lightning's own strategy for one device (benchmarks/losses_worker.py), then
by Horovod and by DDP on several ranks, each with its share of the batch: the same seed, the same
initial weights, the same samples in each step. What is compared, every few steps, is val/loss over
all ranks.

All of it is done twice, in 32 bits, as one trains, and in 64 bits. Several ranks add numbers in
another order, and training amplifies that rounding error. In 64 bits it starts 2^29 times smaller,
so that a difference which remains there is not rounding but another computation. A run is "equal"
when in 64 bits no loss differs from that of one process by more than `EQUAL` of it. The exit status
is 1 if a run is not equal that ought to be.

Such a job has no dropout, which each rank draws for itself; a number of validation samples that the
ranks divide, as DDP repeats some otherwise; and its ranks on this host. No time is measured.
Results go to benchmarks/results/losses_<hardware>_<date>.json, .md, .png and .svg.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import losses_report
from benchmarks.files import RESULTS, continued, slug, write_json
from benchmarks.hardware import hardware, machine, processors
from benchmarks.launching import Failed, Parser, ends_in_a_line, say, tells_what_is_kept, train
from benchmarks.losses_report import Results, unequal
from benchmarks.overrides import batch_size_of, configuration, refuse_ours
from cluster.hosts import Refusal

STEPS, POINTS = 200, 40
PRECISIONS = ["32-true", "64-true"]
ALONE = "strategy._target_=benchmarks.losses_worker.single_in_order"
# Set for the comparison, so refused: what a user gives for them would be ignored silently.
OURS = dict.fromkeys(
    ["strategy", "trainer.precision", "trainer.max_epochs", "trainer.limit_train_batches",
     "trainer.check_val_every_n_epoch", "trainer.val_check_interval", "callbacks", "logger",
     "trainer.enable_checkpointing", "test", "log_dir", "run_dir"], "nothing",
) | {"trainer.max_steps": "STEPS="}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        arguments: of template.py; data.batch_size is that of all ranks together.
        differs: why several ranks are expected to compute something else than one; else empty.
        ddp_on_cpu: why DDP cannot train it without a GPU; else empty.
    """

    name: str
    arguments: list[str] = field(default_factory=list)
    differs: str = ""
    ddp_on_cpu: str = ""


DENOISER = ["experiment=denoiser", "model.depth=5", "model.features=16", "data.size=32"]
JOBS = [
    Job("classifier", ["model=classifier", "model.dropout=0", "data.batch_size=64"]),
    Job(
        "denoiser, sync_batchnorm",
        [*DENOISER, "data.batch_size=16", "trainer.sync_batchnorm=true"],
        ddp_on_cpu="torch's SyncBatchNorm takes GPU tensors only",
    ),
    Job(
        "denoiser",
        [*DENOISER, "data.batch_size=16"],
        differs="each rank normalizes over its share of the batch",
    ),
]  # fmt: skip
Measure = Callable[[list[str], int], dict[str, Any]]


def launch(arguments: list[str], np: int) -> dict[str, Any]:
    """Train on this host; the summary of the run, and its validation losses by step.

    Raises:
        Failed: when it did not end well, on another number of ranks, or without losses.
    """
    what = f"np={np} {' '.join(arguments)}"
    with tempfile.TemporaryDirectory(prefix="losses-") as folder:
        command = [
            sys.executable, "-m", "cluster.horovodrun", "-np", str(np), "-H", f"localhost:{np}",
            sys.executable, "template.py", *arguments, f"log_dir='{folder}/runs'",
        ]  # fmt: skip
        train(command, what, Path(folder) / "output", threads=1)
        (run,) = Path(folder).glob("runs/*/runs/*/")
        summary = json.loads((run / "summary.json").read_text())
        losses = read(run / "metrics.csv")
    if summary["world_size"] != np:
        raise Failed(f"error: {what}: {summary['world_size']} ranks")
    if not losses:
        raise Failed(f"error: {what}: the model logs no val/loss, by which runs are compared")
    return {**summary, "losses": losses}


def read(metrics: Path) -> dict[int, float]:
    """val/loss by the number of training steps before it."""
    if not metrics.is_file():  # nothing was logged
        return {}
    with metrics.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/loss")]
    return {int(row["step"]) + 1: float(row["val/loss"]) for row in rows}


def measure(job: Job, batch: int, sizes: list[int], steps: int, launch: Measure) -> dict[str, Any]:
    """All runs of a job; in each precision that of one process comes first."""
    quick = ["test=false", "callbacks=none", "~logger.tensorboard"]
    common = [*job.arguments, *quick, "trainer.enable_checkpointing=false"]
    one_step = ["trainer.max_epochs=-1", "trainer.max_steps=1", "trainer.limit_val_batches=1",
            "trainer.val_check_interval=1"]  # fmt: skip
    first = launch([*common, *one_step, f"data.batch_size={batch}"], 1)
    samples = first["train_samples"] or 0  # unknown for a stream
    if not (full_batches := samples // batch):
        raise Refusal(f"{job.name}: {samples or 'unknown'} samples make no batch of {batch}")
    # Whole batches only: several ranks might have to fill up the last one of an epoch.
    length = ["trainer.max_epochs=-1", f"trainer.max_steps={steps}",
              f"trainer.limit_train_batches={full_batches}", "trainer.check_val_every_n_epoch=null",
              f"trainer.val_check_interval={max(1, steps // POINTS)}"]  # fmt: skip
    ddp = bool(machine()["gpus"]) or not job.ddp_on_cpu
    runs = []
    for precision in PRECISIONS:
        for strategy, np in plan(sizes, ddp):
            kind = ["strategy=single", ALONE] if strategy == "single" else [f"strategy={strategy}"]
            own = [*kind, f"trainer.precision={precision}", f"data.batch_size={batch // np}"]
            say(f"{job.name}: {precision} {strategy}, {np} x {batch // np}")
            losses = launch([*common, *length, *own], np)["losses"]
            runs.append(
                {"precision": precision, "strategy": strategy, "np": np, "batch": batch // np,
                 "steps": list(losses), "losses": list(losses.values())}
            )  # fmt: skip
    return {**asdict(job), "model": first["model"], "global_batch": batch, "runs": runs}


def plan(sizes: list[int], ddp: bool) -> list[tuple[str, int]]:
    """Strategies and numbers of ranks; the others are compared with the first."""
    strategies = ["horovod", "ddp"] if ddp else ["horovod"]
    several = [(strategy, np) for np in sizes if np > 1 for strategy in strategies]
    return [("single", 1), ("horovod", 1), *several]


def parse(line: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.losses", description=__doc__.partition("\n")[0])
    parser.add_argument("--np", type=int, nargs="+", default=[2, 4], help="ranks: 2 4")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="*", help="of template.py: one job instead of ours")
    arguments = parser.parse_args(line)
    if min([arguments.steps, *arguments.np]) < 1:
        parser.error("STEPS and NP: at least 1")
    arguments.np = list(dict.fromkeys(arguments.np))
    return arguments


def batches(jobs: list[Job], sizes: list[int]) -> list[int]:
    """The global batch of each job.

    Raises:
        Refusal: for a job that template.py would refuse or that has no batch size, and for a batch
            that the ranks do not divide.
    """
    global_batches = []
    for job in jobs:
        batch = batch_size_of(configuration(job.arguments, ["single"]))
        wrong = [str(np) for np in sizes if batch % np]
        if wrong:
            raise Refusal(
                f"data.batch_size={batch} is not divisible by NP={' '.join(wrong)}: the ranks "
                "share it; change one of the two"
            )
        global_batches.append(batch)
    return global_batches


@ends_in_a_line
def main() -> int:
    arguments = parse()
    mine = arguments.overrides
    jobs = [Job(" ".join(mine), mine)] if mine else JOBS
    results: Results = {
        "benchmark": "losses", **hardware(), "steps": arguments.steps, "sizes": arguments.np,
        "names": [job.name for job in jobs], "jobs": [],
    }  # fmt: skip
    name = f"losses_{slug(processors(results))}"
    refuse_ours(mine, OURS, "make bench-losses")
    global_batches = batches(jobs, arguments.np)
    file, results = continued(results, arguments.out, name, "jobs")
    with tells_what_is_kept(file):
        for job, batch in list(zip(jobs, global_batches))[len(results["jobs"]) :]:
            measured = measure(job, batch, arguments.np, arguments.steps, launch)
            results["jobs"].append(measured)
            write_json(results, file)
        text = losses_report.report(results, file.with_suffix(""))
        results["finished"] = True  # in the file when its table and plot are there
        write_json(results, file)
    print(text)
    differing = unequal(results)
    for run in differing:
        say(f"error: not equal: {run}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
