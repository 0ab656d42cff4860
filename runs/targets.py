"""Makes what a `_target_` of the configuration names, and says what it takes, by its signature.

This imports the target, and torch with it, which takes seconds.
"""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
import types
import typing
from typing import Any

from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from runs.folders import ROOT
from runs.refusal import guess

UNKNOWN = re.compile(r"got an unexpected keyword argument '(\w+)'")
MISSING = re.compile(r"(?:loading|target) '([\w.]+)'(?s:.*)No module named '(\w+)[.\w]*'")
NOWHERE = re.compile(r"Are you sure that '(\w+)' is importable from module '([\w.]+)'")
KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
OTHER_LIGHTNING = (
    "here Lightning is the package pytorch_lightning, and its classes do not mix with those of the "
    "package lightning: write import pytorch_lightning as pl"
)


def make(config: DictConfig, **arguments: Any) -> Any:
    """What `_target_` names. Without a `_convert_`, dicts and lists arrive as plain ones, which
    checkpoints can hold."""
    return instantiate(config, _convert_=config.get("_convert_", "all"), **arguments)


def of_other_lightning(instance: object) -> bool:
    """Whether it is made of the package `lightning`: the Trainer here refuses its modules."""
    return any(base.__module__.split(".")[0] == "lightning" for base in type(instance).__mro__)


def argument_names(target: str) -> list[str] | None:
    """Names of its arguments; None if it takes any, or cannot be imported: making it will tell."""
    try:
        parameters = inspect.signature(get_object(target)).parameters.values()
    except Exception:  # no such class, or what importing it raises
        return None
    if any(argument.kind == argument.VAR_KEYWORD for argument in parameters):
        return None
    return [argument.name for argument in parameters]


def type_hint(target: str | None, argument: str) -> Any:
    """The type hint of an argument; None without one."""
    try:
        factory = get_object(target) if target else object
        made_by = factory.__init__ if inspect.isclass(factory) else factory
        wanted = typing.get_type_hints(made_by).get(argument)
        parameter = inspect.signature(made_by).parameters.get(argument)
    except Exception:  # no such class, or hints that cannot be read: making it will tell
        return None
    # width: int = None, which Python before 3.11 reads so itself
    return wanted | None if wanted and parameter and parameter.default is None else wanted


def takes(target: str | None, argument: str, value: Any, unknown: bool = True) -> bool:
    """Whether `value` fits the type hint of the argument; `unknown` without one."""
    wanted = type_hint(target, argument)
    union = typing.get_origin(wanted) in (typing.Union, types.UnionType)
    members = typing.get_args(wanted) if union else [wanted]
    kinds = [typing.get_origin(kind) or kind for kind in members]
    if wanted is None or Any in kinds or not all(isinstance(kind, type) for kind in kinds):
        return unknown  # with Literal, a TypeVar
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, list) and tuple in kinds:  # there are no tuples in a configuration
        return True
    return isinstance(value, tuple(kinds)) or (float in kinds and isinstance(value, int))


def misfit(config: DictConfig) -> str:
    """What is wrong with the values of a `_target_`, in words; "" if nothing is.

    That is a value of another kind where the constructor's type hint asks for a number, or for true
    or false; or an argument that what is made later (`_partial_`) does not take, which would end
    the run in its middle.
    """
    target = config.get("_target_")
    for name in map(str, config):
        member = config[name] if not OmegaConf.is_missing(config, name) else None
        if isinstance(member, DictConfig) and member.get("_partial_"):
            later = str(member.get("_target_"))
            names = argument_names(later)
            unknown = [
                key for key in map(str, member) if key[0] != "_" and key not in (names or [])
            ]
            if names is not None and unknown:
                return (
                    f"{name}.{unknown[0]}: {later} takes no such argument; it takes: "
                    f"{', '.join(names)}{guess(unknown[0], names)}"
                )
        if (wanted := type_hint(target, name)) in KINDS and not takes(target, name, config[name]):
            return f"{name}={config[name]}: {target} takes {KINDS[wanted]} for it"
    return ""


def with_advice(error: str, config: DictConfig) -> str:
    """An error of making what the configuration names, with advice where there is some."""
    match = MISSING.search(error)
    if match and importlib.util.find_spec(match[2]) is None:
        advice = "if that is a package, add it to requirements.txt: the next make installs it"
        if match[2] == "lightning":
            advice = OTHER_LIGHTNING
        close = guess(match[2], (path.name for path in ROOT.iterdir()))
        return f"{match[1]} cannot be loaded: no module named {match[2]!r}{close}; {advice}"
    advice = _advice(error, config)
    if advice.startswith("; it takes:"):  # with a guess, which Python makes since 3.13, too
        error = re.sub(r"\. Did you mean '\w+'\?", "", error)
    return error + advice


def _advice(error: str, config: DictConfig) -> str:
    if match := NOWHERE.search(error):
        return guess(match[1], _members(match[2]))
    if match := UNKNOWN.search(error):
        names = argument_names(str(config.get("_target_"))) or []
        # Else it is of what the constructor makes itself.
        ours = names and match[1] in config and match[1] not in names
        return f"; it takes: {', '.join(names)}{guess(match[1], names)}" if ours else ""
    if "before Module.__init__() call" in error:
        return "; an __init__ has to begin with super().__init__()"
    if "enable_progress_bar=False" in error:
        return "; ~callbacks.progress leaves the progress out"
    if "more than one stateful callback of type" in error:
        return (
            " Two save by the same rule: leave one out, as ~callbacks.best_checkpoint, or give "
            "yours another monitor, mode or every_n_epochs; "
            "callbacks.best_checkpoint.save_top_k=-1 keeps those of all epochs"
        )
    if "enable_checkpointing=False" in error:
        return "; callbacks=none leaves those that save out"
    return ""


def _members(name: str) -> list[str]:
    """What a module has, and a package on disk."""
    try:
        module = importlib.import_module(name)
    except Exception:
        return []
    files = pkgutil.iter_modules(getattr(module, "__path__", None) or [])
    return [*dir(module), *(file.name for file in files)]
