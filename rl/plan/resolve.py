"""resolve: from what is asked for to a Plan, or to everything that keeps it from being one.

Each pass is a function of small values that calls no other pass. It writes down problems and reasons, and
gives a value all the same, so that one look finds everything.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from rl.models.generator.vllm_config import Fill
from rl.plan.budgets import (
    asked_caches,
    caches_of_unknown,
    check_asked,
    engine_budgets,
    generators_cache,
    memories,
    with_cache,
)
from rl.plan.cluster import Cluster
from rl.plan.demand import Demand, Facts
from rl.plan.fit import check_fit
from rl.plan.links import check_loads, links, settle_delta
from rl.plan.memory import Memory
from rl.plan.numerics import settle_numerics
from rl.plan.phases import by_phase, presences, stays
from rl.plan.places import deal_out, threads
from rl.plan.remedies import changes, last_remedy
from rl.plan.roles import ROLES, RoleName
from rl.plan.shapes import check_shapes
from rl.plan.shared import check_shared_memory, published_bytes
from rl.plan.specs import Spec, longest_sequence, specs
from rl.plan.types import Notes, Phase, Plan, Problem, Process, Replica, Settled, WorkerSpec


def resolve(demand: Demand, facts: Facts, cluster: Cluster) -> Plan | tuple[Problem, ...]:
    plan, problems = _resolve_sharing(demand, facts, cluster)
    if plan is not None:
        return plan
    if not any(problem.is_of_fit for problem in problems):
        return problems
    remedy = _remedy(demand, facts, cluster, problems)
    return tuple(
        replace(problem, text=f"{problem.text}; {remedy}") if problem.is_of_fit else problem
        for problem in problems
    )


def _resolve_sharing(
    demand: Demand, facts: Facts, cluster: Cluster
) -> tuple[Plan | None, tuple[Problem, ...]]:
    """placement=auto: by turns where GPUs' memory is all that is missing, since each switch costs seconds."""
    plan, problems = _resolve(demand, facts, cluster)
    is_free = demand.may_take_turns and demand.sharing == "auto"
    is_full = all(problem.is_of_fit for problem in problems)
    if plan is not None or not (is_free and cluster.gpus and is_full):
        return plan, problems
    plan, _ = _resolve(replace(demand, sharing="by_turns"), facts, cluster)
    if plan is None:
        return None, problems
    setting = demand.name("placement")
    why = f"if all stayed, {'; '.join(problem.text for problem in problems)}"
    kept_lines = tuple(line for line in plan.settled if line.setting != setting)
    return replace(plan, settled=(Settled(setting, "auto", "by_turns", why), *kept_lines)), ()


def _resolve(demand: Demand, facts: Facts, cluster: Cluster) -> tuple[Plan | None, tuple[Problem, ...]]:
    notes = Notes()
    numerics = settle_numerics(demand, facts, cluster, notes)
    places = deal_out(demand, cluster, notes)
    if not facts.models:
        return None, tuple(notes.problems)
    check_shapes(demand, facts, numerics, cluster, notes)
    role_specs = specs(demand, facts, numerics)
    if places is None:
        return None, tuple(notes.problems)
    present = presences(demand, list(role_specs), notes)
    num_threads = threads(places, demand, cluster, notes)
    caches: dict[RoleName, float | Fill] = {**asked_caches(demand)}
    published = published_bytes(demand, facts, numerics, places)
    taken = memories(demand, facts, role_specs, on_cpu=not cluster.gpus)
    memory: Mapping[RoleName, Mapping[Phase, Memory]] = {}
    if taken is None:
        caches = caches_of_unknown(demand, places, cluster, notes)
    else:
        check_asked(demand, role_specs, taken, notes)
        if demand.generator is not None and "generator" not in caches:
            caches["generator"] = generators_cache(demand, taken, present, places, cluster, notes)
        memory = by_phase(_whole(taken.memory, caches), present)
        budgets = engine_budgets(memory, present, places, cluster)
        role_specs = _with(role_specs, "device_memory_gib", budgets)
        check_fit(demand, taken, caches, present, places, published, cluster, notes)
    role_specs = _with(role_specs, "kv_cache_gib", caches)
    ways = links(demand, facts, numerics)
    check_loads(demand, ways, places, cluster, notes)
    delta = settle_delta(demand, numerics, places, cluster, notes)
    if not any(problem.is_of_fit for problem in notes.problems):  # of weights that fit elsewhere
        check_shared_memory(demand, published, cluster, notes)
    if notes.problems:
        return None, tuple(notes.problems)
    _settle_tokens(demand, facts, notes)
    replicas = []
    for member in places.started:
        processes = tuple(
            Process(place.host, () if place.gpu is None else (place.gpu,), count, memory.get(member.role, {}))
            for place, count in zip(places.by_name[member.name], num_threads[member.name], strict=True)
        )
        spec, max_restarts = role_specs[member.role], ROLES[member.role].max_restarts(demand)
        replicas.append(Replica(member.name, member.role, max_restarts, processes, spec))
    plan = Plan(
        command=demand.command,
        cluster=cluster,
        replicas=tuple(replicas),
        links=ways,
        stays=stays(places.started, present),
        max_seq_len=longest_sequence(demand, facts),
        deadlines=demand.deadlines,
        settled=tuple(notes.settled),
        transport=demand.transport,
        delta=delta,
    )
    return plan, ()


def _settle_tokens(demand: Demand, facts: Facts, notes: Notes) -> None:
    longest, asked = longest_sequence(demand, facts), demand.max_seq_len
    within = "" if longest < asked else "within "
    positions = facts.models["trainer"].positions
    notes.settle(demand.name("max_seq_len"), asked, longest, f"{within}the model's {positions} positions")
    setting, tokens = demand.name("trainer.micro_batch_tokens"), demand.trainer.micro_batch_tokens
    if setting != demand.name("max_seq_len"):
        notes.settle(setting, tokens, tokens, "as it is set")


def _whole(
    memory: Mapping[RoleName, Memory], caches: Mapping[RoleName, float | Fill]
) -> dict[RoleName, Memory]:
    return {role: with_cache(of, caches[role]) if role in caches else of for role, of in memory.items()}


def _with(
    role_specs: Mapping[RoleName, Spec], name: str, values: Mapping[RoleName, object]
) -> dict[RoleName, Spec]:
    """The specs with this field of their configs changed, for the roles that have a value."""
    changed = dict(role_specs)
    for role, value in values.items():
        spec = changed[role]
        assert not isinstance(spec, WorkerSpec)
        changed[role] = replace(spec, config=replace(spec.config, **{name: value}))  # type: ignore[arg-type]
    return changed


def _remedy(demand: Demand, facts: Facts, cluster: Cluster, problems: tuple[Problem, ...]) -> str:
    """The first change with which it fits and which brings nothing else; else two of them.

    Which two settings is found by the largest change of the first: there are too many pairs to try them all.
    """
    before = {problem.text for problem in problems}

    def fits(changed: Demand) -> bool:
        _, left = _resolve_sharing(changed, facts, cluster)
        return not any(problem.is_of_fit or problem.text not in before for problem in left)

    shape = facts.models["trainer"].shape
    has_experts = shape is not None and shape.num_moe_layers > 0
    singles = list(changes(demand, cluster, has_experts))
    for text, changed in singles:
        if fits(changed):
            return text

    def pairs(firsts: Iterable[tuple[str, Demand]]) -> Iterator[tuple[str, str, Demand]]:
        for text, changed in firsts:
            for other, both in changes(changed, cluster, has_experts):
                if _setting(other) != _setting(text):
                    yield text, other, both

    largest = {_setting(text): (text, changed) for text, changed in singles}
    fitting = (map(_setting, words) for *words, both in pairs(largest.values()) if fits(both))
    settings = [*next(fitting, ())]
    for text, other, both in pairs(singles):
        if [_setting(text), _setting(other)] == settings and fits(both):
            return f"{text}, and {other}"
    return last_remedy(demand, cluster)


def _setting(change: str) -> str:
    """The first that it names."""
    return change.split()[1]
