"""Environments of the verifiers library, unmodified, through the endpoint: a tiny model on two CPU cores.

What has to be installed: docs/environments.md.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl.bounds import PositiveInt
from rl.config import RewardConfig, RunConfig
from rl.configs.calculator import calculator
from rl.envs.adapters.verifiers import Verifiers
from rl.envs.adapters.verifiers_v1 import VerifiersV1
from rl.envs.base import Env
from rl.types import Message, Problem

_CORRUPTION = 0.8  # share of demonstrations that make no use of the calculator


@dataclass(frozen=True)
class ToolEnv(Verifiers):
    """A v0 environment, with demonstrations to warm up on."""

    environment: str = "rl.envs.adapters.calculator_v0"
    max_new_tokens: PositiveInt = 20
    num_eval: PositiveInt = 64

    def chat_demonstration(self, problem: Problem, seed: int) -> Sequence[Message]:
        asked: list[Message] = [{"role": "user", "content": problem.question}]
        if random.Random(seed).random() < _CORRUPTION:
            return [*asked, {"role": "assistant", "content": problem.question}]
        a, sign, b = re.split("([+*])", problem.question)
        function: dict[str, Any] = {"name": {"+": "add", "*": "mul"}[sign]}
        function["arguments"] = {"a": int(a), "b": int(b)}
        return [
            *asked,
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]},
            {"role": "tool", "tool_call_id": "1", "content": problem.answer},
            {"role": "assistant", "content": problem.answer},
        ]


@dataclass(frozen=True)
class AskingUser(VerifiersV1):
    """A v1 environment, with demonstrations to warm up on."""

    environment: str = "rl.envs.adapters.calculator_v1"
    runtime: str = "subprocess"  # nothing that the model writes is run
    max_new_tokens: PositiveInt = 20
    num_eval: PositiveInt = 64

    def chat_demonstration(self, problem: Problem, seed: int) -> Sequence[Message]:
        from rl.envs.adapters.calculator_v1 import value

        asked: list[Message] = [{"role": "user", "content": problem.question}]
        if random.Random(seed).random() < _CORRUPTION:
            return [*asked, {"role": "assistant", "content": "0"}]
        result = value(problem.question)
        return [
            *asked,
            {"role": "assistant", "content": problem.question},
            {"role": "user", "content": result},
            {"role": "assistant", "content": result},
        ]


def _quick(env: Env) -> RunConfig:
    """An episode costs some 80 ms of CPU: a process, its clients, and what verifiers does."""
    reward = RewardConfig(limit_seconds=20.0)
    return replace(calculator(), env=env, reward=reward, prompts_per_step=16, steps=20)


def verifiers_v0() -> RunConfig:
    """A ToolEnv of verifiers 0.3.1."""
    return _quick(ToolEnv())


def verifiers_v1() -> RunConfig:
    """A taskset of verifiers 0.4 whose environment plays the user."""
    return _quick(AskingUser())
