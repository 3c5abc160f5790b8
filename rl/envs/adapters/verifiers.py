"""Environments of verifiers' v0 API (verifiers 0.3.1: `load_environment`), unmodified."""

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl.bounds import PositiveInt
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.episode import Episode
from rl.types import Message, Problem

_KEY = "RL_EPISODE_KEY"


@dataclass(frozen=True)
class Verifiers(AgentEnv):
    """It samples through the run's endpoint, and scores itself: its reward, and its metrics beside it."""

    environment: str = ""
    """A name that verifiers.load_environment takes: an installed package's."""
    options: tuple[tuple[str, Any], ...] = ()
    """What else it takes."""
    num_eval: PositiveInt = 32
    max_turns: PositiveInt = 32
    turn_seconds: float = 60.0
    max_memory_gib: float = 4.0

    def prepare(self) -> None:
        _loaded(self)

    def eval_problems(self) -> list[Problem]:
        return [self._problem(index) for index in range(self.num_eval)]

    def train_problem(self, seed: int) -> Problem:
        rows = len(_loaded(self).get_dataset())
        return self._problem(self.num_eval + seed % (rows - self.num_eval))

    def generate(self, seed: int) -> Problem:
        return self.train_problem(seed)

    async def agent(self, episode: Episode, base_url: str, api_key: str) -> None:
        import verifiers as vf

        os.environ[_KEY] = api_key
        client = vf.ClientConfig(
            client_type="openai_chat_completions", api_base_url=base_url, api_key_var=_KEY, max_retries=0
        )
        env = _loaded(self)
        row = env.get_dataset()[int(episode.problem.id)]
        found = await env.run_rollout(vf.RolloutInput(**row), client, "policy", {})
        if found.get("error"):
            raise RuntimeError(str(found["error"]))
        episode.state["reward"] = float(found["reward"])

    def reward_episode(self, episode: Episode) -> float:
        return episode.state["reward"]

    def validate(self) -> list[str]:
        if importlib.util.find_spec("verifiers") is None:
            return ["the verifiers package is missing; see docs/environments.md for what to install"]
        rows = len(_loaded(self).get_dataset())
        if rows <= self.num_eval:
            return [f"{self.environment} has {rows} rows; lower env.num_eval={self.num_eval}"]
        return []

    def _problem(self, index: int) -> Problem:
        row = _loaded(self).get_dataset()[index]
        asked: Sequence[Message] = row["prompt"]
        return Problem(str(index), json.dumps(list(asked)), str(row.get("answer", "")))


@lru_cache(maxsize=4)
def _loaded(env: Verifiers) -> Any:
    import verifiers as vf

    return vf.load_environment(env.environment, **dict(env.options))
