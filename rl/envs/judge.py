"""Judge: a language model that grades, behind any OpenAI-compatible URL; `rl serve MODEL` is one."""

import asyncio
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from annotated_types import Ge, Le

from rl.bounds import PositiveFloat, PositiveInt
from rl.errors import Unavailable, one_line
from rl.types import Message
from rl.waiting import run_apart

_RUBRIC = "Grade the answer to the question from 0 (wrong) to 10 (right)."
_COMPARE = "Which answer to the question is better?"
_PAUSE_SECONDS = 0.5
_REFUSALS = (400, 413, 422)
"""Statuses that blame the request: the policy's answer may be too long for the judge."""
OWN_URL, OWN_KEY = "RL_JUDGE_URL", "RL_JUDGE_API_KEY"
"""Variables by which reward processes find the judge of their run."""


class JudgeFailed(Exception):
    """It gave no verdict, or refused the question: the sample is scored 0."""


class JudgeUnreachable(JudgeFailed, Unavailable):
    """It did not answer: the sample is dropped."""

    cause = "judge"


@dataclass(frozen=True)
class Verdict:
    """A grade, with what was asked and answered: put it into episode.notes to have it recorded."""

    grade: float  # from 0 to 1
    asked: Sequence[Message]
    answer: str


@dataclass(frozen=True)
class Judge:
    """For use in rewards. Its temperature is 0, unless `reasoning`. Its calls are the reward's own, never the
    policy's."""

    base_url: str = ""
    """An OpenAI-compatible endpoint, as http://localhost:8000/v1; empty: the run's own, of judge.model."""
    model: str = ""
    api_key_variable: str = "JUDGE_API_KEY"
    """The environment variable with its key; the key itself is in no config."""
    rubric: str = _RUBRIC
    """What is good, and what the ends of the scale mean. The form of the reply is told after it."""
    best: PositiveFloat = 10.0
    """The highest grade; the lowest is 0."""
    structured: bool = True
    """Hold its replies to the verdict's form by response_format, as vLLM and OpenAI have it. False for an
    endpoint that has none: a reply in another form is then no verdict."""
    seconds: PositiveFloat = 30.0
    """Time for a verdict, retries and both questions of a comparison included; reward.limit_seconds has to be
    more."""
    reasoning: bool = False
    """For models that refuse max_tokens and a temperature, as OpenAI's that reason: the limit is sent as
    max_completion_tokens, which counts the thoughts too, and no temperature."""
    max_tokens: PositiveInt = 64
    max_retries: Annotated[int, Ge(0), Le(10)] = 2

    def grade(self, question: str, answer: str) -> Verdict:
        """Its grade, as a share of `best`. Raises JudgeFailed where the reply is none, or none came."""
        asked = self.messages(question, answer)
        form = {"type": "number", "minimum": 0, "maximum": self.best}
        reply = self._verdict(asked, "grade", form, self._deadline())
        value = verdict_in(reply, "grade")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= self.best:
            raise self._no_verdict(f"a grade from 0 to {self.best:g}", reply)
        return Verdict(value / self.best, asked, reply)

    def messages(self, question: str, answer: str) -> tuple[Message, ...]:
        """What `grade` asks; a judge of your own learns to reply to it (examples/own_judge.py)."""
        instructions = f'{self.rubric}\nReply with JSON alone: {{"grade": NUMBER}}, from 0 to {self.best:g}.'
        return _messages(instructions, f"Question: {question}\n\nAnswer: {answer}")

    def prefers_first(self, question: str, first: str, second: str) -> float:
        """Asked twice, in both orders, for judges prefer the first: 1, 0, or 0.5 where it is undecided."""
        wins, deadline = 0, self._deadline()
        form = {"type": "integer", "enum": [1, 2]}
        for answer_1, answer_2, number_of_first in ((first, second, 1), (second, first, 2)):
            text = f"Question: {question}\n\nAnswer 1: {answer_1}\n\nAnswer 2: {answer_2}"
            instructions = f'{_COMPARE}\nReply with JSON alone: {{"better": 1}} or {{"better": 2}}.'
            reply = self._verdict(_messages(instructions, text), "better", form, deadline)
            value = verdict_in(reply, "better")
            if isinstance(value, bool) or value not in (1, 2):
                raise self._no_verdict("1 or 2", reply)
            wins += value == number_of_first
        return wins / 2

    def _deadline(self) -> float:
        return time.monotonic() + self.seconds

    def _verdict(self, asked: Sequence[Message], name: str, form: Mapping[str, Any], deadline: float) -> str:
        """The reply, which is {name: a value of this form} where `structured` holds it to that."""
        schema = {
            "type": "object",
            "properties": {name: form},
            "required": [name],
            "additionalProperties": False,
        }
        return self.complete(asked, schema if self.structured else None, deadline)

    def _remedy(self, schema: object) -> str:
        settings = ["structured=False where it knows no response_format"] * (schema is not None)
        settings += ["reasoning=True where it takes no max_tokens"] * (not self.reasoning)
        return f" (set the judge's {', or '.join(settings)})" if settings else ""

    def _no_verdict(self, wanted: str, reply: str) -> JudgeFailed:
        remedy = (
            f"raise its max_tokens={self.max_tokens}"
            if self.structured
            else "set structured=True, or use a judge that keeps to the form"
        )
        return JudgeFailed(f"the judge did not reply with {wanted}: {reply!a:.200}; {remedy}")

    def complete(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None = None,
        deadline: float | None = None,
    ) -> str:
        """Its reply, for verdicts of your own. Raises JudgeFailed.

        schema: a JSON schema to which the reply is held. deadline: of time.monotonic(), for all tries; None:
        `seconds` from now.
        """
        body: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.reasoning:
            body["max_completion_tokens"] = self.max_tokens
        else:
            body |= {"temperature": 0, "max_tokens": self.max_tokens}
        if schema is not None:
            described = {"name": "verdict", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": described}
        url = self.base_url or os.environ.get(OWN_URL, "")
        if not url:
            raise JudgeUnreachable("there is no judge: set its base_url, or the run's judge.model")
        key = os.environ.get(self.api_key_variable if self.base_url else OWN_KEY, "none")
        headers = {"Authorization": f"Bearer {key}"}
        deadline, failure = self._deadline() if deadline is None else deadline, "none"
        tries, is_late = 0, True  # where no time is left for a try
        while tries <= self.max_retries and (left := deadline - time.monotonic()) > 0:
            tries, is_late = tries + 1, False
            try:
                is_own = not self.base_url
                reply = _post(f"{url.rstrip('/')}/chat/completions", body, headers, left, is_own)
                if reply.status_code == 200:
                    choice = reply.json()["choices"][0]
                    if choice["message"]["content"] is None:
                        why = str(choice["message"].get("refusal") or choice.get("finish_reason"))
                        raise JudgeFailed(f"the judge at {url} replied without a text ({why:.200})")
                    return str(choice["message"]["content"])
                failure = f"{reply.status_code} {reply.text:.200}"
                if reply.status_code in _REFUSALS:
                    raise JudgeFailed(
                        f"the judge at {url} refused what it was asked: {failure}{self._remedy(schema)}"
                    )
                if reply.status_code < 500 and reply.status_code != 429:
                    break
            except (httpx.HTTPError, TimeoutError, ValueError, LookupError, TypeError) as error:
                failure, is_late = one_line(error), isinstance(error, TimeoutError)
            if tries <= self.max_retries:
                time.sleep(min(_PAUSE_SECONDS, max(0.0, deadline - time.monotonic())))
        end, remedy = "gave no reply", ""
        if is_late:
            end = f"did not answer within {self.seconds:g} s"
            remedy = "; where it is slow, raise its seconds, and reward.limit_seconds above them"
        raise JudgeUnreachable(f"the judge at {url} {end} (tries: {tries}, the last: {failure}){remedy}")


def _post(
    url: str, body: object, headers: Mapping[str, str], seconds: float, directly: bool
) -> httpx.Response:
    """Raises TimeoutError where the reply has not ended by then: httpx's timeouts are for each part of it.

    directly: through no proxy that the environment names.
    """

    async def post() -> httpx.Response:
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(timeout=None, trust_env=not directly) as client,
        ):
            return await client.post(url, json=body, headers=headers)

    return run_apart(post())


def _messages(instructions: str, text: str) -> tuple[Message, ...]:
    return ({"role": "system", "content": instructions}, {"role": "user", "content": text})


def verdict_in(reply: str, name: str) -> object:
    """The value of a reply that is {name: value}, or the value alone; None where it is anything else."""
    try:
        record = json.loads(reply.rpartition("</think>")[2])
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict):
        record = record[name] if list(record) == [name] else None
    is_number = isinstance(record, int | float) and math.isfinite(record)
    return record if is_number or isinstance(record, str) else None
