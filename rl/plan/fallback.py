"""Fallbacks: where engines go on when hosts are lost for good. Settled before the run starts, as all else."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from rl.models.layout import Layout
from rl.plan.cluster import Cluster
from rl.plan.demand import ENGINE_ROLES, Demand, Facts, RoleName
from rl.plan.resolve import resolve
from rl.plan.sections import Hosts
from rl.plan.types import Plan, Problem, Replica, Settled


def resolve_with_fallbacks(demand: Demand, facts: Facts, cluster: Cluster) -> Plan | tuple[Problem, ...]:
    """As resolve; and for each host that engines may lose, that they can go on without it."""
    plan = resolve(_bare(demand), facts, cluster)
    trainer, settled = demand.trainer, list[Settled]()
    if isinstance(plan, tuple) or not (trainer.min_hosts or trainer.spare_hosts):
        return plan
    if problems := _problems(demand, plan):
        return tuple(Problem(text, "fallback") for text in problems)
    for lost in engine_hosts(plan):
        name = demand.name("trainer.spare_hosts" if trainer.spare_hosts else "trainer.min_hosts")
        engines = without(plan, demand, facts, {lost})
        if isinstance(engines, str):
            return (Problem(f"{name}: without host {lost} {engines}", "fallback"),)
        settled += [
            Settled(f"{replica.role} without host {lost}", "", _shown(replica), name) for replica in engines
        ]
    return replace(plan, settled=(*plan.settled, *settled))


def without(plan: Plan, demand: Demand, facts: Facts, lost: Collection[int]) -> tuple[Replica, ...] | str:
    """Trainer, critic and reference as they are without these hosts; or why they cannot be.

    Spare hosts take the place of lost ones; where none is left, the layout gets smaller.
    """
    changed, trainer = _bare(demand), demand.trainer
    spare = [host for host in trainer.spare_hosts if host not in lost]
    for replica in _engines(plan):
        before = _hosts(replica)
        now = tuple(host for host in before if host not in lost)
        now = (*now, *[host for host in spare if host not in now][: len(before) - len(now)])
        least = trainer.min_hosts or len(before)
        if len(now) < min(least, len(before)):
            return f"{replica.role} has {len(now)} of {len(before)} hosts, and needs {least}"
        layout = _smaller(_layout(replica.role, demand), len(before), len(now))
        if layout is None:
            return f"{replica.role}'s layout cannot be made smaller for {len(now)} of {len(before)} hosts"
        changed = _with(changed, replica.role, layout, now)
    made = resolve(changed, facts, plan.cluster)
    if isinstance(made, tuple):
        return "; ".join(problem.text for problem in made)
    engines = tuple(_engines(made))
    others = [replica for replica in plan.replicas if replica.role not in ENGINE_ROLES]
    if taken := (_devices(engines) - _devices(_engines(plan))) & _devices(others):
        host, gpu = min(taken)
        return f"GPU {host}:{gpu} has another role; a spare host has to have none"
    return engines


def engine_hosts(plan: Plan) -> Hosts:
    return tuple(dict.fromkeys(host for replica in _engines(plan) for host in _hosts(replica)))


def _problems(demand: Demand, plan: Plan) -> list[str]:
    trainer, hosts = demand.trainer, engine_hosts(plan)
    most = max(len(_hosts(replica)) for replica in _engines(plan))
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


def _engines(plan: Plan) -> list[Replica]:
    return [replica for replica in plan.replicas if replica.role in ENGINE_ROLES]


def _hosts(replica: Replica) -> Hosts:
    return tuple(dict.fromkeys(process.host for process in replica.processes))


def _devices(replicas: Collection[Replica]) -> set[tuple[int, int]]:
    return {(process.host, gpu) for r in replicas for process in r.processes for gpu in process.gpus}


def _layout(role: RoleName, demand: Demand) -> Layout:
    layouts: Mapping[RoleName, Layout | None] = {
        "trainer": demand.trainer.layout, "critic": demand.critic, "reference": demand.reference
    }  # fmt: skip
    layout = layouts[role]
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
    return replace(demand, **{role: layout})  # type: ignore[arg-type]


def _shown(replica: Replica) -> str:
    hosts = " ".join(map(str, _hosts(replica)))
    return f"{len(replica.processes)} processes on hosts {hosts}"
