"""The same job under mpirun, where Horovod was built with MPI (make install MPI=1).

    python -m cluster.mpirun -np 8 -H node1:4,node2:4 python template.py

Prints the command line of Open MPI's mpirun and becomes it: one application context per host, so
that each has its own GPUs and variables. As in cluster/horovodrun.py, only variables of an
allow-list leave this host; they are on the command line by name only, those of the host file with
their values. Output, signals and the end of the job are left to mpirun.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys

from cluster.forwarding import SECRET, forwarded
from cluster.hostfile import add_arguments, chosen
from cluster.hosts import Refusal
from cluster.ranks import Rank, ranks


def line(members: list[Rank], command: list[str]) -> list[str]:
    """mpirun's command line for these processes."""
    hosts = list(dict.fromkeys(member.host for member in members))
    argv = ["mpirun", "--tag-output", "--bind-to", "none", "--map-by", "slot"]
    argv += ["--mca", "pml", "ob1", "--mca", "btl", "^openib"]  # as horovodrun --mpi does
    if os.geteuid() == 0:
        argv.append("--allow-run-as-root")
    if nics := sorted({host.nic for host in hosts if host.nic}):
        for transport in ("btl_tcp_if_include", "oob_tcp_if_include"):
            argv += ["--mca", transport, ",".join(nics)]
    options = {" ".join(host.ssh_options()) for host in hosts if not host.is_here}
    if any(" " in option for host in hosts for option in host.ssh):
        raise Refusal("LAUNCHER=mpi: ssh options with spaces: put them in ~/.ssh/config")
    if len(options) > 1:
        raise Refusal("LAUNCHER=mpi: mpirun takes one user, port and ssh options for all hosts")
    if options:
        argv += ["--mca", "plm_rsh_agent", options.pop()]
    for index, host in enumerate(hosts):
        count = sum(member.host == host for member in members)
        argv += [":"] if index else []
        argv += ["-np", str(count), "-H", f"{host.name}:{count}"]
        for name in sorted(forwarded(dict(os.environ))):
            argv += ["-x", name]  # its value travels between mpirun and its daemons
        for name in host.env:
            if any(word in name for word in SECRET):
                raise Refusal(f"{host.name}: env: {name}: mpirun would show it on its command line")
        variables = dict(host.env)
        if host.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.gpus[:count]))
            variables.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi counts
        if host.nic:
            variables["NCCL_SOCKET_IFNAME"] = f"={host.nic}"
        for name, value in variables.items():
            argv += ["-x", f"{name}={value}"]
        argv += command
    return argv


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cluster.mpirun", description=__doc__.partition("\n")[0]
    )
    add_arguments(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each process runs")
    arguments = parser.parse_args()
    os.environ |= {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    os.environ["HOROVOD_LAUNCHED"] = shlex.join(sys.orig_argv)  # runs/run.py says how to go on
    try:
        argv = line(ranks(chosen(arguments), arguments.np), arguments.command)
        if shutil.which("mpirun") is None:
            raise Refusal("mpirun is missing: sudo apt-get install libopenmpi-dev openmpi-bin")
        from horovod.torch import mpi_built

        if not mpi_built():
            raise Refusal("Horovod was built without MPI: make install MPI=1")
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(shlex.join(argv), flush=True)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    sys.exit(main())
