"""Environments that count how often each problem is made. Processes that make problems again import this, and little."""

import random
from collections import Counter
from dataclasses import dataclass

from rl.envs.base import Env
from rl.types import Problem

NUM_EVAL = 9
made: Counter[int] = Counter()
"""Seed -> how often a problem was made of it in this process."""


@dataclass(frozen=True)
class Counted(Env):
    num_eval: int = NUM_EVAL
    max_new_tokens: int = 8
    name: str = "a"

    def generate(self, seed):
        made[seed] += 1
        return Problem(str(seed), f"{self.name} {seed}", "7")

    def reward(self, problem, response, stop):
        return 0.5


@dataclass(frozen=True)
class OwnHeldOut(Counted):
    def eval_problems(self):
        return [self.generate(seed) for seed in range(NUM_EVAL)]


@dataclass(frozen=True)
class Few(Env):
    """Eight problems, of which the first four are held out."""

    num_eval: int = 4

    def generate(self, seed):
        return Problem(str(seed % 8), f"{seed % 8}", "7")

    def eval_problems(self):
        return [self.generate(seed) for seed in range(4)]


@dataclass(frozen=True)
class Drawn(Counted):
    def eval_problems(self):
        return [self.generate(random.getrandbits(40)) for _ in range(NUM_EVAL)]
