"""The job end to end: what a newcomer types, what it leaves, and how it refuses mistakes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from datamodules.digits import Digits
from datamodules.noise import Noise
from models.denoiser import Denoiser
from tests.conftest import ROOT, horovodrun, make_train, run, wait_for_words

FAULTY = "model._target_=tests.faulty_models."
TEMPLATE = [sys.executable, str(ROOT / "template.py")]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return ((torch.full((1, 8, 8), label / 32), label % 10) for label in range(32))


class StreamedDigits(Digits):
    """Streams the same to all ranks."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Stream(), batch_size=4)


class ThreeDigits(Digits):
    """As far as their names go."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.splits[0].dataset.class_to_idx = {"one": 0, "two": 1, "three": 2}


def job(
    ranks: int,
    logs: Path,
    *overrides: str,
    launcher: Callable[..., list[str]] = make_train,
    cwd: Path = ROOT,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """template.py on so many ranks of this host; 0: as plain `python template.py`.

    Our launcher takes half the time of horovodrun, with which the README's commands run, too.
    """
    command = [*TEMPLATE, f"log_dir={logs}", *overrides]
    return run(launcher(ranks, *command) if ranks else command, cwd=cwd, **environment)


@contextlib.contextmanager
def training(
    command: list[str], output: Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a command that has trained for an epoch; it ends with the block."""
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
            env={**os.environ, **environment},
        )  # fmt: skip
    try:
        wait_for_words(process, output, "epoch 2/", 120)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def folders(logs: Path) -> list[Path]:
    return sorted(logs.glob("*/runs/*"))


def summary(logs: Path) -> dict[str, Any]:
    """The summary of the newest run."""
    return json.loads((folders(logs)[-1] / "summary.json").read_text())


def validation_losses(logs: Path) -> list[float]:
    """Of the newest run, one an epoch."""
    rows = (folders(logs)[-1] / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("val/loss")
    return [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]


def best_epoch(logs: Path) -> int:
    """Of the checkpoint that the newest run tested."""
    return torch.load(summary(logs)["checkpoint"], weights_only=False)["epoch"]


def processes_of(logs: Path) -> list[str]:
    """Processes whose command line names this log folder."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(logs) in line:
            commands.append(line)
    return commands


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The default job on two ranks, from another working folder: its log folder and output."""
    logs = tmp_path_factory.mktemp("default")
    done = job(2, logs, launcher=horovodrun, cwd=logs)
    assert done.returncode == 0, done.stdout
    return logs, done.stdout


class TestDefaultRun:
    def test_it_learns_and_stops_early(self, default: tuple[Path, str]) -> None:
        result = summary(default[0])
        assert result["world_size"] == 2 and sum(result["hosts"].values()) == 2
        assert (result["strategy"], result["model"], result["data"]) == (
            "horovod", "classifier", "digits",
        )  # fmt: skip
        assert result["metrics"]["test/acc"] >= 0.97
        assert 2 < result["epochs"] < 50 and result["global_batch_size"] == 64
        assert result["steps"] == result["epochs"] * 20  # 1,257 samples in batches of 2 x 32
        rate = result["epochs"] * 1258 / result["train_seconds"]  # 629 on each rank
        assert result["samples_per_second"] == pytest.approx(rate, rel=0.01)
        assert result["versions"]["horovod"].startswith("0.28.1")
        assert 10 < result["anatomy"]["steps"] <= result["steps"] - 10  # the first ones warm up
        assert [rank["rank"] for rank in result["anatomy"]["ranks"]] == [0, 1]

    def test_one_folder_with_all_in_it(self, default: tuple[Path, str]) -> None:
        (folder,) = folders(default[0])
        kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert len(kept) == 2 and kept[0].startswith("epoch_") and kept[1] == "last.ckpt"
        assert summary(default[0])["checkpoint"] == str(folder / "checkpoints" / kept[0])
        for name in (".hydra/config.yaml", ".hydra/overrides.yaml", "metrics.csv"):
            assert (folder / name).is_file(), name
        assert (folder / ".gitignore").read_text() == "*\n"  # make sync keeps it by this
        assert list(folder.glob("events.out.tfevents.*"))
        header = (folder / "metrics.csv").read_text().splitlines()[0].split(",")
        curves = {"lr", "grad_norm", "samples_per_second", "time/step_ms", "time/all_reduce_ms"}
        assert {"train/loss", "val/loss", "val/acc", "test/acc"} | curves <= set(header)

    def test_rank_0_tells_it_in_readable_lines(self, default: tuple[Path, str]) -> None:
        logs, output = default
        lines = [line for line in output.splitlines() if line.strip()]
        assert not [line for line in lines if line.startswith("[1]")], output
        assert len(lines) < 50 and "\r" not in output
        text = output.replace("[0]<stdout>:", "")
        for expected in (
            "model   classifier, ", "data    digits, 1,257 samples to train", "ranks   2: 2 on ",
            "over Gloo",
            "precision 32-true", "batch   32 a process x 2 ranks = 64 global",
            f"run     {folders(logs)[0]}", "look    make tensorboard", "epoch 1/50  ",
            "stopped early: val/loss", "test    ", "test/acc 0.9", " samples/s: ", "step    ",
            "limit   ", "summary ",
        ):  # fmt: skip
            assert expected in text, expected

    def test_best_checkpoint_is_the_one_tested(self, default: tuple[Path, str]) -> None:
        losses = validation_losses(default[0])
        assert best_epoch(default[0]) == losses.index(min(losses))
        assert f"(best {min(losses):.4g})\n" in default[1]


class TestOtherRuns:
    def test_resume_then_test_only(self, default: tuple[Path, str], tmp_path: Path) -> None:
        last = (
            tmp_path / "classifier" / "runs" / "2000-01-01_00-00-00" / "checkpoints" / "last.ckpt"
        )
        last.parent.mkdir(parents=True)
        shutil.copy(folders(default[0])[0] / "checkpoints" / "last.ckpt", last)
        epochs = summary(default[0])["epochs"]
        overrides = ["~callbacks.early_stopping", f"trainer.max_epochs={epochs + 2}"]
        done = job(2, tmp_path, "ckpt_path=last", *overrides, "profiler=simple", "model.lr=0.5")
        assert done.returncode == 0, done.stdout
        assert f"from    {last}\n" in done.stdout
        assert (
            "lr 0.5\n" in done.stdout and "lr      0.002, as the checkpoint has it" in done.stdout
        )
        assert f"epoch {epochs + 1}/{epochs + 2} " in done.stdout
        assert f"epoch {epochs}/" not in done.stdout and "dirpath" not in done.stdout
        losses = validation_losses(default[0]) + validation_losses(tmp_path)
        assert best_epoch(tmp_path) == losses.index(min(losses))
        result = summary(tmp_path)
        assert result["steps"] == 20 * (epochs + 2)
        assert " samples/s: 40 steps, 2 epochs in " in done.stdout, done.stdout
        samples = result["samples_per_second"] * result["train_seconds"]
        assert samples == pytest.approx(2 * 1258, rel=0.01)  # those of two epochs, no sample twice
        line = f"profile {folders(tmp_path)[-1]}: fit-profile_rank0-0.txt, test-profile_rank0-0.txt"
        assert line in done.stdout, done.stdout
        reports = sorted(folders(tmp_path)[-1].glob("fit-profile*"))
        assert [f.name for f in reports] == [f"fit-profile_rank{r}-{r}.txt" for r in (0, 1)]
        hooks = reports[0].read_text()
        assert "Report.on_train_batch_end" in hooks and "KeepsPatience.on_train_start" in hooks
        assert "KeepsPatience.on_train_batch" not in hooks  # it has none
        assert result["train"] is True

        # A copy, told apart from the path of the best that every checkpoint has in it.
        before = summary(default[0])
        shutil.copy(before["checkpoint"], tmp_path / "mine.ckpt")
        tested = ["train=false", "ckpt_path=mine.ckpt", "predict=true"]
        done = job(0, tmp_path, *tested, cwd=tmp_path)
        assert done.returncode == 0 and re.search(" parameters$", done.stdout, re.M), done.stdout
        alone = summary(tmp_path)
        assert (alone["world_size"], alone["epochs"], alone["train"]) == (1, 0, False)
        assert alone["checkpoint"] == str(tmp_path / "mine.ckpt")
        for name in ("test/acc", "test/loss"):
            assert alone["metrics"][name] == pytest.approx(before["metrics"][name], rel=1e-5)
        predicted = torch.load(alone["predictions"])
        data = Digits()
        data.setup("test")
        labels = torch.tensor([label for _, label in data.splits[2]])
        accuracy = (predicted == labels).float().mean()
        assert alone["metrics"]["test/acc"] == pytest.approx(float(accuracy), rel=1e-5)

    @pytest.mark.parametrize("strategy", [pytest.param("horovod", marks=pytest.mark.slow), "ddp"])
    def test_an_epoch_with_predictions_and_a_number_of_steps_behind_it(
        self, strategy: str, tmp_path: Path
    ) -> None:
        """From the last checkpoint, whose path each rank of DDP has to find by itself."""
        common = [f"strategy={strategy}", "~callbacks.early_stopping"]
        nobody = "http://127.0.0.1:9"  # a proxy, which is not asked for one of the job's own hosts
        one = ["trainer.max_epochs=1", "predict=true"]
        done = job(2, tmp_path, *common, *one, http_proxy=nobody)
        assert done.returncode == 0 and "epoch 1/1 " in done.stdout, done.stdout
        assert re.search(f"ranks   2: 2 on .*; strategy {strategy}", done.stdout)
        assert len(torch.load(summary(tmp_path)["predictions"])) == 360
        steps = ["trainer.max_epochs=-1", "trainer.max_steps=25", "ckpt_path=last"]
        done = job(2, tmp_path, *common, *steps)
        assert done.returncode == 0, done.stdout
        epochs = re.findall(r"epoch (\d+)", done.stdout)
        assert epochs == ["2"], done.stdout
        result = summary(tmp_path)
        assert (result["world_size"], result["steps"]) == (2, 25)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_ctrl_c_without_a_launcher_leaves_a_checkpoint(
        self, number: signal.Signals, tmp_path: Path
    ) -> None:
        long = ["trainer.max_epochs=100000", "callbacks.early_stopping.patience=100000"]
        long += ["data.num_workers=1", FAULTY + "AsksForSteps"]
        command = [*TEMPLATE, f"log_dir={tmp_path}", *long]
        output = tmp_path / "output"
        with training(command, output) as process:
            os.killpg(process.pid, number)  # as a terminal does, and `timeout`: workers get it too
            assert process.wait(60) == 128 + number, output.read_text()
        text = output.read_text()
        checkpoint = folders(tmp_path)[0] / "checkpoints" / "stopped.ckpt"
        assert text.count("Ctrl-C again ends at once") == (number == signal.SIGINT)
        assert "Traceback" not in text
        line = f"stopped; to go on: {shlex.join(command)} ckpt_path={checkpoint}\n"
        assert line in text and checkpoint.is_file()

    def test_a_job_that_slurm_ends_leaves_a_checkpoint(self, tmp_path: Path) -> None:
        """Slurm sends SIGTERM to all of its processes, also when another job comes first."""
        changes = ["trainer.max_epochs=100000", "~callbacks.early_stopping", "data.num_workers=1"]
        output = tmp_path / "output"
        command = make_train(2, *TEMPLATE, f"log_dir={tmp_path}", *changes)
        with training(command, output, SLURM_JOB_ID="1") as launcher:
            for process in reversed(psutil.Process(launcher.pid).children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):  # a worker of the epoch before
                    process.terminate()
            launcher.terminate()
            assert launcher.wait(60) == 128 + signal.SIGTERM, output.read_text()
        text = output.read_text()
        assert text.count("stopped; to go on: ") == 1 and "Traceback" not in text, text
        assert text.endswith("horovodrun: stopped by SIGTERM\n"), text  # and no rank without one
        assert (folders(tmp_path)[0] / "checkpoints" / "stopped.ckpt").is_file()

    def test_a_stop_at_once_is_no_error_of_a_worker(self, tmp_path: Path) -> None:
        """All processes get SIGTERM; torch raises an error where a worker ends by it."""
        changes = ["trainer.max_epochs=100000", "~callbacks.early_stopping", "data.num_workers=1"]
        output = tmp_path / "output"
        command = make_train(1, *TEMPLATE, f"log_dir={tmp_path}", *changes)
        with training(command, output) as launcher:
            launcher.send_signal(signal.SIGUSR2)  # as make stop KILL=1, or a second Ctrl-C
            assert launcher.wait(60) == 128 + signal.SIGUSR2, output.read_text()
        assert "Traceback" not in output.read_text()

    def test_bf16_limits_and_accumulation(self, tmp_path: Path) -> None:
        done = job(
            2, tmp_path, "trainer.precision=bf16-mixed", "trainer.limit_train_batches=6",
            "trainer.max_epochs=2", "trainer.accumulate_grad_batches=2", "lr_scaling=linear",
            FAULTY + "TellsHowItMultiplies", "matmul_precision=high",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("products of float32: high\n") == 2, done.stdout
        assert "precision bf16-mixed" in done.stdout and "lr 0.004" in done.stdout
        assert "32 a process x 2 ranks x 2 accumulated = 128 global" in done.stdout
        assert "curves  show no step of training: 6 steps, and trainer.log_every" in done.stdout
        assert "logging interval" not in done.stdout
        trained = summary(tmp_path)
        assert (trained["steps"], trained["global_batch_size"]) == (6, 128)
        done = job(0, tmp_path, "train=false", "ckpt_path=best", "~callbacks")
        assert done.returncode == 0, done.stdout
        assert f"from    {trained['checkpoint']}\n" in done.stdout
        assert "look  " not in done.stdout
        assert summary(tmp_path)["checkpoint"] == trained["checkpoint"]

    def test_steps_that_end_before_a_validation(self, tmp_path: Path) -> None:
        done = job(0, tmp_path, "trainer.max_steps=3", "logger=none")
        assert done.returncode == 0, done.stdout
        assert "look  " not in done.stdout and "of training on 1 rank\n" in done.stdout
        assert not list(tmp_path.rglob("lightning_logs"))  # of a logger that Lightning chose
        assert "batch   32 a process x 1 rank = 32 global\n" in done.stdout
        assert summary(tmp_path)["steps"] == 3 and "test/acc" in summary(tmp_path)["metrics"]

    def test_denoiser_denoises(self, tmp_path: Path) -> None:
        done = job(
            2, tmp_path, "experiment=denoiser", f"data_dir={tmp_path}/data", "data.size=40",
            "trainer.max_epochs=5", "data.count=264", "predict=true",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        metrics = summary(tmp_path)["metrics"]
        assert metrics["test/psnr_noisy"] == pytest.approx(20, abs=0.2)  # 10 log(1 / 0.1^2)
        assert metrics["test/psnr"] > metrics["test/psnr_noisy"] + 1
        (folder,) = folders(tmp_path)
        assert folder.parent.parent.name == "denoiser"
        assert (folder / "denoised.png").read_bytes().startswith(b"\x89PNG")
        assert len(list((tmp_path / "data").iterdir())) == 1
        # 33 images to test on 2 ranks, each once and in their order
        data = Noise(data_dir=f"{tmp_path}/data", count=264, size=40)
        data.setup("test")
        noisy = torch.stack([noisy for noisy, _, _ in data.splits[2]])
        model = Denoiser.load_from_checkpoint(summary(tmp_path)["checkpoint"]).eval()
        with torch.no_grad():
            expected = model(noisy)
        predicted = torch.load(folder / "predictions.pt")
        assert len(expected) == 33 and torch.allclose(predicted, expected, atol=1e-4)
        assert f"predict {folder}/predictions.pt: 33 samples" in done.stdout

    def test_progress_moves_in_one_line_on_a_terminal(self, tmp_path: Path) -> None:
        main, terminal = pty.openpty()
        command = [*TEMPLATE, f"log_dir={tmp_path}", "trainer.max_epochs=1", "test=false",
                   "data.batch_size=2"]  # fmt: skip
        job = subprocess.Popen(command, stdout=terminal, stderr=subprocess.DEVNULL)
        os.close(terminal)
        output = b""
        with contextlib.suppress(OSError):  # the terminal closes with the job
            while part := os.read(main, 4096):
                output += part
        assert job.wait(timeout=60) == 0
        moved = [line for line in output.decode().split("\n") if "\repoch 1/1  step " in line]
        assert len(moved) == 1 and moved[0].count("\r") > 2, output

    def test_warnings_of_all_ranks_appear_once(self, tmp_path: Path) -> None:
        model = "model._target_=tests.faulty_models.Warns"
        data = "data._target_=tests.test_template.StreamedDigits"
        done = job(2, tmp_path, model, data, "trainer.fast_dev_run=true")
        assert done.returncode == 0, done.stdout
        assert done.stdout.count("all 2 ranks were given the same first batch: Stream has to") == 1
        assert done.stdout.count("UserWarning: everybody says this") == 1
        assert done.stdout.count("warning of rank 1: UserWarning: only rank 1 says this") == 1
        assert done.stdout.count("found no rate") == 1


class PlainBatches(Digits):
    def train_dataloader(self) -> DataLoader:
        data = super().train_dataloader().dataset
        batches = BatchSampler(range(len(data)), 32, drop_last=False)
        return DataLoader(data, batch_sampler=batches)


class TestMistakes:
    """Told in one line, once; non-zero exit; no folder, no process left."""

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["data.batch_size=630"], "data.batch_size=630: a rank's share is 629 samples"),
            (["strategy=single"], "strategy=single: 2 processes were launched"),
            (["log_dir=LICENSE"], "/LICENSE: the run's folder cannot be written: Not a directory"),
        ],
    )
    def test_one_line_of_two_ranks(
        self, tmp_path: Path, overrides: list[str], message: str
    ) -> None:
        done = job(2, tmp_path, *overrides)
        assert done.returncode != 0
        lines = [line for line in done.stdout.splitlines() if "error: " in line]
        assert len(lines) == 1 and message in lines[0], done.stdout
        assert "Traceback" not in done.stdout.split("Process 0 exit")[0]
        assert not folders(tmp_path) and not processes_of(tmp_path)

    def test_one_line_of_one_process(self, default: tuple[Path, str], tmp_path: Path) -> None:
        (tmp_path / "setup.ckpt").write_text("no checkpoint")
        content = {"state_dict": {}, "hyper_parameters": {"a": Path("x")}}
        torch.save(content, tmp_path / "kept.ckpt")
        torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
        broken = tmp_path / "broken"
        (broken / "classifier" / "runs" / "first").mkdir(parents=True)
        (broken / "classifier" / "runs" / "first" / "summary.json").write_text("")
        best = ["train=false", "ckpt_path=best", f"log_dir={broken}"]
        other_model = [f"ckpt_path={summary(default[0])['checkpoint']}", "model.width=8"]
        mine, early = tmp_path / "a" / "b", "callbacks.early_stopping"
        mine.mkdir(parents=True)
        # It leaves a run's folder: the metric is missed when there could have been one.
        nobody_logs = [f"{early}.monitor=val_loss", f"{early}.mode=min", f"log_dir={tmp_path}/3"]
        mistakes = [
            (["model.lrr=1"], "model.lrr: model has no key 'lrr'; it has:"),
            (["ckpt_path=last"], "logs/classifier/runs has a checkpoint to go on from"),
            (best, "first/summary.json is not a summary of a run"),
            (["ckpt_path=nowhere.ckpt"], "nowhere.ckpt: there is no such file"),
            (["ckpt_path=setup.ckpt"], "setup.ckpt: it cannot be read as a checkpoint: torch.save"),
            (["ckpt_path=kept.ckpt"], "kept.ckpt: it holds a pathlib"),
            (["ckpt_path=weights.ckpt"], "weights.ckpt: it has weights alone (save_weights_only)"),
            (other_model, "error: ckpt_path: the checkpoint does not fit the model"),
            ([f"run_dir={mine}/run", "data.batch_size=1300"], "error: data.batch_size=1300: "),
            (nobody_logs, f"error: {early}.monitor=val_loss: nothing is logged by this name"),
            (["trainer.precision=12"], "trainer=default trainer.precision=12: "),
            (["trainer.enable_checkpointing=false"], "; callbacks=none leaves those that save out"),
            (["callbacks.best_checkpoint.monitor=null"], "or give yours another monitor, mode "),
            (["+model.foo=1"], "model=classifier +model.foo=1: "),
            (["run_dir=conf"], "/conf: it exists already; give another, or none"),
            (["train=false"], "train=false: give the checkpoint to test"),
            (["train=false", "test=false"], "train=false test=false: nothing is left to do"),
            (["predict=true", "trainer.limit_predict_batches=0"], "leaves nothing to predict"),
            (["model=denoiser", "model.depth=2"], "model=denoiser model.depth=2: "),
            (
                ["data=fake", "data.classes=20"],
                "model.classes=10 and data.classes=20, model.channels=1 and data.channels=3: log",
            ),
            (
                ["data._target_=tests.test_template.ThreeDigits", "model.classes=2"],
                "classes=2: data=digits has 3 classes; give model",
            ),
            ([FAULTY + "HasNoTest"], "model=classifier: it has no test_step; give it one, or"),
            (["data._target_=tests.test_template.PlainBatches"], "data=digits: Lightning would m"),
            ([FAULTY + "KeepsAnObject"], "checkpoints would hold optimizer and not load"),
        ]
        if not torch.cuda.is_available():
            mistakes.append((["trainer.accelerator=gpu"], "default trainer.accelerator=gpu: "))
        logs = tmp_path / "logs"
        typed = json.dumps([[f"log_dir={logs}", *overrides] for overrides, _ in mistakes])
        done = run([sys.executable, str(ROOT / "tests" / "forks.py"), typed], cwd=tmp_path)
        ends = json.loads(done.stdout.splitlines()[-1])
        for (overrides, message), (status, output) in zip(mistakes, ends, strict=True):
            assert status == 2 and output.count("error: ") == 1, (overrides, output)
            assert output.splitlines()[-1].startswith("error: ") and message in output
            assert "Traceback" not in output
            warned = "warning callbacks.early_stopping.monitor=val_loss: nothing is logged by this"
            assert (warned in output) == (overrides == nobody_logs)  # before training
        assert not list(logs.iterdir()) and not processes_of(logs)
        assert not list(mine.iterdir())  # what was the user's stays

    def test_more_ranks_than_samples(self, tmp_path: Path) -> None:
        done = job(3, tmp_path / "logs", "data=noise", "model=denoiser", "data.count=2",
                   "data.size=8", f"data_dir={tmp_path}/data")  # fmt: skip
        assert done.returncode != 0
        assert done.stdout.count("error: data=noise: 2 samples for 3 ranks") == 1, done.stdout
        assert not folders(tmp_path / "logs")

    def test_a_mistake_of_the_test_keeps_what_was_trained(self, tmp_path: Path) -> None:
        done = job(2, tmp_path, FAULTY + "RefusesItsTest", "trainer.max_epochs=1")
        assert done.returncode != 0 and done.stdout.count("error: ") == 1, done.stdout
        assert "error: no test today" in done.stdout
        (folder,) = folders(tmp_path)
        assert (folder / "checkpoints" / "last.ckpt").is_file()
        assert summary(tmp_path)["epochs"] == 1 and best_epoch(tmp_path) == 0

    def test_a_stop_within_the_test_keeps_what_was_trained(self, tmp_path: Path) -> None:
        one_epoch = [FAULTY + "TakesItsTimeToTest", "trainer.max_epochs=1", f"log_dir={tmp_path}"]
        launcher = [sys.executable, "-m", "cluster.horovodrun", "-H", "localhost:2"]
        process = subprocess.Popen(
            [*launcher, *TEMPLATE, *one_epoch], cwd=ROOT, text=True, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.endswith(":testing\n") and sum("testing" in line for line in lines) == 2:
                process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM, lines
        assert summary(tmp_path)["epochs"] == 1 and best_epoch(tmp_path) == 0
        assert sum(line.startswith("[0]<stdout>:speed ") for line in lines) == 1
        assert sum("testing" in line for line in lines) == 2  # it ended at once

    def test_a_checkpoint_that_cannot_be_written(self, tmp_path: Path) -> None:
        few_blocks = ["sh", "-c", 'ulimit -f 200; exec "$@"', "sh"]  # of 512 bytes, in a file
        done = run([*few_blocks, *TEMPLATE, f"log_dir={tmp_path}"], cwd=ROOT)
        assert done.returncode == 2 and done.stdout.count("error: ") == 1, done.stdout
        assert "epoch_000.ckpt: cannot be written: File too large" in done.stdout
        assert not list(folders(tmp_path)[0].glob("checkpoints/*"))

    def test_a_rank_that_is_told_to_end_does_not_end_well(self, tmp_path: Path) -> None:
        done = job(1, tmp_path, FAULTY + "IsToldToEnd")
        assert done.returncode != 0 and done.stdout.count(": ended by SIGTERM, without") == 1
        assert not (folders(tmp_path)[0] / "summary.json").exists()

    def test_an_error_in_training_keeps_its_traceback(self, tmp_path: Path) -> None:
        done = job(2, tmp_path, FAULTY + "Breaks", launcher=horovodrun)
        assert done.returncode != 0
        assert done.stdout.count("RuntimeError: broken in training") == 1, done.stdout
        assert done.stdout.count("Traceback") == 2, done.stdout  # rank 1's and horovodrun's
        assert len(folders(tmp_path)) == 1 and not processes_of(tmp_path)

    def test_a_training_that_ends_early_says_how_to_go_on(self, tmp_path: Path) -> None:
        for model, error in (
            ("IsKilled", "horovodrun: rank 1 on localhost was killed by SIGKILL"),
            ("LosesAWorker", "error: a worker of a loader was killed, most often because the mem"),
            ("FillsTheDisk", "error: .*: cannot be written: No space left on device\n"),
        ):
            changes = ("~callbacks.early_stopping", "data.num_workers=1")
            done = job(2, tmp_path / model, FAULTY + model, *changes)
            assert done.returncode != 0 and re.search(error, done.stdout), done.stdout
            assert "Traceback" not in done.stdout and not processes_of(tmp_path), done.stdout
            (told,) = re.findall(r"to go on: .* ckpt_path=(\S+)\n", done.stdout)
            assert Path(told) == folders(tmp_path / model)[0] / "checkpoints" / "last.ckpt"

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            ("BreaksEverywhere", "RuntimeError: broken on all ranks"),
            ("BreaksInValidation", "RuntimeError: broken in validation"),  # before an epoch is lost
            ("AsksForAnotherSum", "HorovodInternalError: Mismatched ALLREDUCE tensor shapes"),
        ],
    )
    def test_an_error_of_all_ranks_is_told_once(
        self, tmp_path: Path, model: str, message: str
    ) -> None:
        done = job(2, tmp_path, FAULTY + model)
        assert done.returncode != 0
        assert done.stdout.count(message) == 1 and "epoch 1/" not in done.stdout, done.stdout
        assert "[0]<stderr>:  File" in done.stdout and "[1]<stderr>:  File" not in done.stdout
        assert not processes_of(tmp_path)

    def test_sigterm_to_make_reaches_the_training(self, tmp_path: Path) -> None:
        """With a letter in ARGS that make calls a shell for, which would end alone."""
        changes = "~callbacks.early_stopping trainer.max_epochs=100000"
        command = ["make", "train", "INSTALL=true", f"PYTHON={sys.executable}"]
        output = tmp_path / "output"
        with training([*command, f"ARGS={changes} log_dir='{tmp_path}'"], output) as process:
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(60) != 0
        text = output.read_text()
        first = text.splitlines()[0]
        assert first.endswith(f" template.py {changes} log_dir='{tmp_path}'")  # what can be typed
        launcher = first.partition(" template.py ")[0]
        assert f"stopped; to go on: {launcher} template.py " in text
        assert "horovodrun: stopped by SIGTERM" in text
        assert (folders(tmp_path)[0] / "checkpoints" / "stopped.ckpt").is_file()

    def test_make_train_refuses_before_launching(self, tmp_path: Path) -> None:
        make = ["make", "train", f"PYTHON={sys.executable}"]
        done = run([*make, f"ARGS=trainer.max_epoch=1 log_dir={tmp_path}"])
        assert done.returncode != 0
        assert "did you mean max_epochs?" in done.stdout
        assert "horovodrun" not in done.stdout
        done = run([*make, "ARGS=--halp"])
        assert done.returncode != 0 and "ARGS=--halp: changes have the form" in done.stdout
        assert "usage" not in done.stdout
        done = run([*make, "NP=1 2", "INSTALL=true"])
        assert done.returncode != 0 and "give one number of processes" in done.stdout


def test_ddp_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    changes = ["strategy=ddp", "trainer.devices=2", "trainer.max_epochs=1", f"log_dir={tmp_path}"]
    done = run([*torchrun, TEMPLATE[1], *changes])
    assert done.returncode == 0 and "ranks   2: 2 on" in done.stdout, done.stdout
    result = summary(tmp_path)
    assert (result["world_size"], result["strategy"], result["steps"]) == (2, "ddp", 20)


def test_checkpoints_within_an_epoch(tmp_path: Path) -> None:
    """As the README has it, for epochs of 20 steps."""
    often = "+callbacks.last_checkpoint.every_n_train_steps=7"
    done = job(2, tmp_path, often, "trainer.max_steps=10", "test=false")
    assert done.returncode == 0, done.stdout
    (last,) = folders(tmp_path)[0].glob("checkpoints/last.ckpt")
    assert torch.load(last, weights_only=False)["global_step"] == 7
    done = job(2, tmp_path, often, f"ckpt_path={last}", "trainer.max_epochs=1", "test=false")
    assert done.returncode == 0 and " 13 steps, 1 epoch in " in done.stdout, done.stdout
