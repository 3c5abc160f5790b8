"""Environments of verifiers' v1 API (verifiers 0.4: the id of a taskset), unmodified."""

import copy
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from rl.bounds import PositiveInt
from rl.envs.adapters.verifiers_base import KEY_VARIABLE, VerifiersBase
from rl.envs.chat.episode import Episode, ServerLost
from rl.envs.problems import digest_of
from rl.envs.variables import clean_environment
from rl.errors import ConfigError
from rl.types import Problem
from rl.waiting import run_apart

_HARNESS = "rl.envs.adapters.verifiers_v1_harness"
_REPLACED = ("bash", "null")  # verifiers' own loops: the first is its default


@dataclass(frozen=True)
class VerifiersV1(VerifiersBase):
    """The reward is the mean over the agents that are trained.

    An agent whose harness is verifiers' `bash` (the default) or `null` is a chat loop with the taskset's
    tools, in the episode's process: no shell, and nothing to install first. Any other harness, and any
    runtime, is as its config says.
    """

    runtime: str = ""
    """Of agents whose config sets none: where their programs, tasks and rewards run what the model writes.
    `subprocess` is this machine, isolated by nothing; `docker`, `podman`, `apptainer`, `prime`, `modal` and
    `e2b` are verifiers' sandboxes (its own default is `prime`, a remote one)."""

    max_tasks: PositiveInt = 10_000
    """Of a larger or endless taskset, these first ones are used."""

    def prepare(self) -> None:
        super().prepare()
        _loaded(self)

    def generate(self, seed: int) -> Problem:
        tasks = _loaded(self)[1]
        index = seed % len(tasks)
        data = tasks[index].data
        # Tasks may be asked in the same words, and differ in what the taskset has to itself: a game's seed.
        content = data.model_dump(mode="json", exclude_none=True, exclude={"idx", "id", "name"})
        asked = data.prompt_text or data.name or f"task {index}"
        return Problem(str(index), asked, metadata={"task": digest_of(content)})

    async def agent(self, episode: Episode, base_url: str, api_key: str) -> None:
        with clean_environment(self.variables):
            os.environ[KEY_VARIABLE] = api_key
            await self._run(episode, base_url)

    async def _run(self, episode: Episode, base_url: str) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.env import RunSlot

        env, tasks = _loaded(self)
        client = EvalClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE)
        context = ModelContext("policy", client, vf.SamplingConfig())
        async with env.serving():
            run = await env.run_slot(RunSlot(tasks[int(episode.problem.id)]), context)
        if not run.ok:
            errors = [*run.errors, *(error for trace in run.traces for error in trace.errors)]
            why = "; ".join(f"{e.type}: {e.message}" for e in errors) or "the episode is not ok"
            raise ServerLost(why) if _is_lost(run) else RuntimeError(why)
        trained = [trace for trace in run.traces if trace.agent.trainable]
        episode.state["reward"] = sum(trace.reward for trace in trained) / max(1, len(trained))
        episode.notes["metrics"] = [dict(trace.metrics) for trace in run.traces]

    def validate(self) -> list[str]:
        if not _is_installed():
            return ["verifiers 0.4 is missing; see docs/environments.md for how to install it"]
        if not self.runtime and (roles := _without_runtime(self)):
            return [_no_runtime(roles)]
        environment, tasks = _loaded(self)
        if roles := _played_by_policy(environment):
            return [_no_client(roles)]
        if len(tasks) <= self.num_eval:
            return [f"{self.environment} has {len(tasks)} tasks; lower env.num_eval={self.num_eval}"]
        return []


def _is_lost(run: Any) -> bool:
    """Whether a server failed that the policy has no part in: another agent's model, or a tunnel."""
    others = [error for trace in run.traces if not trace.agent.trainable for error in trace.errors]
    errors = [*run.errors, *(error for trace in run.traces for error in trace.errors)]
    return any(error.type == "ProviderError" for error in others) or any(
        error.type == "TunnelError" for error in errors
    )


def _is_installed() -> bool:
    """0.3.1 has `legacy`, and another v1."""
    if importlib.util.find_spec("verifiers") is None:
        return False
    return bool(importlib.util.find_spec("verifiers.v1")) and not importlib.util.find_spec("verifiers.legacy")


@lru_cache(maxsize=4)
def _loaded(env: VerifiersV1) -> tuple[Any, Sequence[Any]]:
    """verifiers' environment, and its tasks. Raises ConfigError where an agent has no runtime."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    data, config = _config(env)
    roles = _without_runtime(env)
    if roles and not env.runtime:
        raise ConfigError(_no_runtime(roles))
    for role in roles:
        _put(data, [role, "runtime", "type"], env.runtime)
    harnesses = config.agent_harnesses()
    for role in agent_config_fields(config):
        if harnesses[role].id in _REPLACED:
            _put(data, [role, "harness"], {"id": _plugin(_HARNESS)})
    environment = load_environment(resolve_env_config(data))
    return environment, list(islice(environment.taskset, env.max_tasks))


def _config(env: VerifiersV1) -> tuple[dict[str, Any], Any]:
    """What the options say, and what verifiers makes of it."""
    from verifiers.v1.utils.loaders import resolve_env_config

    data: dict[str, Any] = {"taskset": {"id": _plugin(env.environment)}}
    for name, value in env.options:
        _put(data, name.split("."), value)
    return data, resolve_env_config(copy.deepcopy(data))


def _without_runtime(env: VerifiersV1) -> list[str]:
    """The agents for which neither the environment nor the options name a runtime."""
    from verifiers.v1.configs.agent import agent_config_fields

    agents = agent_config_fields(_config(env)[1])
    return [role for role, agent in agents.items() if "runtime" not in agent.model_fields_set]


def _no_runtime(roles: Sequence[str]) -> str:
    return (
        f"env.runtime is empty, and the agent {' and '.join(roles)} has none in verifiers' config; name one: "
        f"subprocess runs what the model writes on this machine without isolation, prime in a remote sandbox"
    )


def _played_by_policy(environment: Any) -> list[str]:
    """The agents that are not trained and have no client: verifiers gives them the run's."""
    from verifiers.v1.agent import Agents, make_agent
    from verifiers.v1.configs.agent import agent_config_fields, resolve_agent

    agents = Agents(environment.config, lambda _, spec: make_agent(resolve_agent(spec, model="policy")))
    run_apart(environment.setup(agents))
    clientless = [role for role, spec in agent_config_fields(environment.config).items() if not spec.client]
    return [role for role in clientless if not getattr(agents, role).trainable]


def _no_client(roles: Sequence[str]) -> str:
    role = roles[0]
    wanted = (("client.type", "eval"), ("client.base_url", "https://..."), ("model", "..."))
    options = ", ".join(f'("{role}.{name}", "{value}")' for name, value in wanted)
    return (
        f"the agent {' and '.join(roles)} is not trained and has no client of its own, so that the policy "
        f"would play it and be trained on its part too; add {options} to env.options, and where it needs a "
        f'key, ("{role}.client.api_key_var", "NAME") there and "NAME" to env.variables'
    )


def _plugin(name: str) -> str:
    """verifiers finds plugins by names without dots: one for a module that has some."""
    if "." not in name:
        return name
    flat = name.replace(".", "_")
    sys.modules[flat] = importlib.import_module(name)
    return flat


def _put(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        data = data.setdefault(name, {})
    data[path[-1]] = value
