"""Multiply two numbers with a calculator: two turns and a tool, learned by a tiny model in minutes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rl.bounds import PositiveInt, Share
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode
from rl.envs.chat.tools import tool
from rl.types import Message, Problem, Rewards

ALPHABET = "0123456789+*>[](),=abdmulEr: "


@dataclass(frozen=True)
class Calculator(ChatEnv):
    """ "47*86" asks for a call, [mul(a=47,b=86)], and then for the calculator's result as the answer."""

    max_new_tokens: PositiveInt = 20
    max_turns: PositiveInt = 2
    max_digits: PositiveInt = 2
    """Most digits of the numbers."""
    corruption: Share = 0.8
    """Share of demonstrations that repeat the question instead of calling the calculator."""
    rewards: Literal["episode", "turns"] = "episode"
    """One reward for the answer, or half of it for each turn: the right call, and the answer."""

    def generate(self, seed: int) -> Problem:
        rng = random.Random(seed)
        name, sign = rng.choice((("add", "+"), ("mul", "*")))
        a, b = (rng.randrange(10**self.max_digits) for _ in range(2))
        result = a + b if name == "add" else a * b
        return Problem(f"{seed:x}", f"{a}{sign}{b}", str(result), {"name": name, "a": a, "b": b})

    @tool
    def add(self, a: int, b: int) -> int:
        """a plus b."""
        return a + b

    @tool
    def mul(self, a: int, b: int) -> int:
        """a times b."""
        return a * b

    def reward_episode(self, episode: Episode) -> float | Rewards:
        answered = float(episode.response == episode.problem.answer)
        if self.rewards == "episode":
            return answered
        asked = episode.problem.metadata
        called = [{"name": result.name, **result.arguments} for result in episode.tool_results]
        turns = [0.5 * (called == [asked]), *[0.0] * (len(episode.turn_tokens) - 1)]
        turns[-1] += 0.5 * answered
        return Rewards(turns=tuple(turns))

    def chat_demonstration(self, problem: Problem, seed: int) -> Sequence[Message]:
        rng, asked = random.Random(seed), problem.metadata
        if rng.random() < self.corruption:
            return [{"role": "assistant", "content": problem.question}]
        arguments = {"a": asked["a"], "b": asked["b"]}
        call = {"id": "1", "type": "function", "function": {"name": asked["name"], "arguments": arguments}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "name": asked["name"], "content": problem.answer},
            {"role": "assistant", "content": problem.answer},
        ]
