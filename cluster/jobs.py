"""Jobs that go on when the terminal is closed: launch, status, logs, stop.

    python -m cluster.jobs launch -np 8 -H node1:4,node2:4 [--at 02:00] python template.py
    python -m cluster.jobs status
    python -m cluster.jobs logs [RUN] [--rank 3] [--follow]
    python -m cluster.jobs stop [RUN] [--kill]

Without RUN, logs takes the newest run, and stop the only one that is running.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from cluster.doctor import leave, refuse_unfit
from cluster.horovodrun import AT_ONCE, STOP_SECONDS, seconds
from cluster.hostfile import add_arguments, chosen, given, listed
from cluster.hosts import Refusal
from cluster.ranks import ranks, used
from cluster.record import ALIVE, FOLDER, begun, birth, new_folder, note_end, place, write

NOTE_SECONDS = 30  # that `launch` has to write run.json, with the id of the process it started
STOPPED = "stopped before it ended"
END_SECONDS = 7  # after the time for a checkpoint: for all processes on all hosts to end


def launch(arguments: argparse.Namespace) -> int:
    """Start the job in a session of its own, and return."""
    if not arguments.command:
        raise Refusal("the command is missing, as python template.py")
    start = _start(arguments.at)
    hosts = chosen(arguments)
    members = ranks(hosts, arguments.np)  # also refuses here what cannot run
    refuse_unfit(used(hosts, arguments.np))
    folder = new_folder()
    run = [sys.executable, "-m", "cluster.jobs", "run", "--record", str(folder)]
    run += ["--at", start.isoformat()] if start else []
    run += _given(arguments)
    with open(folder / "launcher.log", "w") as log:
        process = subprocess.Popen(
            run, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    state = begun(folder, members, arguments.command, arguments.stop_seconds, process.pid)
    if start:
        state |= {"state": "waiting", "at": start.isoformat(" ", "minutes")}
    try:
        write(folder, state)
    except OSError:  # a full disk
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print(f"run    {folder.name}" + (f", at {start.isoformat(' ', 'minutes')}" if start else ""))
    print(f"       {len(members)} processes; output in {folder}/")
    print("look   make status    make logs FOLLOW=1    make stop")
    return 0


def _given(arguments: argparse.Namespace) -> list[str]:
    """The options and the command, which `launch` passes to `run`, and that to the launcher."""
    return [f"--stop-seconds={arguments.stop_seconds}", *given(arguments), *arguments.command]


def run(arguments: argparse.Namespace) -> int:
    """The detached process: wait for the time, then become the launcher."""
    deadline = time.monotonic() + NOTE_SECONDS
    while not (arguments.record / "run.json").exists():
        if time.monotonic() > deadline:
            raise Refusal(f"nothing is noted of this run in {arguments.record}: it is not started")
        time.sleep(0.01)
    if arguments.at:

        def stopped(number: int, _: object) -> NoReturn:
            # `stop` notes it too, but `status` might find us gone before that.
            note_end(arguments.record, "stopped", STOPPED)
            sys.exit(128 + number)

        signal.signal(signal.SIGTERM, stopped)
        start = datetime.datetime.fromisoformat(arguments.at)
        while (left := (start - datetime.datetime.now()).total_seconds()) > 0:
            time.sleep(min(left, 30))  # the clock may be set meanwhile
        try:  # again, as the code on some host may have changed since
            refuse_unfit(used(chosen(arguments), arguments.np))
        except (Refusal, OSError) as error:
            note_end(arguments.record, "failed", str(error))
            raise
    line = [sys.executable, "-m", "cluster.horovodrun", "--record", str(arguments.record)]
    os.execv(sys.executable, [*line, *_given(arguments)])


def _start(at: str) -> datetime.datetime | None:
    """The time that AT names: the next 02:00, or 2026-11-22 02:00."""
    if not at:
        return None
    now = datetime.datetime.now()
    with contextlib.suppress(ValueError):
        if len(at) <= 5:
            clock = datetime.datetime.strptime(at, "%H:%M").time()
            start = datetime.datetime.combine(now.date(), clock)
            return start if start > now else start + datetime.timedelta(days=1)
        start = datetime.datetime.fromisoformat(at)
        if start.tzinfo:
            start = start.astimezone().replace(tzinfo=None)
        if start > now:
            return start
        raise Refusal(f"AT={at} is past; now it is {now.isoformat(' ', 'minutes')}")
    raise Refusal(f"AT={at}: write a time as 02:00 or '2026-11-22 02:00'")


def runs() -> list[dict[str, Any]]:
    """All runs that are known, the oldest first; those whose launcher was killed are lost."""
    states = []
    for file in sorted(FOLDER.glob("*/run.json")):
        try:
            state = json.loads(file.read_text())
            here = state["launcher"] == place()
            gone = here and state["state"] in ALIVE and birth(state["pid"]) != state["birth"]
            if gone:  # it may have noted its end between our two looks
                state = json.loads(file.read_text())
                gone = state["state"] in ALIVE
            datetime.datetime.fromisoformat(state["began"])
            if gone and not state["detached"]:  # its user saw it end in the terminal
                shutil.rmtree(file.parent, ignore_errors=True)
                continue
            if gone:
                _mark_lost(file.parent, state)
        except (OSError, ValueError, LookupError, TypeError):
            continue  # removed just now, or not a file of ours
        states.append(state)
    return states


def _mark_lost(folder: Path, state: dict[str, Any]) -> None:
    why = "it ended without a word: its launcher was killed (at logout? docs/hosts.md), "
    why += "or the disk is full"
    last = max(path.stat().st_mtime for path in folder.iterdir())
    ended = datetime.datetime.fromtimestamp(last).isoformat(timespec="seconds")
    state |= {"state": "lost", "reason": why, "ended": ended}
    with contextlib.suppress(OSError):  # for hosts that share this folder
        write(folder, state)


def status(arguments: argparse.Namespace) -> int:
    """Print a line for each run: the last ten that ended, and all that run."""
    states = runs()
    alive = [state for state in states if state["state"] in ALIVE]
    shown = [state for state in states if state not in alive][-10:] + alive
    if arguments.json:
        print(json.dumps(shown, indent=1))
        return 0
    if not shown:
        print("no runs: make launch HOSTS=... ARGS=... starts one")
        return 0
    rows = [("RUN", "STATE", "RANKS", "TOOK", "HOSTS", "WHAT")]
    for state in shown:
        why = state.get("reason") or (f"at {state['at']}" if state["state"] == "waiting" else "")
        hosts = listed(state["hosts"])
        # The command may have several lines, as python -c has.
        what = " ".join(state["command"].split()) + (f" ({' '.join(why.split())})" if why else "")
        rows.append((state["id"], state["state"], str(state["ranks"]), _took(state), hosts, what))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join([text.ljust(width) for text, width in zip(row, widths)] + [row[5]]))
    return 0


def _took(state: dict[str, Any]) -> str:
    began = datetime.datetime.fromisoformat(state["began"])
    ended = state.get("ended")
    end = datetime.datetime.fromisoformat(ended) if ended else datetime.datetime.now()
    # Not negative where the clock of another host, which began it, is ahead.
    return str(datetime.timedelta(seconds=max(0, int((end - began).total_seconds()))))


def _named(name: str | None, alive: bool = False, logged: bool = False) -> dict[str, Any]:
    """The state of the run with this name; without a name, of the newest whose output is kept
    (`logged`), or of the only one that runs (`alive`).

    Raises:
        Refusal: when there is none, or several could be meant.
    """
    states = [state for state in runs() if not alive or state["state"] in ALIVE]
    kind = "running run" if alive else "run"
    if name:
        for state in states:
            if state["id"] == name:
                return state
        raise Refusal(f"RUN={name}: no such {kind}; make status shows those there are")
    states = [state for state in states if state["detached"] or not logged]
    if not states:
        raise Refusal(f"there is no {kind}; make status shows what was")
    if alive and len(states) > 1:
        names = ", ".join(state["id"] for state in states)
        raise Refusal(f"several runs are running: RUN= one of {names}")
    return states[-1]


def logs(arguments: argparse.Namespace) -> int:
    """Print what a rank has printed; with --follow until the run ends."""
    state = _named(arguments.run, logged=True)
    folder = FOLDER / state["id"]
    if not state["detached"]:
        raise Refusal(f"run {state['id']} prints to the terminal that it was started in")
    name = "launcher" if arguments.rank == "launcher" else f"rank-{arguments.rank}"
    if name != "launcher" and not (
        arguments.rank.isdecimal() and int(arguments.rank) < state["ranks"]
    ):
        raise Refusal(
            f"RANK={arguments.rank}: the run has ranks 0 to {state['ranks'] - 1}, and launcher"
        )
    file = folder / f"{name}.log"
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    offset, announced = 0, False
    while True:
        state = _named(state["id"])
        ended = state["state"] not in ALIVE
        if file.exists():
            with open(file, encoding="utf-8", errors="replace", newline="") as log:
                log.seek(offset)
                while text := log.read(1 << 20):
                    sys.stdout.write(text)
                offset = log.tell()
            sys.stdout.flush()
        if not offset and not announced:  # as of most ranks but 0: say so at once
            announced = True
            print(f"{name} has printed nothing{'' if ended else ' yet'}", file=sys.stderr)
        if ended or not arguments.follow:
            break
        time.sleep(0.3)
    if state.get("reason"):
        print(f"{state['state']}: {state['reason']}", file=sys.stderr)
    return 0


def stop(arguments: argparse.Namespace) -> int:
    """End a run on all its hosts; first it is asked for a checkpoint."""
    state = _named(arguments.run, alive=True)
    if state["launcher"] != place():
        raise Refusal(
            f"run {state['id']} was launched on {state['launcher']}: stop it there, "
            f"or, if that is gone, rm -r {os.path.relpath(FOLDER)}/{state['id']}"
        )
    pid, start = state["pid"], time.monotonic()
    if birth(pid) == state["birth"]:
        try:
            os.kill(pid, signal.SIGTERM)
        except PermissionError:
            raise Refusal(f"run {state['id']} is another user's: they can stop it") from None
        except ProcessLookupError:
            pass  # it has ended since then
        if arguments.kill:
            time.sleep(0.2)  # two signals sent at once may arrive in the other order
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, AT_ONCE)
        elif state["state"] == "running":
            print(f"stopping {state['id']}: up to {state['stop_seconds']:g} s for a checkpoint")
            sys.stdout.flush()
    while birth(pid) == state["birth"]:
        if time.monotonic() - start > state["stop_seconds"] + END_SECONDS:
            # Its agents then end what runs on their hosts.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.1)
    if state["detached"]:
        note_end(FOLDER / state["id"], "stopped", STOPPED)
    print(f"stopped {state['id']} after {time.monotonic() - start:.0f} s")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.jobs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("launch", "run"):
        command = commands.add_parser(name)
        command.add_argument("--at", default="", help="start at this time, as 02:00")
        command.add_argument("--stop-seconds", type=seconds, default=STOP_SECONDS)
        add_arguments(command)
        if name == "run":
            command.add_argument("--record", type=Path)
        command.add_argument("command", nargs=argparse.REMAINDER)
    commands.add_parser("status").add_argument("--json", action="store_true")
    command = commands.add_parser("logs")
    command.add_argument("run", nargs="?")
    command.add_argument("--rank", default="0", help="its number, or launcher")
    command.add_argument("--follow", action="store_true")
    command = commands.add_parser("stop")
    command.add_argument("run", nargs="?")
    command.add_argument("--kill", action="store_true", help="at once, without a checkpoint")
    arguments = parser.parse_args()
    if getattr(arguments, "command", None) and arguments.command[0] == "--":
        del arguments.command[0]
    try:
        tasks = {"launch": launch, "run": run, "status": status, "logs": logs, "stop": stop}
        return tasks[arguments.what](arguments)
    except BrokenPipeError:  # make logs | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Refusal, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        leave()


if __name__ == "__main__":
    sys.exit(main())
