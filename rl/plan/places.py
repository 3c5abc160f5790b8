"""Passes: on which host and devices each process is, and how many threads it has."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rl.plan.cluster import Cluster
from rl.plan.demand import ENGINE_ROLES, Demand, RoleName
from rl.plan.types import Notes

_GIB_PER_PROCESS = 1.0  # what a process with torch and vLLM or torchtitan takes before it loads a model
_PROCESSES_PER_CORE = 4


@dataclass(frozen=True)
class Wanted:
    """So many replicas of a role, each of so many processes. Engines are one replica each."""

    role: RoleName
    num_replicas: int
    procs_of_each: int

    @property
    def num_procs(self) -> int:
        return self.num_replicas * self.procs_of_each


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


@dataclass(frozen=True)
class Places:
    """Of each member's processes, and whether GPUs have several."""

    started: tuple[Member, ...]
    by_name: Mapping[str, tuple[Place, ...]]
    shared: bool

    def devices_of(self, role: RoleName) -> list[tuple[int, int]]:
        """(host, GPU) of each process of a role. Empty on a CPU."""
        of_role = (
            place for member in self.started if member.role == role for place in self.by_name[member.name]
        )
        return [(place.host, place.gpu) for place in of_role if place.gpu is not None]

    def beside(self, role: RoleName) -> bool:
        """Whether some process of a role shares its GPU."""
        mine = {*self.devices_of(role)}
        return any(len(roles) > 1 and device in mine for device, roles in self.on_devices().items())

    def on_devices(self) -> dict[tuple[int, int | None], list[RoleName]]:
        """(host, GPU) -> the role of each process there; reward workers need no device."""
        there: dict[tuple[int, int | None], list[RoleName]] = {}
        for member in self.started:
            if member.role != "reward":
                for place in self.by_name[member.name]:
                    there.setdefault((place.host, place.gpu), []).append(member.role)
        return there


def wanted(demand: Demand) -> tuple[Wanted, ...]:
    """In the order in which devices are dealt out."""
    generator, judge = demand.generator, demand.judge
    roles = [Wanted("trainer", 1, demand.trainer.layout.num_procs)]
    if generator is not None:
        roles.append(Wanted("generator", generator.num_replicas, generator.tensor_parallel))
    if demand.critic is not None:
        roles.append(Wanted("critic", 1, demand.critic.num_procs))
    if demand.reference is not None:
        roles.append(Wanted("reference", 1, demand.reference.num_procs))
    if judge is not None:
        roles.append(Wanted("judge", judge.num_replicas, judge.tensor_parallel))
    if demand.reward is not None:
        roles.append(Wanted("reward", demand.reward.num_procs, 1))
    return tuple(roles)


def _members(roles: Sequence[Wanted]) -> tuple[Member, ...]:
    return tuple(
        Member(of.role if of.role in ENGINE_ROLES else f"{of.role}-{i}", of.role, of.procs_of_each)
        for of in roles
        for i in range(of.num_replicas)
    )


def deal_out(demand: Demand, cluster: Cluster, notes: Notes) -> Places | None:
    """None where there is no place for somebody. No list is made before it is known that its members fit."""
    before, roles = len(notes.problems), wanted(demand)
    on_devices, shared = [of for of in roles if of.role != "reward"], False
    _check_hosts(roles, cluster, notes)
    if cluster.gpus:
        shared = _is_shared(on_devices, demand, cluster, notes)
        _check_one_role(on_devices, cluster, notes)
    elif demand.sharing == "side_by_side":
        notes.problem("places", "placement=side_by_side has no effect without GPUs; leave it out")
    if len(notes.problems) > before:
        return None
    places, devices, next_device = dict[str, tuple[Place, ...]](), cluster.devices, 0
    started = _members(roles)
    for member in started:
        if not devices or member.role == "reward":
            places[member.name] = (Place(0, None),) * member.num_procs
            continue
        if not shared and member.role not in ENGINE_ROLES:  # a generator's ranks meet on one host
            next_device = _on_one_host(member.num_procs, next_device, devices)
        numbers = [i % len(devices) for i in range(next_device, next_device + member.num_procs)]
        places[member.name] = tuple(Place(*devices[i]) for i in numbers)
        next_device += member.num_procs
    return Places(started, places, shared)


def _on_one_host(num_procs: int, first: int, devices: Sequence[tuple[int, int]]) -> int:
    """The first device from `first` on, from which so many are of one host; `first` where there is none."""
    for start in range(first, len(devices) - num_procs + 1):
        if devices[start][0] == devices[start + num_procs - 1][0]:
            return start
    return first


def _is_shared(on_devices: Sequence[Wanted], demand: Demand, cluster: Cluster, notes: Notes) -> bool:
    needed, num_gpus = sum(of.num_procs for of in on_devices), len(cluster.gpus)
    if demand.sharing == "alone" and needed > num_gpus:
        parts = " + ".join(f"{of.role} {of.num_procs}" for of in on_devices)
        notes.problem(
            "places",
            f"{needed} processes ({parts}) need a GPU each but the machine has {num_gpus}; use fewer, or set "
            f"--placement side_by_side",
        )
    shared = demand.sharing in ("side_by_side", "by_turns") or (
        demand.sharing == "auto" and needed > num_gpus
    )
    asked = demand.sharing != "auto"
    value = demand.sharing if asked else ("side_by_side" if shared else "alone")
    why = f"{needed} processes for {num_gpus} GPU{'s' * (num_gpus > 1)}"
    notes.settle(demand.name("placement"), demand.sharing, value, "asked for" if asked else why)
    return shared


def _check_one_role(on_devices: Sequence[Wanted], cluster: Cluster, notes: Notes) -> None:
    """The ranks of an engine, or of one generator, cannot share a GPU."""
    num_gpus = len(cluster.gpus)
    for of in on_devices:
        if of.procs_of_each > num_gpus:
            notes.problem(
                "places",
                f"{of.role} has {of.procs_of_each} processes and the machine {num_gpus} "
                f"GPU{'s' * (num_gpus > 1)}: those of one role cannot share; use fewer",
            )


def _check_hosts(roles: Sequence[Wanted], cluster: Cluster, notes: Notes) -> None:
    total, hosts = sum(of.num_procs for of in roles), cluster.hosts
    most = sum(min(int(h.free_gib / _GIB_PER_PROCESS), h.num_cores * _PROCESSES_PER_CORE) for h in hosts)
    if total > most:
        cores, free = sum(host.num_cores for host in hosts), sum(host.free_gib for host in hosts)
        notes.problem(
            "places",
            f"{total} processes are more than this machine can hold ({cores} cores, {free:.0f} GiB free: at "
            f"most {most}); use fewer",
        )


_BESIDE: dict[RoleName, Collection[RoleName]] = {
    "trainer": ("trainer", "critic"),  # both learn at the same time
    "critic": ("trainer", "critic"),
    "reference": ENGINE_ROLES,  # its forward pass meets those of both
    "generator": {"generator"},
    "judge": {"judge"},
}
"""Role -> who works at the same time, and shares the cores."""


def threads(places: Places, demand: Demand, cluster: Cluster, notes: Notes) -> dict[str, tuple[int, ...]]:
    """Member -> threads of each of its processes."""
    asked: dict[RoleName, int] = {"trainer": demand.trainer.num_threads}
    fixed: dict[RoleName, int] = {"reward": 1}
    if cluster.gpus:
        fixed["generator"] = 1
    if demand.generator is not None:
        asked["generator"] = demand.generator.num_threads
    settled, roles = dict[str, tuple[int, ...]](), set[RoleName]()
    for member in places.started:
        role, of_processes = member.role, []
        for place in places.by_name[member.name]:
            cores, others = (
                cluster.hosts[place.host].num_cores,
                _at_work(role, place.host, places, demand.overlap),
            )
            of_processes.append(asked.get(role) or fixed.get(role) or max(1, cores // others))
        if role != "reward" and role not in roles:
            roles.add(role)
            why = "it computes on a GPU" if role in fixed else f"{cores} cores for {others} at work at a time"
            reason = "asked for" if asked.get(role) else why
            notes.settle(f"{role}.num_threads", asked.get(role) or "auto", of_processes[0], reason)
        settled[member.name] = tuple(of_processes)
    return settled


def _at_work(role: RoleName, host: int, places: Places, overlap: bool) -> int:
    """Processes on a host that work at the same time as those of a role, itself among them."""
    beside = {*_BESIDE.get(role, (role,))}
    if overlap:
        beside |= {*(ENGINE_ROLES if role == "generator" else ("generator",))}
    return sum(
        place.host == host
        for member in places.started
        if member.role in beside
        for place in places.by_name[member.name]
    )
