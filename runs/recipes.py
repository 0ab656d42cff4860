"""What is wrong with a file of conf/experiment or conf/debug, found before Hydra reads it.

Such a file chooses from the groups of conf/config.yaml, by `override /model: denoiser` below
`# @package _global_`. Where that is wrong, Hydra names neither the file nor the mistake.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from runs.folders import ROOT
from runs.refusal import Refusal, guess

CONF = ROOT / "conf"
RECIPES = ("experiment", "debug")  # groups whose files change all the others


def read(group: str, name: str) -> dict[str, Any]:
    """Check the defaults of a file; its other keys.

    Raises:
        Refusal: when its first line is missing, or conf/ has no such choice.
    """
    file = CONF / group / f"{name}.yaml"
    where, text = f"conf/{group}/{name}.yaml", file.read_text()
    if not re.match(r"\s*# *@package +_global_\s", text + "\n"):  # below a comment Hydra reads none
        raise Refusal(f"{where}: its first line has to be `# @package _global_`")
    keys = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    if not isinstance(keys, dict):
        raise Refusal(f"{where}: keys are expected in it, as data: and model:")
    for entry in keys.pop("defaults", None) or []:
        for key, choice in entry.items() if isinstance(entry, dict) else ():
            _check_choice(where, str(key), choice)
    return {str(key): value for key, value in keys.items()}


def _check_choice(where: str, key: str, choice: Any) -> None:
    group = key.split()[-1].lstrip("/")
    if group in groups() and key.split() != ["override", f"/{group}"]:
        raise Refusal(f"{where}: write `override /{group}: {choice}` in its defaults, not `{key}:`")
    checkable = (CONF / group).is_dir() and isinstance(choice, str) and "${" not in choice
    if checkable and (problem := missing(group, choice)):
        raise Refusal(f"{where}: {key}: {choice}: {problem}")


def groups() -> list[str]:
    """The groups that conf/config.yaml chooses from."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    return [str(group) for entry in defaults if isinstance(entry, dict) for group in entry]


def missing(group: str, choice: Any) -> str | None:
    """What to say of a group that has no such file or structured config; None if it has."""
    files = (CONF / group).rglob("*.yaml")
    named = {str(file.relative_to(CONF / group).with_suffix("")) for file in files}
    with contextlib.suppress(OSError):  # where code has registered none for this group
        stored = ConfigStore.instance().list(group)  # and groups within it
        named |= {name.removesuffix(".yaml") for name in stored if name.endswith(".yaml")}
    options = sorted(named)
    if choice in options:
        return None
    choice = str(choice).lower() if isinstance(choice, bool) else choice
    hint = f"there are: {', '.join(options)}{guess(choice, options)}"
    others = [other for other in groups() if (CONF / other / f"{choice}.yaml").is_file()]
    if len(others) == 1:  # "none" and "default" are in many
        hint += f"; or did you mean {others[0]}={choice}?"
    return f"there is no conf/{group}/{choice}.yaml; {hint}"
