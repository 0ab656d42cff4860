"""What is refused before anything is launched, and what passes; in milliseconds."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import pytest
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf

from runs import config, recipes
from runs.config import check
from runs.refusal import Refusal
from runs.targets import misfit, takes
from tests.conftest import run


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/, which is checked in its place."""
    folder = shutil.copytree(config.CONF, tmp_path / "conf")
    for module in (config, recipes):
        monkeypatch.setattr(module, "CONF", folder)
    return folder


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modl=denoiser", "no key 'modl'; it has: .*did you mean model"),
        ("model=denoisr", "no conf/model/denoisr.yaml; there are: .*classifier, .*did you"),
        ("trainer=ddp", "there are: .*default.*; or did you mean strategy=ddp?"),
        ("model=none", "classifier, .*denoiser"),
        ("experiment=nope", "no conf/experiment/nope.yaml; there are: .*denoiser, "),
        ("model.lrr=1", "model has no key 'lrr'; it has: .*did you mean lr"),
        ("callbacks.early_stop.patience=1", "callbacks has no key 'early_stop'.*early_stopping"),
        ("model.lr.value=1", "model.lr has no key 'value'"),
        ("callbacks.progress.1=2", "callbacks.progress has no key '1'"),
        ("trainer.plugins.1._target_=a.B", "trainer.plugins is a list of 1, counted from 0"),
        ("trainer.plugins.x=1", "trainer.plugins is a list of 1, counted from 0"),
        ("trainer.plugins.0.x=1", "trainer.plugins.0 has no key 'x'; it has: _target_"),
        ("lr=0.1", "lr=0.1: write model.lr, with its group"),
        ("~batch_size", "write data.batch_size, with its group"),
        ("trainer.inference_mode=false", r"write \+trainer.inference_mode=false"),
        ("trainer.logger=false", r"logger is a group of conf/: write logger=... without trainer"),
        ("+model=denoiser", "conf/ has this group; write model=denoiser"),
        ("trainer.max_epochs=abc", "a whole number is expected there, like 50"),
        ("trainer.max_epochs=1.5", "a whole number is expected"),
        ("trainer.max_epochs=true", "a whole number is expected"),
        ("model.lr=fast", "a number is expected there, like 0.002"),
        ("test=maybe", "true or false is expected there, like true"),
        ("trainer.precision=true", "a text is expected"),
        ("trainer=3", "no conf/trainer/3.yaml"),
        ("trainer.gradient_clip_val=abc", "Trainer takes no str"),
        ("trainer.gradient_clip_val=true", "Trainer takes no bool"),
        ("data.batch_size=0", "data.batch_size=0: at least 1 is needed"),
        ("seed=-1", "seed=-1: at least 0 is needed"),
        ("model.lr=-0.1", "model.lr=-0.1: at least 0 is needed"),
        ("trainer.accumulate_grad_batches=0", "at least 1 is needed"),
        ("trainer.gradient_clip_val=-1", "at least 0 is needed"),
        ("data=null", "data=null: Hydra takes no null for a group; leave it out"),
        ("+logger.wandb.tags=[a]", r"^\+logger.wandb.tags=\[a\]: give logger=wandb with it"),
        ("logger=null", "logger=null: Hydra takes no null for a group; write logger=none"),
        ("model=[classifier,denoiser]", "give one of them"),
        ("experiment=[denoiser]", "give one of them"),
        ("callbacks=[default,defualt]", r"no conf/callbacks/defualt.yaml; .*mean default\?"),
        ("data_dir=null", "data_dir=null: a value is needed there, like data"),
        ("log_dir=null", "log_dir=null: a value is needed there, like logs"),
        ("trainer.fast_dev_run=1.5", "true or false is expected"),
        ("matmul_precision=tf32", "there are: highest, high, medium"),
        ("lr_scaling=cubic", "there are: none, linear, sqrt"),
        ("data.batch_size=null", "a value is needed there, like 32"),
        ("seed=null", "a value is needed there, like 42"),
        (
            "data.batch_size",
            "has the form key=value, .*; a value with blanks is quoted, as \"key='a ",
        ),
        ("callbacks.early_stopping={monitor: x, patients: 3}", "key 'patients'; it has:.*patience"),
        ("callbacks.early_stopping={patience: long}", "a whole number is expected there, like 5"),
        ("model.lr=[1", "the value cannot be read: its brackets do not balance"),
        ("model.lr={a:1", "the value cannot be read: its brackets do not balance"),
        (
            "task='[1",
            r"the value cannot be read; quote it for Hydra and .* make's ARGS=.* as \\\"key=",
        ),
        (
            "ckpt_path=/a/b=1.ckpt",
            "the value cannot be read; quote it for Hydra and the shell, as "
            r"\"ckpt_path='/a/b=1.ckpt'\", in make's ARGS=.* as \\\"ckpt_path='/a/b=1.ckpt'\\\"$",
        ),
        ("task=a=$b", "quote it for Hydra and the shell, as \"key='a value'\", in make's ARGS"),
        ("ckpt_path=", "give a path, last or best; null for none"),
        ("log_dir=", "log_dir=: give a folder, or leave it out"),
        ("run_dir=", "run_dir=: give a folder, or leave it out"),
        ("~model", "~model: a run needs one; choose another with model="),
        ("+model.lr=0.1", r"\+model.lr: conf/ has it; write model.lr=... without \+"),
        ("+callback.ema._target_=a.B", r"there is no callback \(did you mean callbacks\?\)"),
        ("++callback.ema.decay=0.9", r"there is no callback \(did you mean callbacks\?\)"),
        ("+max_epochs=3", r"\+max_epochs=3: write trainer.max_epochs, with its group"),
        (
            "strategy.compression=16",
            "a text is expected there, like none; a number as text is quoted as "
            "\"strategy.compression='16'\", in make's ARGS=",
        ),
        ("model.lr=0.1,0.2", "several values"),
        (
            "callbacks.best_checkpoint.monitor=val/acc",
            "better, callbacks.best_checkpoint.mode=min or",
        ),
        ("callbacks.best_checkpoint={monitor: a}", "better, callbacks.best_checkpoint.mode=min or"),
    ],
)
def test_a_mistake_is_refused_in_a_line_that_begins_with_its_key(
    override: str, message: str
) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        check(["seed=1", override])
    assert str(caught.value).startswith(override.split("=")[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", ["-m", "--multirun", "--multi"])
def test_hydras_own_sweep_is_refused_by_each_name(flag: str) -> None:
    with pytest.raises(Refusal, match="make sweep tries several values"):
        check([flag, "seed=1,2"])


def test_one_experiment_at_a_time() -> None:
    with pytest.raises(
        Refusal, match="^experiment=denoiser experiment=denoiser_full: give one of them$"
    ):
        check(["experiment=denoiser", "experiment=denoiser_full"])
    check(["model=denoiser", "model=classifier", "model.width=9"])


@pytest.mark.parametrize("module", ["config", "sweep"])
def test_a_rank_that_another_launcher_left_is_none(module: str) -> None:
    """Ranks wait for rank 0 to tell, which there is not before a launch."""
    asked = {
        "config": ["modl=denoiser"],
        "sweep": ["--arguments", "modl=denoiser,unet", "--", "true"],
    }
    done = run([sys.executable, "-m", f"runs.{module}", *asked[module]], HOROVOD_RANK="1")
    assert done.returncode == 2 and "no key 'modl'" in done.stdout and "rank 1" not in done.stdout


def test_a_file_that_is_no_yaml_is_named(conf: Path) -> None:
    (conf / "model" / "mine.yaml").write_text("lr: 1\n  depth: 2\n")
    with pytest.raises(Refusal, match=r"mine.yaml.*line 2"):
        check(["model=mine"])


def test_a_file_in_another_encoding_is_named(conf: Path) -> None:
    (conf / "model" / "mine.yaml").write_bytes("# café\nlr: 1\n".encode("latin-1"))
    with pytest.raises(Refusal, match="^conf/model/mine.yaml: save it as UTF-8; invalid cont"):
        check(["model=mine"])


def test_a_value_that_has_to_be_given_can_be(conf: Path) -> None:
    text = f"_target_: {__name__}.Sized\nlr: ???\nwidth: ???\nname:\n  a: ???\n"
    (conf / "model" / "mine.yaml").write_text(text)
    check(["model=mine", "model.lr=0.1", "model.width=3", "model.name={a: true}"])
    with pytest.raises(Refusal, match="^model.width=wide: .*Sized takes no str for it"):
        check(["model=mine", "model.width=wide"])


def test_a_number_is_of_any_kind_where_no_hint_says_which(conf: Path) -> None:
    text = f"_target_: {__name__}.Hinted\nbare: 0\neither: 3\n"
    (conf / "model" / "mine.yaml").write_text(text)
    check(["model=mine", "model.bare=1e-4"])
    for refused in ("model.either=0.5", "model.bare=few", "seed=1e3"):
        with pytest.raises(Refusal, match="a whole number is expected"):
            check(["model=mine", refused])


def test_a_structured_config_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As models/__init__.py may register one (docs/faq.md)."""
    monkeypatch.setattr(ConfigStore.instance(), "repo", deepcopy(ConfigStore.instance().repo))
    ConfigStore.instance().store(group="model", name="mine", node={"lr": 1.0})
    ConfigStore.instance().store(group="callbacks", name="mine", node={"a": {"_target_": "b"}})
    check(["model=mine", "model.lr=2.0", "callbacks=mine"])
    with pytest.raises(Refusal, match="no conf/model/min.yaml; there are: .* mine, .*did you mean"):
        check(["model=min"])
    with pytest.raises(Refusal, match="no conf/data/mine.yaml"):
        check(["data=mine"])


def test_a_choice_with_its_suffix_is_refused(conf: Path) -> None:
    text = (conf / "config.yaml").read_text()
    assert "callbacks: default\n" in text
    with_suffix = text.replace("callbacks: default\n", "callbacks: default.yaml\n")
    (conf / "config.yaml").write_text(with_suffix)
    with pytest.raises(Refusal, match="conf/: callbacks: default.yaml: name the file without"):
        check([])


def test_a_file_in_a_folder_of_its_group(conf: Path) -> None:
    (conf / "model" / "mine").mkdir()
    (conf / "model" / "mine" / "small.yaml").write_text("lr: 1\n")
    check(["model=mine/small"])
    with pytest.raises(Refusal, match=r"no conf/model/smal.yaml; .*mine/small"):
        check(["model=smal"])


def test_callbacks_of_ones_own_say_what_is_better(conf: Path) -> None:
    file = conf / "callbacks" / "mine.yaml"
    file.write_text("defaults: [default]\nbest_checkpoint: {monitor: val/acc}\n")
    with pytest.raises(
        Refusal, match="^conf/callbacks/mine.yaml: .*best_checkpoint.monitor=val/acc: also say"
    ):
        check(["callbacks=mine"])
    check(["callbacks=mine", "callbacks.best_checkpoint.mode=max"])
    file.write_text("defaults: [default]\nbest_checkpoint: {monitor: val/acc, mode: max}\n")
    check(["callbacks=mine"])
    check(["callbacks=[default,mine]"])
    file.write_text("best_checkpoint: {monitor: val/acc}\n")
    with pytest.raises(
        Refusal, match="^conf/callbacks/mine.yaml: .*best_checkpoint.monitor=val/acc: also say"
    ):
        check(["callbacks=[default,mine]"])


HEAD = "# @package _global_\n"


def test_an_experiment_that_config_yaml_names_says_what_is_better(conf: Path) -> None:
    text = HEAD + "callbacks: {best_checkpoint: {monitor: val/acc}}"
    (conf / "experiment" / "mine.yaml").write_text(text)
    config_yaml = conf / "config.yaml"
    config_yaml.write_text(config_yaml.read_text().replace("experiment: null", "experiment: mine"))
    with pytest.raises(Refusal, match="^conf/experiment/mine.yaml: .*monitor=val/acc: also say"):
        check([])
    check(["~experiment"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [override /model: denoiser]", "first line has to be `# @package _global_`"),
        (
            "# mine\n" + HEAD + "trainer: {max_epochs: 1}",
            "first line has to be `# @package _global_`",
        ),
        (
            HEAD + "defaults: [override /model: denoisr]",
            "no conf/model/denoisr.yaml; .*mean denoiser",
        ),
        (
            HEAD + "defaults: [/model: denoiser]",
            "write `override /model: denoiser` .*, not `/model:`",
        ),
        (HEAD + "defaults: [override model: denoiser]", "write `override /model: denoiser` in its"),
        (HEAD + "trainer: {max_epocs: 1}", r"trainer.max_epocs: .*did you mean max_epochs\?"),
        (HEAD + "trainer: {max_epochs: few}", "max_epochs=few: a whole number is expected"),
        (HEAD + "data: {batch_size: 0}", "data.batch_size=0: at least 1 is needed"),
        (HEAD + "model: {widht: 8}", r"model.widht: model has no key 'widht'; it has: lr, .*width"),
        (HEAD + "callbacks: {stop: {checkpiont: a}}", r"\(did you mean checkpoint\?\)"),
        (
            HEAD + "callbacks: {best_checkpoint: {monitor: a}}",
            "monitor=a: also say .*mode=min or .*mode=max",
        ),
    ],
)
def test_an_experiment_with_a_mistake_is_named(text: str, message: str, conf: Path) -> None:
    (conf / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(Refusal, match=f"^conf/experiment/mine.yaml: .*{message}"):
        check(["experiment=mine"])


@pytest.mark.parametrize(
    "text",
    [
        "defaults: [denoiser, override /callbacks: none]\nmodel: {depth: 4}",
        "trainer: {enable_progress_bar: false, limit_train_batches: 5, max_time: null}",
        "horizon: 3\nmodel: {width: '${horizon}'}\ncallbacks: {mine: {_target_: a.B, c: 1}}",
        "model: {_target_: models.denoiser.Denoiser, depth: 4}",
        "model: {_target_: tests.test_config.TakesAny, anything: 1}",
        "callbacks: {early_stopping: null}",
        "logger: {wandb: {tags: [mine], group: a}, mlflow: {tags: {a: b}}}",  # once it is chosen
        "callbacks: {best_checkpoint: {monitor: a, mode: max}, mine: {_target_: a.B, monitor: a}}",
        "defaults: [/mine: a, /mine@model.mine: a]\nmine: {b: 2}",
        "",
    ],
)
def test_what_an_experiment_may_say(text: str, conf: Path) -> None:
    (conf / "experiment" / "mine.yaml").write_text(HEAD + text)
    (conf / "mine").mkdir()
    (conf / "mine" / "a.yaml").write_text("b: 1\n0: 1\n")
    check(["experiment=mine", "debug=overfit"])
    if "/mine: a" not in text:
        check(["experiment=mine", "+mine=a"])


def test_an_experiment_may_choose_within_a_group(conf: Path) -> None:
    files = {
        "model/mine": f"defaults: [optimizer: adam]\n_target_: {__name__}.TakesAny\n",
        "model/optimizer/adam": "_target_: torch.optim.Adam\nlr: 1\n",
        "model/optimizer/sgd": "_target_: torch.optim.SGD\nlr: 1\nmomentum: 0\n",
        "experiment/mine": HEAD
        + "defaults: [override /model: mine, override /model/optimizer: sgd]"
        "\nmodel: {optimizer: {momentum: 0.9}}\n",
    }
    for name, text in files.items():
        file = conf / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    check(["experiment=mine"])
    file.write_text(text.replace("momentum", "momentun"))
    with pytest.raises(Refusal, match=r"model.optimizer.momentun: .*did you mean momentum\?"):
        check(["experiment=mine"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hydra.run.dir=a", "hydra.run.dir=a: template.py makes .*run_dir=.* names .* make sweep"),
        ("hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN: template.py makes"),
        ("++hydra.job.chdir=true", r"\+\+hydra.job.chdir=true: template.py makes"),
        ("hydra.nokey=1", "Could not override 'hydra.nokey'"),
        ("hydra/launcher=nope", "Could not find 'hydra/launcher/nope'"),
    ],
)
def test_what_is_refused_of_hydras_own(override: str, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        check(["seed=1", override])


def test_what_hydra_advises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a group that a model's defaults put at another place."""

    def fail(_: list[str]) -> None:
        raise HydraException("Could not override 'optimizer'.\nDid you mean to override a@b?\nTo")

    monkeypatch.setattr(config, "_check", fail)
    with pytest.raises(Refusal, match=r"override 'optimizer'\. Did you mean to override a@b\?$"):
        check(["optimizer=adam"])


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=denoiser", "data=noise", "model.depth=5", "data.count=3"],
        ["experiment=denoiser", "model.features=8"],
        ["trainer.limit_train_batches=10", "trainer.precision=32", "trainer.devices=[0]"],
        ["trainer.gradient_clip_val=1", "trainer.max_time=00:01:00:00", "trainer.max_epochs=null"],
        ["+trainer.enable_autolog_hparams=false", "~callbacks.early_stopping", "logger=none"],
        ["ckpt_path=a.ckpt", "task=mine", "model.lr=${seed}", "data.num_workers=2"],
        ["callbacks.last_checkpoint._target_=nowhere.Nothing", "hydra/job_logging=stdout"],
        ["~logger", "~profiler", "~callbacks"],
        ["callbacks=[none,default]", "callbacks.early_stopping.patience=3", "experiment=denoiser"],
        ["+model@teacher=denoiser", "teacher.depth=34", "logger=[none]"],
        ["callbacks.best_checkpoint.monitor=val/acc", "callbacks.best_checkpoint.mode=max"],
        ["callbacks.best_checkpoint.monitor=null"],
        # Of any type for Lightning; without a hint; text that a number follows from.
        ["trainer.precision=16", "task=3", "data_dir='1'", "log_dir=1"],
        ["callbacks.last_checkpoint.filename=3"],
        ["debug=limit", "trainer.limit_train_batches=0.5", "trainer.fast_dev_run=3"],
        ["trainer.plugins.0._target_=a.B", "~trainer.plugins.0._target_"],
        ["--help"],
    ],
)
def test_what_is_no_mistake_is_accepted(overrides: list[str]) -> None:
    check(overrides)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
@pytest.mark.parametrize("found", [None, importlib.machinery.ModuleSpec("a folder", None)])
def test_a_logger_whose_package_is_missing(
    name: str, found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(Refusal) as caught:
        check([f"logger={name}"])
    assert str(caught.value) == (
        f"logger={name}: the package {name} is missing: {sys.executable} -m pip install {name}"
    )
    check([])  # which asks for neither


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_whose_package_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec(name, None, origin="somewhere")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    check([f"logger={name}", f"logger.{name}.log_model=true", f"+logger.{name}.tags=null"])


class Hinted:
    def __init__(
        self, pair: tuple[float, float] | None, several: list[int], either: int | tuple[int, int],
        word: Literal["a", "b"], number: float | None, names: Sequence[str], any_: Any, bare=1,
        implicit: int = None,  # noqa: RUF013
    ) -> None: ...  # fmt: skip


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ("{lr: fast}", r"lr=fast: .*Sized takes a number for it$"),
        ("{lr: null}", "lr=None: .* takes a number for it$"),
        ("{width: 64.5}", "width=64.5: .* takes a whole number for it$"),
        ("{deep: 1}", "deep=1: .* takes true or false for it$"),
        ("{lr: 1, width: 3, deep: true, name: 5, unknown: x}", "^$"),
        ("{lr: 1, later: {_target_: torch.optim.SGD, _partial_: true, lr: 1}}", "^$"),
        (
            "{lr: 1, later: {_target_: torch.optim.SGD, _partial_: true, momentun: 1}}",
            r"^later.momentun: torch.optim.SGD takes no such .*\(did you mean momentum\?\)$",
        ),
    ],
)
def test_a_value_in_a_file_that_does_not_fit(values: str, told: str) -> None:
    node = OmegaConf.create({"_target_": f"{__name__}.Sized", **OmegaConf.create(values)})
    assert re.search(told, misfit(node))


class TakesAny:
    def __init__(self, **arguments: Any) -> None: ...


class Sized:
    def __init__(self, lr: float, width: int = 1, deep: bool = False, name: str = "") -> None: ...


@pytest.mark.parametrize(
    ("argument", "value", "fits"),
    [
        ("pair", [0.9, 0.95], True), ("pair", "fast", False), ("pair", 1, False),
        ("several", [1, 2], True), ("several", 1, False),
        ("either", [3, 5], True), ("either", 3, True), ("either", "three", False),
        ("word", "a", None), ("number", 1, True), ("number", True, False), ("number", "x", False),
        ("names", ["a"], True), ("names", 1, False), ("any_", 1, None), ("bare", 1, None),
        ("implicit", None, True), ("implicit", 2, True), ("implicit", "x", False),
    ],
)  # fmt: skip
def test_what_fits_the_hint_of_an_argument(argument: str, value: Any, fits: bool | None) -> None:
    for unknown in (False, True):
        result = takes(f"{__name__}.Hinted", argument, value, unknown)
        assert result == (unknown if fits is None else fits)


def test_what_is_registered_in_models_is_there_for_all_commands() -> None:
    """Resolvers and structured configs; without torch, whose import takes seconds."""
    code = "import sys, runs.config; assert 'models' in sys.modules and 'torch' not in sys.modules"
    assert run([sys.executable, "-c", code]).returncode == 0


def test_an_interrupted_import_prints_no_traceback(tmp_path: Path) -> None:
    """Ctrl-C as packages load, in the first second of `make train`."""
    fake = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    (tmp_path / "hydra.py").write_text(fake)
    result = run([sys.executable, "-m", "runs.config"], PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stdout) == (-signal.SIGINT, "")
