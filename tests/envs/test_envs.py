import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil
import pyarrow
import pytest
from pyarrow import parquet

from configs.algorithms import distillation
from configs.smollm2 import work_out
from rl.controller.rollouts import Rollouts
from rl.envs.base import Env, RolloutContext, derive_seed
from rl.envs.question_file import QuestionFile
from rl.envs.sort_letters import SortLetters
from rl.envs.verifier import Verifier
from rl.errors import ConfigError, RunError
from rl.models.sources import TinyQwen3
from rl.models.tokenizer import HFTokenizer
from rl.types import (
    Completion,
    Problem,
    Rewards,
    Rollout,
    SamplingParams,
    Score,
    Segment,
    StopReason,
    VersionRange,
)
from tests.controller.fakes import build


def test_sorting_is_rewarded_only_when_exact_and_ended():
    env = SortLetters()
    problem = Problem("1", "cab>", "abc")
    assert env.reward(problem, "abc", StopReason.STOP) == 1
    assert env.reward(problem, "abc", StopReason.LENGTH) == 0
    assert env.reward(problem, "abcd", StopReason.STOP) == 0


def test_problems_follow_from_their_seed_and_held_out_ones_are_never_trained_on():
    env = SortLetters(min_letters=1, max_letters=2, num_eval=300)
    held_out = {p.question for p in env.eval_problems()}
    assert len(held_out) == 300
    drawn = [env.train_problem(derive_seed(0, i)) for i in range(300)]
    assert not held_out & {p.question for p in drawn}
    assert drawn == [env.train_problem(derive_seed(0, i)) for i in range(300)]
    with pytest.raises(ConfigError, match="lower env.num_eval"):
        SortLetters(min_letters=1, max_letters=1, num_eval=27).eval_problems()


def test_the_share_of_wrong_demonstrations_is_the_corruption():
    env = SortLetters(corruption=0.7)
    problems = [env.train_problem(i) for i in range(500)]
    right = sum(env.demonstration(p, i) == p.answer for i, p in enumerate(problems))
    assert 0.25 < right / 500 < 0.37  # holds: meaning, one in three answers is right; seeded draws


def test_a_question_file_splits_and_verifies(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("".join(f'{{"question": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(5)))
    env = QuestionFile(path=str(file), num_eval=2)
    assert [p.question for p in env.eval_problems()] == ["0+1", "1+1"]
    assert {env.train_problem(i).question for i in range(50)} == {"2+1", "3+1", "4+1"}
    assert env.validate() == []
    problem = Problem("1", "q", "1,000")
    assert env.reward(problem, "so 7 plus 993 is 1000.", StopReason.STOP) == 1
    assert env.reward(problem, "1000 or 7", StopReason.STOP) == 0
    assert env.reward(problem, "1000", StopReason.LENGTH) == 0


@pytest.mark.parametrize(
    ("answer", "response", "is_right"),
    [
        ("121932631112635269", "it is 121,932,631,112,635,269", True),
        ("121932631112635269", "it is 121932631112635270", False),
        ("7", "7.0", True),
        ("0.5", "it is .5", True),
        ("0.5", "0.50", True),
        ("-0.5", "-.5.", True),
        ("5", "it is .5", False),
        ("42", "the answer is ...42", True),
        ("10", "1..10", True),
        ("3", "section 1.2.3", True),
        ("0.1", "0.10000000000000001", False),
    ],
)
def test_numbers_are_compared_exactly(answer, response, is_right):
    env = QuestionFile()
    assert env.reward(Problem("1", "q", answer), response, StopReason.STOP) == is_right


def test_a_question_file_never_trains_on_what_it_holds_out_and_names_answers_it_cannot_verify(tmp_path):
    file = tmp_path / "data.jsonl"
    rows = [("a", 1), ("a", 1), ("b", 2)]
    file.write_text("".join(f'{{"question": "{q}", "answer": "{a}"}}\n' for q, a in rows))
    env = QuestionFile(path=str(file), num_eval=1)
    assert {env.train_problem(i).question for i in range(20)} == {"b"}
    file.write_text('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "so 42 apples"}\n')
    assert "1 answers of" in env.validate()[0] and "data.jsonl:2" in env.validate()[0]


def test_drive_keeps_tokens_as_they_were_sampled(tmp_path):
    tokenizer = HFTokenizer(TinyQwen3(alphabet="abc>").materialize(tmp_path))

    class Fake:
        async def sample(self, prompt, n, params):
            return [Completion([3, 4, 2], [-0.1, -0.2, -0.3], VersionRange(5, 5), StopReason.STOP)] * n

    prompt = Env().encode(Problem("1", "ba>", "ab"), tokenizer)
    rollouts = asyncio.run(Env().drive(prompt, 2, RolloutContext(Fake(), tokenizer, SamplingParams(8), 128)))
    assert len(rollouts) == 2
    assert rollouts[0].segments[0].tokens.tolist() == [1, 4, 3, 6] and not rollouts[0].segments[0].sampled
    assert rollouts[0].segments[1].tokens.tolist() == [3, 4, 2] and rollouts[0].response == "ab"


@dataclass(frozen=True)
class Odd(Env):
    def reward(self, problem, response, stop):
        print("a reward that prints does not disturb the answers")
        if response == "raise":
            raise KeyError("gone")
        if response == "hang":
            time.sleep(60)
        if response == "exit":
            threading.Thread(target=time.sleep, args=(60,)).start()  # Python would wait for it
            raise SystemExit(3)
        if response == "close":
            os.closerange(3, 100)
            time.sleep(60)
        if response.startswith("spawn"):
            child = subprocess.Popen(["sleep", "60"])
            Path(response.removeprefix("spawn ")).write_text(str(child.pid))
            child.wait()
        if response == "read":
            return float(sys.stdin.readline() == "")
        return float(response)


def rollout(response):
    prompt = (Segment([1], False, [0.0]),)
    return Rollout(Problem("1", "q", "a"), prompt, response, StopReason.STOP, VersionRange(0, 0))


def test_scores_of_a_call_that_was_given_up_are_nobody_elses():
    """The worker's thread goes on with a group whose run begins again at a checkpoint."""
    verifier, given_up = Verifier(Slow(), limit_seconds=5), list[float]()
    try:
        old = threading.Thread(target=lambda: given_up.extend(verifier.score([rollout("100")] * 8)))
        old.start()
        time.sleep(0.5)
        scores = verifier.score([rollout(str(number)) for number in range(8)])
        old.join(20)
    finally:
        verifier.close()
    assert [score.reward for score in scores] == list(range(8))
    assert 0 < len(given_up) < 8


@dataclass(frozen=True)
class Slow(Env):
    def reward(self, problem, response, stop):
        time.sleep(0.2)
        return float(response)


def test_a_reward_function_can_only_hurt_its_own_sample():
    verifier = Verifier(Odd(), limit_seconds=5)
    try:
        started = time.monotonic()
        scores = verifier.score([rollout(r) for r in ("0.25", "raise", "hang", "0.5", "exit", "1")])
        assert time.monotonic() - started < 60  # what one of them sleeps
    finally:
        verifier.close()
    assert [s.reward for s in scores if s.error is None] == [0.25, 0.5, 1.0]
    assert "KeyError" in scores[1].error
    assert "over 5 s" in scores[2].error
    assert "code 3" in scores[4].error


def test_a_reward_that_is_not_a_number_closes_its_files_or_starts_programs(tmp_path):
    pid_file = tmp_path / "pid"
    verifier = Verifier(Odd(), limit_seconds=5)
    try:
        started = time.monotonic()
        scores = verifier.score([rollout(r) for r in ("nan", "close", f"spawn {pid_file}", "read", "0.5")])
        assert time.monotonic() - started < 60  # what one of them sleeps
    finally:
        verifier.close()
    assert scores[0].error == "the reward is nan"
    assert "closed its connection" in scores[1].error
    assert "over 5 s" in scores[2].error
    assert [s.reward for s in scores[3:]] == [1.0, 0.5]
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid_file.read_text())).status() == psutil.STATUS_ZOMBIE


@dataclass(frozen=True)
class Unprepared(Env):
    def prepare(self):
        threading.Thread(target=time.sleep, args=(60,)).start()  # Python would wait for it
        raise OSError("no server")


def test_a_prepare_that_fails_is_told_at_once_whatever_it_has_started():
    started = time.monotonic()
    with pytest.raises(RunError, match="prepare.. of the environment failed: OSError: no server"):
        Verifier(Unprepared(), limit_seconds=5)
    assert time.monotonic() - started < 50  # holds: meaning, the thread takes 60


@dataclass(frozen=True)
class Parts(Env):
    """Its reward is what the question says."""

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        return eval(problem.question, {"Rewards": Rewards})


def test_rewards_of_turns_and_tokens_are_counted():
    verifier = Verifier(Parts(), 5.0)

    def score(reward):
        turns = (
            Segment([1], False, [0.0]),
            Segment([2, 3], True, [0.0] * 2),
            Segment([4], False, [0.0]),
            Segment([5], True, [0.0]),
        )
        made = Rollout(Problem("1", reward, ""), turns, "", StopReason.STOP, VersionRange(0, 0))
        return verifier.score([made])[0]

    try:
        of_turns = score("Rewards(turns=(0.5, 1))")
        assert (of_turns.reward, of_turns.parts) == (1.5, Rewards(turns=(0.5, 1.0)))
        assert score("Rewards(tokens=(1, 2, 3))").parts.tokens == (1, 2, 3)
        assert score("1").parts == Rewards()
        assert score("Rewards(turns=(1,))").error == "the reward function gave 1 rewards for 2 turns"
        assert score("Rewards(tokens=(1,))").error == "the reward function gave 1 rewards for 3 tokens"
        assert "has to have turns or tokens" in score("Rewards()").error
        assert "the reward is" in score("Rewards(turns=(float('nan'), 1))").error
    finally:
        verifier.close()


def test_preferences_prefer_the_answer_to_a_mistake():
    env = SortLetters()
    for i in range(100):
        problem = env.train_problem(i)
        chosen, rejected = env.preference(problem, i)
        assert chosen == problem.answer != rejected and env.preference(problem, i) == (chosen, rejected)


def test_a_file_of_questions_holds_demonstrations_and_preferences(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(
        '{"question": "1+1", "answer": "2", "response": "It is 2"}\n\n'
        '{"question": "2+2", "answer": "4", "chosen": "4", "rejected": "5"}\n'
    )
    env = QuestionFile(path=str(path), num_eval=1)
    first, second = env._read()
    assert env.demonstration(first, 0) == "It is 2" and env.demonstration(second, 0) == "4"
    assert env.preference(second, 0) == ("4", "5")
    with pytest.raises(ConfigError, match="lines.jsonl:1 has no chosen and rejected"):
        env.preference(first, 0)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b"not json", "line 2 is not JSON"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b"[1, 2]", "line 2 is not an object"),
        (b'{"question": "q"}', "line 2 has no answer"),
        (b"{}", "line 2 has no question and no answer"),
        (b'{"question": ["q"], "answer": "1"}', "line 2 has a question that is not a string (['q'])"),
        (b'{"question": null, "answer": "1"}', "line 2 has a question that is not a string (None)"),
        (
            b'{"question": "q", "answer": true}',
            "line 2 has an answer that is neither a string nor a number (True)",
        ),
        (
            b'{"question": "q", "answer": {}}',
            "line 2 has an answer that is neither a string nor a number ({})",
        ),
        (b'{"question": "\xff", "answer": "1"}', "line 2 is not UTF-8 (invalid start byte at byte 14)"),
    ],
)
def test_a_bad_line_of_a_question_file_is_named(tmp_path, line, wrong):
    file = tmp_path / "q.jsonl"
    file.write_bytes(b'{"question": "1+1", "answer": 2}\n' + line + b"\n")
    (problem,) = QuestionFile(path=str(file), num_eval=1).validate()
    assert f"{file} {wrong}" in problem and 'as {"question": "What is 2 + 2?", "answer": "4"}' in problem


def test_a_question_file_is_split_at_line_feeds_alone(tmp_path):
    file = tmp_path / "q.jsonl"
    rows = '{"question": "one\u2028line", "answer": 1}\r\n{"question": "two", "answer": 2.5}\n'
    file.write_bytes(b"\xef\xbb\xbf" + rows.encode())
    env = QuestionFile(path=str(file), num_eval=1)
    assert env.validate() == [] and env.eval_problems()[0].question == "one\u2028line"
    assert env.train_problem(0).answer == "2.5"


class Spelled:
    """A tokenizer of characters, which writes turns out as <role>text."""

    eos_id = 0

    def encode(self, text):
        return [1, *map(ord, text)]

    def encode_plain(self, text):
        return [*map(ord, text)]

    def encode_chat(self, user, system=""):
        return self.encode(f"<system>{system}" * bool(system) + f"<user>{user}")

    def decode(self, tokens):
        return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    "settings, text",
    [
        ({}, "ba>"),
        ({"prompt_prefix": "dc>cd\n"}, "dc>cd\nba>"),
        ({"chat": True}, "<user>ba>"),
        ({"chat": True, "prompt_prefix": "Sort."}, "<system>Sort.<user>ba>"),
    ],
)
def test_a_prompt_is_prefix_and_question_or_turns_of_them(settings, text):
    prompt = SortLetters(**settings).encode(Problem("1", "ba>", "ab"), Spelled())
    assert prompt.tokens == (1, *map(ord, text))


def test_a_completion_ends_at_eos_or_at_a_text_of_the_env():
    asked = []

    class Sampler:
        async def sample(self, prompt, n, params):
            asked.append(params)
            return [Completion([97], [-1.0], VersionRange(0, 0), StopReason.STOP)] * n

    async def score(rollouts):
        return [Score(1.0) for _ in rollouts]

    for stop in ((), ("\n", ".")):
        rollouts = Rollouts(SortLetters(num_eval=8, stop=stop), Spelled(), score, 2, 0, max_tokens=99)
        asyncio.run(rollouts.train_group(0, Sampler()))
    assert [params.stop_token_ids for params in asked] == [(0,), (0, 10, 46)]


@pytest.mark.parametrize(("tokens", "stop", "response"), [
    ([97, 10], StopReason.STOP, "a"), ([97, 46], StopReason.STOP, "a"), ([10], StopReason.STOP, ""),
    ([97, 10], StopReason.LENGTH, "a\n"), ([10, 97], StopReason.STOP, "\na"), ([], StopReason.STOP, ""),
])  # fmt: skip
def test_the_text_that_ends_a_completion_is_no_part_of_the_response(tokens, stop, response):
    class Sampler:
        async def sample(self, prompt, n, params):
            return [Completion(tokens, [-1.0] * len(tokens), VersionRange(0, 0), stop)] * n

    async def score(rollouts):
        return [Score(1.0) for _ in rollouts]

    rollouts = Rollouts(SortLetters(num_eval=8, stop=("\n", ".")), Spelled(), score, 2, 0, max_tokens=99)
    group = asyncio.run(rollouts.train_group(0, Sampler()))
    assert {rollout.response for rollout in group.rollouts} == {response}
    assert {tuple(rollout.turn_tokens[0]) for rollout in group.rollouts} == {tuple(tokens)}


def test_a_prompt_without_room_for_an_answer_costs_its_own_samples(tmp_path):
    """As the first prompt of a conversation does."""

    class Sampler:
        async def sample(self, prompt, n, params):
            raise AssertionError("nothing is sampled")

    rollouts = Rollouts(SortLetters(num_eval=8, prompt_prefix="x" * 99), Spelled(), None, 2, 0, max_tokens=99)
    group = asyncio.run(rollouts.train_group(0, Sampler()))
    assert [(score.cause, score.is_dropped, score.reward) for score in group.scores] == [
        ("too_long", True, 0.0)
    ] * 2
    assert "leaves no room for an answer within 99 (max_seq_len" in group.scores[0].error
    assert not group.was_sampled and group.rollouts[0].turn_lengths == []
    batch, _ = build([group], distillation(), tmp_path)  # which reads no rewards
    assert batch.groups[0].samples == []


GSM8K = {"question": "How many?", "answer": "He has 3 + 4 = <<3+4=7>>7 apples.\n#### 7"}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_gsm8k_s_answers_are_read_from_either_kind_of_file(tmp_path, suffix):
    path, rows = tmp_path / f"train.{suffix}", [{**GSM8K, "question": f"How many? {i}"} for i in range(3)]
    if suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = QuestionFile(path=str(path), num_eval=1)
    assert env.validate() == []
    problem = env.train_problem(0)
    assert problem.answer == "7" and env.demonstration(problem, 0) == GSM8K["answer"]
    assert env.reward(problem, "so 4 + 3, that is 7.0", StopReason.STOP) == 1
    assert env.reward(problem, "7 or 8", StopReason.STOP) == 0


def test_a_broken_parquet_file_is_named(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and nothing else")
    (line,) = QuestionFile(path=str(tmp_path / "train.parquet")).validate()
    assert "train.parquet is not a readable parquet file" in line and "fetch it again" in line


def test_smollm2s_demonstrations_are_right():
    """Each side of each = is the answer."""
    for a, b, sign in product(range(100), range(100), "+-"):
        sides = work_out(f"{a} {sign} {b}").split("=")
        assert {eval(side) for side in sides} == {a + b if sign == "+" else a - b}
