"""What each command asks for of a run's settings, and what is known of the run's models."""

from collections.abc import Collection, Mapping
from typing import Literal

from rl.controller.config import RunConfig
from rl.errors import ConfigError
from rl.models.hf import max_positions
from rl.models.sources import ModelSource
from rl.plan.demand import Demand, Facts, JudgeDemand, ModelFacts, RoleName, Sharing

_SHARING: Mapping[str, Sharing] = {"auto": "auto", "separate": "alone", "shared": "side_by_side"}
Command = Literal["train", "eval", "replay"]
NOT_STARTED: Mapping[Command, Collection[RoleName]] = {
    "train": (),
    "eval": ("critic", "reference"),
    "replay": ("generator", "judge", "reward"),
}
"""Command -> the roles that it starts none of, though a run has them."""


def demand_of(config: RunConfig, command: Command) -> Demand:
    without, judge = NOT_STARTED[command], None
    if config.judge.model is not None and "judge" not in without:
        of_config = config.judge
        judge = JudgeDemand(
            of_config.num_replicas, of_config.tensor_parallel, of_config.max_tokens, of_config.kv_cache_gib
        )
    wants_critic = config.algorithm.needs_critic and "critic" not in without
    wants_reference = config.algorithm.needs_reference and not config.reference_is_adapter
    return Demand(
        command=command,
        trainer=config.trainer,
        generator=None if "generator" in without else config.generator,
        critic=config.critic.layout if wants_critic else None,
        reference=config.reference.layout if wants_reference and "reference" not in without else None,
        judge=judge,
        reward=None if "reward" in without else config.reward,
        dtype=config.dtype,
        sharing=_SHARING[config.placement],
        overlap=config.max_offpolicy_steps > 0 or config.stream_groups > 0,
        transport=config.weight_sync.transport,
        deadlines=config.deadlines,
        longest_answer=config.env.max_new_tokens,
        reference_is_adapter=config.reference_is_adapter,
        seed=config.seed,
        drawn=_drawn(config),
    )


def _drawn(config: RunConfig) -> tuple[RoleName, ...]:
    teacher = config.reference.model or config.model
    policy: tuple[RoleName, ...] = ("trainer", "critic") if config.model.random_weights else ()
    return (*policy, "reference") if teacher.random_weights else policy


def facts_of(config: RunConfig) -> Facts | None:
    """None where a model's config.json cannot be read, which `validate` says."""
    policy, judge = config.model, config.judge.model
    models: dict[RoleName, ModelSource] = {role: policy for role in ("trainer", "generator", "critic")}
    models["reference"] = config.reference.model or policy
    if judge is not None:
        models["judge"] = judge
    try:
        return Facts({role: _facts(model) for role, model in models.items()})
    except ConfigError:
        return None


def _facts(model: ModelSource) -> ModelFacts:
    hf = model.config()
    return ModelFacts.of(hf, max_positions(hf))
