"""Which process gets which device of which host."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rl.plan.cluster import Cluster
from rl.plan.hosts import spread
from rl.plan.roles import ENGINE_ROLES, ROLES, RoleName
from rl.plan.sections import Hosts

Device = tuple[int, int]
"""(host, GPU)."""


@dataclass(frozen=True)
class Member:
    """A replica to be: its processes are started, and end, as one."""

    name: str
    role: RoleName
    num_procs: int


@dataclass(frozen=True)
class Place:
    """Of one process. gpu: its number on the host; None on a CPU."""

    host: int
    gpu: int | None


def on_cpus(started: Sequence[Member], allowed: Mapping[RoleName, Hosts]) -> dict[str, tuple[Place, ...]]:
    """An engine's ranks are spread over its hosts; replicas of the others go to one after the other."""
    places, count = dict[str, tuple[Place, ...]](), Counter[RoleName]()
    for member in started:
        hosts = allowed[member.role]
        if member.role in ENGINE_ROLES:
            by_rank = spread(member.num_procs, hosts)
            places[member.name] = tuple(Place(by_rank[rank], None) for rank in range(member.num_procs))
        else:
            places[member.name] = (Place(hosts[count[member.role] % len(hosts)], None),) * member.num_procs
        count[member.role] += 1
    return places


def on_gpus(
    started: Sequence[Member],
    cluster: Cluster,
    allowed: Mapping[RoleName, Hosts],
    named: Collection[RoleName],
    in_turn: bool,
) -> dict[str, tuple[Place, ...]] | None:
    """named: roles whose hosts somebody chose. in_turn: begin again where the GPUs are used up; else None.

    Roles with named hosts are spread over those as on CPUs; the others take GPUs in order. An engine's ranks
    on one host follow each other. Those of a generator or judge meet on one host.
    """
    places = on_cpus([member for member in started if ROLES[member.role].kind == "worker"], allowed)
    devices, count = _Devices(cluster, in_turn), Counter[RoleName]()
    for member in started:
        if member.name in places:
            continue
        hosts = allowed[member.role]
        if member.role in named:
            taken = _on_named(member, hosts, count[member.role], devices)
        else:
            taken = devices.in_order(hosts, member.num_procs, on_one=member.role not in ENGINE_ROLES)
        if taken is None:
            return None
        taken = sorted(taken, key=lambda device: hosts.index(device[0]))
        places[member.name] = tuple(Place(*device) for device in taken)
        count[member.role] += 1
    return places


def _on_named(member: Member, hosts: Hosts, number: int, devices: "_Devices") -> list[Device] | None:
    """number: how many of its role were there before it."""
    if member.role in ENGINE_ROLES:
        parts = Counter(spread(member.num_procs, hosts).values()).items()
        taken = [devices.on_host(host, count) for host, count in parts]
        return None if None in taken else [device for part in taken if part for device in part]
    first = number % len(hosts)
    in_turn = hosts[first:] + hosts[:first]
    for host in sorted(in_turn, key=lambda host: devices.rounds(host, member.num_procs)):
        if (part := devices.on_host(host, member.num_procs)) is not None:
            return part
    return None


class _Devices:
    """GPUs, as they are dealt out."""

    def __init__(self, cluster: Cluster, in_turn: bool):
        self._all, self._in_turn = cluster.devices, in_turn
        self._next_of = Counter[Hosts]()
        self._used = set[Device]()

    def on_host(self, host: int, count: int) -> list[Device] | None:
        """So many of one host; None where it has too few that are free."""
        devices = [device for device in self._all if device[0] == host]
        if not self._in_turn:
            devices = [device for device in devices if device not in self._used]
        if count > len(devices):
            return None
        first = self._next_of[(host,)] % len(devices) if self._in_turn else 0
        self._next_of[(host,)] = first + count
        return self._taken([devices[i % len(devices)] for i in range(first, first + count)])

    def rounds(self, host: int, count: int) -> int:
        """How often the host's GPUs have been dealt out, once so many more are."""
        num_devices = sum(device[0] == host for device in self._all)
        return max(0, self._next_of[(host,)] + count - 1) // max(1, num_devices) if self._in_turn else 0

    def in_order(self, hosts: Hosts, count: int, on_one: bool) -> list[Device] | None:
        """So many of all hosts; on_one: all of one host. GPUs between are left to later roles."""
        devices, first = [device for device in self._all if device[0] in hosts], self._next_of[hosts]
        if not self._in_turn:
            devices, first = [device for device in devices if device not in self._used], 0
        if on_one:
            first = self._on_one_host(count, first, devices)
        last = first + count
        if last > len(devices) and not self._in_turn:
            return None
        taken = self._taken([devices[i % len(devices)] for i in range(first, last)])
        self._next_of[hosts] = last
        return taken

    def _taken(self, devices: list[Device]) -> list[Device]:
        self._used.update(devices)
        return devices

    def _on_one_host(self, num_procs: int, first: int, devices: Sequence[Device]) -> int:
        """The first device from `first` on, from which so many are of one host; else past the end."""
        count = len(devices)
        for start in range(first, first + (count if self._in_turn else max(0, count - first))):
            at, end = start % count, start % count + num_procs - 1
            if end < count and devices[at][0] == devices[end][0]:
                return start
        return count
