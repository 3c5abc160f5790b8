"""From a run's settings to its Plan: what each command asks for, and what is known of the models."""

import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from rl.cluster.hosts import cluster_at
from rl.config.defaults import settled_of_learning
from rl.config.run import RunConfig
from rl.errors import ConfigError
from rl.models.hf import max_positions
from rl.models.sources import ModelSource
from rl.plan.cluster import Cluster
from rl.plan.demand import Demand, Facts, JudgeDemand, ModelFacts
from rl.plan.fallback import resolve_with_fallbacks, without
from rl.plan.resolve import resolve
from rl.plan.roles import ENGINE_ROLES, ROLES, RoleName
from rl.plan.types import Fallback, Plan

Command = Literal["train", "eval", "replay"]
NOT_STARTED: Mapping[Command, Collection[RoleName]] = {
    "train": (),
    "eval": tuple(role for role in ENGINE_ROLES if role != "trainer"),
    "replay": tuple(name for name, role in ROLES.items() if not role.learns),
}
"""Command -> the roles that it starts none of, though a run has them."""
OPTIONAL = ("torchao",)


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
    return Demand(
        command=command,
        trainer=config.trainer,
        generator=None if "generator" in without else config.generator,
        engines={role: layout for role, layout in config.engines.items() if role not in without},
        judge=judges,
        reward=None if "reward" in without else config.reward,
        max_seq_len=config.max_seq_len,
        dtype=config.dtype,
        sharing=config.placement,
        hosts={role: hosts for role in ROLES if (hosts := getattr(config, role).hosts)},
        overlap=command == "train" and (config.max_offpolicy_steps > 0 or config.stream_groups > 0),
        switches=command in ("train", "eval"),
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
        drawn=tuple(role for role in ENGINE_ROLES if config.model_of(role).random_weights),
    )


def _models(config: RunConfig, demand: Demand) -> dict[RoleName, ModelSource]:
    """The roles of the demand that have a model -> which."""
    return {
        name: config.model_of(name)
        for name, role in ROLES.items()
        if role.kind != "worker" and role.size(demand) is not None
    }


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


def own_directory(role: RoleName) -> str:
    """In the run's, of what it makes of the role's own model."""
    return "teacher" if role == "reference" else role


def model_dirs(config: RunConfig, plan: Plan, run_dir: Path) -> dict[str, Path]:
    """Where each model that the plan names is. What a run makes or fetches lies in run_dir."""
    dirs = {"model": config.model.materialize(run_dir)}
    for name in plan.roles:
        model, own = ROLES[name].model, config.model_of(name)
        if model not in dirs:
            is_policys = own is config.model
            dirs[model] = dirs["model"] if is_policys else own.materialize(run_dir / own_directory(name))
    return dirs
