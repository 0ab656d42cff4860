"""Locks GPUs for a job, so that another job of the same user on this host takes none of them."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import IO

NAMED = re.compile(r"\d+|(GPU|MIG)-[\w-]+")  # how CUDA_VISIBLE_DEVICES names a GPU
DRIVER = Path("/proc/driver/nvidia/gpus")  # has a folder for each GPU


def used_gpus(listed: list[int] | None, visible: str | None, ranks: int) -> list[str]:
    """The GPUs that the ranks of this host will use, by their numbers or UUIDs.

    Args:
        listed: those of HOSTFILE.
        visible: CUDA_VISIBLE_DEVICES, if it is set.
    """
    if listed is not None:
        return [str(gpu) for gpu in listed]
    if visible is None:  # HorovodStrategy takes them by local rank
        return [str(gpu) for gpu in range(ranks) if Path(f"/dev/nvidia{gpu}").exists()]
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return []
    return [gpu for gpu in visible.split(",") if NAMED.fullmatch(gpu)][:ranks]


def lock_gpu(gpu: str, run: str) -> IO[str]:
    """Lock a file for the GPU, and write the name of our run to it; closing it unlocks it.

    Raises:
        ValueError: when another run has locked it, or the file is another user's.
    """
    # Not in TMPDIR, which may differ between jobs; not through a link that somebody put there.
    name = f"horovod-gpu-{os.uname().nodename}-{os.getuid()}-{place_of(gpu)}"
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
    file.write(run)
    file.flush()
    return file


def place_of(gpu: str, driver: Path = DRIVER) -> str:
    """A GPU's place on the bus, from its number or the beginning of its UUID: one name for one GPU.
    Where the driver does not say, and for a part of a GPU (MIG), it is `gpu` itself."""
    places = sorted(driver.glob("*/information"))  # as nvidia-smi and PCI_BUS_ID count
    if gpu.isdecimal():
        return dict(enumerate(file.parent.name for file in places)).get(int(gpu), gpu)
    begins = re.compile(rf"GPU UUID:\s+{re.escape(gpu)}")
    return next((file.parent.name for file in places if begins.search(file.read_text())), gpu)
