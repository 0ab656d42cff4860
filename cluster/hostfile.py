"""The hosts of a job as users write them, read and written.

    HOSTS=node1:4,node2:4                  as horovodrun's -H; also node[1-16]:4
    HOSTFILE=hosts.yaml                    says more about each:

    hosts:
      node1: {slots: 2, gpus: [1, 7], nic: enp2s0f1}
      node2: {slots: 2, gpus: [0, 1], nic: enp1s0f0, user: ada, port: 2222,
              ssh: [ProxyJump=login], env: {NCCL_DEBUG: INFO}}

Everything is checked before any ssh is started.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.hosts import Host, Refusal
from cluster.variables import unfolded

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
EXAMPLES: dict[str, Any] = {  # of what a host file may say of a host
    "slots": "4", "gpus": [0, 1], "nic": "eth0", "user": "ada", "port": "2222",
    "ssh": ["ProxyJump=login"], "env": {"NCCL_DEBUG": "INFO"},
}  # fmt: skip
MOST_DIGITS = 5  # of a number in node[1-16]


def parse(text: str) -> list[Host]:
    """Hosts of a list such as `node1:4,node2:4` or `node[1-2]:4`; without a number, of one slot.

    Raises:
        Refusal: when the list is malformed, or names a host twice.
    """
    hosts = []
    for item in unfolded(text):
        name, colon, slots = item.strip().partition(":")
        if not NAME.fullmatch(name) or (colon and not re.fullmatch("[1-9][0-9]{0,4}", slots)):
            raise Refusal(
                f"HOSTS={text}: '{item}' is not a host: write name:slots, as node1:4,node2:4"
            )
        hosts.append(Host(name, int(slots or 1)))
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            raise Refusal(f"HOSTS={text}: {name} is there twice: add up its slots")
    return hosts


class _AsWritten(yaml.SafeLoader):
    """Keeps each value as the text that was written, whatever its tag: "on" and "010", not true and
    8. Refuses equal keys, of which YAML takes the last without a word."""

    yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("<<"))]}  # noqa: RUF012
    yaml_constructors: dict[str, Any] = {}  # noqa: RUF012

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        before: list[Any] = []  # a key may be a list or a mapping
        for key, _ in node.value:
            if key.value in before and key.value != "<<":  # of which there may be several
                problem = f"{key.value} is there twice: write it once"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            before.append(key.value)
        return node


FORM = "'hosts:' and below it a line a host: node1: {slots: 4}"


def read(file: Path) -> list[Host]:
    """Hosts of a host file, whose format the top of this module shows.

    Raises:
        Refusal: when it cannot be read, is malformed, or contradicts itself.
    """
    where = f"HOSTFILE={file}"
    try:
        content = yaml.load(file.read_text(), _AsWritten)
    except OSError as error:
        raise Refusal(f"{where}: {error.strerror}; give the path of a host file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}" if mark else "no YAML"
        reason = getattr(error, "problem", None) or getattr(error, "reason", error)
        if "<document start>" in str(reason):  # as of a host file of horovodrun's
            reason = f"write {FORM}"
        raise Refusal(f"{where}: {place}: {reason}") from None
    hosts = content.get("hosts") if isinstance(content, dict) else None
    if not isinstance(hosts, dict) or not hosts:
        raise Refusal(f"{where}: write {FORM}")
    if misplaced := [key for key in content if key in EXAMPLES]:  # other keys may be for YAML's <<
        raise Refusal(f"{where}: '{misplaced[0]}' stands beside hosts: it belongs to each of them")
    return [_host(name, said, file) for name, said in hosts.items()]


def _host(name: str, said: Any, file: Path) -> Host:
    where = f"HOSTFILE={file}: {name}"
    said = {"slots": said} if isinstance(said, str) else said
    if not isinstance(said, dict):
        raise Refusal(f"{where}: {said}: write how many processes it may run, as {{slots: 4}}")
    if not NAME.fullmatch(name):
        raise Refusal(f"{where}: this is not the name of a host")
    for key, value in said.items():
        if key not in EXAMPLES:
            raise Refusal(f"{where}: '{key}' is unknown; there are {', '.join(EXAMPLES)}")
        if type(value) is not type(EXAMPLES[key]) or value in ("", "~", "null"):
            raise Refusal(f"{where}: {key}={value}: write as {EXAMPLES[key]}")
    if "slots" not in said:
        raise Refusal(f"{where}: it needs its slots, as {{slots: 4}}")
    slots = _number(where, "slots", said["slots"], range(1, 100_000))
    port = _number(where, "port", said["port"], range(1, 65_536)) if "port" in said else None
    gpus, ssh, env = said.get("gpus"), said.get("ssh", []), said.get("env", {})
    if gpus is not None:
        gpus = tuple(_number(where, "gpus", gpu, range(100_000)) for gpu in gpus)
        if len({*gpus}) < len(gpus):
            raise Refusal(f"{where}: gpus={[*gpus]}: write each once, as [0, 1]")
        if slots > len(gpus):
            raise Refusal(
                f"{where}: {slots} slots and {len(gpus)} gpus: a process needs its own; "
                "take fewer slots or leave gpus out"
            )
    for option in ssh:
        if not re.fullmatch(r"\w+[= ].+", str(option)):
            raise Refusal(f"{where}: ssh: '{option}' is no option: write as ProxyJump=login")
    for variable, value in env.items():
        if not VARIABLE.fullmatch(variable):
            raise Refusal(f"{where}: env: '{variable}' is no name of a variable")
        if not isinstance(value, str):
            raise Refusal(f"{where}: env: {variable}={value} is no text: put it in quotes")
    return Host(name, slots, gpus, said.get("nic"), said.get("user"), port, tuple(ssh), env, file)


def _number(where: str, key: str, text: Any, fit: range) -> int:
    if not re.fullmatch("[0-9]{1,5}", str(text)) or int(text) not in fit:
        raise Refusal(f"{where}: {key}={text} is no number from {fit[0]} to {fit[-1]}")
    return int(text)


def typed(hosts: Sequence[Host]) -> str:
    """What to type behind make for these hosts: HOSTS=, or the host file that they are from."""
    if hosts[0].file:
        return f"HOSTFILE={shlex.quote(str(hosts[0].file))}"
    return "HOSTS=" + shlex.quote(listed({host.name: host.slots for host in hosts}))


def listed(hosts: dict[str, int]) -> str:
    """Names and slots as HOSTS= takes them: node[1-8]:4,login:1."""
    groups = [(slots, [*names]) for slots, names in itertools.groupby(hosts, hosts.get)]
    return ",".join(f"{name}:{slots}" for slots, names in groups for name in folded(names))


def folded(names: Sequence[str]) -> list[str]:
    """The names, with three and more that are numbered in order as one: node[1-3]."""
    runs: list[list[str]] = []
    for name in names:
        if runs and name == _following(runs[-1][-1]):
            runs[-1].append(name)
        else:
            runs.append([name])
    texts = []
    for run in runs:
        (begin, first, end), (_, last, _) = _numbered(run[0]), _numbered(run[-1])
        texts += [f"{begin}[{first}-{last}]{end}"] if len(run) > 2 else run
    return texts


def _numbered(name: str) -> tuple[str, str, str]:
    """A name around the last digits in it, at most MOST_DIGITS; there may be none."""
    match = re.fullmatch(rf"(.*?)(\d{{0,{MOST_DIGITS}}})(\D*)", name)
    assert match is not None
    return match[1], match[2], match[3]


def _following(name: str) -> str:
    """The name with the next number, written as wide; empty where there is none."""
    begin, number, end = _numbered(name)
    following = f"{int(number or 0) + 1:0{len(number)}}"
    return f"{begin}{following}{end}" if number and len(following) <= MOST_DIGITS else ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """-np, -H and --hostfile; `chosen` reads them."""
    parser.add_argument("-np", type=int, help="number of processes; all slots by default")
    parser.add_argument("-H", "--hosts", default="", help="node1:4,node2:4 or node[1-2]:4")
    parser.add_argument("--hostfile", default="", help="a YAML file that says more of each host")


def chosen(arguments: argparse.Namespace) -> list[Host]:
    """The hosts that the command line names; this host, for all processes, when it names none.

    Raises:
        Refusal: see `parse` and `read`.
    """
    if arguments.hosts and arguments.hostfile:
        raise Refusal("HOSTS and HOSTFILE both name hosts: give one of them")
    if arguments.hostfile:
        return read(Path(arguments.hostfile).expanduser())
    return parse(arguments.hosts or f"localhost:{max(1, arguments.np or 1)}")


def given(arguments: argparse.Namespace) -> list[str]:
    """The options of `add_arguments` again, to pass to another command."""
    line = ["-np", str(arguments.np)] if arguments.np else []
    line += ["-H", arguments.hosts] if arguments.hosts else []
    return line + (["--hostfile", arguments.hostfile] if arguments.hostfile else [])


def entry(host: Host) -> dict[str, Any]:
    """What a host file says of this host, for yaml.safe_dump."""
    said = {key: getattr(host, key) for key in EXAMPLES}
    return {key: value for key, value in said.items() if value}
