"""The processes of a job on one host: started, listened to, and ended to the last one.

    python -m cluster.agent        by cluster/horovodrun.py, over one ssh a host

Lines of JSON come in: first the job, then a sign of life every few seconds, and signals to pass on.
Lines of JSON go out: what ranks print, their ends, and signs of life. When the launcher is gone
(its end of the pipe closed, or nothing heard for SILENCE_SECONDS) all processes are ended. They are
found as descendants of this one, which adopts those whose parents ended; if this one is killed,
the kernel kills the ranks.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import json
import os
import re
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

LIFE_SECONDS = 3  # between signs of life
# After which the other side is taken for gone. A link that was down is used again when TCP tries
# again: 25 s after it went, or 51 (0.2 s, and each time twice as long).
SILENCE_SECONDS = 60
PRCTL = ctypes.CDLL(None).prctl
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
SIOCGIFADDR = 0x8915  # netdevice(7)
LONGEST_LINE = 1 << 20  # that is passed on in one piece
_Text = codecs.getincrementaldecoder("utf-8")
NAMED = re.compile(r"\d+|(GPU|MIG)-[\w-]+")  # as CUDA_VISIBLE_DEVICES names GPUs
DRIVER = Path("/proc/driver/nvidia/gpus")  # has a folder for each
MARK = b"# preload:"  # a line of a script: what is above it, ranks of a host may share
IGNORED = (signal.SIGINT, signal.SIGHUP)  # the terminal's Ctrl-C is the launcher's to judge
MOST_FILES = 1 << 16  # open: each rank is connected to all others, twice to those of its host


class Agent:
    """Runs one job, as the first line says, until its last process has ended."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}  # by process id
        self._preloading: tuple[subprocess.Popen, list[int]] | None = None  # and its ranks
        self._asked: list[int] = []  # signals for these
        self._meeting = threading.Lock()  # of who is a rank: _listen signals them
        self._saying = threading.Lock()
        self._locks: list[Any] = []
        self._ending = threading.Lock()
        self._passing_on = threading.Event()  # what ranks print; not while its reader pauses
        self._passing_on.set()

    def run(self) -> None:
        with open(0, "rb", buffering=0, closefd=False) as orders:  # takes no more than a line
            line = orders.readline()
        if not line:
            return
        job = json.loads(line)
        try:
            environment = self._environment(job)
            if "SLURM_JOB_ID" not in os.environ:  # which gives each job its own
                self._take_gpus(job, environment.get("CUDA_VISIBLE_DEVICES"))
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
        """What all ranks of this host see: of ssh, forwarded, and the network interface."""
        nic = job["nic"] or interface_towards(job["launcher"])
        nics = [name for _, name in socket.if_nameindex()]
        if nic not in nics:
            options = ", ".join(nics)
            raise ValueError(
                f"no network interface {nic}; there are {options}: mend nic in HOSTFILE"
            )
        names = ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        interface = dict.fromkeys(names, nic) | {"NCCL_SOCKET_IFNAME": f"={nic}"}  # not its prefix
        # The numbers of GPUs are those of nvidia-smi; CUDA's own are by speed.
        by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        environment = {**by_bus, **interface, **os.environ, **job["environment"]}
        environment |= interface if job["nic"] else {}
        gloo_nic = environment["HOROVOD_GLOO_IFACE"]
        if gloo_nic not in nics:
            raise ValueError(
                f"HOROVOD_GLOO_IFACE={gloo_nic} in the environment: there are {', '.join(nics)}: "
                "unset it, or give nic in HOSTFILE"
            )
        return environment

    def _take_gpus(self, job: dict[str, Any], visible: str | None) -> None:
        """Mark the GPUs as ours until we end; the lock of a file goes with its process."""
        count = len(job["ranks"])
        gpus = job["gpus"]
        if gpus is None and visible is not None:
            has_gpus = any(Path("/dev").glob("nvidia[0-9]*"))
            gpus = [gpu for gpu in visible.split(",") if has_gpus and NAMED.fullmatch(gpu)][:count]
        elif gpus is None:  # those that HorovodStrategy takes by local rank
            gpus = [gpu for gpu in range(count) if Path(f"/dev/nvidia{gpu}").exists()]
        for gpu in gpus:
            name = f"horovod-gpu-{os.uname().nodename}-{os.getuid()}-{place_of(str(gpu))}"
            # Not TMPDIR, which others may not have; not through a link that somebody has put there.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                file = os.fdopen(os.open(Path("/tmp") / name, flags, 0o600), "r+")
                is_ours = os.fstat(file.fileno()).st_uid == os.getuid()
            except PermissionError:
                is_ours = False
            if not is_ours:
                raise ValueError(
                    f"/tmp/{name} is another user's, who keeps GPU {gpu} from you: have it deleted"
                )
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip()
                raise ValueError(
                    f"GPU {gpu} is in use by run {owner}: wait for it, take others (gpus in "
                    f"HOSTFILE), or make stop RUN={owner}"
                ) from None
            file.seek(0)
            file.truncate()
            file.write(job["run"])
            file.flush()
            self._locks.append(file)

    def _start(
        self, rank: int, command: list[str], environment: dict[str, str],
        selector: selectors.BaseSelector,
    ) -> None:  # fmt: skip
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_become_rank,
        )  # fmt: skip
        process.returncode = 0  # not Popen's to wait for: all children are waited for together
        self._ranks[process.pid] = rank
        for stream in ("stdout", "stderr"):
            read = [rank, stream, b"", _Text(errors="replace")]
            selector.register(getattr(process, stream), selectors.EVENT_READ, read)

    def _start_together(
        self, job: dict[str, Any], environment: dict[str, str], selector: selectors.BaseSelector
    ) -> None:
        """All ranks from one process that has made their imports: cluster/preload.py."""
        python, *script = job["command"]
        by_rank = [set(variables.items()) for variables in job["ranks"].values()]
        environment = environment | dict(set.intersection(*by_rank))  # HOSTFILE's, before imports
        outputs: dict[str, list[int]] = {}
        for rank in job["ranks"]:
            outputs[rank] = []
            for stream in ("stdout", "stderr"):
                reads, writes = os.pipe()
                outputs[rank].append(writes)
                read = [int(rank), stream, b"", _Text(errors="replace")]
                selector.register(reads, selectors.EVENT_READ, read)
        writing = [descriptor for pair in outputs.values() for descriptor in pair]
        process = subprocess.Popen(
            [python, "-m", "cluster.preload", *script], env=environment, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writing[1], pass_fds=writing,
            preexec_fn=_become_rank,
        )  # fmt: skip
        process.returncode = 0  # as above
        for descriptor in writing:
            os.close(descriptor)
        self._preloading = process, [int(rank) for rank in job["ranks"]]
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as orders:
            orders.write(json.dumps({"ranks": job["ranks"], "outputs": outputs}).encode())

    def _adopt(self, pid: int, status: int) -> None:
        """The ranks are our children now, if their parent has ended; those that it did not get to
        ended with it. A child has ended: it, one of them, or what an import had left behind."""
        assert self._preloading is not None
        process, ranks = self._preloading
        if pid != process.pid:
            ended, status = os.waitpid(process.pid, os.WNOHANG)
            if not ended:
                return
        assert process.stdout is not None
        with process.stdout:
            # All is written, but what an import has forked may hold the other end.
            os.set_blocking(process.stdout.fileno(), False)
            lines = (process.stdout.read() or b"").splitlines()
        with self._meeting:
            for child, rank in (map(int, line.split()) for line in lines):
                self._ranks[child] = rank
                for number in self._asked:  # meanwhile: of those that were forked by then
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, number)
            self._preloading = None
        for rank in set(ranks) - set(self._ranks.values()):
            self._say(rank=rank, exit=os.waitstatus_to_exitcode(status))

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Pass on what ranks print, and tell their ends, until none is left."""
        last_sign = 0.0
        while self._ranks or self._preloading:
            if self._passing_on.wait(timeout=0.2):
                for key, _ in selector.select(timeout=0.2):
                    self._pass_on(key, selector)
            if time.monotonic() - last_sign > LIFE_SECONDS:
                last_sign = time.monotonic()
                self._say()
                for file in self._locks:  # else systemd deletes what is 10 days old in /tmp
                    os.utime(file.fileno())
            self._reap(selector)

    def _pass_on(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> int:
        """What there is to read on a stream: the number of its bytes, 0 at its end."""
        rank, stream, fragment, text = key.data
        data = os.read(key.fd, 1 << 16)
        # Horovod: a progress bar ends its lines with \r alone, and is passed on as it moves.
        lines = (fragment + data).splitlines(keepends=True)
        rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        for line in lines:
            self._say(rank=rank, stream=stream, line=text.decode(line))
        if not data:
            if rest := text.decode(rest, final=True):
                self._say(rank=rank, stream=stream, line=rest)
            selector.unregister(key.fileobj)
        elif len(rest) > LONGEST_LINE:
            self._say(rank=rank, stream=stream, line=text.decode(rest), part=True)
            rest = b""
        key.data[2] = rest  # with a \r at its end too, which a \n may follow
        return len(data)

    def _reap(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if self._preloading and pid not in self._ranks:
                    self._adopt(pid, status)
                # Forgotten before its last words are told, which may take long: from now on its
                # number may be another process's, which _listen shall not signal.
                rank = self._ranks.pop(pid, None)
                if rank is not None:
                    self._empty(rank, selector)
                    self._say(rank=rank, exit=os.waitstatus_to_exitcode(status))

    def _empty(self, rank: int, selector: selectors.BaseSelector) -> None:
        """Pass on what a rank that has ended printed last: what its pipes hold, which is read at
        once, and their ends. Children that hold a pipe may print for ever."""
        for key in [key for key in selector.get_map().values() if key.data[0] == rank]:
            count = fcntl.ioctl(key.fd, termios.FIONREAD, bytes(4))
            left = int.from_bytes(count, sys.byteorder)
            while left >= 0 and _readable(key.fd) and (read := self._pass_on(key, selector)):
                left -= read

    def _listen(self, silence: float) -> None:
        """The launcher's lines. When they stop, or one is no JSON, all processes are ended."""
        waiting = selectors.DefaultSelector()
        waiting.register(0, selectors.EVENT_READ)
        fragment, waited = b"", 0
        try:
            while waited < silence:
                # In slices: the time in which we are stopped, as by scontrol suspend, is none.
                if not waiting.select(timeout=min(LIFE_SECONDS, silence)):
                    waited += LIFE_SECONDS
                    continue
                waited = 0
                if not (data := os.read(0, 1 << 16)):
                    return
                *lines, fragment = (fragment + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            # Not waited for: this too may be a write that nobody reads.
            why = f"the launcher was not heard for {silence:g} s: all has ended here"
            telling = threading.Thread(target=self._say, kwargs={"error": why}, daemon=True)
            telling.start()
            telling.join(timeout=1)
        finally:
            self._end_all(3)
            os._exit(1)  # also out of a write that nobody reads

    def _ask_to_stop(self, number: int, frame: object) -> None:
        """By the launcher, of all ranks. Slurm sends this to the processes of what it ends."""
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
        """Tell all descendants to end, and kill those that have not after `grace` seconds."""
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


def place_of(gpu: str, driver: Path = DRIVER) -> str:
    """A GPU's place on the bus, by its number or the beginning of its UUID: one name for one GPU.
    As it is given where the driver does not tell, and of a part of a GPU (MIG)."""
    places = sorted(driver.glob("*/information"))  # as nvidia-smi and PCI_BUS_ID count
    if gpu.isdecimal():
        return dict(enumerate(file.parent.name for file in places)).get(int(gpu), gpu)
    begins = re.compile(rf"GPU UUID:\s+{re.escape(gpu)}")
    return next((file.parent.name for file in places if begins.search(file.read_text())), gpu)


def shares_imports(command: list[str]) -> bool:
    """Whether it is `python script.py ...`, and the script has the mark."""
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


def allow_files() -> None:
    """For this process and its children, up to MOST_FILES, as far as the administrator lets us."""
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
                # pid (name, which may hold anything) state parent ...
                state, parent, *_ = (
                    Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                )
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(entry))
    pids = list(children.get(os.getpid(), []))
    for pid in pids:  # grows while it is walked
        pids += children.get(pid, [])
    return pids


def address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface of this host; None without."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def own_address(towards: str) -> str:
    """The address of this host by which packets to `towards` leave."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # UDP: looks up the route, sends nothing
        return str(probe.getsockname()[0])


def interface_towards(address: str) -> str:
    """The network interface by which this host reaches another, or which has the address itself.

    Raises:
        ValueError: when there is no route.
    """
    try:
        own = own_address(address)
    except OSError as error:
        raise ValueError(f"no route to the launch host, {address}: {error.strerror}") from None
    names = [name for _, name in socket.if_nameindex() if address_of(name) == own]
    if not names:
        raise ValueError(
            f"{own}, by which it reaches {address}, is the first address of no network interface: "
            "give nic in HOSTFILE"
        )
    return names[0]


if __name__ == "__main__":
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    Agent().run()
