"""Pass: what each role's processes are started with."""

from dataclasses import fields, replace
from typing import Any

from rl.models.engine_config import EngineConfig
from rl.models.generator.vllm_config import VLLMConfig
from rl.plan.demand import Demand, Facts
from rl.plan.numerics import Numerics
from rl.plan.roles import ROLES, RoleName
from rl.plan.types import Adapter, EngineSpec, GeneratorSpec, WorkerSpec
from rl.types import POLICY, REFERENCE

Spec = EngineSpec | GeneratorSpec | WorkerSpec


def longest_sequence(demand: Demand, facts: Facts) -> int:
    """Tokens: prompt and all that is sampled."""
    return min(facts.models["trainer"].positions, demand.max_seq_len)


def specs(demand: Demand, facts: Facts, numerics: Numerics) -> dict[RoleName, Spec]:
    """By role. A generator's cache is the one that is asked for, or 0."""
    trainer = _engine(demand, facts, numerics)
    role_specs: dict[RoleName, Spec] = {"trainer": _trainer(demand, trainer)}
    if demand.generator is not None:
        role_specs["generator"] = _generator(demand, facts, numerics)
    for role, layout in demand.engines.items():
        row = ROLES[role]
        # One that learns learns all of its weights, also where the policy is an adapter. With `adapters`, of
        # which it gets none, nothing learns: weights are there once, in compute dtype.
        config = replace(trainer, layout=layout, adapters=not row.learns, head=row.head)
        role_specs[role] = EngineSpec(demand.trainer.engine, row.model, _drawn(demand, role, config))
    if demand.judge is not None:
        role_specs["judge"] = _judge(demand, facts, numerics)
    if demand.reward is not None:
        role_specs["reward"] = WorkerSpec(demand.reward.limit_seconds)
    return role_specs


def _engine(demand: Demand, facts: Facts, numerics: Numerics) -> EngineConfig:
    settled = {
        "dtype": numerics.dtype,
        "max_seq_len": longest_sequence(demand, facts),
        "adapters": demand.trainer.lora.rank > 0 or demand.clients_adapters is not None,
        "dropout_seed": demand.seed if demand.trainer.dropout else 0,
        "timeout_seconds": demand.deadlines.train,
        "save_seconds": demand.deadlines.checkpoint,
    }
    return EngineConfig(**_handed_on(demand.trainer, EngineConfig) | settled)


def _handed_on(section: Any, config: type) -> dict[str, Any]:
    """Settings of the section that the config has by the same name."""
    names = {field.name for field in fields(config)}
    return {field.name: getattr(section, field.name) for field in fields(section) if field.name in names}


def _drawn(demand: Demand, role: RoleName, config: EngineConfig) -> EngineConfig:
    return replace(config, seed=demand.seed) if role in demand.drawn else config


def _trainer(demand: Demand, engine: EngineConfig) -> EngineSpec:
    lora, adapters = demand.trainer.lora, []
    if lora.rank:
        adapters.append(Adapter(POLICY, lora, demand.seed))
    if demand.reference_is_adapter:
        adapters.append(Adapter(REFERENCE, lora, demand.seed))
    config = _drawn(demand, "trainer", engine)
    return EngineSpec(demand.trainer.engine, "model", config, tuple(adapters))


def _generator(demand: Demand, facts: Facts, numerics: Numerics) -> GeneratorSpec:
    generator = demand.generator
    assert generator is not None
    settled = {
        "model_dir": "",
        "dtype": numerics.dtype,
        "max_model_len": longest_sequence(demand, facts),
        "cuda_graphs": numerics.cuda_graphs,
        "max_lora_rank": demand.max_rank,
        "max_adapters": demand.max_adapters,
        "lora_targets": (demand.clients_adapters or demand.trainer.lora).targets if demand.max_rank else (),
        "sleeps": demand.sharing == "by_turns",
        "stop_texts": demand.stop_texts,
        "scaled_logprobs": demand.scaled_logprobs,
    }
    config = VLLMConfig(**_handed_on(generator, VLLMConfig) | settled)
    return GeneratorSpec("model", config, generator.updates)


def _judge(demand: Demand, facts: Facts, numerics: Numerics) -> GeneratorSpec:
    judge = demand.judge
    assert judge is not None
    config = VLLMConfig(
        model_dir="",
        weights="directory",
        dtype=numerics.dtype,
        max_model_len=min(facts.models["judge"].positions, judge.max_tokens),
        kv_cache_gib=judge.kv_cache_gib,
        cuda_graphs=numerics.cuda_graphs,
        tensor_parallel=judge.tensor_parallel,
        stop_texts=True,  # its verdicts are held to a JSON schema
    )
    return GeneratorSpec(ROLES["judge"].model, config)
