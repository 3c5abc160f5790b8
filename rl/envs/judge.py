"""Judge: a language model that grades, behind any OpenAI-compatible URL; `rl serve MODEL` is one."""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import httpx
from annotated_types import Ge, Le

from rl.bounds import PositiveFloat, PositiveInt
from rl.errors import Unavailable
from rl.types import Message

_GRADE = re.compile(r"-?\d+(?:\.\d+)?")
_RUBRIC = "Grade the answer to the question from 0 (wrong) to 10 (right). Reply with the number alone."
_COMPARE = "Which answer to the question is better? Reply with 1 or 2 alone."
_PAUSE_SECONDS = 0.5
OWN_URL, OWN_KEY = "RL_JUDGE_URL", "RL_JUDGE_API_KEY"
"""Variables by which reward processes find the judge of their run."""


class JudgeFailed(Exception):
    """It gave no verdict."""


class JudgeUnreachable(JudgeFailed, Unavailable):
    """It did not answer: the sample is dropped."""

    cause = "judge"


@dataclass(frozen=True)
class Verdict:
    """A grade, with what was asked and answered: put it into episode.notes to have it recorded."""

    grade: float  # from 0 to 1
    asked: Sequence[Message]
    said: str


@dataclass(frozen=True)
class Judge:
    """For use in rewards. Its temperature is 0; its calls are the reward's own, never the policy's."""

    base_url: str = ""
    """An OpenAI-compatible endpoint, as http://localhost:8000/v1; empty: the run's own, of judge.model."""
    model: str = ""
    api_key_variable: str = "JUDGE_API_KEY"
    """The environment variable with its key; the key itself is in no config."""
    rubric: str = _RUBRIC
    """What it is told to do: it has to end in a number from 0 to `best`."""
    best: PositiveFloat = 10.0
    seconds: PositiveFloat = 30.0
    """Time for a verdict, retries included; reward.limit_seconds has to be more."""
    max_tokens: PositiveInt = 64
    max_retries: Annotated[int, Ge(0), Le(10)] = 2

    def grade(self, question: str, answer: str) -> Verdict:
        """The last number of its reply, as a share of `best`. Raises JudgeFailed."""
        return self._ask(self.rubric, f"Question: {question}\n\nAnswer: {answer}", self.best)

    def prefers_first(self, question: str, first: str, second: str) -> float:
        """Asked twice, in both orders, for judges prefer the first: 1, 0, or 0.5 where it is undecided."""
        verdicts = []
        for one, two in ((first, second), (second, first)):
            text = f"Question: {question}\n\nAnswer 1: {one}\n\nAnswer 2: {two}"
            verdicts.append(self._ask(_COMPARE, text, 2.0).grade == 0.5)
        return (verdicts[0] + (not verdicts[1])) / 2

    def _ask(self, told: str, text: str, best: float) -> Verdict:
        asked = [{"role": "system", "content": told}, {"role": "user", "content": text}]
        said = self.complete(asked)
        numbers = _GRADE.findall(said)
        if not numbers or not 0 <= (value := float(numbers[-1])) <= best:
            raise JudgeFailed(f"the judge gave no grade from 0 to {best:g}: {said!r:.200}")
        return Verdict(value / best, asked, said)

    def complete(self, messages: Sequence[Message]) -> str:
        """Its reply, for verdicts of your own. Raises JudgeFailed."""
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": self.max_tokens}
        url = self.base_url or os.environ.get(OWN_URL, "")
        if not url:
            raise JudgeUnreachable("there is no judge: set its base_url, or the run's judge.model")
        key = os.environ.get(self.api_key_variable if self.base_url else OWN_KEY, "none")
        headers = {"Authorization": f"Bearer {key}"}
        deadline, failure = time.monotonic() + self.seconds, "no time"
        for _ in range(self.max_retries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                reply = httpx.post(
                    f"{url.rstrip('/')}/chat/completions", json=body, headers=headers, timeout=left
                )
                if reply.status_code == 200:
                    return str(reply.json()["choices"][0]["message"]["content"])
                failure = f"{reply.status_code} {reply.text:.200}"
                if reply.status_code < 500 and reply.status_code != 429:
                    break
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                failure = f"{type(error).__name__} {error}"
            time.sleep(min(_PAUSE_SECONDS, max(0.0, deadline - time.monotonic())))
        raise JudgeUnreachable(f"the judge at {url} did not answer within {self.seconds:g} s: {failure}")
