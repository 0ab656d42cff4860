"""What a job takes to other hosts: variables of this one, and its address."""

from __future__ import annotations

from cluster.hosts import Host, Refusal
from cluster.probe import interfaces, own_address

# What leaves this host: variables whose names begin so, and those that FORWARD adds.
FORWARDED = (
    "PATH", "LD_LIBRARY_PATH", "LANG", "LC_", "TZ", "PYTHON", "HOROVOD_", "NCCL_", "GLOO_", "UCX_",
    "CUDA_", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_", "PL_", "HYDRA_", "MALLOC_",
    "FI_", "IBV_", "RDMAV_",  # fabrics other than Ethernet, as NCCL's plugins reach them
)  # fmt: skip
SECRET = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "_KEY")  # stay unless FORWARD names them


def forwarded(environment: dict[str, str]) -> dict[str, str]:
    """The variables of `environment` that may leave this host."""
    prefixes = tuple(environment.get("FORWARD", "").replace(",", " ").split())
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(prefixes)
        or (name.startswith(FORWARDED) and not any(word in name for word in SECRET))
    }
    visible = variables.get("CUDA_VISIBLE_DEVICES", "")
    if visible and ("SLURM_JOB_ID" in environment or visible.startswith(("GPU-", "MIG-"))):
        # Slurm set it for this node, or it names GPUs of this one, as PBS does.
        del variables["CUDA_VISIBLE_DEVICES"]
    return variables


def addresses(hosts: list[Host]) -> dict[Host, str]:
    """The address of this host for each of them: that of its `nic`, where the host file names one.

    The name of this host may lead to its loopback only; its own ranks get the address for others.
    """
    if nic := next((host.nic for host in hosts if host.is_here and host.nic), None):
        if (address := interfaces().get(nic)) is None:
            raise Refusal(f"this host has no network interface {nic} with an address: fix nic")
        return dict.fromkeys(hosts, address)
    towards = {}
    for host in hosts:
        if not host.is_here:
            try:
                towards[host] = own_address(host.address)
            except OSError as error:
                where = f"{host.name}: there is no route to {host.address}"
                raise Refusal(f"{where}: {error.strerror}") from None
    default = next(iter(towards.values()), "127.0.0.1")
    return {host: towards.get(host, default) for host in hosts}
