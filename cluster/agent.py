"""Starts the processes of a job on one host, passes on what they print, and ends every last one.

    python -m cluster.agent        started by cluster/horovodrun.py, by one ssh per host

It reads lines of JSON: first the job, then a sign of life every few seconds, and signals to pass
on. It writes lines of JSON: what ranks print, how they end, and signs of life. When the launcher is
gone (it has closed its end of the pipe, or nothing was heard for SILENCE_SECONDS), the agent ends
all processes. It finds them as its descendants, since it adopts those whose parents have ended.
If the agent itself is killed, the kernel kills the ranks.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import functools
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import IO, Any

from cluster.gpus import lock_gpu, used_gpus
from cluster.probe import interfaces, own_address

LIFE_SECONDS = 3  # between signs of life
# Silence after which the other side counts as gone. TCP retries after 0.2 s, then after twice as
# long each time: a link that was down is used again 25 s, or 51 s, after it went.
SILENCE_SECONDS = 60
REACH_SECONDS = 20  # to connect to the launcher: TCP asks again after 1, 3, 7 and 15 s
PRCTL = ctypes.CDLL(None).prctl
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
LONGEST_LINE = 1 << 20  # bytes that are passed on in one piece
MARK = b"# preload:"  # begins a line of a script; ranks of a host may share what is above it
IGNORED = (signal.SIGINT, signal.SIGHUP)  # the launcher decides what the terminal's Ctrl-C means
MOST_FILES = 1 << 16  # open: each rank is connected to all others, twice to those of its host


class Stream:
    """One output of a rank, while it is read."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self.text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.fragment = b""  # of a line whose end has not come yet


class Agent:
    """Runs one job, as the first line says, until its last process has ended."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}  # by process id
        # The process that forks ranks (cluster/preload.py) and their numbers, until they are ours.
        self._preloading: tuple[subprocess.Popen, list[int]] | None = None
        self._asked: list[int] = []  # signals that came meanwhile
        self._meeting = threading.Lock()  # for _ranks and _preloading, which _listen signals
        self._saying = threading.Lock()
        self._locks: list[IO[str]] = []  # files of GPUs
        self._ending = threading.Lock()
        self._passing_on = threading.Event()  # cleared while the reader of the output pauses
        self._passing_on.set()

    def run(self) -> None:
        # Unbuffered, so that it takes no more than the first line: _listen reads the rest.
        with open(0, "rb", buffering=0, closefd=False) as orders:
            line = orders.readline()
        if not line:
            return
        job = json.loads(line)
        try:
            environment = self._environment(job)
            check_way(job["launcher"], int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
            if "SLURM_JOB_ID" not in os.environ:  # Slurm gives each job its own
                visible = environment.get("CUDA_VISIBLE_DEVICES")
                gpus = used_gpus(job["gpus"], visible, len(job["ranks"]))
                self._locks = [lock_gpu(gpu, job["run"]) for gpu in gpus]
        except (ValueError, OSError) as error:
            self._say(error=str(error))
            return
        PRCTL(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        allow_files()
        selector = selectors.DefaultSelector()
        try:
            if job["preload"] and len(job["ranks"]) > 1 and shares_imports(job["command"]):
                self._start_together(job, environment, selector)
            else:
                for rank, variables in job["ranks"].items():
                    self._start(int(rank), job["command"], environment | variables, selector)
        except OSError as error:
            self._say(error=f"{job['command'][0]}: {error.strerror}")
            self._end_all(0)
            return
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        # Only now: threads that exist while a process is started can leave it with their locks.
        threading.Thread(target=self._listen, args=[job["silence"]], daemon=True).start()
        self._watch(selector)
        self._end_all(0)  # what ranks left behind

    def _environment(self, job: dict[str, Any]) -> dict[str, str]:
        """What all ranks of this host share: this login's variables, forwarded ones, interfaces."""
        nic = job["nic"] or interface_towards(job["launcher"])
        # "=": this one, not all whose names begin so.
        interface = dict.fromkeys(("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME"), nic)
        interface["NCCL_SOCKET_IFNAME"] = f"={nic}"
        # GPUs are numbered as by nvidia-smi; CUDA would number them by speed.
        by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        environment = {**by_bus, **interface, **os.environ, **job["environment"]}
        environment |= interface if job["nic"] else {}
        nic, nics = environment["HOROVOD_GLOO_IFACE"], [name for _, name in socket.if_nameindex()]
        if nic not in nics:
            fix = "fix" if job["nic"] else "unset HOROVOD_GLOO_IFACE, or give"
            options = ", ".join(nics)
            raise ValueError(
                f"no network interface {nic}; there are {options}: {fix} nic in HOSTFILE"
            )
        return environment

    def _start(
        self, rank: int, command: list[str], environment: dict[str, str],
        selector: selectors.BaseSelector,
    ) -> None:  # fmt: skip
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_become_rank,
        )  # fmt: skip
        process.returncode = 0  # so that Popen does not wait for it: _reap waits for all children
        self._ranks[process.pid] = rank
        for name in ("stdout", "stderr"):
            selector.register(getattr(process, name), selectors.EVENT_READ, Stream(rank, name))

    def _start_together(
        self, job: dict[str, Any], environment: dict[str, str], selector: selectors.BaseSelector
    ) -> None:
        """All ranks from one process that has made their imports: cluster/preload.py."""
        python, *script = job["command"]
        # What is the same for all ranks, as HOSTFILE's env, is there before the imports.
        by_rank = [set(variables.items()) for variables in job["ranks"].values()]
        environment = environment | dict(set.intersection(*by_rank))
        outputs: dict[str, list[int]] = {}
        for rank in job["ranks"]:
            outputs[rank] = []
            for name in ("stdout", "stderr"):
                reads, writes = os.pipe()
                outputs[rank].append(writes)
                selector.register(reads, selectors.EVENT_READ, Stream(int(rank), name))
        writing = [descriptor for pair in outputs.values() for descriptor in pair]
        process = subprocess.Popen(
            [python, "-m", "cluster.preload", *script], env=environment, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writing[1], pass_fds=writing,
            preexec_fn=_become_rank,
        )  # fmt: skip
        process.returncode = 0  # see _start
        for descriptor in writing:
            os.close(descriptor)
        self._preloading = process, [int(rank) for rank in job["ranks"]]
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as orders:
            orders.write(json.dumps({"ranks": job["ranks"], "outputs": outputs}).encode())

    def _adopt(self, pid: int, status: int) -> None:
        """Take over the ranks if the process that forks them has ended; those that it did not get
        to have ended with it. `pid` is a child that has ended: that process, a rank, or something
        that an import left behind."""
        assert self._preloading is not None
        process, ranks = self._preloading
        if pid != process.pid:
            ended, status = os.waitpid(process.pid, os.WNOHANG)
            if not ended:
                return
        assert process.stdout is not None
        with process.stdout:
            # All is written, but a process that an import forked may hold the other end.
            os.set_blocking(process.stdout.fileno(), False)
            lines = (process.stdout.read() or b"").splitlines()
        with self._meeting:
            for child, rank in (map(int, line.split()) for line in lines):
                self._ranks[child] = rank
                for number in self._asked:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, number)
            self._preloading = None
        for rank in set(ranks) - set(self._ranks.values()):
            self._say(rank=rank, exit=os.waitstatus_to_exitcode(status))

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Pass on what ranks print, and report how they end, until none is left."""
        last_sign = 0.0
        while self._ranks or self._preloading:
            if self._passing_on.wait(timeout=0.2):
                for key, _ in selector.select(timeout=0.2):
                    self._pass_on(key, selector)
            if time.monotonic() - last_sign > LIFE_SECONDS:
                last_sign = time.monotonic()
                self._say()
                for file in self._locks:  # systemd deletes what is 10 days old in /tmp
                    os.utime(file.fileno())
            self._reap(selector)

    def _pass_on(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> int:
        """Read once from a stream; the number of bytes, 0 at its end."""
        stream: Stream = key.data
        say = functools.partial(self._say, rank=stream.rank, stream=stream.name)
        data = os.read(key.fd, 1 << 16)
        # Horovod: a progress bar ends its lines with \r alone, and is passed on as it moves.
        lines = (stream.fragment + data).splitlines(keepends=True)
        # Kept with a \r at its end too, which a \n may follow.
        stream.fragment = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        for line in lines:
            say(line=stream.text.decode(line))
        if not data:
            if rest := stream.text.decode(stream.fragment, final=True):
                say(line=rest)
            selector.unregister(key.fileobj)
        elif len(stream.fragment) > LONGEST_LINE:
            say(line=stream.text.decode(stream.fragment), part=True)
            stream.fragment = b""
        return len(data)

    def _reap(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if self._preloading and pid not in self._ranks:
                    self._adopt(pid, status)
                # Forgotten before its last words are passed on, which may take long: its id may
                # now become another process's, which _listen must not signal.
                rank = self._ranks.pop(pid, None)
                if rank is not None:
                    self._empty(rank, selector)
                    self._say(rank=rank, exit=os.waitstatus_to_exitcode(status))

    def _empty(self, rank: int, selector: selectors.BaseSelector) -> None:
        """Pass on what a rank that has ended printed last: no more than its pipes hold now, as
        children that hold a pipe may print for ever."""
        for key in [key for key in selector.get_map().values() if key.data.rank == rank]:
            count = fcntl.ioctl(key.fd, termios.FIONREAD, bytes(4))
            left = int.from_bytes(count, sys.byteorder)
            while left >= 0 and _readable(key.fd) and (read := self._pass_on(key, selector)):
                left -= read

    def _listen(self, silence: float) -> None:
        """Obey the launcher. When its lines stop, or one is not JSON, all processes are ended."""
        waiting = selectors.DefaultSelector()
        waiting.register(0, selectors.EVENT_READ)
        fragment, waited = b"", 0
        try:
            while waited < silence:
                # In slices, so that time in which we are stopped (scontrol suspend) does not count.
                if not waiting.select(timeout=min(LIFE_SECONDS, silence)):
                    waited += LIFE_SECONDS
                    continue
                waited = 0
                if not (data := os.read(0, 1 << 16)):
                    return
                *lines, fragment = (fragment + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            # By a thread: where nobody reads, the write never returns.
            why = f"the launcher was not heard for {silence:g} s: all has ended here"
            telling = threading.Thread(target=self._say, kwargs={"error": why}, daemon=True)
            telling.start()
            telling.join(timeout=1)
        finally:
            self._end_all(3)
            os._exit(1)  # even if another thread is in a write that never returns

    def _ask_to_stop(self, number: int, frame: object) -> None:
        """Have the launcher stop the whole job: Slurm sends SIGTERM to us when it ends a job."""
        # By a thread: this one may be within _say.
        threading.Thread(target=self._say, kwargs={"asked": number}, daemon=True).start()

    def _obey(self, order: dict[str, Any]) -> None:
        if "signal" in order:
            number = getattr(signal, order["signal"])
            with self._meeting:
                pids = [*self._ranks]
                if self._preloading:
                    pids.append(self._preloading[0].pid)
                    self._asked.append(number)
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
        if "hold" in order:
            (self._passing_on.clear if order["hold"] else self._passing_on.set)()
        if "end" in order:
            threading.Thread(target=self._end_all, args=[order["end"]], daemon=True).start()

    def _end_all(self, grace: float) -> None:
        """Tell all descendants to end, and kill those that still run after `grace` seconds."""
        with self._ending:
            start = time.monotonic()
            number = signal.SIGTERM if grace else signal.SIGKILL
            while alive := descendants():
                for pid in alive:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                if number == signal.SIGTERM:
                    while descendants() and time.monotonic() - start < grace:
                        time.sleep(0.05)
                    number = signal.SIGKILL
                else:
                    time.sleep(0.02)

    def _say(self, **what: Any) -> None:
        with self._saying:
            try:
                sys.stdout.buffer.write(json.dumps(what).encode() + b"\n")
                sys.stdout.buffer.flush()
            except OSError:
                os._exit(1)  # nobody listens; the kernel kills the ranks


def shares_imports(command: list[str]) -> bool:
    """Whether it is `python script.py ...` and the script has a line that begins with MARK."""
    if len(command) < 2 or not Path(command[0]).name.startswith("python"):
        return False
    script = Path(command[1])
    return script.suffix == ".py" and script.is_file() and b"\n" + MARK in script.read_bytes()


def die_with_parent() -> None:
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _become_rank() -> None:
    die_with_parent()
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)


def check_way(address: str, port: int) -> None:
    """ValueError where this host does not reach the launcher's, where ranks find each other: they
    would try for minutes, and say nothing."""
    try:
        socket.create_connection((address, port), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise ValueError(
            f"does not reach this host at {address}, port {port}, where ranks find each other: "
            f"{error}: let it through the firewall here, or start from one of the hosts"
        ) from None


def allow_files() -> None:
    """Let this process and its children open MOST_FILES, or as many as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (wanted := min(hard, MOST_FILES)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _readable(descriptor: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(timeout=0))


def descendants() -> list[int]:
    """All processes below this one that still run."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                # proc(5): pid (name, which may hold anything, half a letter too) state parent ...
                text = Path(f"/proc/{entry}/stat").read_text(errors="replace")
                state, parent, *_ = text.rpartition(")")[2].split()
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(entry))
    pids = list(children.get(os.getpid(), []))
    for pid in pids:  # grows while it is walked
        pids += children.get(pid, [])
    return pids


def interface_towards(address: str) -> str:
    """The network interface by which this host reaches `address`, or which has that address.

    Raises:
        ValueError: when there is no route.
    """
    try:
        own = own_address(address)
    except OSError as error:
        raise ValueError(f"no route to the launch host, {address}: {error.strerror}") from None
    for name, its_address in interfaces().items():
        if its_address == own:
            return name
    raise ValueError(
        f"{own}, by which it reaches {address}, is the first address of no network interface: "
        "give nic in HOSTFILE"
    )


if __name__ == "__main__":
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    Agent().run()
