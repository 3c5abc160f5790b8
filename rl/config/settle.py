"""From a run's settings to its Plan: what each command asks for, and what is known of the models."""

import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from rl.cluster.hosts import cluster_at
from rl.config.defaults import settled_of_learning
from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.models.hf import max_positions
from rl.models.sources import ModelSource
from rl.plan.cluster import Cluster
from rl.plan.demand import Demand, Facts, JudgeDemand, ModelFacts, RoleName
from rl.plan.fallback import resolve_with_fallbacks, without
from rl.plan.resolve import resolve
from rl.plan.types import Fallback, Plan

Command = Literal["train", "eval", "replay"]
NOT_STARTED: Mapping[Command, Collection[RoleName]] = {
    "train": (),
    "eval": ("critic", "reference"),
    "replay": ("generator", "reference", "judge", "reward"),
}
"""Command -> the roles that it starts none of, though a run has them."""
OPTIONAL = ("torchao",)
_ROLES: tuple[RoleName, ...] = get_args(RoleName)


def settle(config: RunConfig, command: Command = "train", cluster: Cluster | None = None) -> Plan:
    """cluster: None: the run's hosts. Raises ConfigError with every problem, one a line."""
    plan = plan_or_problems(config, command, cluster)
    if isinstance(plan, Plan):
        return plan
    if not plan:
        check_models_read(config, command)
    raise ConfigError("\n".join(plan))


def why_no_plan(
    config: RunConfig, command: Command = "train", cluster: Cluster | None = None, model_known: bool = True
) -> list[str]:
    """One line for each problem. model_known: the model's config.json can be read."""
    try:
        plan = plan_or_problems(config, command, cluster, model_known)
    except ConfigError as error:  # of hosts
        return str(error).splitlines()
    return [] if isinstance(plan, Plan) else plan


def plan_or_problems(
    config: RunConfig, command: Command, cluster: Cluster | None = None, model_known: bool = True
) -> Plan | list[str]:
    """The Plan, or what is wrong, one line each.

    Where a model cannot be read there is no Plan, and no line says so. Raises ConfigError where a host does
    not answer or cannot be used.
    """
    demand = demand_of(config, command)
    facts = facts_of(config, demand) if model_known else Facts(packages=_packages())
    joining = config.joining_hosts if demand.generator is not None else 0
    hosts = (cluster or cluster_of(config)).with_joining(joining)
    plan = (resolve_with_fallbacks if command == "train" else resolve)(demand, facts, hosts)
    if not isinstance(plan, Plan):
        return [problem.text for problem in plan]
    of_learning = settled_of_learning(config, plan.value_of("dtype")) if command == "train" else ()
    return replace(plan, settled=(*plan.settled, *of_learning))


def fallback_of(config: RunConfig, plan: Plan) -> Fallback:
    """Config and models' files are read now, not once a host is lost."""
    demand = demand_of(config, "train")
    return partial(without, plan, demand, facts_of(config, demand))


def cluster_of(config: RunConfig) -> Cluster:
    """What the run's hosts have, but for those that may join.

    Raises ConfigError where one does not answer, or cannot be used.
    """
    if config.joining_hosts and not config.hosts:
        raise ConfigError(
            f"joining_hosts={config.joining_hosts} has no effect without --hosts; name those that are there"
        )
    return cluster_at(config.hosts)


def check_models_read(config: RunConfig, command: Command) -> None:
    """Raises ConfigError where the config.json of a model that the command needs cannot be read."""
    for model in _models(config, demand_of(config, command)).values():
        model.config()


def demand_of(config: RunConfig, command: Command) -> Demand:
    without, judge = NOT_STARTED[command], config.judge
    judges = None
    if judge.model is not None and "judge" not in without:
        judges = JudgeDemand(judge.num_replicas, judge.tensor_parallel, judge.max_tokens, judge.kv_cache_gib)
    wants_critic = config.algorithm.needs_critic and "critic" not in without
    wants_reference = config.algorithm.needs_reference and not config.reference_is_adapter
    return Demand(
        command=command,
        trainer=config.trainer,
        generator=None if "generator" in without else config.generator,
        critic=config.critic.layout if wants_critic else None,
        reference=config.reference.layout if wants_reference and "reference" not in without else None,
        judge=judges,
        reward=None if "reward" in without else config.reward,
        max_seq_len=config.max_seq_len,
        dtype=config.dtype,
        sharing=config.placement,
        hosts={role: hosts for role in _ROLES if (hosts := getattr(config, role).hosts)},
        overlap=command == "train" and (config.max_offpolicy_steps > 0 or config.stream_groups > 0),
        learns=command != "eval",
        saves=command == "train",
        saves_beside=config.data != "rollouts",
        from_checkpoint=bool(config.resume),
        transport=config.weight_sync.transport,
        delta=config.weight_sync.delta,
        deadlines=config.deadlines,
        longest_answer=config.env.max_new_tokens,
        reference_is_adapter=config.reference_is_adapter,
        teacher=config.reference.model is not None,
        seed=config.seed,
        drawn=_drawn(config),
    )


def _drawn(config: RunConfig) -> tuple[RoleName, ...]:
    teacher = config.reference.model or config.model
    policy: tuple[RoleName, ...] = ("trainer", "critic") if config.model.random_weights else ()
    return (*policy, "reference") if teacher.random_weights else policy


def _models(config: RunConfig, demand: Demand) -> dict[RoleName, ModelSource]:
    """Role -> the model that it has."""
    models: dict[RoleName, ModelSource] = dict.fromkeys(("trainer", "generator", "critic"), config.model)
    if demand.reference is not None:
        models["reference"] = config.reference.model or config.model
    if demand.judge is not None and config.judge.model is not None:
        models["judge"] = config.judge.model
    return models


def facts_of(config: RunConfig, demand: Demand) -> Facts:
    """Of the models that the demand's roles have. Without models where a config.json cannot be read."""
    models = _models(config, demand)
    try:
        facts = {model: _facts(model) for model in {*models.values()}}
        return Facts({role: facts[model] for role, model in models.items()}, _packages())
    except ConfigError:
        return Facts(packages=_packages())


def _facts(model: ModelSource) -> ModelFacts:
    hf = model.config()
    try:
        layers, num_elements = frozenset(model.linear_layers()), model.num_elements()
    except ConfigError:  # a model of which only config.json is here
        layers, num_elements = frozenset(), 0
    return ModelFacts.of(hf, max_positions(hf), layers, num_elements)


def longest_sequence(config: RunConfig) -> int:
    """Tokens: prompt and all that is sampled."""
    return min(max_positions(config.model.config()), config.max_seq_len)


def _packages() -> frozenset[str]:
    return frozenset(name for name in OPTIONAL if importlib.util.find_spec(name) is not None)


def model_dirs(config: RunConfig, plan: Plan, run_dir: Path) -> dict[str, Path]:
    """Where each model that the plan names is. What a run makes or fetches lies in run_dir."""
    dirs, teacher = {"model": config.model.materialize(run_dir)}, config.reference.model
    if plan.of("reference"):
        dirs["reference"] = dirs["model"] if teacher is None else teacher.materialize(run_dir / "teacher")
    if plan.of("judge"):
        assert config.judge.model is not None
        dirs["judge"] = config.judge.model.materialize(run_dir / "judge")
    return dirs
