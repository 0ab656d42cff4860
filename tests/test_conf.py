"""Every file of conf/ works: found by listing the folder, so that a new one is tested too."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError
from pytorch_lightning import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.nn import Linear, ReLU
from torch.utils._pytree import tree_leaves

from models.classifier import Classifier
from runs import loggers
from runs.config import CONF, LOGGERS
from runs.progress import Progress
from runs.refusal import Refusal
from runs.run import Run
from runs.targets import make, with_advice
from tests.conftest import ROOT, make_train, run
from tests.pictures import write_all

# Where a configuration has these keys, they are made small.
SMALL = {
    "data.count": 16, "data.size": 16, "data.batch_size": 4, "data.num_workers": 0,
    "model.depth": 4, "model.size": 16, "data.megabytes": 0.05, "model.layers": 1,
}  # fmt: skip

# Data of this repository, whose files are made here; that of a fork is tried where it lies, if it
# does.
DATA = ["cifar10", "digits", "fake", "folder", "mnist", "noise", "photos", "shards", "text"]

# Experiments of this repository, whose heads promise something; yours may look as they like.
OURS = [
    "cifar_resnet", "dcgan", "denoiser", "denoiser_full", "gpt_tiny", "imagenet_resnet50",
    "mnist_cnn", "model_parallel",
]  # fmt: skip
DEBUGS = ["anomaly", "limit", "one_batch", "overfit", "profiler"]

pytestmark = pytest.mark.usefixtures("one_thread")


def names(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


@pytest.fixture(autouse=True)
def conf() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def small(config: DictConfig, folder: Path) -> list[str]:
    """The overrides that make a configuration small, and the files that it reads."""
    if not (folder / "data").exists():
        write_all(folder / "data")
    values = {key: OmegaConf.select(config, key, default=False) for key in SMALL}
    # What a fork calls so may be a list, say of widths, or a word: it stays.
    keys = [key for key in SMALL if type(values[key]) in (int, float, type(None))]
    if "data.size" not in keys and "model.size" in keys:  # of pictures that are as they are
        keys.remove("model.size")
    if "ResNet" in str(config.model.get("_target_")):  # which has 18 layers or more
        keys.remove("model.depth")
    changes = [f"{key}={SMALL[key]}" for key in keys]
    return [*changes, f"data_dir={folder}/data"] if is_ours(config.data._target_) else changes


def is_ours(target: str) -> bool:
    return target.split(".")[-2] in DATA


def fits(groups: list[str], folder: Path) -> Exception | None:
    """Why a model does not train, validate and test one batch of a data set; None if it does."""
    seed_everything(0, verbose=False)
    trainer = Trainer(
        fast_dev_run=True, accelerator="cpu", default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        config = compose("config", [*groups, *small(compose("config", groups), folder)])
        module, dataset = make(config.model), make(config.data)
        trainer.fit(module, dataset)
        if is_overridden("test_step", module) and is_overridden("test_dataloader", dataset):
            trainer.test(module, dataset, verbose=False)
    except Exception as error:
        return error
    return None


def datamodule(data: str, folder: Path) -> LightningDataModule:
    """A data set, small; one that refers to the model, with the first model that fits it."""
    for groups in [[f"data={data}"], *([f"data={data}", f"model={m}"] for m in names("model"))]:
        with contextlib.suppress(InterpolationResolutionError):
            config = compose("config", [*groups, *small(compose("config", groups), folder)])
            return make(config.data)
    raise AssertionError(f"data={data}: no model has what it refers to")


def test_a_data_set_may_refer_to_its_model(tmp_path: Path) -> None:
    """As `horizon: ${model.horizon}` does, which the default model has not."""
    shutil.copytree(CONF, tmp_path / "conf")
    mine = "defaults: [digits]\nsplit_seed: ${model.depth}\n"
    (tmp_path / "conf" / "data" / "mine.yaml").write_text(mine)
    GlobalHydra.instance().clear()  # of conf() above
    with initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
        assert isinstance(fits(["model=classifier", "data=mine"], tmp_path), Exception)
        assert datamodule("mine", tmp_path).hparams["split_seed"] == 4


def test_data_of_a_fork_is_read_where_it_lies(tmp_path: Path) -> None:
    config = compose("config", ["data=noise"])
    assert f"data_dir={tmp_path}/data" in small(config, tmp_path)
    config.data._target_ = "datamodules.reviews.Reviews"
    assert not [change for change in small(config, tmp_path) if change.startswith("data_dir")]


@pytest.mark.parametrize("model", names("model"))
def test_each_model_trains_on_some_data(model: str, tmp_path: Path) -> None:
    """First on what experiments give it, then on any that happens to fit."""
    failures = {}
    experiments = [[f"experiment={name}"] for name in names("experiment")]
    chosen = [groups for groups in experiments if model_of(groups) == model]
    for groups in [*chosen, *([f"model={model}", f"data={data}"] for data in names("data"))]:
        failures[" ".join(groups)] = failure = fits(groups, tmp_path)
        if failure is None:
            return
    message = "\n".join(f"{groups}: {failure!r}" for groups, failure in failures.items())
    for groups, failure in failures.items():
        ours = is_ours(compose("config", groups.split()).data._target_)
        if isinstance(failure, FileNotFoundError) and not ours:
            pytest.skip(message)
    pytest.fail(message)


def model_of(groups: list[str]) -> str:
    """Which file of conf/model they take."""
    return compose("config", groups, return_hydra_config=True).hydra.runtime.choices["model"]


@pytest.mark.parametrize("data", names("data"))
def test_each_data_set_has_batches(data: str, tmp_path: Path) -> None:
    dataset = datamodule(data, tmp_path)
    try:
        dataset.prepare_data()
        dataset.setup("fit")
    except FileNotFoundError as error:
        if is_ours(f"{type(dataset).__module__}.{type(dataset).__name__}"):
            raise
        pytest.skip(f"data={data}: {error}")
    loaders = [dataset.train_dataloader(), dataset.val_dataloader()]
    for loader in CombinedLoader(loaders).flattened:  # each may be several
        assert len(tree_leaves(next(iter(loader)))[0]) > 0


@pytest.mark.parametrize("experiment", names("experiment"))
def test_experiment_runs_on_two_ranks(experiment: str, tmp_path: Path) -> None:
    config = compose("config", [f"experiment={experiment}"])
    overrides = [f"experiment={experiment}", *small(config, tmp_path), f"log_dir={tmp_path}/logs"]
    job = [sys.executable, "template.py", *overrides, "debug=one_batch"]
    done = run(make_train(2, *job))
    if experiment not in OURS and "No such file" in done.stdout:
        pytest.skip(f"experiment={experiment}: its data is not here")
    assert done.returncode == 0, done.stdout
    assert "ranks   2:" in done.stdout
    if experiment in OURS:
        assert "test/" in done.stdout
        lr = config.model.lr * (2 if config.lr_scaling == "linear" else 1)
        told = rf"parameters( \([\d,]+ trained\))?, lr {lr:g}\n"  # also where it warms up
        assert re.search(told, done.stdout)
        assert (" trained), lr" in done.stdout) == (experiment == "dcgan"), done.stdout  # its judge


@pytest.mark.parametrize(
    ("group", "name"),
    [("experiment", name) for name in names("experiment") if name in OURS]
    + [("debug", name) for name in DEBUGS],
)
def test_header_begins_with_its_command(group: str, name: str) -> None:
    header = (CONF / group / f"{name}.yaml").read_text()
    assert header.startswith("# @package _global_\n#\n# make train ")
    assert f"{group}={name}" in header.splitlines()[2]


def job(*overrides: str, **choices: str) -> Run:
    """A Run of a configuration, without what begins one."""
    made = Run.__new__(Run)
    made.config, made.choices = compose("config", list(overrides)), choices
    return made


def debug(name: str, folder: Path, *overrides: str) -> tuple[Trainer, dict[str, float]]:
    """What debug=NAME does with the default job, in this process: trainer and metrics."""
    arguments = [f"debug={name}", f"run_dir={folder}", "trainer.accelerator=cpu", *overrides]
    config = compose("config", arguments)
    seed_everything(0, verbose=False)
    callbacks = [make(part) for part in config.callbacks.values()]
    loggers = [make(part) for part in config.logger.values()]
    profiler = make(config.profiler) if config.profiler else None
    trainer = make(
        config.trainer, callbacks=callbacks, logger=loggers, profiler=profiler,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(make(config.model), make(config.data))
    return trainer, {name: float(value) for name, value in trainer.callback_metrics.items()}


@functools.cache
def composed(line: str) -> DictConfig:
    return compose("config", [line])


@pytest.mark.parametrize("name", names("debug"))
def test_debug_goes_with_all_experiments_and_models(name: str) -> None:
    for other in ["model=denoiser", *(f"experiment={file}" for file in names("experiment"))]:
        # An experiment's change of a callback that is not there any more is none.
        callbacks = "none" if name in ("overfit", "profiler") else "default"
        mine = job(other, f"debug={name}", callbacks=callbacks)
        before, after = composed(other), mine.config
        assert (after.model, after.data) == (before.model, before.data) and after != before
        # Over several epochs Lightning counts whole batches, not shares of an epoch.
        trainer = after.trainer
        assert trainer.check_val_every_n_epoch or isinstance(trainer.val_check_interval, int)
        made = mine.instantiate("callbacks")
        assert all(isinstance(callback, Callback) for callback in made)


def test_another_argument_of_the_trainer_is_taken() -> None:
    """The one that its file names, beside the callbacks of a run."""
    (example,) = re.findall(r"`(\+trainer[^`]+)`", (CONF / "trainer" / "default.yaml").read_text())
    config = compose("config", [example, "run_dir=x", "trainer.accelerator=cpu"])
    callbacks = [make(part) for part in config.callbacks.values()]
    assert isinstance(make(config.trainer, callbacks=callbacks), Trainer)


@pytest.mark.parametrize("choices", [{"callbacks": "default"}, {}])  # Hydra keeps no list of them
def test_what_is_no_callback_is_refused(choices: dict[str, str]) -> None:
    with pytest.raises(Refusal, match="callbacks.early: there is no such member of it"):
        job("+callbacks.early.patience=3", **choices).instantiate("callbacks")


class HasSettings(LightningModule):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network


@pytest.mark.parametrize(
    ("written", "kinds"), [({}, (dict, list)), ({"_convert_": "none"}, (DictConfig, ListConfig))]
)
def test_nested_settings_arrive_as_the_file_asks(
    written: dict[str, Any], kinds: tuple[type, type]
) -> None:
    mine = job(model="mine")
    target = {"_target_": f"{__name__}.HasSettings", "network": {"widths": [1, 2]}}
    mine.config.model = OmegaConf.create({**target, **written})
    network = mine.instantiate("model").network
    assert (type(network), type(network["widths"])) == kinds


class HasState(Callback):
    def __init__(self, every: list[int], options: dict[str, int]) -> None:
        self.every, self.options = every, options


def test_callbacks_get_plain_lists_which_checkpoints_can_hold() -> None:
    mine = job(callbacks="mine")
    target = {"_target_": f"{__name__}.HasState", "every": [1, 2], "options": {"a": 1}}
    mine.config.callbacks = OmegaConf.create({"own": target})
    (own,) = mine.instantiate("callbacks")
    assert (type(own.every), type(own.options)) == (list, dict)


def test_settings_of_a_logger_that_was_not_chosen_are_left_over() -> None:
    group = {"logger": "default"}
    assert len(job("+logger.wandb.tags=[a]", "run_dir=x", **group).instantiate("logger")) == 2
    with pytest.raises(Refusal, match="logger.tensorbord: there is no such member of it"):
        job("+logger.tensorbord.name=a", "run_dir=x", **group).instantiate("logger")


def test_a_callback_that_is_null_is_left_out() -> None:
    mine = job("callbacks.early_stopping=null", "run_dir=x", callbacks="default")
    callbacks = mine.instantiate("callbacks")
    assert len(callbacks) == len(mine.config.callbacks) - 1
    assert not any(isinstance(callback, EarlyStopping) for callback in callbacks)


@pytest.mark.parametrize(
    ("group", "overrides", "message"),
    [
        ("model", ["model._target_=torch.nn.Identity", "~model.lr"], "to name a LightningModule"),
        ("strategy", ["~strategy"], "^strategy: a run needs one; leave ~strategy out"),
    ],
)
def test_what_is_none_of_its_group_is_refused(
    group: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(Refusal, match=message):
        job(*overrides, model="mine").instantiate(group)


def opened(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> DictConfig:
    """The configuration of a job, with the folder of runs that it would make its own in."""
    mine = job(*overrides, model="mine")
    monkeypatch.setattr(Run, "_make_folder", lambda *_: None)
    folder = mine.open(SimpleNamespace(broadcast=lambda what: what))
    assert str(folder) == mine.config.run_dir
    return mine.config


def test_where_a_run_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where data are, from any working folder."""
    config = opened(monkeypatch)
    assert config.run_dir == str(ROOT / "logs" / "mine" / "runs")
    assert config.data_dir == str(ROOT / "data")
    config = opened(monkeypatch, "log_dir='~/logs'", "data_dir='~/data'", "task=mine/digits")
    # One folder: others are looked for in logs/*/runs.
    assert config.run_dir == str(Path.home() / "logs" / "mine_digits" / "runs")
    assert config.data_dir == str(Path.home() / "data")
    assert opened(monkeypatch, "run_dir='~/mine'").run_dir == str(Path.home() / "mine")


def test_to_predict_is_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["train=false", "test=false", "predict=true", "ckpt_path=mine.ckpt"]
    assert opened(monkeypatch, *overrides).run_dir == str(ROOT / "logs" / "mine" / "runs")


class ForgetsSuper(LightningModule):
    def __init__(self, **_: object) -> None:
        self.network = Linear(1, 1)


LOOKS_UP = [f"model._target_={__name__}.LooksUp"]


class LooksUp(LightningModule):
    def __init__(self, name: str, **_: object) -> None:
        super().__init__()
        if not name:
            raise ValueError
        self.activation = {"relu": ReLU()}[name]


class Adam:
    def __init__(self, lr: float) -> None: ...


@pytest.mark.parametrize(
    ("group", "overrides", "message"),
    [
        ("model", ["model._target_=models.unet.UNte"], r"\(did you mean UNet\?\)"),
        ("model", ["model._target_=models.clasifier.Classifier"], r"\(did you mean classifier\?\)"),
        ("model", ["+model.widht=8"], r"'widht'; it takes: .*width.*\(did you mean width\?\)"),
        ("model", ["+model.o={_target_: tests.test_conf.Adam, rl: 1}"], "argument 'rl'$"),
        ("model", ["model._target_=models.unet.Unet"], r"\(did you mean UNet\?\)"),
        (
            "model",
            [*LOOKS_UP, "+model.name=rleu"],
            r"tests/test_conf.py, line \d+: KeyError: 'rleu'",
        ),
        ("model", [*LOOKS_UP, "+model.name=''"], r"tests/test_conf.py, line \d+: ValueError$"),
        ("model", [f"model._target_={__name__}.ForgetsSuper"], r"begin with super\(\).__init__"),
        ("trainer", ["+trainer.enable_progress_bar=false"], "; ~callbacks.progress leaves the"),
        ("trainer", ["+trainer.callbacks=[]"], "trainer.callbacks: template.py sets this itself"),
    ],
)
def test_what_cannot_be_made_is_told_with_advice(
    group: str, overrides: list[str], message: str
) -> None:
    arguments = {"callbacks": [Progress()]} if group == "trainer" else {}
    with pytest.raises(Refusal, match=f"^{group}=mine: (?s:.*){message}"):
        job(*overrides, **{group: "mine"}).instantiate(group, **arguments)


def test_one_guess_of_an_argument_is_told() -> None:
    """Python makes one, too, since 3.13; it stays where ours does not know."""
    config = OmegaConf.create({"_target_": "models.classifier.Classifier", "widht": 8})
    error = "__init__() got an unexpected keyword argument '{}'. Did you mean '{}'?"
    told = with_advice(error.format("widht", "width"), config)
    assert "argument 'widht'; it takes: " in told and told.endswith(" (did you mean width?)")
    of_a_part = error.format("depht", "depth")
    assert with_advice(of_a_part, config) == of_a_part


@pytest.mark.parametrize(
    ("imported", "message"),
    [
        (
            "timn.nn",
            "brought.Mine cannot be loaded: no module named 'timn'; .* to requirements.txt",
        ),
        ("modells.resnet", r"no module named 'modells' \(did you mean models\?\); "),
        ("models.nothing", "No module named 'models.nothing'"),
    ],
)
def test_a_module_that_is_missing_is_named(
    imported: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "brought.py").write_text(f"import {imported}\n")
    with pytest.raises(Refusal, match=f"^model=mine: (?s:.*){message}"):
        job("model._target_=brought.Mine", model="mine").instantiate("model")


def test_classes_of_the_other_lightning_are_refused() -> None:
    """Its Trainer would take them, ours does not, and says nothing of why. Callbacks it does."""
    other = type("Theirs", (LightningModule,), {"__module__": "lightning.pytorch.core.module"})
    mine = type("Mine", (other,), {})
    theirs = job(model="mine", callbacks="mine")
    with mock.patch("runs.run.make", lambda *_, **__: mine()):
        with pytest.raises(Refusal, match="^model=mine: Mine: .*write import pytorch_lightning as"):
            theirs.instantiate("model")
        assert theirs.instantiate("callbacks")
    with mock.patch("importlib.util.find_spec", return_value=None):  # where it is not installed
        message = with_advice(
            "Error loading 'models.x.Mine': No module named 'lightning'", theirs.config
        )
    assert message.startswith(
        "models.x.Mine cannot be loaded: no module named 'lightning'; here Light"
    )


def test_a_model_needs_no_learning_rate() -> None:
    job("~model.lr", model="mine").scale_learning_rate(4)
    with pytest.raises(Refusal, match="lr_scaling=linear: model=mine has no lr to scale"):
        job("~model.lr", "lr_scaling=linear", model="mine").scale_learning_rate(4)


@pytest.mark.parametrize(("scaling", "lr"), [("none", 0.5), ("linear", 2), ("sqrt", 1)])
def test_what_refers_to_the_learning_rate_is_scaled_too(scaling: str, lr: float) -> None:
    nested = ["model.lr=0.5", "+model.optimizer.lr=${model.lr}", f"lr_scaling={scaling}"]
    mine = job(*nested, model="mine")
    mine.scale_learning_rate(4)
    assert (mine.config.model.lr, mine.config.model.optimizer.lr) == (lr, lr)


def test_debug_overfit_learns_its_batch_by_heart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def validates(*_: object) -> None:
        raise AssertionError("it validates")

    monkeypatch.setattr(Classifier, "validation_step", validates)
    trainer, metrics = debug("overfit", tmp_path, "model.dropout=0")
    assert trainer.global_step == 200 and metrics["train/loss"] < 0.01
    assert "val/loss" not in metrics and not (tmp_path / "checkpoints").exists()


def test_debug_limit_is_a_whole_run_in_small(tmp_path: Path) -> None:
    trainer, metrics = debug("limit", tmp_path)
    assert trainer.global_step == 10 and "val/loss" in metrics
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()


def test_debug_anomaly_names_the_operation(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="LogBackward0.* returned nan"):
        debug("anomaly", tmp_path, "model._target_=tests.faulty_models.Vanishes", "logger=none")


def test_a_training_too_short_to_be_traced_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    debug("limit", tmp_path, "profiler=trace", "profiler.warmup=20")
    told = "trace   nothing: training ended within profiler.warmup=20 batches\n"
    assert told in capsys.readouterr().out and not (tmp_path / "trace").exists()


def test_debug_profiler_leaves_table_and_trace(tmp_path: Path) -> None:
    trainer, _ = debug("profiler", tmp_path)
    assert trainer.global_step == 20
    assert "aten::" in next(tmp_path.glob("fit-profile*.txt")).read_text()
    assert list(tmp_path.glob("*.pt.trace.json"))


@pytest.mark.parametrize("group", ["strategy", "callbacks", "logger", "profiler", "trainer"])
def test_the_other_groups_can_be_made(group: str, tmp_path: Path) -> None:
    for name in names(group):
        if name in LOGGERS and importlib.util.find_spec(name) is None:
            config = compose("config", [f"logger={name}"])  # makes those of default, and its own
            assert {"csv", "tensorboard", name} == set(config.logger)
            continue
        config = compose(
            "config", [f"{group}={name}", f"run_dir={tmp_path}", f"log_dir={tmp_path}"]
        )
        member = config[group]
        with open_dict(config):
            if "_target_" in member:
                make(member)
            else:
                assert all(make(part) is not None for part in member.values())


def test_the_database_of_mlflow_is_for_rank_0_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "MLFlowLogger", dict)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logs, run = f"{tmp_path}/logs", f"{tmp_path}/logs/mine/runs/1"
    monkeypatch.setenv("HOROVOD_RANK", "1")
    assert loggers.mlflow(logs, run)["tracking_uri"] == "http://localhost:9"
    assert not Path(logs).exists()
    monkeypatch.setenv("HOROVOD_RANK", "0")
    assert loggers.mlflow(logs, run, log_model=True) == {
        "tracking_uri": f"sqlite:///{logs}/mlflow.db", "artifact_location": f"file://{logs}/mlflow",
        "run_name": "mine/runs/1", "log_model": True,
    }  # fmt: skip
    assert Path(logs).is_dir()  # which SQLite does not make
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    named = loggers.mlflow(logs, run, run_name="a")
    assert named == {"tracking_uri": "http://server", "run_name": "a"}
