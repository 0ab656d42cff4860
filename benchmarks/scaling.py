"""How training scales: the job itself on several numbers of processes, a table and a plot of it.

    make bench                            the default job on 1, 2, 4, ... GPUs, or 1 and 2 processes
    make bench NP="1 2 4 8" HOSTS=node1:4,node2:4 ARGS="experiment=denoiser"
    make bench STRATEGY="horovod ddp" MODE=both         beside DDP; weak and strong scaling
    make bench REPEATS=7 STEPS=200                      or EPOCHS=2: whole epochs

Each run is template.py under `python -m cluster.horovodrun`, started as `make train` does, but
without evaluation, checkpoints and logs. Under weak scaling data.batch_size is that of a process,
under strong scaling that of all processes together. Runs take turns, with repeats outermost, and
the first steps of each are left out. One run of a few steps at the largest size comes first and is
not counted: it shows that the job works, fills caches, and tells how many steps take `SECONDS`. A
step is a batch; with trainer.accumulate_grad_batches the warm-up and what is measured are whole
updates.

After each run the results are written to benchmarks/results/scaling_<model>_<hardware>_<date>.json.
Ctrl-C keeps all whole repeats, and the same command goes on; with other settings, code or hardware
it writes a file of its own. benchmarks/efficiency.py says what the columns mean, load.py what makes
a mark.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import scaling_report
from benchmarks.efficiency import Results, runs_of, steps_per_epoch
from benchmarks.files import RESULTS, continued, slug, whole_repeats, write_json
from benchmarks.launching import Failed, Job, Parser, ends_in_a_line, say, tells_what_is_kept
from benchmarks.overrides import accumulated, steps_of
from benchmarks.scaling_plan import jobs, length, plan, turns, whole_updates

SECONDS = 5  # that a run measures, unless the number of steps or epochs is given
MIN_STEPS, TRIAL_STEPS, WARMUP = 30, 20, 10
ABOUT = ("model", "train_samples", "drop_last", "operations")  # what all runs have in common
Measure = Callable[[Job, list[str]], dict[str, Any]]


# ---------------------------------------------------------------------------- measuring


def try_out(results: Results, measure: Measure) -> None:
    """Make a short run at the largest size, and fill results["trial"]."""
    settings = results["settings"]
    # Horovod's first, if it is one of them: its "operations" say which all-reduces can predict it.
    strategies = sorted(settings["strategies"], key=lambda name: name != "horovod")
    largest = {**settings, "sizes": settings["sizes"][-1:], "strategies": strategies}
    job, together = jobs(largest, [])[0], accumulated(results["config"])
    steps = whole_updates(TRIAL_STEPS, together)
    measured = measure(job, steps_of(settings["warmup"], steps))
    refuse_other_steps(measured, job, steps)
    steps = max(MIN_STEPS, math.ceil(SECONDS * 1e3 / measured["step_ms"]))
    results["trial"] = {
        "steps": settings["steps"] or whole_updates(steps, together),
        **{key: measured[key] for key in ABOUT},
    }


def run(results: Results, measure: Measure, save: Callable[[], None]) -> None:
    """All runs that are not there yet, in turns; `save` is called after each."""
    settings = results["settings"]
    if not results["trial"]:
        say(f"a short run first, which does not count: np={settings['sizes'][-1]}")
        try_out(results, measure)
    planned = turns(jobs(settings, results["oversubscribed"]), settings["repeats"])
    durations: list[float] = []
    for number, (repeat, job) in enumerate(planned, start=1):
        if repeat in runs_of(results, job.strategy, job.np, job.batch, job.alone):
            continue
        began = time.monotonic()
        ranks = 1 if job.alone else job.np  # that share an epoch's samples
        measured = measure(job, length(results, ranks, job.batch))
        steps = results["trial"]["steps"]
        if epochs := settings["epochs"]:
            steps = epochs * steps_per_epoch(results, ranks, job.batch)
        refuse_other_steps(measured, job, steps)
        kept = {key: value for key, value in measured.items() if key not in ABOUT}
        results["runs"].append({"repeat": repeat, **kept})
        save()
        durations.append(time.monotonic() - began)
        left = (len(planned) - number) * sum(durations) / len(durations)
        remaining = f", {scaling_report.duration(left)} left" if number < len(planned) else ""
        say(f"run {number}/{len(planned)}  {job}: {measured['step_ms']:.2f} ms a step{remaining}")


def refuse_other_steps(measured: dict[str, Any], job: Job, steps: int) -> None:
    """Raises Failed where a run measured another number of steps than it was told to."""
    if measured["measured_steps"] != steps:
        raise Failed(
            f"error: {job}: {measured['measured_steps']} steps were measured, not {steps}: "
            "something else ends training, or keeps it from ending: look for a callback that sets "
            "should_stop, for trainer.min_steps and min_epochs; with EPOCHS also for an epoch of "
            "other batches than data.batch_size makes of its samples: then give STEPS"
        )


# ---------------------------------------------------------------------------- the file


def open_file(results: Results, folder: Path) -> tuple[Path, Results]:
    """The unfinished file of the same measurement and its whole repeats, or a new file name."""
    model = slug(results["config"]["task"] or results["config"]["model"]["_target_"].split(".")[-1])
    network = results["settings"]["network"] or ""
    hardware = slug(f"{scaling_report.hardware_of(results)} {network}")
    file, results = continued(results, folder, f"scaling_{model}_{hardware}", "runs", "trial")
    a_repeat = len(jobs(results["settings"], results["oversubscribed"]))
    kept = whole_repeats(results["runs"], a_repeat)
    if left := len(results["runs"]) - len(kept):
        runs = f"{left} run{'s' * (left > 1)}"
        say(f"measured again: {runs} of the repeat that was interrupted, for all of it at one time")
    return file, {**results, "runs": kept}


# ---------------------------------------------------------------------------- the command


def parse(line: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.scaling", description=__doc__.partition("\n")[0])
    parser.add_argument("-H", "--hosts", default="", help="node1:4,node2:4")
    parser.add_argument("--hostfile", default="", help="a YAML file that says more of each host")
    parser.add_argument("--np", type=int, nargs="+", help="processes: 1 2 4 ...")
    parser.add_argument("--strategy", nargs="+", default=["horovod"], choices=["horovod", "ddp"])
    parser.add_argument("--mode", default="weak", choices=["weak", "strong", "both"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, help=f"of a run; by default {SECONDS} s of them")
    parser.add_argument("--epochs", type=int, help="whole epochs instead; the first is left out")
    parser.add_argument("--warmup", type=int, help=f"steps that are left out ({WARMUP})")
    parser.add_argument("--network", help="what to call it in the results, as 500mbit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="*", help="of template.py, after --")
    arguments = parser.parse_args(line)
    for name in ("repeats", "steps", "epochs"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"{name.upper()}={value}: at least 1")
    if arguments.steps and arguments.epochs:
        parser.error("STEPS and EPOCHS both say how long a run is: give one of them")
    if arguments.warmup is None:
        arguments.warmup = WARMUP
    elif arguments.warmup < 0:
        parser.error(f"WARMUP={arguments.warmup}: at least 0")
    elif arguments.epochs:
        parser.error(
            f"WARMUP={arguments.warmup}: with EPOCHS the first epoch is left out: give one of them"
        )
    arguments.strategy = list(dict.fromkeys(arguments.strategy))
    return arguments


@ends_in_a_line
def main() -> int:
    arguments = parse()
    results, launcher = plan(arguments)
    file, results = open_file(results, arguments.out)
    with tells_what_is_kept(file):
        run(results, launcher.run, lambda: write_json(results, file))
        results["finished"] = True  # in the file when its tables and plot are there
        print(scaling_report.write(results, file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
