"""Passes: on which host and devices each process is, and how many threads it has."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl.plan.cluster import Cluster
from rl.plan.dealing import Member, Place, on_cpus, on_gpus
from rl.plan.demand import Demand
from rl.plan.hosts import allowed_hosts, check_hosts, spread
from rl.plan.memory import GIB_OF_PROCESS
from rl.plan.roles import ENGINE_ROLES, ROLES, RoleName
from rl.plan.sections import Hosts
from rl.plan.types import Notes

_PROCESSES_PER_CORE = 8
_PROCESSES_PER_GPU = 32


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
class Places:
    """Of each member's processes, and whether GPUs have several."""

    started: tuple[Member, ...]
    by_name: Mapping[str, tuple[Place, ...]]
    shared: bool

    def of(self, role: RoleName) -> list[Place]:
        """Of each process of a role."""
        names = [member.name for member in self.started if member.role == role]
        return [place for name in names for place in self.by_name[name]]

    def devices_of(self, role: RoleName) -> list[tuple[int, int]]:
        """(host, GPU) of each process of a role. Empty on a CPU."""
        return [(place.host, place.gpu) for place in self.of(role) if place.gpu is not None]

    def beside(self, role: RoleName) -> bool:
        """Whether some process of a role shares its GPU."""
        devices = {*self.devices_of(role)}
        return any(len(roles) > 1 and device in devices for device, roles in self.on_devices().items())

    def on_devices(self) -> dict[tuple[int, int | None], list[RoleName]]:
        """(host, GPU) -> the role of each process there; workers need no device."""
        roles_on: dict[tuple[int, int | None], list[RoleName]] = {}
        for member in self.started:
            if ROLES[member.role].kind != "worker":
                for place in self.by_name[member.name]:
                    roles_on.setdefault((place.host, place.gpu), []).append(member.role)
        return roles_on


def wanted(demand: Demand) -> tuple[Wanted, ...]:
    """In the order in which devices are dealt out."""
    return tuple(Wanted(name, *size) for name, role in ROLES.items() if (size := role.size(demand)))


def _members(roles: Sequence[Wanted]) -> tuple[Member, ...]:
    return tuple(
        Member(of.role if of.role in ENGINE_ROLES else f"{of.role}-{i}", of.role, of.procs_of_each)
        for of in roles
        for i in range(of.num_replicas)
    )


def deal_out(demand: Demand, cluster: Cluster, notes: Notes) -> Places | None:
    """None where there is no place for somebody. No list is made before it is known that its members fit."""
    before, roles = len(notes.problems), wanted(demand)
    on_devices = [of for of in roles if ROLES[of.role].kind != "worker"]
    allowed = allowed_hosts([of.role for of in roles], demand, cluster, notes)
    _check_number(roles, cluster, notes)
    if cluster.gpus:
        _check_one_role(on_devices, allowed, demand, cluster, notes)
    elif demand.sharing in ("alone", "side_by_side"):
        notes.problem(f"placement={demand.sharing} has no effect without GPUs; leave it out")
    if len(notes.problems) > before:
        return None
    started = _members(roles)
    if not cluster.gpus:
        if demand.sharing == "by_turns":
            notes.settle(demand.name("placement"), "by_turns", "by_turns", "asked for")
        else:
            notes.settle(demand.name("placement"), "auto", "side_by_side", "all processes share the CPU")
        return _checked(Places(started, on_cpus(started, allowed), False), demand, cluster, notes)
    named, alone = {role for role in allowed if demand.hosts.get(role)}, None
    if demand.sharing in ("auto", "alone"):
        alone = on_gpus(started, cluster, allowed, named, in_turn=False)
    shared = alone is None
    _settle_sharing(on_devices, demand, shared, cluster, notes)
    if shared and demand.sharing == "alone":
        return None
    places = alone or on_gpus(started, cluster, allowed, named, in_turn=True)
    assert places is not None, "each role fits the GPUs"
    return _checked(Places(started, places, shared), demand, cluster, notes)


def _checked(places: Places, demand: Demand, cluster: Cluster, notes: Notes) -> Places | None:
    """None where a host has too many or too few processes of a role."""
    before = len(notes.problems)
    hosts = {name: [place.host for place in of_name] for name, of_name in places.by_name.items()}
    check_hosts([(member.role, hosts[member.name]) for member in places.started], demand, cluster, notes)
    return places if len(notes.problems) == before else None


def _settle_sharing(
    on_devices: Sequence[Wanted], demand: Demand, shared: bool, cluster: Cluster, notes: Notes
) -> None:
    needed, num_gpus = sum(of.num_procs for of in on_devices), len(cluster.gpus)
    apart = (
        ", not all of them where a role's ranks meet, or on its hosts"
        if shared and needed <= num_gpus
        else ""
    )
    if shared and demand.sharing == "alone":
        parts = " + ".join(f"{of.role} {of.num_procs}" for of in on_devices)
        notes.problem(
            f"{needed} processes ({parts}) need a GPU each but {_have(cluster)} {num_gpus}{apart}; use "
            f"fewer, or set --placement side_by_side",
        )
    asked = demand.sharing != "auto"
    value = demand.sharing if asked else ("side_by_side" if shared else "alone")
    why = f"{needed} processes for {num_gpus} GPU{'s' * (num_gpus > 1)}{apart}"
    notes.settle(demand.name("placement"), demand.sharing, value, "asked for" if asked else why)


def _have(cluster: Cluster) -> str:
    return "the machine has" if len(cluster.hosts) == 1 else f"the {len(cluster.hosts)} hosts have"


def _cluster_name(cluster: Cluster) -> str:
    return "this machine" if len(cluster.hosts) == 1 else "these hosts"


def _check_one_role(
    on_devices: Sequence[Wanted],
    allowed: Mapping[RoleName, Hosts],
    demand: Demand,
    cluster: Cluster,
    notes: Notes,
) -> None:
    """The ranks of an engine cannot share a GPU; those of one generator are on one host besides."""
    for of in on_devices:
        by_host = [len(cluster.hosts[host].gpus) for host in allowed[of.role]]
        num_gpus = sum(by_host) if of.role in ENGINE_ROLES else max(by_host)
        if of.procs_of_each > num_gpus:
            where = "the machine" if len(cluster.hosts) == 1 or of.role in ENGINE_ROLES else "a host"
            if len(by_host) < len(cluster.hosts):
                where = f"host {allowed[of.role][0]}" if len(by_host) == 1 else f"{len(by_host)} hosts"
            notes.problem(
                f"{of.role} has {of.procs_of_each} processes and {where} {num_gpus} "
                f"GPU{'s' * (num_gpus > 1)}: those of one role cannot share; use fewer",
            )
        elif of.role in ENGINE_ROLES and demand.hosts.get(of.role):
            on_host = Counter(spread(of.procs_of_each, allowed[of.role]).values())
            for host, count in on_host.items():
                if count > len(cluster.hosts[host].gpus):
                    notes.problem(
                        f"{of.role} has {count} of its {of.procs_of_each} processes on host {host}, which "
                        f"has {len(cluster.hosts[host].gpus)} GPUs: those of one role cannot share; use "
                        f"fewer, or name other hosts with --{demand.name(f'{of.role}.hosts')}",
                    )


def _check_number(roles: Sequence[Wanted], cluster: Cluster, notes: Notes) -> None:
    """The bound keeps lists short, and a CPU's cores to some use. A model's own memory is looked at later."""
    total = sum(of.num_procs for of in roles)
    num_cores = sum(host.num_cores for host in cluster.hosts)
    most = _PROCESSES_PER_CORE * num_cores
    if cluster.gpus:
        most = _PROCESSES_PER_GPU * len(cluster.gpus) + num_cores
    if total > most:
        notes.problem(
            f"{total} processes are more than {_cluster_name(cluster)} can hold ({cluster}: at most {most}); "
            f"use fewer",
        )
        return
    free = sum(host.free_gib for host in cluster.hosts)
    needed = sum(GIB_OF_PROCESS[ROLES[of.role].kind] * of.num_procs for of in roles)
    if not cluster.gpus and needed > free:
        notes.problem(
            f"{total} processes take {needed:.1f} GiB before they load a model, and {_cluster_name(cluster)} "
            f"{'has' if len(cluster.hosts) == 1 else 'have'} {free:.1f} free; use fewer",
        )


def threads(places: Places, demand: Demand, cluster: Cluster, notes: Notes) -> dict[str, tuple[int, ...]]:
    """Member -> threads of each of its processes."""
    asked: dict[RoleName, int] = {"trainer": demand.trainer.num_threads}
    of_one_thread = ("worker", "generator") if cluster.gpus else ("worker",)  # kinds
    fixed = {name: 1 for name, role in ROLES.items() if role.kind in of_one_thread}
    if demand.generator is not None:
        asked["generator"] = demand.generator.num_threads
    counts = Counter(
        (member.role, place.host) for member in places.started for place in places.by_name[member.name]
    )
    shares = {at: _share(*at, counts, demand.overlap, cluster) for at in counts}
    settled = {}
    for member in places.started:
        num_threads = asked.get(member.role) or fixed.get(member.role)
        settled[member.name] = tuple(
            num_threads or shares[member.role, place.host][0] for place in places.by_name[member.name]
        )
    for role in ("trainer", "generator"):  # the roles with such a setting
        if first := next((member for member in places.started if member.role == role), None):
            share = shares[role, places.by_name[first.name][0].host]
            why = "it computes on a GPU" if role in fixed else share[1]
            reason = "asked for" if asked.get(role) else why
            value = settled[first.name][0]
            notes.settle(f"{role}.num_threads", asked.get(role) or "auto", value, reason)
    return settled


def _share(
    role: RoleName, host: int, counts: Mapping[tuple[RoleName, int], int], overlap: bool, cluster: Cluster
) -> tuple[int, str]:
    """Threads of each process of a role on a host, and why: its cores over who works at the same time."""
    beside = {*ROLES[role].beside}
    if overlap:
        beside |= {*(ENGINE_ROLES if role == "generator" else ("generator",))}
    at_work = sum(counts.get((neighbour, host), 0) for neighbour in beside)
    cores = cluster.hosts[host].num_cores
    return max(1, cores // at_work), f"{cores} cores for {at_work} at work at a time"
