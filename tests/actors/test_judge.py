"""A run's own judge, asked by envs.judge.Judge as a reward process asks it."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from rl.actors.judge import JudgeReplica, JudgeServer
from rl.actors.remote import ProcessDied
from rl.actors.replica import Pool
from rl.envs.judge import Judge, JudgeFailed
from rl.types import Completion, StopReason, VersionRange
from rl.waiting import Signal, beside

BAD = {"name": "x", "schema": {"type": "nothing"}}


class Tokenizer:
    """A token is a letter."""

    eos_id = 0

    def encode_messages(self, messages):
        return [ord(letter) for message in messages for letter in message["content"]]

    def decode(self, tokens):
        return "".join(map(chr, tokens))


class Processes:
    """Grades 7; dies of the letter †, and never ends with ‡."""

    def __init__(self):
        self.asked, self.given_up, self.slow = [], [], None

    async def give_up_samples(self, keys=None):
        self.given_up += keys

    async def sample(self, prompt, n, params, key=None):
        self.asked.append((prompt, n, params))
        if ord("‡") in prompt:
            self.slow = key
            await asyncio.Event().wait()
        if ord("†") in prompt:
            raise ProcessDied("the judge died")
        return [Completion([ord("7"), ord(" ")], [-1.0, -1.0], VersionRange(0, 0), StopReason.STOP)] * n

    async def check(self):
        pass

    async def kill(self):
        pass


@asynccontextmanager
async def serving(monkeypatch, max_restarts=1):
    """(url, key, its processes)"""
    processes, changed = Processes(), Signal()

    async def spawn():
        return processes

    pool = Pool("judge", [JudgeReplica("judge-0", spawn, max_restarts, changed)], changed)
    server = JudgeServer(pool, Tokenizer(), max_tokens=200)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    async with beside(server.run()):
        await pool.started()
        yield *server.environment.values(), processes


def test_a_judge_without_a_url_is_the_runs_own(monkeypatch):
    async def main():
        async with serving(monkeypatch) as (_, _, processes):
            verdict = await asyncio.to_thread(Judge(rubric="Grade.").grade, "2 + 2?", "4")
            return verdict, processes.asked

    verdict, [(prompt, n, params)] = asyncio.run(main())
    assert verdict.grade == 0.7 and verdict.answer == "7"
    assert Tokenizer().decode(prompt).startswith("Grade.") and n == 1
    assert (params.temperature, params.max_new_tokens, params.stop_token_ids) == (0.0, 64, (0,))
    assert json.loads(params.json_schema)["required"] == ["grade"]


def test_who_asks_badly_hears_why(monkeypatch):
    messages = [{"role": "user", "content": "a"}]

    async def main():
        found = []
        async with serving(monkeypatch) as (url, key, processes), httpx.AsyncClient() as client:
            for body, its_key in (
                ({"messages": messages}, "another"),
                ({"messages": messages}, "b\xf6se"),
                ({"messages": messages, "logit_bias": {}}, key),
                ({"messages": "a"}, key),
                ({"messages": messages, "n": 0}, key),
                ({"messages": messages, "response_format": {"type": "json_object"}}, key),
                ({"messages": messages, "response_format": {"type": "json_schema"}}, key),
                ({"messages": messages, "response_format": {"type": "json_schema", "json_schema": BAD}}, key),
                ({"messages": [{"role": "user"}]}, key),
                ({"messages": [{"role": "user", "content": "a" * 300}]}, key),
                ({"messages": messages, "n": 3, "max_tokens": 500}, key),
            ):
                headers = {"Authorization": f"Bearer {its_key}".encode("latin-1")}
                answer = await client.post(f"{url}/chat/completions", json=body, headers=headers)
                found.append((answer.status_code, answer.json().get("error", {}).get("message", "")))
            return found, processes.asked, answer.json()

    found, asked, good = asyncio.run(main())
    assert [status for status, _ in found] == [401, 401, *[400] * 8, 200]
    expected = [
        "not this run's",
        "not this run's",
        "logit_bias",
        "messages",
        "n:",
        *["response_format"] * 3,
        "chat template fails",
    ]
    expected.append("raise judge.max_tokens=200")
    assert all(part in said for part, (_, said) in zip(expected, found[:-1], strict=True)), found
    assert len(good["choices"]) == 3 and [params.max_new_tokens for _, _, params in asked] == [199]


def test_a_judge_that_died_for_good_costs_the_sample_alone(monkeypatch):
    async def main():
        async with serving(monkeypatch, max_restarts=0):
            judge = Judge(seconds=10.0, max_retries=1)
            with pytest.raises(JudgeFailed, match="503"):
                await asyncio.to_thread(judge.grade, "†", "4")

    asyncio.run(main())


def test_without_a_judge_a_judge_says_so(monkeypatch):
    monkeypatch.delenv("RL_JUDGE_URL", raising=False)
    with pytest.raises(JudgeFailed, match="set its base_url, or the run's judge.model"):
        Judge().grade("a", "b")


def test_the_generator_ends_what_a_client_does_not_wait_for_any_more(monkeypatch):
    """Else it would hold up the questions after it, until they are given up too."""

    async def main():
        async with serving(monkeypatch) as (url, key, processes):
            body = {"messages": [{"role": "user", "content": "‡"}]}
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as client:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(f"{url}/chat/completions", json=body, timeout=0.5)
            async with asyncio.timeout(10):
                while not processes.given_up:
                    await asyncio.sleep(0.01)
            assert processes.given_up == [processes.slow]

    asyncio.run(main())


def test_a_question_is_sampled_as_it_asks_and_may_leave_room_for_one_token(monkeypatch):
    def asking(num_letters, **more):
        return {"messages": [{"role": "user", "content": "a" * num_letters}], **more}

    how = {"temperature": 0.25, "top_p": 0.5, "seed": 2**31 + 7, "n": 3, "max_tokens": 9}
    bodies = [asking(1, **how, max_completion_tokens=5), asking(199), asking(200)]

    async def main():
        async with serving(monkeypatch) as (url, key, processes), httpx.AsyncClient() as client:
            headers = {"Authorization": f"Bearer {key}"}
            answers = [await client.post(f"{url}/chat/completions", json=b, headers=headers) for b in bodies]
            return answers, processes.asked

    answers, asked = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    (_, num, first), (_, _, fitting) = asked
    assert (num, first.temperature, first.top_p, first.seed, first.max_new_tokens) == (3, 0.25, 0.5, 7, 5)
    assert fitting.max_new_tokens == 1
    choices = answers[0].json()["choices"]
    assert [(each["index"], each["message"]["content"]) for each in choices] == [(0, "7"), (1, "7"), (2, "7")]
