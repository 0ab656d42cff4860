"""A sweep: one training a trial, each on all processes, one after the other.

    make sweep ARGS="model.lr=0.1,0.01 data.batch_size=32,64"
    make sweep TRIALS=20 METRIC=test/acc MODE=max ARGS="model.lr=tag(log,interval(1e-4,1e-1))"

    python -m runs.sweep --arguments "model.lr=0.1,0.01" -- horovodrun -np 2 python template.py

Each trial is the command behind `--` with the trial's changes: no rank draws anything. A trial is
judged by the best value of the metric over its epochs. One that fails is noted and the sweep goes
on; the same command again runs what is not done yet, the failed ones too, and with more TRIALS
draws further ones. Trials do not run side by side, and none is ended early for doing badly.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runs.config import CONF
from runs.folders import ROOT, new_folder, quoted, shown, task_folder, whole
from runs.refusal import Refusal, refuse
from runs.space import Space
from runs.trials import Trial, best_of, judge, reason, write_results

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAST_LINES = 8  # of a failed trial's output, which are shown
JOB_NAME = "hydra.job.name=template"  # as in a training
PRCTL, PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1


def _end_with_parent() -> None:
    """A killed sweep leaves no trial training: the same command would begin another beside it."""
    PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Launcher:
    """Runs commands one after the other, and passes a signal to end on to the one that runs."""

    def __init__(self) -> None:
        self.stopped = 0  # the signal that asked to end
        self._process: subprocess.Popen[bytes] | None = None
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def __call__(self, command: list[str], output: Path) -> int:
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,  # a Ctrl-C reaches it once: through us
                preexec_fn=_end_with_parent,
            )  # fmt: skip
            if self.stopped:  # before there was a process to pass it on to
                self._process.send_signal(self.stopped)
            return self._process.wait()

    def _pass_on(self, number: int, frame: object) -> None:
        self.stopped = number
        if self._process is not None:
            self._process.send_signal(number)


class Sweep:
    """The folder of a sweep and its trials, kept in sweep.json, which is whole at any moment.

    Args:
        command: the training, to which each trial adds its changes.
        arguments: the changes with several values.
        count: how many trials to draw; None: all combinations.
        metric, mode: what trials are compared by, and whether min or max of it is best; "": as the
            best checkpoint is chosen.
    """

    def __init__(
        self, command: list[str], arguments: list[str], count: int | None, metric: str, mode: str
    ) -> None:
        self.space = Space(arguments, count)
        config = _composed([values[0] for values in self.space.values.values()])
        self.command = command
        self.metric, self.mode = _judged_by(metric, mode, config)
        self.count = count or len(self.space.grid())
        self.drawn = count is not None
        # What makes two sweeps the same. METRIC may differ: it is read when a trial has ended. So
        # may TRIALS of those that draw: a sweep of its own would draw the same trials again.
        self._key = {"command": command, "arguments": arguments, "drawn": self.drawn}
        sweeps = _sweeps_folder(config)
        self.trials: list[Trial] = []
        self.resumed = self._find(sweeps)
        self.count = max(self.count, len(self.trials))
        self.folder = self.resumed or new_folder(sweeps)
        self._lock()
        if not self.resumed and not self.drawn:
            grid = self.space.grid()
            self.trials = [Trial(number, changes) for number, changes in enumerate(grid, 1)]
        self._measured = False  # has a trial given METRIC?
        for trial in self.trials:
            trial.value, trial.tests = None, {}
            if trial.state == "done" and not (Path(trial.folder) / "summary.json").exists():
                trial.state = "waiting"  # its folder was removed: it is run again
        self._judge([trial for trial in self.trials if trial.state == "done"])
        self._save()

    def run(self, launch: Launcher) -> int:
        """All trials that are not done; the exit status."""
        self._tell_start()
        for number in range(1, self.count + 1):
            if launch.stopped:
                break
            if number > len(self.trials):
                tried = [(trial.changes, trial.value) for trial in self.trials]
                self.trials.append(Trial(number, self.space.draw(tried, number, self.mode)))
            if self.trials[number - 1].state != "done":
                self._run_trial(self.trials[number - 1], launch)
        self._tell_end(launch.stopped)
        if launch.stopped:
            return 128 + launch.stopped
        return int(any(trial.state != "done" for trial in self.trials))

    def _run_trial(self, trial: Trial, launch: Launcher) -> None:
        folder = self._new_folder(f"trial_{trial.number}")
        trial.folder, trial.state, output = str(folder), "running", _output(folder)
        self._save()
        print(f"trial {trial.number}/{self.count}  {self._varied(trial)}", flush=True)
        print(f"  output  {shown(output)}", flush=True)
        began = time.monotonic()
        trial.exit = launch([*self.command, *trial.changes, f"run_dir={quoted(folder)}"], output)
        trial.seconds = round(time.monotonic() - began, 1)
        done = trial.exit == 0 and (folder / "summary.json").exists()
        trial.state = "done" if done else "stopped" if launch.stopped else "failed"
        trial.reason = "" if done else f"exit {trial.exit}: {reason(output)}"
        self._save()  # before METRIC is looked for, which may be misspelt
        if trial.exit == 0 and trial.state != "stopped":
            self._judge([trial])
            self._save()
        self._tell_trial(trial, output)

    def _judge(self, trials: list[Trial]) -> None:
        """Read METRIC of trials that have ended well; refuse one that none has given so far."""
        for trial in trials:
            self._measured |= judge(trial, self.metric, self.mode)
        if trials and not self._measured:
            raise Refusal(
                f"METRIC={self.metric}: trial {trials[0].number} has {trials[0].reason}; the same "
                "command with another METRIC goes on here"
            )

    def _new_folder(self, name: str) -> Path:
        """A folder beside those of earlier attempts at the trial, which stay."""
        folder = self.folder / name
        for attempt in itertools.count(2):
            if not _output(folder).exists():
                break
            folder = self.folder / f"{name}_{attempt}"
        return folder

    # ---------------------------------------------------------------- what is kept

    def _find(self, sweeps: Path) -> Path | None:
        """The folder of the newest sweep of the same command, if it has something left to do."""
        for file in sorted(sweeps.glob("*/sweep.json"), reverse=True):
            try:
                content = json.loads(file.read_text())
                if {key: content.get(key) for key in self._key} != self._key:
                    continue
                trials = [Trial(**trial) for trial in content["tried"]]
            except (ValueError, AttributeError, KeyError, TypeError):
                raise Refusal(f"{shown(file)} is not a sweep: fix it or delete it") from None
            if len(trials) >= self.count and all(trial.state == "done" for trial in trials):
                return None
            self.trials = trials
            return file.parent
        return None

    def _lock(self) -> None:
        # Held until this process ends.
        try:  # a file that is open to write: NFS locks neither folders nor what is only read
            self.held = os.open(self.folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o666)
        except PermissionError:  # another user's file; on a local disk this locks it, too
            self.held = os.open(self.folder / ".lock", os.O_RDONLY)
        try:
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refusal(f"{shown(self.folder)}: this sweep runs already") from None
        except OSError:
            pass  # a file system without locks

    def _save(self) -> None:
        content = {**self._key, "tried": [asdict(trial) for trial in self.trials]}
        with whole(self.folder / "sweep.json") as part:
            part.write(json.dumps(content, indent=1).encode())
        again = None
        if best := best_of(self.trials, self.mode):
            again = shlex.join([*self.command, *best.changes])
            (self.folder / "best.txt").write_text(again + "\n")
        write_results(self.folder, self.trials, self.space.swept, self.metric, self.mode, again)

    # ---------------------------------------------------------------- what is told

    def _varied(self, trial: Trial) -> str:
        """The changes that differ between trials."""
        keys = tuple(f"{key}=" for key in self.space.swept)
        return " ".join(change for change in trial.changes if change.startswith(keys))

    def _tell_start(self) -> None:
        done = sum(trial.state == "done" for trial in self.trials)
        print(f"sweep   {shown(self.folder)}: {self.count} trials by {self.mode} {self.metric}")
        if self.resumed:
            progress = f"{done} of {self.count} are done: the others are run"
            print(f"        begun before, {progress} (remove the folder to begin anew)")
        sys.stdout.flush()

    def _tell_trial(self, trial: Trial, output: Path) -> None:
        took = timedelta(seconds=round(trial.seconds or 0))
        if trial.state == "failed":
            for line in output.read_text(errors="replace").splitlines()[-LAST_LINES:]:
                print(f"  | {line}")
        value = f"  {trial.reason}" if trial.state == "done" and trial.reason else ""
        value = value if trial.value is None else f"  {self.metric} {trial.value:.4g}"
        best = best_of(self.trials, self.mode)
        outlook = f"  best {best.value:.4g} (trial {best.number})" if best else ""
        ended = [t.seconds for t in self.trials if t.seconds and t.state in ("done", "failed")]
        left = self.count - sum(t.state in ("done", "failed") for t in self.trials)
        if left and ended:
            outlook += f"  about {timedelta(seconds=round(left * sum(ended) / len(ended)))} left"
        print(f"  {trial.state:<7} {took}{value}{outlook}", flush=True)

    def _tell_end(self, stopped: int) -> None:
        counts = {s: sum(t.state == s for t in self.trials) for s in ("done", "failed")}
        left = self.count - sum(counts.values())
        print(f"        {counts['done']} done, {counts['failed']} failed, {left} left", end="")
        again = stopped or counts["failed"] or left
        print("; the same command again runs what is not done" if again else "")
        print(f"results {shown(self.folder / 'results.md')}")
        if best := best_of(self.trials, self.mode):
            print(f"best    trial {best.number}: {self.metric} {best.value:.4g}")
            print(f"again   {(self.folder / 'best.txt').read_text()}", end="", flush=True)


def _output(folder: Path) -> Path:
    """A trial's output, beside its folder, which a run that is refused does not leave."""
    return folder.with_suffix(".txt")


def _words(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError as error:  # a quote that is not closed
        raise Refusal(f"ARGS={arguments}: {error}") from None


def _composed(changes: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [*changes, JOB_NAME], return_hydra_config=True)
    HydraConfig.instance().set_config(config)  # for ${hydra:...} in conf/
    return config


def _judged_by(metric: str, mode: str, config: DictConfig) -> tuple[str, str]:
    kept = OmegaConf.select(config, "callbacks.best_checkpoint") or {}
    metric = metric or kept.get("monitor") or "val/loss"
    if not mode and metric == kept.get("monitor"):
        mode = kept.get("mode", "min")  # as ModelCheckpoint has it
    mode = mode or ("min" if metric.endswith("loss") else "")
    if mode not in ("min", "max"):
        raise Refusal(f"METRIC={metric}: say what is best of it, MODE=max or MODE=min")
    return metric, mode


def _sweeps_folder(config: DictConfig) -> Path:
    log_dir, model = ROOT / Path(config.log_dir).expanduser(), config.hydra.runtime.choices["model"]
    return task_folder(log_dir, config.task, model) / "sweeps"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m runs.sweep", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arguments", default="", help="changes, some with several values")
    parser.add_argument("--trials", help="how many to draw; without it all combinations are run")
    parser.add_argument(
        "--metric", default="", help="what trials are compared by (that of the best checkpoint)"
    )
    parser.add_argument("--mode", default="", help="min or max")
    parser.add_argument("command", nargs="+", help="the command of a training, behind --")
    flags = parser.parse_args()
    try:
        if flags.trials and not (flags.trials.isdecimal() and int(flags.trials)):
            raise Refusal(f"TRIALS={flags.trials}: write how many, as TRIALS=20")
        count = int(flags.trials) if flags.trials else None
        judged_by = flags.metric, flags.mode
        return Sweep(flags.command, _words(flags.arguments), count, *judged_by).run(Launcher())
    except (Refusal, HydraException, OmegaConfBaseException) as error:
        refuse(" ".join(str(error).split()), a_rank=False)
    except OSError as error:
        refuse(f"{error.filename or 'writing'}: {error.strerror}", a_rank=False)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 2


if __name__ == "__main__":
    sys.exit(main())
