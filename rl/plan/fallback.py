"""Fallbacks: where engines go on when hosts are lost for good. Settled before the run starts, as all else."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice

from rl.models.layout import Layout
from rl.plan.budgets import gib
from rl.plan.cluster import USABLE, Cluster
from rl.plan.demand import Demand, Facts
from rl.plan.memory import GIB
from rl.plan.resolve import resolve
from rl.plan.roles import ENGINE_ROLES, RoleName
from rl.plan.sections import Hosts
from rl.plan.types import PHASES, GeneratorSpec, Plan, Problem, Replica, Settled

_MOST_LOSSES = 64  # of one number of hosts


def resolve_with_fallbacks(demand: Demand, facts: Facts, cluster: Cluster) -> Plan | tuple[Problem, ...]:
    """As resolve; and for each host that engines may lose, that they can go on without it."""
    plan = resolve(_bare(demand), facts, cluster)
    trainer, settled = demand.trainer, list[Settled]()
    if isinstance(plan, tuple) or not (trainer.min_hosts or trainer.spare_hosts):
        return plan
    if problems := _problems(demand, plan):
        return tuple(Problem(text) for text in problems)
    name = demand.name("trainer.spare_hosts" if trainer.spare_hosts else "trainer.min_hosts")
    for lost in _losses(demand, plan):
        numbers = " ".join(map(str, lost))
        engines = without(plan, demand, facts, lost)
        if isinstance(engines, str):
            return (Problem(f"{name}: without host {numbers} {engines}"),)
        if len(lost) == 1:
            alone = _without_any(plan, demand, lost)
            settled += [
                Settled(f"{replica.role} without host {numbers}", "", _shown(replica) + alone, name)
                for replica in engines
            ]
    return replace(plan, settled=(*plan.settled, *settled), spare_hosts=trainer.spare_hosts)


def without(plan: Plan, demand: Demand, facts: Facts, lost: Collection[int]) -> tuple[Replica, ...] | str:
    """Trainer, critic and reference as they are without these hosts; or why they cannot be.

    Spare hosts take the place of lost ones; where none is left, the layout gets smaller.
    """
    changed, trainer = _with_caches(_bare(demand), plan), demand.trainer
    # What the run has settled. Processes that stay have its dtype, whatever fewer or other hosts could do.
    changed = replace(changed, delta="auto", dtype=plan.value_of("dtype"))  # type: ignore[arg-type]
    if plan.takes_turns:
        changed = replace(changed, sharing="by_turns")
    spare = [host for host in trainer.spare_hosts if host not in lost]
    staying = [replica for replica in plan.replicas if replica.role not in ENGINE_ROLES]
    for replica in _engines(plan):
        before = replica.hosts
        now = tuple(host for host in before if host not in lost)
        added = [host for host in spare if host not in now][: len(before) - len(now)]
        if busy := [host for host in added if any(device[0] == host for device in _devices(staying))]:
            return f"host {busy[0]}'s GPUs have another role; a spare host's have none"
        now = (*now, *added)
        least = trainer.min_hosts or len(before)
        if len(now) < min(least, len(before)):
            return f"{replica.role} has {len(now)} of {len(before)} hosts, and needs {least}"
        layout = _smaller(_layout(replica.role, demand), len(before), len(now))
        if layout is None:
            return f"{replica.role}'s layout cannot be made smaller for {len(now)} of {len(before)} hosts"
        changed = _with(changed, replica.role, layout, now)
    after = resolve(changed, facts, plan.cluster)
    if isinstance(after, tuple):
        return "; ".join(problem.text for problem in after)
    if after.takes_turns and not plan.takes_turns:
        return "what is left fits by turns alone; set --placement by_turns"
    engines = tuple(_engines(after))
    if taken := (_devices(engines) - _devices(_engines(plan))) & _devices(staying):
        host, gpu = min(taken)
        return f"GPU {host}:{gpu} has another role; give engines hosts of their own"
    no_room = "" if plan.takes_turns else _without_room(engines, staying, plan.cluster)
    return no_room or engines


def _without_any(plan: Plan, demand: Demand, lost: Collection[int]) -> str:
    """What goes with these hosts that the run cannot do without: it ends, unless they are back in time."""
    for role in dict.fromkeys(r.role for r in plan.replicas if r.role not in ENGINE_ROLES):
        if {host for replica in plan.of(role) for host in replica.hosts} <= {*lost}:
            return f", but no {role} process is left; set {demand.name(f'{role}.hosts')} to more hosts"
    if demand.transport == "torchstore" and 0 in lost:
        return ", but torchstore's process is gone; set weight_sync.transport=shared_memory"
    return ""


def _without_room(engines: Sequence[Replica], staying: Sequence[Replica], cluster: Cluster) -> str:
    """On which of their GPUs engines have no room beside what stays there; empty: on none."""
    for host, gpu in sorted(_devices(engines)):
        processes = [p for r in (*engines, *staying) for p in r.processes if p.host == host and gpu in p.gpus]
        needed = max(sum(p.memory[phase].total for p in processes if p.memory) for phase in PHASES) / GIB
        room = cluster.hosts[host].gpus[gpu].gib * USABLE
        if needed > room:
            return (
                f"GPU {host}:{gpu} would need {needed:.1f} of {room:.1f} GiB; give engines hosts of their "
                f"own, or generators less memory"
            )
    return ""


def engine_hosts(plan: Plan) -> Hosts:
    return tuple(dict.fromkeys(host for replica in _engines(plan) for host in replica.hosts))


def _losses(demand: Demand, plan: Plan) -> Iterator[Hosts]:
    """Every set of hosts that engines may lose, the small ones first, as far as they can be looked at."""
    hosts, trainer = engine_hosts(plan), demand.trainer
    fewest = min(len(replica.hosts) for replica in _engines(plan))
    most = (fewest - trainer.min_hosts if trainer.min_hosts else 0) + len(trainer.spare_hosts)
    for count in range(1, max(1, most) + 1):
        yield from islice(combinations(hosts, count), _MOST_LOSSES)


def _problems(demand: Demand, plan: Plan) -> list[str]:
    trainer, hosts = demand.trainer, engine_hosts(plan)
    most = max(len(replica.hosts) for replica in _engines(plan))
    least, spare = (demand.name(f"trainer.{name}") for name in ("min_hosts", "spare_hosts"))
    problems = []
    if trainer.min_hosts >= most > 0:
        problems.append(f"{least}={trainer.min_hosts} has no effect on engines of {most}; give fewer, or 0")
    for host in trainer.spare_hosts:
        if host >= len(plan.cluster.hosts) or plan.cluster.hosts[host].may_join:
            problems.append(f"{spare} names host {host}, which is not there; name one of --hosts")
        elif host in hosts:
            problems.append(f"{spare} names host {host}, which engines have already; name another")
    return problems


def _bare(demand: Demand) -> Demand:
    return replace(demand, trainer=replace(demand.trainer, min_hosts=0, spare_hosts=()))


def _with_caches(demand: Demand, plan: Plan) -> Demand:
    """Generators have what they were started with."""
    if demand.generator is None:
        return demand
    spec = plan.of("generator")[0].spec
    assert isinstance(spec, GeneratorSpec)
    cache = spec.config.kv_cache_gib
    return replace(demand, generator=replace(demand.generator, kv_cache_gib=gib(cache)))


def _engines(plan: Plan) -> list[Replica]:
    return [replica for replica in plan.replicas if replica.role in ENGINE_ROLES]


def _devices(replicas: Collection[Replica]) -> set[tuple[int, int]]:
    return {(process.host, gpu) for r in replicas for process in r.processes for gpu in process.gpus}


def _layout(role: RoleName, demand: Demand) -> Layout:
    layout = demand.layout(role)
    assert layout is not None
    return layout


def _smaller(layout: Layout, before: int, now: int) -> Layout | None:
    """As many processes on each host: fewer copies, else fewer shards."""
    for axis in ("replicate", "shard"):
        size = getattr(layout, axis) * now
        if size % before == 0:
            return replace(layout, **{axis: size // before})
    return None


def _with(demand: Demand, role: RoleName, layout: Layout, hosts: Hosts) -> Demand:
    demand = replace(demand, hosts={**demand.hosts, role: hosts})
    if role == "trainer":
        return replace(demand, trainer=replace(demand.trainer, layout=layout, hosts=hosts))
    return replace(demand, engines={**demand.engines, role: layout})


def _shown(replica: Replica) -> str:
    hosts = " ".join(map(str, replica.hosts))
    return f"{len(replica.processes)} processes on hosts {hosts}"
