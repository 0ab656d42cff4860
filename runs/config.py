"""Check the changes of a command line against conf/, before anything is launched or written.

    python -m runs.config model=classifier data.batch_size=64

Prints nothing if all is well; else one line that names the key and what exists, with exit status 2.
The type of a key is that of its value in conf/ or, where that is null, of the constructor's type
hint.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import signal
import sys
from typing import Any

if __name__ == "__main__":  # a Ctrl-C while the packages below load ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import models  # noqa: F401  where resolvers and structured configs of one's own are registered
from runs import recipes
from runs.recipes import CONF
from runs.refusal import Refusal, guess, launched_rank, refuse
from runs.targets import argument_names, takes, type_hint

LOGGERS = ("wandb", "mlflow")  # packages that requirements.txt lacks, and files of conf/logger
PARTS = ("data", "model", "strategy", "trainer")  # groups of which each run has one
NEEDED = ("data_dir", "data.batch_size", "log_dir", "seed")  # which may not be null
LEAST = {
    "data.batch_size": 1, "model.lr": 0, "seed": 0, "trainer.accumulate_grad_batches": 1,
    "trainer.gradient_clip_val": 0,
}  # fmt: skip
# Hydra's own, which would change where each rank works, or make several runs in one process.
FOLDERS = (
    "hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.mode", "hydra.job.chdir",
)  # fmt: skip
CHOICES = {
    "lr_scaling": ["none", "linear", "sqrt"],
    "matmul_precision": ["highest", "high", "medium"],
}
# ${rank:} in conf/ is this process's rank, for files that each rank writes for itself.
OmegaConf.register_new_resolver("rank", launched_rank, replace=True)


def check(arguments: list[str]) -> None:
    """Check the overrides of a command line; Hydra's own flags (--help, --cfg, ...) are left to it.

    Raises:
        Refusal: for an unknown key or group, a value of the wrong type, or an unreadable one; and
            for -m, with which Hydra would make all runs in one process, in folders of its own.
    """
    short = [word for word in arguments if len(word) > 2 and "--multirun".startswith(word)]
    if short or "-m" in arguments:  # argparse takes --mult, too
        raise Refusal('-m: make sweep tries several values: make sweep ARGS="model.lr=0.1,0.01"')
    if any(argument.startswith("-") for argument in arguments):
        return
    try:
        _check(arguments)
    except UnicodeDecodeError as error:
        raise Refusal(f"conf/{_undecodable()}: save it as UTF-8; {error.reason} in it") from None
    except yaml.YAMLError as error:
        raise Refusal(f"conf/: {' '.join(str(error).split())}") from None
    except (HydraException, OmegaConfBaseException) as error:
        if match := re.search("An item is already at '(.+)'", str(error)):
            raise Refusal(f"+{match[1]}: conf/ has it; write {match[1]}=... without +") from None
        first, *more = str(error).strip().splitlines()
        if more and (first.endswith(":") or more[0].startswith("Did you mean")):
            first += f" {more[0]}"
        raise Refusal(first) from None


def _check(arguments: list[str]) -> None:
    overrides = [parse(argument) for argument in arguments]
    for override in overrides:
        if override.is_sweep_override():
            raise Refusal(
                f"{override.input_line}: several values for one run; a list is written [1,2], and "
                "make sweep tries one after the other"
            )
    groups = [override for override in overrides if _is_group(override)]
    changes = [override for override in overrides if not _is_group(override)]
    for override in groups:
        _check_group(override)
    for group in recipes.RECIPES:  # of other groups the last counts, as with Hydra
        chosen = [str(o.input_line) for o in groups if o.key_or_group == group]
        if len(chosen) > 1:
            raise Refusal(f"{' '.join(chosen)}: give one of them")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config, choices = _composed(groups)
        for override in changes:
            _check_change(override, config)
        for override in groups:
            _check_recipe(override, choices)
        _check_monitors(_changed_callbacks(changes, choices), config)
        if any(_hydra_may_refuse(override) for override in overrides):
            config = compose("config", arguments)
        _check_loggers(overrides, config)


def _composed(groups: list[Override]) -> tuple[DictConfig, dict[str, Any]]:
    """The configuration with these files of its groups, and the file that each group has."""
    config = compose("config", [str(o.input_line) for o in groups], return_hydra_config=True)
    lists = {o.key_or_group: o.value() for o in groups if isinstance(o.value(), list)}
    choices = lists | dict(config.hydra.runtime.choices)  # which has no lists
    for group, choice in choices.items():
        if str(choice).endswith(".yaml"):  # Hydra takes it, for another name of the same
            raise Refusal(f"conf/: {group}: {choice}: name the file without .yaml")
    with open_dict(config):
        del config["hydra"]
    return config, choices


def _undecodable() -> str:
    """The first file of conf/ that is not UTF-8."""
    for file in sorted(CONF.rglob("*.yaml")):
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return str(file.relative_to(CONF))
    return ""


def parse(argument: str) -> Override:
    """A change as Hydra reads it; raises Refusal when Hydra cannot."""
    if "=" not in argument and not argument.startswith("~"):
        raise Refusal(
            f"{argument}: a change has the form key=value, like data.batch_size=64; a value with "
            f"blanks is quoted, {_how_to_quote()}"
        )
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        unquoted = re.sub(r"'[^']*'?|\"[^\"]*\"?", "", argument)
        if any(unquoted.count(left) != unquoted.count(right) for left, right in ("[]", "{}", "()")):
            why = ": its brackets do not balance"
        else:
            key, _, value = argument.partition("=")
            why = f"; quote it for Hydra and the shell, {_how_to_quote(key, value)}"
        raise Refusal(f"{argument}: the value cannot be read{why}") from None


def _how_to_quote(key: str = "key", value: Any = "a value") -> str:
    """Once for Hydra, once for the shell; make's ARGS is read by one more shell."""
    if value == "" or re.search(r"""['"$`\\!]""", str(value)):  # these take more than quotes
        key, value = "key", "a value"
    return f'as "{key}=\'{value}\'", in make\'s ARGS="..." as \\"{key}=\'{value}\'\\"'


def _is_group(override: Override) -> bool:
    return (CONF / override.key_or_group.lstrip("/")).is_dir()


def _hydra_may_refuse(override: Override) -> bool:
    """Whether it may pass our checks and not Hydra's, which take another tenth of a second."""
    its_own = override.key_or_group.startswith(("hydra.", "hydra/"))
    return its_own or override.is_add() or override.is_force_add() or override.is_delete()


# ---------------------------------------------------------------- groups and their files


def _check_group(override: Override) -> None:
    group, value = override.key_or_group.lstrip("/"), override.value()
    if override.is_delete():
        if group in PARTS:
            raise Refusal(f"~{group}: a run needs one; choose another with {group}=")
        return
    if value is None:
        instead = (
            f"write {group}=none" if (CONF / group / "none.yaml").is_file() else "leave it out"
        )
        raise Refusal(f"{override.input_line}: Hydra takes no null for a group; {instead}")
    if isinstance(value, list) and group in (*PARTS, *recipes.RECIPES):
        raise Refusal(f"{override.input_line}: give one of them")
    for choice in _listed(value):
        if problem := recipes.missing(group, choice):
            raise Refusal(f"{override.input_line}: {problem}")
    if override.is_add() and not override.package and group in recipes.groups():
        raise Refusal(f"+{group}={value}: conf/ has this group; write {group}={value}")
    if group in recipes.RECIPES:
        recipes.read(group, str(value))


def _listed(choice: Any) -> list[Any]:
    """The files that a group is made of: Hydra puts several together, callbacks=[default,mine]."""
    return choice if isinstance(choice, list) else [] if choice is None else [choice]


def _check_recipe(override: Override, choices: dict[str, Any]) -> None:
    """Check an experiment's keys like those of a command line; it may add what code takes.

    Args:
        choices: the file of each group that was taken.
    """
    group, name = override.key_or_group.lstrip("/"), str(override.value())
    if group not in recipes.RECIPES or override.is_delete():
        return
    others = [other for other in recipes.groups() if other not in recipes.RECIPES]
    chosen = [f"{other}={choices[other]}" for other in others if choices.get(other)]
    base = compose("config", chosen, return_hydra_config=True).hydra.runtime.choices
    inner = [other for other in base if "/" in other and choices.get(other)]  # model/optimizer
    chosen += [f"{other}={choices[other]}" for other in inner]
    try:
        _check_keys("", recipes.read(group, name), compose("config", chosen))
    except Refusal as refusal:
        raise Refusal(f"conf/{group}/{name}.yaml: {refusal}") from None


def _check_keys(group: str, keys: dict[str, Any], config: DictConfig) -> None:
    target = keys.get("_target_", config.get("_target_"))
    anew = target != config.get("_target_")
    for name, value in keys.items():
        key = f"{group}.{name}".lstrip(".")
        if _has(config, name) and not anew:
            node = _written(config, name)
            if isinstance(node, DictConfig) and isinstance(value, dict):
                _check_keys(key, value, node)
            elif node is not None:  # for null only the type hint tells, which imports torch
                _check_value(key, name, value, config)
        elif target and not str(name).startswith("_"):
            accepted = argument_names(target)
            if accepted is not None and name not in accepted:
                raise Refusal(f"{key}: {_no_key(group, name, accepted)}")


# ---------------------------------------------------------------- keys


def _check_change(override: Override, config: DictConfig) -> None:
    key: str = override.key_or_group
    if key in FOLDERS:
        raise Refusal(
            f"{override.input_line}: template.py makes the run's folder: run_dir=... names it, and "
            "make sweep tries several values"
        )
    if key.startswith(("hydra.", "hydra/")):
        return
    if override.is_add() or override.is_force_add():
        _check_added(override, config)
        return
    parent: Any = config
    *parents, last = parts = key.split(".")
    for depth, part in enumerate(parts):
        where = ".".join(parts[:depth])
        if isinstance(parent, ListConfig):
            if not part.isdecimal() or int(part) >= len(parent):
                raise Refusal(f"{key}: {where} is a list of {len(parent)}, counted from 0")
        elif not _has(parent, part):
            problem = _no_key(where, part, sorted(_keys(parent)))
            raise Refusal(_meant(override, part, parent) or f"{key}: {problem}")
        if depth < len(parents):
            name = int(part) if isinstance(parent, ListConfig) else part
            member = parent._get_node(name)
            parent = member if isinstance(member, ListConfig) else _written(parent, name)
    if isinstance(parent, DictConfig) and not override.is_delete():
        _check_value(key, last, override.value(), parent)


def _check_added(override: Override, config: DictConfig) -> None:
    """A new key at the top of conf/ is for the user's own ${...}; it must be no misspelt group."""
    first = override.key_or_group.partition(".")[0]
    known = [*_keys(config), *recipes.groups()]
    if first in known:
        return
    if close := difflib.get_close_matches(first, known, n=1, cutoff=0.85):
        raise Refusal(f"{override.input_line}: there is no {first} (did you mean {close[0]}?)")
    if problem := _meant(override, first, config):
        raise Refusal(problem)


def _no_key(where: str, name: str, names: list[str]) -> str:
    options = f"{', '.join(names) or 'none'}{guess(name, names)}"
    return f"{where or 'the configuration'} has no key {name!r}; it has: {options}"


def _meant(override: Override, name: str, parent: Any) -> str | None:
    """What to write instead of a key that conf/ lacks: one of a group, or +key if code takes it."""
    line, key = override.input_line, override.key_or_group
    if key == name:
        keys = [f"{group}.{key}" for group in parent if key in _keys(_written(parent, group))]
        return f"{line}: write {' or '.join(keys)}, with its group" if keys else None
    if name in recipes.groups():  # template.py gives the Trainer what these groups name
        return (
            f"{line}: {name} is a group of conf/: write {name}=... without {key[: -len(name) - 1]}"
        )
    # A misspelling is told without importing the target, which takes seconds.
    if "_target_" not in _keys(parent) or override.is_delete() or guess(name, _keys(parent)):
        return None
    target = parent._target_
    if key.endswith(f".{name}") and name in (argument_names(target) or []):
        return f"{line}: {target} takes it, but conf/ does not set it: write +{line}"
    return None


def _keys(node: Any) -> list[str]:
    return [str(key) for key in node] if isinstance(node, DictConfig) else []


def _has(node: Any, name: Any) -> bool:
    return isinstance(node, DictConfig) and name in list(node)  # `in node` is false for ???


def _written(config: DictConfig, name: Any) -> Any:
    """A value as it stands in conf/, also where it is an interpolation."""
    node: Any = config._get_node(name)
    if isinstance(node, DictConfig):
        return node
    if node._is_missing():  # ???, for which any value is to be given
        return None
    return OmegaConf.to_container(node) if isinstance(node, ListConfig) else node._value()


# ---------------------------------------------------------------- values


def _check_value(key: str, name: Any, value: Any, parent: DictConfig) -> None:
    node = _written(parent, name)
    if isinstance(value, dict) and isinstance(node, DictConfig):
        for inner, member in value.items():
            if not _has(node, inner):
                raise Refusal(f"{key}.{inner}: {_no_key(key, inner, sorted(_keys(node)))}")
            _check_value(f"{key}.{inner}", inner, member, node)
        return
    _check_limits(key, value, node)
    if value is not None and not (isinstance(value, str) and "${" in value):
        _check_kind(key, name, value, node, parent.get("_target_"))


def _check_limits(key: str, value: Any, node: Any) -> None:
    """What the keys of this repository may be, by their names."""
    if isinstance(value, (int, float)) and value < LEAST.get(key, value):
        raise Refusal(f"{key}={value}: at least {LEAST[key]} is needed there")
    if key in CHOICES and value not in CHOICES[key]:
        raise Refusal(f"{key}={value}: there are: {', '.join(CHOICES[key])}")
    if key in ("data_dir", "log_dir", "run_dir") and value == "":
        raise Refusal(f"{key}=: give a folder, or leave it out")
    if key == "ckpt_path" and value == "":
        raise Refusal("ckpt_path=: give a path, last or best; null for none")
    if key in NEEDED and value is None:
        raise Refusal(f"{key}=null: a value is needed there, like {_shown(node)}")


def _check_kind(key: str, name: Any, value: Any, node: Any, target: str | None) -> None:
    """A value is of the kind of that in conf/, or of another that the target's hint allows."""
    wanted = _expected(node, value)
    # limit_train_batches is a share or a number: what stands in conf/ may be the other.
    other_number = _is_number(node) and _is_number(value)
    if wanted and not (target and takes(target, name, value, unknown=other_number)):
        raise Refusal(f"{key}={value}: {wanted} is expected there, like {_shown(node)} in conf/")
    if _is_number(value) and isinstance(node, str) and type_hint(target, name) is str:
        raise Refusal(
            f"{key}={value}: a text is expected there{f', like {node}' if node else ''}; a number "
            f"as text is quoted {_how_to_quote(key, value)}"
        )
    if node is None and not takes(target, name, value):
        raise Refusal(f"{key}={value}: {target} takes no {type(value).__name__} for it")


def _expected(default: Any, value: Any) -> str | None:
    """What kind of value `default` asks for, when `value` is of another kind; None if it fits."""
    kinds: list[tuple[type, bool, str]] = [
        (type(None), True, ""),
        (bool, isinstance(value, bool), "true or false"),
        (int, _is_number(value) and isinstance(value, int), "a whole number"),
        (float, _is_number(value), "a number"),
        (DictConfig, isinstance(value, dict), "a group of keys"),
        (list, isinstance(value, list), "a list"),
        (object, not isinstance(value, (dict, bool)), "a text"),
    ]
    return next(None if fits else name for kind, fits, name in kinds if isinstance(default, kind))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---------------------------------------------------------------- callbacks and loggers


def _changed_callbacks(changes: list[Override], choices: dict[str, Any]) -> list[tuple[str, Any]]:
    """What is set of callbacks, with the file of conf/ that sets it, or "" where it was typed."""
    changed: list[tuple[str, Any]] = []
    for override in changes:
        match override.key_or_group.split("."):
            case ["callbacks", name, key]:
                changed.append(("", {name: {key: override.value()}}))
            case ["callbacks", name]:
                changed.append(("", {name: override.value()}))
    for group in ("callbacks", *recipes.RECIPES):
        for choice in _listed(choices.get(group)):
            file = CONF / group / f"{choice}.yaml"
            if file.is_file():  # or it is a structured config
                keys: Any = OmegaConf.to_container(OmegaConf.load(file))
                members = keys if group == "callbacks" else keys.get("callbacks")
                changed.append((f"conf/{group}/{choice}.yaml: ", members))
    return changed


def _check_monitors(changed: list[tuple[str, Any]], config: DictConfig) -> None:
    """A metric to watch comes with what is better, lest a mode of before keeps the worst as best.

    Args:
        changed: as `_changed_callbacks` gives it.
        config: of all groups.
    """
    members = [
        (where, name, member)
        for where, callbacks in changed
        for name, member in (callbacks.items() if isinstance(callbacks, dict) else ())
        if isinstance(member, dict)
    ]
    # A mode beside a monitor is of that monitor.
    given = {name for _, name, member in members if "mode" in member and "monitor" not in member}
    for where, name, member in members:
        key, inherited = f"callbacks.{name}", (config.get("callbacks") or {}).get(name) or {}
        alone = member.get("monitor") and "mode" not in member and name not in given
        if alone and ("mode" in inherited or not where):
            raise Refusal(
                f"{where}{key}.monitor={member['monitor']}: also say which is better, "
                f"{key}.mode=min or {key}.mode=max"
            )


def _check_loggers(overrides: list[Override], config: DictConfig) -> None:
    """Packages that are missing, and settings typed for a logger that was not chosen, which in an
    experiment are left over."""
    loggers = config.get("logger") or {}
    for name in LOGGERS:
        typed = [o for o in overrides if o.key_or_group.startswith(f"logger.{name}.")]
        chosen = "_target_" in (loggers.get(name) or {})
        if typed and not chosen:
            raise Refusal(f"{typed[0].input_line}: give logger={name} with it")
        spec = importlib.util.find_spec(name)
        # A folder of this name, as W&B leaves them, has a spec too, but no origin.
        if chosen and (spec is None or spec.origin is None):
            raise Refusal(
                f"logger={name}: the package {name} is missing: "
                f"{sys.executable} -m pip install {name}"
            )


if __name__ == "__main__":  # by make, before it launches
    try:
        check(sys.argv[1:])
        if flag := next((word for word in sys.argv[1:] if word.startswith("-")), None):
            raise Refusal(
                f"ARGS={flag}: changes have the form key=value; an option of Hydra is for "
                f"{sys.executable} template.py {flag}"
            )
    except Refusal as refusal:
        refuse(str(refusal), a_rank=False)
