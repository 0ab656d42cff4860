"""horovodrun for a cluster: the same command line, and what several hosts need beside it.

    python -m cluster.horovodrun -np 8 -H node1:4,node2:4 python template.py
    python -m cluster.horovodrun --hostfile hosts.yaml python template.py

What differs from Horovod's own horovodrun:

- one ssh per host, not one per process; the ranks of a host share the imports of template.py
  (cluster/preload.py; with PRELOAD=0 each makes its own);
- each host uses its own network interface and GPUs (cluster/hostfile.py);
- over ssh only variables of an allow-list leave this host, and none on a command line (within Slurm
  srun passes all of them on, as it always does);
- where the folder is missing on a host, the job ends; horovodrun would run it in $HOME;
- only the job itself may use the rendezvous server;
- when a process fails, or a host falls silent, all processes end and one line says why.

The first Ctrl-C asks the processes for a checkpoint (SIGUSR1), the second ends them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from enum import IntEnum
from pathlib import Path
from typing import Any

from cluster.agent import LIFE_SECONDS, SILENCE_SECONDS, allow_files
from cluster.connection import Connection
from cluster.forwarding import addresses, forwarded
from cluster.hostfile import add_arguments, chosen
from cluster.hosts import SSH_SECONDS, Host, Refusal, refuse_one_twice
from cluster.ranks import Rank, ranks
from cluster.record import Record, note_end
from cluster.rendezvous import Rendezvous
from cluster.ssh import connecting, explain

# That Gloo waits for a late rank: at the start one that imports from a slow file system, later one
# behind a network that is down for a while. We notice ourselves when a rank or host is gone.
GLOO_SECONDS = 120
STOPPED_SECONDS = 5  # between two steps, which take 0.2 s: we were stopped meanwhile
GRACE_SECONDS = 1  # for other processes to report their own errors when one has failed
STOP_SECONDS = 8  # from the request for a checkpoint to the end, unless --stop-seconds is given
END_SECONDS = 3  # from SIGTERM to SIGKILL
# Killed from outside: a rank that loses others raises an error or aborts, but never ends so.
KILLED = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
# How a rank ends that was asked for a checkpoint: by runs/run.py (128 + ...), without a handler
# (-...), or because another rank ended (EX_TEMPFAIL).
ASKED = (128 + signal.SIGUSR1, -signal.SIGUSR1, 128 + signal.SIGINT, -signal.SIGINT, os.EX_TEMPFAIL)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AT_ONCE = signal.SIGUSR2  # sent by programs after one of SIGNALS; unlike those it is never ignored


class Cause(IntEnum):
    """Why a job ends. Of several causes the highest is told, as it explains the others: a rank that
    was killed those that failed because it was gone."""

    RANK_FOLLOWED = 0  # it ended as another one did
    RANK_FAILED = 1
    RANK_KILLED = 2
    HOST_FAILED = 3  # or its agent, or the way to it
    STOPPED = 4  # the job was told to


class Job:
    """Processes on hosts, from their start to the end of all.

    Args:
        members: the processes.
        command: what each runs.
        record: where the job's state is kept for status, logs and stop.
        stop_seconds: time for a checkpoint when the job is told to stop.
    """

    def __init__(
        self, members: list[Rank], command: list[str], record: Record, stop_seconds: float
    ) -> None:
        self.members, self.command, self.record = members, command, record
        self.stop_seconds = stop_seconds
        self.connections: list[Connection] = []
        # Bounded, as is what waits behind it to be printed: see Record.is_behind.
        self._events: queue.Queue = queue.Queue(maxsize=1000)
        self._running = {member.rank for member in members}
        self._silence = SILENCE_SECONDS + len(members) / 10
        self._cause: tuple[Cause, str] | None = None  # why the job ends, and that in words
        # Of ranks that were asked for a checkpoint, the first failure, or who had to be ended.
        self._unsaved = ""
        self._at_once = False  # who stopped it wants no checkpoint
        self._ended_well = ""  # the first rank that ended without an error
        self._rendezvous: Rendezvous | None = None
        self._status = 0
        # When these are due (infinity: done). At "stop" the time for a checkpoint is over, at "end"
        # others had time to report errors after a rank failed: in both cases agents then end their
        # ranks. At "kill" we no longer wait for agents.
        self._deadlines: dict[str, float] = {}
        self._stepped = time.monotonic()
        self._signals = 0

    def run(self) -> int:
        """The exit status: 0, that of the first process that failed, or 128 + a signal."""
        hosts = list(dict.fromkeys(member.host for member in self.members))
        refuse_one_twice(hosts)
        own_addresses = addresses(hosts)
        allow_files()  # for the rendezvous: a connection of each rank that waits for others
        rendezvous = self._rendezvous = Rendezvous(sorted(set(own_addresses.values())))
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.signal(AT_ONCE, self._on_signal)
        # Ctrl-Z would stop the signs of life too, and with them the job.
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        threading.Thread(target=self._give_life, daemon=True).start()
        try:
            for host in hosts:
                members = [member for member in self.members if member.host == host]
                turn = self._wait_for_turn()
                if self._ends():
                    self._running -= {member.rank for member in members}
                    continue
                environment = self._environment(host) | rendezvous.environment(own_addresses[host])
                order = self._order(host, members, environment, own_addresses[host])
                # Its first line is the order: no sign of life or signal may come before.
                self.connections.append(Connection(host, members, self._events, turn, order))
            self.record.update(state="running")
            while self._running or any(c.process.poll() is None for c in self.connections):
                self._step()
        finally:
            # Also after an error of ours: an agent whose input ends, ends what it started.
            for connection in self.connections:
                connection.close()
            for connection in self.connections:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    connection.process.wait(timeout=END_SECONDS + 2)
                connection.kill()
            rendezvous.close()
        return self._finish()

    def _order(
        self, host: Host, members: list[Rank], environment: dict[str, str], address: str
    ) -> dict[str, Any]:
        """What the agent is to start."""
        on_cpu = "trainer.accelerator=cpu" in self.command
        gpus = None if host.gpus is None else host.gpus[: len(members)]
        return {
            "run": self.record.id,
            "command": self.command,
            "environment": environment,
            "ranks": {m.rank: m.environment(len(self.members)) for m in members},
            "nic": host.nic,
            "launcher": address,
            "gpus": [] if on_cpu else gpus,
            "silence": SILENCE_SECONDS,
            "preload": os.environ.get("PRELOAD") != "0",
        }

    def _environment(self, host: Host) -> dict[str, str]:
        timeout = "HOROVOD_GLOO_TIMEOUT_SECONDS"
        ours = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            timeout: os.environ.get(timeout, str(GLOO_SECONDS + len(self.members))),
            "PYTHONUNBUFFERED": "1",
            # The agent reads UTF-8, whatever the locale; names of files may hold any bytes.
            "PYTHONIOENCODING": "utf-8:surrogateescape",
            "HOROVOD_LAUNCHED": shlex.join(self._typed()),  # runs/run.py says how to go on
        }
        # The agent of this host inherits our environment.
        return ours if host.is_here else forwarded(dict(os.environ)) | ours

    def _typed(self) -> list[str]:
        """The command line for a user to type again: ours, or that of `make launch`."""
        typed = list(sys.orig_argv)
        if "--record" in typed[: len(typed) - len(self.command)]:
            # It follows -m cluster.horovodrun, as cluster/jobs.py starts it.
            index = typed.index("--record")
            typed[index - 1 : index + 2] = ["cluster.jobs", "launch"]
        return typed

    def _wait_for_turn(self) -> bool:
        """Wait until we may connect, hearing events; False if it took too long or the job ends."""
        deadline = time.monotonic() + SSH_SECONDS + 2
        while True:
            self._step(wait=0)
            if self._ends() or time.monotonic() > deadline:
                return False
            if connecting.acquire(timeout=0.1):
                return True

    def _ends(self) -> bool:
        return "end" in self._deadlines or "stop" in self._deadlines

    def _step(self, wait: float = 0.2) -> None:
        """Take one event, and do what is due."""
        self.record.hurries = self._ends()
        behind = self.record.is_behind()
        with contextlib.suppress(queue.Empty):
            connection, event = self._events.get(timeout=min(wait, 0.02) if behind else wait)
            self._take(connection, event)
        for connection in self.connections:
            connection.hold(behind)
        self._notice_silence()
        now = time.monotonic()
        if not self._running:  # an agent may wait for a process that not even SIGKILL ends
            self._deadlines.setdefault("kill", now + 10)
        for name, act in (("stop", self._cut_off), ("end", self._end), ("kill", self._kill)):
            if now > self._deadlines.get(name, float("inf")):
                self._deadlines[name] = float("inf")
                act()

    def _notice_silence(self) -> None:
        """Fail where a host has not been heard for too long while we listened."""
        now = time.monotonic()
        if now - self._stepped > STOPPED_SECONDS:  # we were stopped, as by scontrol suspend
            for connection in self.connections:
                connection.listening_since += now - self._stepped
        self._stepped = now
        for connection in self.connections:
            silent = connection.silent_for()
            if silent > self._silence and connection.process.poll() is None:
                text = f"{connection.host.name} has not been heard for {silent:.0f} s: is it down?"
                self._fail(Cause.HOST_FAILED, f"{text} Its agent ends what runs there", 1)
                connection.kill()

    def _take(self, connection: Connection, event: dict[str, Any]) -> None:
        host = connection.host
        if "line" in event:
            part = event.get("part", False)  # of a very long line
            assert self._rendezvous is not None
            # HOROVOD_LOG_LEVEL=debug prints the secret, and whoever knows it can end the job.
            line = event["line"].replace(self._rendezvous.secret, "...")
            self.record.line(event["rank"], event["stream"], line, part)
        elif "exit" in event:
            rank, code = event["rank"], event["exit"]
            self._running.discard(rank)
            who = f"rank {rank} on {host.name}"
            if code == -signal.SIGABRT and (why := self._gave_up(who, rank)):
                self._fail(Cause.RANK_FAILED, why, code)
            elif code == os.EX_TEMPFAIL:  # runs/run.py
                self._fail(Cause.RANK_FOLLOWED, f"{who} ended as another rank did", code)
            elif code:
                cause = Cause.RANK_KILLED if code in KILLED else Cause.RANK_FAILED
                self._fail(cause, f"{who} {_ended(code)}", code)
            elif "kill" not in self._deadlines:
                self._ended_well = self._ended_well or who
        elif "asked" in event:  # someone, as Slurm, asked the agent to end
            self._on_signal(event["asked"], None)
        elif "error" in event:
            self._fail(Cause.HOST_FAILED, f"{host.name}: {event['error']}", 2)
        elif "gone" in event:
            lost = {member.rank for member in connection.members} & self._running
            self._running -= lost
            if lost and host.is_here and event["gone"] < 0:  # else it is the end of an ssh
                self._fail(Cause.HOST_FAILED, f"{host.name}: its agent {_ended(event['gone'])}", 1)
            elif lost:
                reason = explain(host, event["gone"], event["said"])
                self._fail(Cause.HOST_FAILED, f"{host.name}: {reason}", 1)

    def _gave_up(self, who: str, rank: int) -> str:
        """Why a rank may have aborted, judged by who has come to hvd.init(); empty if all have."""
        assert self._rendezvous is not None
        keys = self._rendezvous.seen.copy()  # another thread adds to it
        if any(key.startswith("ddp/") for key in keys):  # strategy=ddp: ranks meet elsewhere
            return ""
        late = [member for member in self.members if f"global/{member.rank}" not in keys]
        if any(member.rank == rank for member in late):
            return (
                f"{who} {_ended(-signal.SIGABRT)} before hvd.init() had begun: where its last "
                "lines say HTTP request failed, it did not reach this host (make doctor)"
            )
        names = ", ".join(f"rank {member.rank} on {member.host.name}" for member in late[:3])
        more = f" and {len(late) - 3} more" if len(late) > 3 else ""
        return f"{names}{more} did not come to hvd.init(), and {who} gave up" if late else ""

    def _fail(self, cause: Cause, text: str, code: int) -> None:
        """Note why, and end the others soon."""
        if not self._ends():
            self._deadlines["end"] = time.monotonic() + GRACE_SECONDS
        if self._signals and "kill" not in self._deadlines and code not in ASKED:
            self._unsaved = self._unsaved or text
        if "kill" not in self._deadlines and (self._cause is None or cause > self._cause[0]):
            self._cause = (cause, text)
            self._status = 128 - code if code < 0 else code

    def _on_signal(self, number: int, frame: object) -> None:
        if "end" in self._deadlines:
            return  # a rank has failed, which is why it ends
        self._signals += 1
        if self._signals == 1:
            self._status = 128 + number
            self._cause = (Cause.STOPPED, f"stopped by {signal.Signals(number).name}")
            # A second signal may interrupt us here: the deadline that it sets stays.
            self._deadlines.setdefault("stop", time.monotonic() + self.stop_seconds)
            threading.Thread(target=self._ask_to_stop, daemon=True).start()
        # Other signals only ask again: another `make stop`, or a terminal that closes (SIGHUP may
        # come twice, and record.py sends one too). Of two at once AT_ONCE may be the first here.
        self._at_once |= number == AT_ONCE
        if number == AT_ONCE or (self._signals > 1 and number == signal.SIGINT):
            self._deadlines["stop"] = 0

    def _ask_to_stop(self) -> None:
        for connection in self.connections:
            connection.send(signal="SIGUSR1")
        seconds = f"{self.stop_seconds:g} s"
        self.record.tell(f"stopping: {seconds} for a checkpoint; another Ctrl-C ends it now")

    def _cut_off(self) -> None:
        if self._running and not self._at_once:
            count = len(self._running)
            others = f" and {count - 1} more" if count > 1 else ""
            late = f"rank {min(self._running)}{others} had not ended"
            self._unsaved = self._unsaved or late
        self._end()

    def _end(self) -> None:
        self._deadlines["kill"] = time.monotonic() + END_SECONDS + 2
        for connection in self.connections:
            connection.send(end=END_SECONDS)

    def _kill(self) -> None:
        for connection in self.connections:
            if connection.process.poll() is None:
                text = f"{connection.host.name} does not answer: its agent ends what runs there"
                self.record.tell(text)
                if self._cause is not None:
                    self._cause = self._cause[0], f"{self._cause[1]}; {text}"
                connection.kill()

    def _give_life(self) -> None:
        while True:
            for connection in list(self.connections):
                connection.send()
            time.sleep(LIFE_SECONDS)

    def _finish(self) -> int:
        self.record.hurries = self._cause is not None
        for number in (*SIGNALS, AT_ONCE):  # from now on they end the wait for a reader who pauses
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._hurry)
        reason = None
        if self._cause is not None:
            cause, reason = self._cause
            # Others may have waited for it in a collective.
            if self._ended_well and cause < Cause.RANK_KILLED:
                reason += f"; {self._ended_well} ended without an error"
            if self._unsaved:
                reason += f", but {self._unsaved}: look whether there is a checkpoint"
            self.record.tell(reason)
        state = "done" if self._cause is None else "stopped" if self._signals else "failed"
        self.record.update(state=state, reason=reason, exit=self._status)
        return self._status

    def _hurry(self, number: int, frame: object) -> None:
        self.record.hurries = True


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory? dmesg tells)" if code == -9 else "")


def seconds(text: str) -> float:
    """A type for argparse: seconds, which may be 0."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
        raise argparse.ArgumentTypeError(f"STOP_SECONDS={text}: give seconds, 0 or more")
    return float(text)


def open_missing() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed (`>&-`): no pipe may get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def main() -> int:
    open_missing()
    parser = argparse.ArgumentParser(
        prog="python -m cluster.horovodrun", description=__doc__.partition("\n")[0]
    )
    add_arguments(parser)
    parser.add_argument(
        "--stop-seconds", type=seconds, default=STOP_SECONDS,
        help="for a checkpoint, when told to stop (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each process runs")
    arguments = parser.parse_args()
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    if not arguments.command:
        parser.error("the command is missing, as python template.py")
    try:
        members = ranks(chosen(arguments), arguments.np)
        stop_seconds = arguments.stop_seconds
        with Record(arguments.record, members, arguments.command, stop_seconds) as record:
            status = Job(members, arguments.command, record, stop_seconds).run()
        # One more Ctrl-C, or AT_ONCE behind a SIGTERM that was quick, would change our exit status.
        for number in (*SIGNALS, AT_ONCE):
            signal.signal(number, signal.SIG_IGN)
        return status
    except (Refusal, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        if arguments.record:
            note_end(arguments.record, "failed", str(error))
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
