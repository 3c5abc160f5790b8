"""Pass: whether it all fits: the fullest device, or host, with the figures."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rl.models.generator.vllm_config import Fill
from rl.plan.budgets import MARGIN, Taken, with_cache
from rl.plan.cluster import USABLE, Cluster
from rl.plan.demand import Demand
from rl.plan.memory import GIB, GIB_OF_PROCESS, Memory
from rl.plan.phases import Presences, by_phase
from rl.plan.places import Places
from rl.plan.roles import ENGINE_ROLES, ROLES, RoleName
from rl.plan.types import PHASES, Notes, Phase

_KEPT_ON_HOST = ("weights", "optimizer")
"""Parts of an engine's memory that it has on its host while it is suspended."""
_ByPhase = Mapping[RoleName, Mapping[Phase, Memory]]
"""Of each process of a role, on its device."""


def check_fit(
    demand: Demand,
    taken: Taken,
    caches: Mapping[RoleName, float | Fill],
    present: Presences,
    places: Places,
    published: Mapping[int, float],
    cluster: Cluster,
    notes: Notes,
) -> None:
    """Where vLLM takes what it finds free, it has to find what one sequence takes.

    published: host -> bytes of published weights, which are the host's memory, too.
    """
    whole = dict(taken.memory)
    for role, cache in caches.items():
        whole[role] = with_cache(whole[role], taken.least_cache[role] if isinstance(cache, Fill) else cache)
    if cluster.gpus:
        _check_devices(demand, by_phase(whole, present), places, cluster, notes)
        by_turns = demand.sharing == "by_turns" and demand.generator is not None
        _check_host_of_gpus(whole, by_turns, places, published, cluster, notes)
    else:
        _check_host(demand, by_phase(whole, present), places, cluster, notes)


def _check_host(demand: Demand, memory: _ByPhase, places: Places, cluster: Cluster, notes: Notes) -> None:
    for (host, _), roles in places.on_devices().items():
        free = cluster.hosts[host].free_gib
        needed = {phase: at_a_time({r: memory[r][phase] for r in roles}, roles) / GIB for phase in PHASES}
        fullest = max(needed, key=lambda phase: needed[phase])
        where = f" on {host_name(host, cluster)}" if len(cluster.hosts) > 1 else ""
        if (most := needed[fullest]) > free:
            notes.problem(
                f"the {_command(demand)} needs about {most:.1f} GiB{where} ({_list(roles, memory, fullest)}) "
                f"but {free:.1f} are free, {_tenths(most - free)} GiB short{_when(demand, fullest)}",
                is_of_fit=True,
            )


def _check_devices(demand: Demand, memory: _ByPhase, places: Places, cluster: Cluster, notes: Notes) -> None:
    worked_out = demand.generator is not None and not demand.generator.kv_cache_gib
    with_margin = worked_out and places.beside("generator") and demand.sharing != "by_turns"
    fullest, text = 0.0, ""
    for (host, gpu), roles in places.on_devices().items():
        if gpu is None:
            continue
        room = cluster.hosts[host].gpus[gpu].gib * USABLE
        margin = MARGIN if with_margin and "generator" in roles else 1.0
        for phase in PHASES:
            needed = sum(
                memory[role][phase].total / GIB * (1.0 if role == "generator" else margin) for role in roles
            )
            if needed > room and needed > fullest:
                fullest = needed
                spare = ", and a tenth of what the engines take to spare" * (margin > 1)
                text = (
                    f"{_name(host, gpu, cluster)} has {room:.1f} GiB for processes that need about "
                    f"{needed:.1f} ({_list(roles, memory, phase)}{spare}), {_tenths(needed - room)} GiB short"
                    f"{_when(demand, phase)}"
                )
    if text:
        notes.problem(text, is_of_fit=True)


def _check_host_of_gpus(
    memory: Mapping[RoleName, Memory],
    by_turns: bool,
    places: Places,
    published: Mapping[int, float],
    cluster: Cluster,
    notes: Notes,
) -> None:
    """A host holds its processes, published weights, and what a checkpoint is written from. By turns it also
    holds, while generators work, what its engines have: weights and moments, and no gradient."""
    engines = [(place.host, role) for role in ENGINE_ROLES for place in places.of(role)]
    leaves = _KEPT_ON_HOST if by_turns else ()
    gib = {
        role: (memory[role].staged + sum(memory[role].parts.get(part, 0.0) for part in leaves)) / GIB
        for _, role in engines
    }
    what = "processes, weights and checkpoints on their way"
    if by_turns:
        what = f"what leaves its GPUs, {what}"
    of_processes = Counter[int]()
    for member in places.started:
        for place in places.by_name[member.name]:
            of_processes[place.host] += round(GIB_OF_PROCESS[ROLES[member.role].kind] * GIB)
    for number, host in enumerate(cluster.hosts):
        roles = [role for on, role in engines if on == number]
        needed = sum(gib[role] for role in roles)
        needed -= _never_together({role: memory[role].staged for role in roles}, roles) / GIB
        weights = published.get(number, 0.0) / GIB
        processes = of_processes[number] / GIB
        needed += weights + processes
        if needed > host.free_gib:
            figures = [_figures(roles, gib)] if roles else []
            figures += [f"published weights {weights:.1f}"] if weights else []
            figures += [f"processes {processes:.1f}"]
            where = host_name(number, cluster) if len(cluster.hosts) > 1 else "the host"
            notes.problem(
                f"{where} has {host.free_gib:.1f} GiB free for {what}, about {needed:.1f} "
                f"({', '.join(figures)}), {_tenths(needed - host.free_gib)} GiB short",
                is_of_fit=True,
            )


def at_a_time(memory: Mapping[RoleName, Memory], roles: Sequence[RoleName]) -> float:
    """Bytes of these processes."""
    copies = {role: memory[role].parts.get("checkpoint", 0.0) for role in roles}
    return sum(memory[role].total for role in roles) - _never_together(copies, roles)


def _never_together(copies: Mapping[RoleName, float], roles: Sequence[RoleName]) -> float:
    """Of the copies that checkpoints are written from, all but the largest role's: the critic's checkpoint is
    on the disk before the trainer's is copied. copies: of each process of a role."""
    of_roles = [roles.count(role) * size for role, size in copies.items()]
    return sum(of_roles) - max(of_roles, default=0.0)


def host_name(host: int, cluster: Cluster) -> str:
    """For people."""
    of_host = cluster.hosts[host]
    label = of_host.address or ("may join" if of_host.may_join else "")
    return f"host {host} ({label})" if label else f"host {host}"


def _when(demand: Demand, phase: Phase) -> str:
    return f" in the phase {phase}" if demand.sharing == "by_turns" else ""


def _name(host: int, gpu: int, cluster: Cluster) -> str:
    return f"GPU {gpu}" if len(cluster.hosts) == 1 else f"GPU {gpu} of host {host}"


def _command(demand: Demand) -> str:
    return "server" if demand.command == "serve" else "run"


def _list(roles: Sequence[RoleName], memory: _ByPhase, phase: Phase) -> str:
    """A cache is counted; where one was worked out, it is what is left, and at least one sequence's."""
    return _figures(roles, {role: memory[role][phase].total / GIB for role in roles})


def _figures(roles: Sequence[RoleName], gib: Mapping[RoleName, float]) -> str:
    """gib: of each process of a role."""
    counts = Counter(roles).items()
    return ", ".join(f"{role} {f'{n} x ' if n > 1 else ''}{gib[role]:.1f}" for role, n in counts)


def _tenths(gib: float) -> str:
    """Rounded up, so that a shortfall is never 0."""
    return f"{math.ceil(gib * 10) / 10:.1f}"
