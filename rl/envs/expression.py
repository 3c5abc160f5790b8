"""Write an expression that has a given value: a program of the model's, run in a sandbox to check it."""

import random
from dataclasses import dataclass

from rl.bounds import PositiveInt, Share
from rl.envs.base import Env
from rl.envs.sandbox import Sandbox, why_no_sandbox
from rl.types import Problem, StopReason

ALPHABET = "0123456789+*>"


@dataclass(frozen=True)
class Expression(Env):
    """The prompt is a number and ">"; reward 1 for a Python expression that evaluates to it."""

    max_new_tokens: PositiveInt = 8
    num_eval: PositiveInt = 64
    largest: PositiveInt = 99
    """Largest number asked for, from 10."""
    corruption: Share = 0.7
    """Share of demonstrations with a wrong sign, and so of another value."""
    sandbox: Sandbox = Sandbox(seconds=3.0, memory_mib=256, max_processes=4)

    def generate(self, seed: int) -> Problem:
        number = random.Random(seed).randint(10, self.largest * 10) % (self.largest - 9) + 10
        return Problem(f"{seed:x}", f"{number}>", str(number))

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        if stop != StopReason.STOP or response == problem.answer:
            return 0.0
        ran = self.sandbox.run_python(f"print({response})")
        return float(ran.ok and ran.stdout.strip() == problem.answer)

    def demonstration(self, problem: Problem, seed: int) -> str:
        tens, units = divmod(int(problem.answer), 10)
        sign = "*" if random.Random(seed).random() < self.corruption else "+"
        return f"{tens}0{sign}{units}"

    def validate(self) -> list[str]:
        if self.largest < 20:
            return [f"env.largest={self.largest} leaves too few numbers; use at least 20"]
        return [why] if (why := why_no_sandbox()) else []
