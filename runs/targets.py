"""What a `_target_` of the configuration takes, by its signature.

To look at it is to import it, and torch with it, which takes seconds.
"""

from __future__ import annotations

import inspect
import typing
from typing import Any, Literal

from hydra.utils import get_object


def arguments(target: str) -> list[str] | None:
    """The names; None where it takes any, or cannot be looked at: making it will tell."""
    try:
        found = inspect.signature(get_object(target)).parameters.values()
    except Exception:  # no such class, or what importing it raises
        return None
    if any(argument.kind == argument.VAR_KEYWORD for argument in found):
        return None
    return [argument.name for argument in found]


def hint(target: str | None, argument: str) -> Any:
    """The type hint of an argument; None without one."""
    try:
        made = get_object(target) if target else object
        hints = typing.get_type_hints(made.__init__ if inspect.isclass(made) else made)
    except Exception:  # no such class, or hints that cannot be read: making it will tell
        return None
    return hints.get(argument)


def takes(target: str | None, argument: str, value: Any, unknown: bool = True) -> bool:
    """Whether `value` fits the type hint of the argument; `unknown` without one."""
    wanted = hint(target, argument)
    kinds = [typing.get_origin(kind) or kind for kind in typing.get_args(wanted) or [wanted]]
    if wanted is None or Any in kinds or Literal in kinds:
        return unknown
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, tuple(kinds)) or (float in kinds and isinstance(value, int))
