"""Procedural tasks of the reasoning-gym package, verified by the package itself."""

import importlib.util
import re
from dataclasses import dataclass
from typing import Any, Literal

from rl.envs.base import Env
from rl.envs.numbers import NUMBER, last_number
from rl.rewards import is_success
from rl.types import Problem, StopReason

_HALF, _HALVED_AT = 0.5, 5.0
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class ReasoningGym(Env):
    """Reward: 1 where reasoning-gym accepts the response's answer, if it ended; else 0, or a part."""

    chat: bool = True
    dataset: str = "chain_sum"
    """Name of a reasoning-gym dataset."""
    options: tuple[tuple[str, Any], ...] = ()
    """Options of the dataset, such as (("max_terms", 2),)."""
    answers: Literal["number", "line", "tag"] = "number"
    """Where a response has its answer. number: its last number. line: its last line. tag: between its last
    <answer> and </answer>, for answers of any form; the prompt has to ask for it (env.prompt_prefix)."""
    partial_credit: Literal["none", "dataset", "distance"] = "none"
    """What a wrong number gets. dataset: what reasoning-gym gives it: of 18, where 8 is right, a half.
    distance: 0.5 / (1 + d / 5), d being how far it is from the answer, so that groups without a right number
    teach too."""

    def generate(self, seed: int) -> Problem:
        item = self._entry(seed)
        return Problem(id=str(seed), question=item["question"], answer=str(item["answer"]))

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        if stop != StopReason.STOP or (answer := self._final_answer(response)) is None:
            return 0.0
        entry = self._entry(int(problem.id))
        score = float(self._dataset(int(problem.id)).score_answer(answer, entry))
        if is_success(score) or self.partial_credit == "none":
            return float(is_success(score))
        if self.partial_credit == "dataset":
            return score
        return _HALF / (1 + abs(float(answer) - float(problem.answer)) / _HALVED_AT)

    def _final_answer(self, response: str) -> str | None:
        if self.answers == "line":
            return response.strip().rpartition("\n")[2] or None
        if self.answers == "tag":
            tagged = _TAGGED.findall(response)
            return tagged[-1].strip() if tagged else None
        return last_number(response)

    def prepare(self) -> None:
        import reasoning_gym  # noqa: F401  2 s

    def validate(self) -> list[str]:
        if importlib.util.find_spec("reasoning_gym") is None:
            return ["the reasoning-gym package is missing; run: make tasks"]
        if self.partial_credit == "distance" and self.answers != "number":
            return [f"env.partial_credit=distance is for numbers; set env.answers=number, not {self.answers}"]
        answers = self._some_answers() if self.answers == "number" else []
        if answers and not any(map(NUMBER.fullmatch, answers)):
            return [
                f"env.dataset={self.dataset} has answers that are no numbers, such as {answers[0]!r:.40}; "
                f"set env.answers to line or tag"
            ]
        return []

    def _some_answers(self) -> list[str]:
        """None where a problem cannot be made: that is told elsewhere."""
        try:
            return [str(self._entry(seed)["answer"]).strip() for seed in range(5)]
        except Exception:
            return []

    def _entry(self, seed: int) -> dict[str, Any]:
        return self._dataset(seed)[0]

    def _dataset(self, seed: int) -> Any:
        import reasoning_gym  # not a part of every installation

        return reasoning_gym.create_dataset(self.dataset, seed=seed % 2**32, size=1, **dict(self.options))
