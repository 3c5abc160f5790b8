"""The environments of benchmarks/episodes.py, in a module of their own: other processes import them."""

import random
import time
from dataclasses import dataclass

import openai

from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode
from rl.envs.chat.tools import tool
from rl.types import Problem

_TOOL = {
    "type": "function",
    "function": {"name": "wait", "description": "Wait.", "parameters": {"type": "object", "properties": {}}},
}


def _wait(rng: random.Random) -> str:
    time.sleep(rng.uniform(0, 2))
    return "waited"


@dataclass(frozen=True)
class Waiting(ChatEnv):
    max_turns: int = 4

    def generate(self, seed: int) -> Problem:
        return Problem(str(seed), "wait twice")

    @tool
    def wait(self, episode: Episode) -> str:
        """Wait."""
        return _wait(episode.rng)

    def reward_episode(self, episode: Episode) -> float:
        return float(len(episode.tool_results) == 2)


@dataclass(frozen=True)
class Caller(AgentEnv):
    """The same, as an agent on OpenAI's client."""

    max_turns: int = 4
    max_memory_gib: float = 4.0

    def generate(self, seed: int) -> Problem:
        return Problem(str(seed), "wait twice")

    def agent(self, episode: Episode, base_url: str, api_key: str) -> None:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages = [{"role": "user", "content": episode.problem.question}]
        while True:
            message = (
                client.chat.completions.create(model="m", messages=messages, tools=[_TOOL]).choices[0].message
            )
            messages.append(message.to_dict())
            if not message.tool_calls:
                return
            told = _wait(episode.rng)
            messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": told})

    def reward_episode(self, episode: Episode) -> float:
        return 1.0
