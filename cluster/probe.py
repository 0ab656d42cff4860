"""What a host reports of itself: it needs Python's own library only, and changes nothing.

cluster/doctor.py sends this file's text over ssh to `python -c`, so that a host without a checkout
can answer too. Where there is no environment yet, its own python3 runs it, which may be 3.6. It
prints a line of JSON with facts; then it may be given addresses of other hosts, and prints which of
them it reaches. cluster/findings.py says what the facts mean.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import math
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

CODE = (".py", ".yaml", ".yml", ".toml", ".txt", ".sh", "Makefile")
MOST_BYTES = 1 << 20  # of a file that is read; larger ones are compared by their size
CONNECT_SECONDS = 3
CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Run by the environment's interpreter, as this may be another.
VERSIONS = """
import importlib.metadata as m, json, platform
found = {"python": platform.python_version()}
for name in %r:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: found[name] = None
print(json.dumps(found))
"""
# CUDA counts the GPUs: torch.cuda.device_count() asks the driver's NVML, which also lists those
# that CUDA cannot use, because the driver is old or NVSwitch's fabric manager does not run.
BUILD = """
import json, torch, horovod.torch as hvd
gpus = torch._C._cuda_getDeviceCount() if torch.version.cuda else 0
print(json.dumps({"cuda": torch.version.cuda, "gpus": gpus,
    "nccl": bool(hvd.nccl_built()), "gloo": hvd.gloo_built(), "mpi": hvd.mpi_built()}))
"""


def code(root: str, kinds: "tuple[str, ...]") -> "dict[str, str]":
    """A digest of each file in the checkout whose name ends with one of `kinds`."""
    digests = {}
    for folder, folders, files in os.walk(root):
        relative = os.path.relpath(folder, root)
        if ".hydra" in folders and ".gitignore" in files:  # a run's, which make sync leaves there
            folders[:] = []
            continue
        folders[:] = [
            name for name in folders
            if not name.startswith(".") and name not in ("__pycache__", "node_modules")
            and not (relative == "." and name in ("logs", "data", "multirun"))
        ]  # fmt: skip
        for name in files:
            path = os.path.join(folder, name)
            if name.endswith(kinds) and not name.startswith(".") and os.path.isfile(path):
                digests[os.path.normpath(os.path.join(relative, name))] = digest(path)
    return digests


def digest(path: str) -> str:
    try:
        size = os.path.getsize(path)
        if size > MOST_BYTES:
            return f"{size} bytes"
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError as error:
        return f"unreadable: {error.strerror}"


def identity(root: str) -> "list[int]":
    """The same on two hosts only where they share the file system."""
    state = os.stat(os.path.join(root, "template.py"))
    return [state.st_ino, state.st_ctime_ns]


def run(command: "list[str]", seconds: int) -> "tuple[int, str, str]":
    """Exit status, stdout and stderr."""
    pipe = subprocess.PIPE
    result = subprocess.run(command, stdout=pipe, stderr=pipe, timeout=seconds)
    out, err = (text.decode(errors="replace") for text in (result.stdout, result.stderr))
    return result.returncode, out, err


def ask(python: str, script: str) -> "dict | str":
    """The JSON that a script prints in the environment's interpreter, or why it does not."""
    try:
        status, out, err = run([python, "-c", script], 60)
    except OSError as error:
        return error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return "no answer within 60 s"
    if status:
        return (err.strip().splitlines() or [f"ended with {status}"])[-1]
    return json.loads(out.splitlines()[-1])


def mib(text: str) -> int:
    return int(text) if text.isdecimal() else 0  # "[N/A]" where GPU and CPU share memory


def gpus() -> dict:
    """What nvidia-smi reports of each GPU, and whose processes are on them."""
    if shutil.which("nvidia-smi") is None:
        return {"devices": [], "error": None, "processes": []}
    fields = "index,uuid,name,driver_version,memory.total,memory.free"
    command = ["nvidia-smi", "--format=csv,noheader,nounits"]
    try:
        status, out, err = run([*command, "--query-gpu=" + fields], 20)
        _, apps, _ = run([*command, "--query-compute-apps=pid,gpu_uuid"], 20)
    except subprocess.TimeoutExpired:
        return {"devices": [], "error": "nvidia-smi does not answer", "processes": []}
    if status:
        return {"devices": [], "error": out.strip() or err.strip(), "processes": []}
    rows = [[cell.strip() for cell in row.split(",")] for row in out.splitlines()]
    devices = [
        {"index": int(index), "name": name, "driver": driver, "total": mib(most), "free": mib(left)}
        for index, _, name, driver, most, left in rows
    ]
    indices = {row[1]: int(row[0]) for row in rows}
    processes = []
    for row in apps.splitlines():
        pid, _, uuid = (cell.strip() for cell in row.partition(","))
        if not pid.isdigit():
            continue  # a message instead of a row
        try:
            owner = os.stat("/proc/" + pid).st_uid
        except OSError:
            continue
        processes.append({"pid": int(pid), "gpu": indices.get(uuid), "uid": owner})
    return {"devices": devices, "error": None, "processes": processes}


def interfaces() -> "dict[str, str]":
    """The first IPv4 address of each interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                # SIOCGIFADDR of netdevice(7)
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def own_address(towards: str) -> str:
    """The address of this host by which packets to another leave."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # UDP: looks up the route, sends nothing
        return str(probe.getsockname()[0])


def groups(controller: str) -> "list[Path]":
    """The folders of this process's control group and of those above it (cgroups(7)): version 2 has
    one tree, version 1 one for each controller. Within a container its own group may be the root.
    """
    folders = []
    for line in first_of(OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = CGROUPS / controller if controllers else CGROUPS
            own = root / path.strip("/")
            above = [own, *own.parents]
            folders += above[: above.index(root) + 1]
    return folders


def first_of(*files: Path) -> str:
    """The content of the first of these files that can be read; empty if none can."""
    for file in files:
        try:
            return file.read_text().strip()
        except OSError:
            continue
    return ""


def usable_cores() -> int:
    """Whole cores, by affinity and control groups; a limit of Docker's --cpus or of Kubernetes is
    rounded up. strategies/cores.py has the same, as that folder stands alone.
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    for folder in groups("cpu"):
        quota, _, period = first_of(folder / "cpu.max").partition(" ")
        quota = quota or first_of(folder / "cpu.cfs_quota_us")
        period = period or first_of(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            limits.append(int(quota) / int(period))
    return max(1, math.ceil(min(limits)))


def infiniband(folder: str = "/sys/class/infiniband") -> bool:
    """Whether a port of InfiniBand is up; RoCE counts too."""
    for state in glob.glob(f"{folder}/*/ports/*/state"):
        with contextlib.suppress(OSError), open(state) as file:
            if "ACTIVE" in file.read():
                return True
    return False


def memory() -> int:
    """MiB that are available, on the host and within the limits of its container."""
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    left = [int(lines["MemAvailable"].split()[0]) << 10]
    for folder in groups("memory"):
        limit = first_of(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = first_of(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit.isdecimal() and used.isdecimal():
            kinds = dict(line.split() for line in first_of(folder / "memory.stat").splitlines())
            cache = kinds.get("total_inactive_file") or kinds.get("inactive_file", "0")
            left.append(int(limit) - int(used) + int(cache))  # the kernel can drop cached files
    return max(0, min(left)) >> 20


def free(path: str) -> int:
    """MiB free on the file system of the path, or of the nearest folder above it that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free >> 20


def facts(request: dict) -> dict:
    root, python = request["root"], request["python"]
    checkout = os.path.isfile(os.path.join(root, "template.py"))
    if os.path.isdir(root):
        os.chdir(root)
    logs = os.path.join(root, "logs")
    written = logs if os.path.isdir(logs) else root
    addresses, own = interfaces(), ""
    with contextlib.suppress(OSError):  # no route: "towards" is None
        own = own_address(request["launcher"])
    answer = {
        "time": time.time(),
        "root": os.path.isdir(root),
        "code": code(root, tuple(request["kinds"])) if checkout else None,
        "identity": identity(root) if checkout else None,
        "versions": ask(python, VERSIONS % (request["packages"],)),
        "gpus": gpus(),
        "interfaces": addresses,
        "towards": next((name for name, address in addresses.items() if address == own), None),
        "cores": usable_cores(),
        "memory": memory(),
        "disk": {path: free(path) for path in (root, "/tmp")},
        "logs": free(logs),
        "readonly": "" if os.access(written, os.W_OK) or not os.path.isdir(root) else written,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # jobs raise theirs to it
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": infiniband(),
    }
    if not request["quick"]:
        answer["build"] = ask(python, BUILD)
    return answer


def reach(peers: list) -> "dict[str, str | None]":
    """Why each of the others is not reached; None where it is."""
    problems: dict[str, str | None] = {}
    for name, address, port in peers:
        try:
            socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
            problems[name] = None
        except OSError as error:
            problems[name] = str(error)
    return problems


def main() -> None:
    request = json.loads(sys.argv[1])
    answer = facts(request)
    nic = request["nic"] or answer["towards"]
    if not request["quick"] and nic in answer["interfaces"]:
        # The kernel completes the connections of others; nobody has to accept them.
        listener = socket.socket()
        listener.bind((answer["interfaces"][nic], 0))
        listener.listen(1024)
        answer["listens"] = listener.getsockname()
    print(json.dumps(answer), flush=True)
    if not request["quick"]:
        for line in sys.stdin:
            print(json.dumps(reach(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
