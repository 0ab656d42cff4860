"""Which process of a job runs on which host, as Horovod counts them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from cluster.hostfile import listed
from cluster.hosts import Host, Refusal


@dataclass(frozen=True)
class Rank:
    """One process and its place in the job, as Horovod counts."""

    host: Host
    rank: int
    local_rank: int
    local_size: int
    cross_rank: int  # the number of its host, of those that have such a local rank
    cross_size: int  # how many hosts have such a local rank

    def environment(self, size: int) -> dict[str, str]:
        """The variables from which Horovod takes the place of the process."""
        variables = {
            "HOROVOD_HOSTNAME": self.host.name,
            "HOROVOD_RANK": self.rank,
            "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": self.local_rank,
            "HOROVOD_LOCAL_SIZE": self.local_size,
            "HOROVOD_CROSS_RANK": self.cross_rank,
            "HOROVOD_CROSS_SIZE": self.cross_size,
        }
        if self.host.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self.host.gpus[self.local_rank]
        return {name: str(value) for name, value in variables.items()} | self.host.env


def ranks(hosts: list[Host], size: int | None = None) -> list[Rank]:
    """`size` processes, by default as many as there are slots; hosts are filled in their order.

    Raises:
        Refusal: when there are fewer slots.
    """
    slots = sum(host.slots for host in hosts)
    size = slots if size is None else size
    if not 1 <= size <= slots:
        there = listed({host.name: host.slots for host in hosts})
        raise Refusal(f"NP={size} processes on {slots} slots ({there}): take 1 to {slots}")
    local_sizes, left = [], size
    for host in hosts:
        local_sizes.append(min(host.slots, left))
        left -= local_sizes[-1]
    members: list[Rank] = []
    for index, (host, local_size) in enumerate(zip(hosts, local_sizes)):
        for local_rank in range(local_size):
            cross = [other > local_rank for other in local_sizes]
            places = (local_rank, local_size, sum(cross[:index]), sum(cross))
            members.append(Rank(host, len(members), *places))
    return members


def used(hosts: list[Host], size: int | None) -> list[Host]:
    """The hosts that `size` processes run on, each with as many slots as it has processes.

    Raises:
        Refusal: see `ranks`.
    """
    counts = Counter(member.host for member in ranks(hosts, size))
    return [replace(host, slots=count) for host, count in counts.items()]
