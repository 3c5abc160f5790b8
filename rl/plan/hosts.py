"""Pass: on which hosts the processes of each role may be."""

from collections.abc import Mapping, Sequence

from rl.plan.cluster import Cluster
from rl.plan.demand import Demand
from rl.plan.roles import ENGINE_ROLES, ROLES, RoleName
from rl.plan.sections import Hosts
from rl.plan.types import Notes


def allowed_hosts(
    roles: Sequence[RoleName], demand: Demand, cluster: Cluster, notes: Notes
) -> dict[RoleName, Hosts]:
    """By role, in the order in which they are filled. An unknown number is a problem, and left out."""
    allowed, everywhere = dict[RoleName, Hosts](), tuple(range(len(cluster.hosts)))
    joining = tuple(host for host in everywhere if cluster.hosts[host].may_join)
    present = everywhere[: len(everywhere) - len(joining)]
    for role in roles:
        asked = demand.hosts.get(role, ())
        setting = demand.name(f"{role}.hosts")
        for problem in _wrong(asked, cluster):
            notes.problem(f"{setting} {problem}; {_known(cluster)}")
        for host in sorted({*asked} & {*joining}) if role != "generator" else ():
            reason = "which may join later; name another: only generators may be there"
            notes.problem(f"{setting} names host {host}, {reason}")
        allowed[role] = tuple(host for host in dict.fromkeys(asked) if host in everywhere)
        if not allowed[role]:
            allowed[role] = _default(role, present, has_gpus=bool(cluster.gpus))
            allowed[role] += joining if role == "generator" else ()
        if len(everywhere) > 1:
            why = "asked for" if asked else _why(role, has_gpus=bool(cluster.gpus))
            notes.settle(setting, _written(asked) or "auto", _written(allowed[role]), why)
    return allowed


def _wrong(asked: Hosts, cluster: Cluster) -> list[str]:
    """What is wrong with the numbers."""
    problems = [f"names host {host}" for host in dict.fromkeys(asked) if host >= len(cluster.hosts)]
    if len({*asked}) < len(asked):
        problems.append("names a host twice")
    return problems


def _default(role: RoleName, everywhere: Hosts, has_gpus: bool) -> Hosts:
    """GPUs are dealt out over all hosts. On CPUs the engines have the first host's cores alone."""
    if has_gpus and ROLES[role].kind != "worker":
        return everywhere
    if has_gpus or role in ENGINE_ROLES:
        return everywhere[:1]
    return everywhere[1:] or everywhere


def _why(role: RoleName, has_gpus: bool) -> str:
    if ROLES[role].kind == "worker" and has_gpus:
        return "it needs no GPU"
    return "GPUs are dealt out in order" if has_gpus else "engines on the first host, the others elsewhere"


def _known(cluster: Cluster) -> str:
    count = len(cluster.hosts)
    return "the only host is 0" if count == 1 else f"the {count} hosts are 0 to {count - 1}"


def _written(hosts: Hosts) -> str:
    return " ".join(map(str, hosts))


def spread(num_procs: int, hosts: Hosts) -> Mapping[int, int]:
    """Rank -> host, as many on each in order; what is left over is on the last."""
    each = max(1, num_procs // len(hosts))
    return {rank: hosts[min(rank // each, len(hosts) - 1)] for rank in range(num_procs)}


def check_hosts(
    of_replicas: Sequence[tuple[RoleName, Sequence[int]]], demand: Demand, cluster: Cluster, notes: Notes
) -> None:
    """of_replicas: each one's role, and each of its processes' host."""
    for role, hosts in of_replicas:
        if role in ENGINE_ROLES:
            _check_even(role, hosts, demand, notes)
    for role in dict.fromkeys(role for role, _ in of_replicas):
        hosts_of_role = [host for of, hosts in of_replicas if of == role for host in hosts]
        _check_used(role, hosts_of_role, demand, cluster, notes)
    joining = {number for number, host in enumerate(cluster.hosts) if host.may_join}
    if not joining:
        return
    on = {host for role, hosts in of_replicas if role == "generator" for host in hosts}
    count, hosts_of = f"joining_hosts={len(joining)}", demand.name("generator.hosts")
    if demand.sharing == "by_turns":
        notes.problem(f"{count} has no effect with placement=by_turns; leave out one of them")
    elif unused := sorted(joining - on):
        notes.problem(
            f"{count}: no generator is on host {unused[0]}; raise {demand.name('generator.num_replicas')}, "
            f"or name it with --{hosts_of}",
        )
    elif not on - joining:
        notes.problem(
            f"{count}: every generator is on a host that may join; --{hosts_of} has to name another"
        )


def _check_used(
    role: RoleName, of_processes: Sequence[int], demand: Demand, cluster: Cluster, notes: Notes
) -> None:
    """of_processes: each one's host."""
    setting, more = demand.name(f"{role}.hosts"), demand.name(f"{role}.{ROLES[role].setting}")
    for host in demand.hosts.get(role, ()):
        if host not in of_processes and not cluster.hosts[host].may_join:
            count = len(of_processes)
            notes.problem(
                f"{setting} names host {host}, and none of the {role}'s {count} process{'es' * (count > 1)} "
                f"is there; leave it out, or raise {more}",
            )


def _check_even(role: RoleName, of_ranks: Sequence[int], demand: Demand, notes: Notes) -> None:
    """Monarch starts a mesh with as many processes on each of its hosts. of_ranks: each rank's host."""
    counts = {host: of_ranks.count(host) for host in dict.fromkeys(of_ranks)}
    if len({*counts.values()}) > 1:
        dealt = ", ".join(f"{count} on host {host}" for host, count in counts.items())
        notes.problem(
            f"{role} has {len(of_ranks)} processes, {dealt}: each of its hosts has to have as many; use "
            f"another layout, or name its hosts with --{demand.name(f'{role}.hosts')}",
        )
