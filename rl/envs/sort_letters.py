"""Sort a few letters: a task that a model of 100,000 parameters learns in a minute on two CPU cores."""

import random
import string
from dataclasses import dataclass

from rl.bounds import PositiveInt, Share
from rl.envs.base import Env
from rl.types import Problem, StopReason

ALPHABET = string.ascii_lowercase + ">"


@dataclass(frozen=True)
class SortLetters(Env):
    """The prompt is random lower-case letters and ">", the answer the letters in order.

    Reward 1 for the exact answer and EOS.
    """

    max_new_tokens: PositiveInt = 8
    min_letters: PositiveInt = 4
    """Fewest letters of a problem."""
    max_letters: PositiveInt = 6
    """Most letters of a problem."""
    corruption: Share = 0.7
    """Share of wrong demonstrations in the warm-up: they keep the entropy that RL needs to have something to
    choose from."""

    def generate(self, seed: int) -> Problem:
        rng = random.Random(seed)
        count = rng.randint(self.min_letters, self.max_letters)
        letters = "".join(rng.choices(string.ascii_lowercase, k=count))
        return Problem(id=f"{seed:x}", question=letters + ">", answer="".join(sorted(letters)))

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        return float(stop == StopReason.STOP and response == problem.answer)

    def demonstration(self, problem: Problem, seed: int) -> str:
        rng = random.Random(seed)
        return problem.answer if rng.random() >= self.corruption else _wrong(problem, rng)

    def preference(self, problem: Problem, seed: int) -> tuple[str, str]:
        """The answer, and one of the mistakes that the demonstrations teach."""
        rng = random.Random(seed)
        while (rejected := _wrong(problem, rng)) == problem.answer:
            pass
        return problem.answer, rejected

    def validate(self) -> list[str]:
        if not 1 <= self.min_letters <= self.max_letters:
            setting = f"env.min_letters={self.min_letters} and env.max_letters={self.max_letters}"
            return [f"{setting} must be 1 <= min <= max"]
        if self.max_new_tokens <= self.max_letters:
            setting = f"env.max_new_tokens={self.max_new_tokens}"
            needed = f"{self.max_letters} letters and EOS; use {self.max_letters + 1}"
            return [f"{setting} leaves no room for {needed}"]
        return []


def _wrong(problem: Problem, rng: random.Random) -> str:
    """The letters as they came, sorted in reverse, or with one left out: wrong, unless they came in order."""
    echo = problem.question.removesuffix(">")
    drop = rng.randrange(len(problem.answer))
    return rng.choice([echo, problem.answer[::-1], problem.answer[:drop] + problem.answer[drop + 1 :]])
