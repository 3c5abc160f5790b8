"""Passes: what each process takes, the generators' cache, and what an engine that shares a GPU may take."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rl.models.generator.vllm_config import Fill, served_rank
from rl.plan.cluster import USABLE, Cluster
from rl.plan.demand import Demand, Facts
from rl.plan.memory import GIB, Memory, engine_memory, generator_memory, longest_sequence_bytes
from rl.plan.model_shape import BYTES
from rl.plan.phases import Presences, remaining
from rl.plan.places import Places
from rl.plan.roles import ENGINE_ROLES, ROLES, RoleName
from rl.plan.specs import Spec
from rl.plan.types import EngineSpec, GeneratorSpec, Notes, Phase, WorkerSpec
from rl.types import LoRA

MARGIN = 1.1
"""For engines beside a cache that was worked out: what arithmetic does not see."""
_CPU_CACHE_GIB = 0.25
_ON_A_CPU = "on a CPU, unless one sequence takes more"


@dataclass(frozen=True)
class Taken:
    """Of each process of a role, without its cache. least_cache: GiB that one sequence takes of it."""

    memory: Mapping[RoleName, Memory]
    least_cache: Mapping[RoleName, float]


def memories(demand: Demand, facts: Facts, specs: Mapping[RoleName, Spec], on_cpu: bool) -> Taken | None:
    """None where a model's sizes are not known: then nothing is claimed."""
    parts, least = dict[RoleName, Memory](), dict[RoleName, float]()
    for role, spec in specs.items():
        if isinstance(spec, WorkerSpec):
            continue
        shape = facts.models[role].shape
        if shape is None:
            return None
        if isinstance(spec, EngineSpec):
            lora = demand.learned_adapters if role == "trainer" else LoRA()
            learns = ROLES[role].learns
            memory = engine_memory(
                shape, spec.config, lora, learns, on_cpu, spec.kind,
                num_adapters=2 if role == "trainer" and demand.reference_is_adapter else 1,
                saves=demand.saves, overlap=demand.overlap or demand.saves_beside,
            )  # fmt: skip
            parts[role] = memory if demand.learns else _loaded(memory, demand.from_checkpoint)
        else:
            memory = generator_memory(shape, replace(spec.config, kv_cache_gib=0.0), on_cpu)
            if role == "generator" and demand.max_rank:
                slots = LoRA(rank=served_rank(demand.max_rank) * demand.max_adapters)
                held = shape.adapter_elements(slots) * BYTES[spec.config.dtype]
                memory = replace(memory, parts={**memory.parts, "adapters": held})
            parts[role], least[role] = memory, longest_sequence_bytes(shape, spec.config) / GIB
    return Taken(parts, least)


def _loaded(memory: Memory, from_checkpoint: bool) -> Memory:
    """Of an engine that only loads and publishes weights. A checkpoint brings the optimizer's moments."""
    left_out = {"gradients", "activations", "head", *(() if from_checkpoint else ("optimizer",))}
    parts = {part: size for part, size in memory.parts.items() if part not in left_out}
    return replace(memory, parts=parts)


def with_cache(memory: Memory, cache: float | Fill) -> Memory:
    return replace(memory, parts={**memory.parts, "cache": gib(cache) * GIB})


def gib(cache: float | Fill) -> float:
    return cache.expected_gib if isinstance(cache, Fill) else cache


def asked_caches(demand: Demand) -> dict[RoleName, float]:
    """GiB of each process; a role is missing where it asks for none."""
    asked: dict[RoleName, float] = {}
    if demand.judge is not None:
        asked["judge"] = demand.judge.kv_cache_gib
    if demand.generator is not None and demand.generator.kv_cache_gib:
        asked["generator"] = demand.generator.kv_cache_gib
    return asked


def check_asked(demand: Demand, specs: Mapping[RoleName, Spec], taken: Taken, notes: Notes) -> None:
    """vLLM does not start with a cache under one sequence."""
    for role, size in asked_caches(demand).items():
        spec, setting, least = specs[role], demand.name(f"{role}.kv_cache_gib"), taken.least_cache[role]
        assert isinstance(spec, GeneratorSpec)
        notes.settle(setting, f"{size:g}", f"{size:g}", "asked for")
        if size < least:
            longest = demand.name("max_seq_len" if role == "generator" else "judge.max_tokens")
            notes.problem(
                f"{setting}={size:g} is less than one sequence of {spec.config.max_model_len} tokens takes, "
                f"{least:.2g} GiB; raise it, or lower {longest}",
            )


def generators_cache(
    demand: Demand, taken: Taken, present: Presences, places: Places, cluster: Cluster, notes: Notes
) -> float | Fill:
    """Of each process, where no size is asked for: at least one sequence's, even if that does not fit."""
    least = taken.least_cache["generator"]
    if not cluster.gpus:
        cache: float | Fill = max(_CPU_CACHE_GIB, least)
        value, why = f"{cache:.4g}", _ON_A_CPU if cache == _CPU_CACHE_GIB else "one sequence"
    elif places.beside("generator"):
        cache = max(_left(demand, taken, present, places, cluster), least)
        value, why = f"{cache:.4g}", f"what the other roles leave of the fullest GPU: {_words(cache / least)}"
        if demand.sharing == "auto" and demand.may_take_turns:
            why += "; more with placement=by_turns"
    else:
        room = min(cluster.hosts[host].gpus[gpu].gib for host, gpu in places.devices_of("generator")) * USABLE
        cache = Fill(max(room - taken.memory["generator"].total / GIB, least))
        value, why = f"about {cache.expected_gib:.1f}", "a GPU of its own: what vLLM finds free"
    notes.settle(demand.name("generator.kv_cache_gib"), 0, value, why)
    return cache


def _words(num: float) -> str:
    """num: sequences that a cache holds."""
    return f"{num:.0f} sequence{'s' * (round(num) != 1)} of full length"


def _left(demand: Demand, taken: Taken, present: Presences, places: Places, cluster: Cluster) -> float:
    """GiB for the cache of each generator that shares its GPU, in the phase in which it works."""
    caches, left = asked_caches(demand), math.inf
    margin = MARGIN if demand.sharing != "by_turns" else 1.0  # suspended, they take what they took before
    beside = {
        role: remaining(with_cache(memory, caches.get(role, 0.0)), present["generate"][role]).total / GIB
        for role, memory in taken.memory.items()
    }
    for (host, gpu), roles in places.on_devices().items():
        if gpu is None or not (num_caches := roles.count("generator")):
            continue
        taken_beside = sum(beside[role] for role in roles if role != "generator") * margin
        room = cluster.hosts[host].gpus[gpu].gib * USABLE
        left = min(left, (room - taken_beside - num_caches * beside["generator"]) / num_caches)
    return math.floor(left * 10) / 10


def caches_of_unknown(
    demand: Demand, places: Places, cluster: Cluster, notes: Notes
) -> dict[RoleName, float | Fill]:
    """Of models whose config.json gives no sizes of a decoder."""
    asked, setting = asked_caches(demand), demand.name("generator.kv_cache_gib")
    caches = dict[RoleName, float | Fill](asked)
    for role, size in asked.items():
        notes.settle(demand.name(f"{role}.kv_cache_gib"), f"{size:g}", f"{size:g}", "asked for")
    if places.shared:
        shares = any(gpu is not None and len(roles) > 1 for (_, gpu), roles in places.on_devices().items())
        separate = "each has one of its own: set --placement alone"
        remedy = "use a GPU for each process" if shares else separate
        notes.problem(
            f"what each role takes of a shared GPU is not known: the model's config.json gives no sizes of a "
            f"decoder; {remedy}",
        )
    if not cluster.gpus:
        for (host, _), roles in places.on_devices().items():
            needed, free = sum(asked.get(role, 0.0) for role in roles), cluster.hosts[host].free_gib
            if needed > free:
                notes.problem(
                    f"{setting} and the judge's need {needed:g} GiB but {free:.1f} are free; use less",
                )
    if demand.generator is not None and "generator" not in caches:
        caches["generator"] = Fill(0.0) if cluster.gpus else _CPU_CACHE_GIB
        why = "a GPU of its own: what vLLM finds free" if cluster.gpus else _ON_A_CPU
        value = "what is free" if cluster.gpus else _CPU_CACHE_GIB
        notes.settle(setting, 0, value, f"{why}; the model's sizes are not known")
    return caches


def engine_budgets(
    memory: Mapping[RoleName, Mapping[Phase, Memory]], present: Presences, places: Places, cluster: Cluster
) -> dict[RoleName, float]:
    """GiB that a process of an engine may take of a GPU that it shares: what is planned for nobody else.

    memory: of each process of a role, by phase.
    """
    budgets: dict[RoleName, float] = {}
    if not places.shared:
        return budgets
    for (host, gpu), roles in places.on_devices().items():
        if gpu is None:
            continue
        room = cluster.hosts[host].gpus[gpu].gib * USABLE
        for role in (role for role in ENGINE_ROLES if role in roles):
            beside = max(
                (sum(memory[neighbour][phase].total for neighbour in roles) - memory[role][phase].total) / GIB
                for phase, presence in present.items()
                if presence[role] == "whole"
            )
            budgets[role] = min(budgets.get(role, math.inf), room - beside)
    return budgets
