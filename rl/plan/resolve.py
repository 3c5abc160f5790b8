"""resolve: from what is asked for to a Plan, or to everything that keeps it from being one.

Each pass is a function of small values that calls no other pass. It writes down problems and reasons, and
gives a value all the same, so that one look finds everything.
"""

from collections.abc import Mapping
from dataclasses import replace

from rl.models.generator.vllm_config import Fill
from rl.plan.budgets import (
    asked_caches,
    check_asked,
    engine_budgets,
    generators_cache,
    memories,
    with_cache,
)
from rl.plan.cluster import Cluster
from rl.plan.demand import Demand, Facts, RoleName
from rl.plan.fit import check_fit
from rl.plan.links import links
from rl.plan.memory import Memory
from rl.plan.numerics import settle_numerics
from rl.plan.phases import by_phase, presences, stays
from rl.plan.places import Places, deal_out, threads
from rl.plan.remedies import changes, last_remedy
from rl.plan.shapes import check_shapes
from rl.plan.specs import Spec, longest_sequence, max_restarts, specs
from rl.plan.types import EngineSpec, GeneratorSpec, Notes, Phase, Plan, Problem, Process, Replica


def resolve(demand: Demand, facts: Facts, cluster: Cluster) -> Plan | tuple[Problem, ...]:
    plan, problems = _resolve(demand, facts, cluster)
    if plan is not None:
        return plan
    if not any(problem.made_by == "fit" for problem in problems):
        return problems
    remedy = _remedy(demand, facts, cluster, problems)
    return tuple(
        replace(problem, text=f"{problem.text}; {remedy}") if problem.made_by == "fit" else problem
        for problem in problems
    )


def _resolve(demand: Demand, facts: Facts, cluster: Cluster) -> tuple[Plan | None, tuple[Problem, ...]]:
    notes = Notes()
    numerics = settle_numerics(demand, facts, cluster, notes)
    places = deal_out(demand, cluster, notes)
    if not facts.models:
        return None, tuple(notes.problems)
    check_shapes(demand, facts, numerics, cluster, notes)
    made = specs(demand, facts, numerics)
    if places is None:
        return None, tuple(notes.problems)
    present = presences(demand, list(made), notes)
    num_threads = threads(places, demand, cluster, notes)
    caches: dict[RoleName, float | Fill] = {**asked_caches(demand)}
    taken = memories(demand, facts, made, on_cpu=not cluster.gpus)
    memory: Mapping[RoleName, Mapping[Phase, Memory]] = {}
    if taken is None:
        caches = _caches_of_unknown(demand, asked_caches(demand), places, cluster, notes)
    else:
        check_asked(demand, made, taken, notes)
        if demand.generator is not None and "generator" not in caches:
            caches["generator"] = generators_cache(demand, taken, present, places, cluster, notes)
        memory = by_phase(_whole(taken.memory, caches), present)
        made = _with_budgets(made, engine_budgets(memory, present, places, cluster))
        check_fit(demand, taken, caches, present, places, cluster, notes)
    made = _with_caches(made, caches)
    ways = links(demand, facts, numerics, places, notes)
    if notes.problems:
        return None, tuple(notes.problems)
    longest = longest_sequence(demand, facts)
    notes.settle(
        demand.name("trainer.max_tokens"), demand.trainer.max_tokens, longest, _of_length(demand, facts)
    )
    restarts, replicas = max_restarts(demand), []
    for member in places.started:
        processes = tuple(
            Process(place.host, () if place.gpu is None else (place.gpu,), count, memory.get(member.role, {}))
            for place, count in zip(places.by_name[member.name], num_threads[member.name], strict=True)
        )
        spec = made[member.role]
        replicas.append(Replica(member.name, member.role, restarts[member.role], processes, spec))
    plan = Plan(
        command=demand.command,
        cluster=cluster,
        replicas=tuple(replicas),
        links=ways,
        stays=stays(places.started, present),
        max_seq_len=longest,
        deadlines=demand.deadlines,
        settled=tuple(notes.settled),
        transport=demand.transport,
    )
    return plan, ()


def _whole(
    memory: Mapping[RoleName, Memory], caches: Mapping[RoleName, float | Fill]
) -> dict[RoleName, Memory]:
    return {role: with_cache(of, caches[role]) if role in caches else of for role, of in memory.items()}


def _with_budgets(made: Mapping[RoleName, Spec], budgets: Mapping[RoleName, float]) -> dict[RoleName, Spec]:
    changed = dict(made)
    for role, budget in budgets.items():
        spec = changed[role]
        assert isinstance(spec, EngineSpec)
        changed[role] = replace(spec, config=replace(spec.config, device_memory_gib=budget))
    return changed


def _with_caches(
    made: Mapping[RoleName, Spec], caches: Mapping[RoleName, float | Fill]
) -> dict[RoleName, Spec]:
    changed = dict(made)
    for role, cache in caches.items():
        spec = changed[role]
        assert isinstance(spec, GeneratorSpec)
        changed[role] = replace(spec, config=replace(spec.config, kv_cache_gib=cache))
    return changed


def _caches_of_unknown(
    demand: Demand,
    asked: Mapping[RoleName, float],
    places: Places,
    cluster: Cluster,
    notes: Notes,
) -> dict[RoleName, float | Fill]:
    """Of models whose config.json gives no sizes of a decoder."""
    setting, caches = demand.name("generator.kv_cache_gib"), dict[RoleName, float | Fill](asked)
    for role, size in asked.items():
        notes.settle(demand.name(f"{role}.kv_cache_gib"), f"{size:g}", f"{size:g}", "asked for")
    if places.shared:
        notes.problem(
            "caches",
            "what each role takes of a shared GPU is not known: the model's config.json gives no sizes of a "
            "decoder; use a GPU for each process",
        )
    if not cluster.gpus:
        needed = sum(asked.get(role, 0.0) for roles in places.on_devices().values() for role in roles)
        if needed > cluster.hosts[0].free_gib:
            notes.problem(
                "caches",
                f"{setting} and the judge's need {needed:g} GiB but {cluster.hosts[0].free_gib:.1f} are "
                f"free; use less",
            )
    if demand.generator is not None and "generator" not in caches:
        caches["generator"] = Fill(0.0) if cluster.gpus else 0.25
        why = "a GPU of its own: what vLLM finds free" if cluster.gpus else "a CPU's default"
        value = "what is free" if cluster.gpus else "0.25"
        notes.settle(setting, 0, value, f"{why}; the model's sizes are not known")
    return caches


def _of_length(demand: Demand, facts: Facts) -> str:
    positions = facts.models["trainer"].positions
    return "the model's positions" if positions < demand.trainer.max_tokens else "asked for"


def _remedy(demand: Demand, facts: Facts, cluster: Cluster, problems: tuple[Problem, ...]) -> str:
    """The first change with which it fits, and which brings nothing else."""
    before = {problem.text for problem in problems}
    for text, changed in changes(demand, cluster):
        _, left = _resolve(changed, facts, cluster)
        if not any(problem.made_by == "fit" or problem.text not in before for problem in left):
            return text
    return last_remedy(demand, cluster)
