import asyncio
import json
import sys
from decimal import Decimal
from itertools import product
from types import SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet

from configs.algorithms import distillation
from configs.smollm2 import work_out
from rl.controller.rollouts import Rollouts
from rl.envs.base import Env, RolloutContext, derive_seed
from rl.envs.mixture import Mixture
from rl.envs.numbers import last_number, value
from rl.envs.question_file import QuestionFile
from rl.envs.reasoning import ReasoningGym
from rl.envs.sort_letters import SortLetters
from rl.errors import ConfigError
from rl.models.sources import TinyQwen3
from rl.models.tokenizer import HFTokenizer
from rl.types import (
    Completion,
    Problem,
    SamplingParams,
    Score,
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


def test_preferences_prefer_the_answer_to_a_mistake():
    env = SortLetters()
    for i in range(100):
        problem = env.train_problem(i)
        chosen, rejected = env.preference(problem, i)
        assert chosen == problem.answer != rejected and env.preference(problem, i) == (chosen, rejected)


def test_a_question_is_held_out_in_its_other_form_too(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    as_messages = '{"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}\n'
    other = '{"question": "3+3?", "answer": "6"}\n'
    first.write_text('{"question": "2+2?", "answer": "4"}\n' + as_messages + other)
    env = QuestionFile(path=str(first), num_eval=1)
    assert {env.train_problem(i).id for i in range(20)} == {"a.jsonl:3"}
    second.write_text(other.replace("3", "9") + as_messages + other.replace("3", "5"))
    tasks = (("a", env), ("b", QuestionFile(path=str(second), num_eval=1)))
    mixture = Mixture(tasks=tasks, weights=(0.0, 1.0), max_new_tokens=512)
    assert {mixture.train_problem(i).question for i in range(20)} == {"5+5?"}


def test_what_is_null_is_not_there(tmp_path):
    """As in parquet files, whose rows have all columns."""
    path = tmp_path / "lines.jsonl"
    row = '{"question": "1+1", "answer": "2", "response": null, "chosen": null, "rejected": null}\n'
    path.write_text(row + row.replace("1+1", "2+2"))
    env = QuestionFile(path=str(path), num_eval=1)
    assert env.validate() == []
    assert env.demonstration(env._read()[0], 0) == "2"
    with pytest.raises(ConfigError, match="lines.jsonl:1 has no chosen and rejected"):
        env.preference(env._read()[0], 0)


def test_a_dataset_whose_answers_are_no_numbers_is_refused_where_numbers_are_compared(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for answers, refused in ((["olleh", "dlrow"], True), (["olleh", "12"], False), ([], False)):
        monkeypatch.setattr(ReasoningGym, "_some_answers", lambda env, answers=answers: answers)
        problems = ReasoningGym(dataset="spell_backward").validate()
        assert bool(problems) == refused
        if refused:
            assert (
                "answers that are no numbers, such as 'olleh'; set env.answers to line or tag" in problems[0]
            )
        assert ReasoningGym(dataset="spell_backward", answers="line").validate() == []


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


@pytest.mark.parametrize(
    "text, number",
    [
        ("It is .5", "0.5"), ("pages 10-12", "12"), ("from 3-5", "5"), ("so x=\u22125", "-5"), ("x=-5", "-5"),
        ("1,2,3", "3"), ("1,234,567.5", "1234567.5"), ("(3)-5", "5"), ("-.25", "-0.25"), ("- 5", "5"),
        ("3.5.", "3.5"), ("1,2345", "2345"),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert value(last_number(text)) == Decimal(number)
    assert Decimal(last_number(text)) == Decimal(number)


def test_a_text_without_digits_has_no_number():
    assert last_number("none at all - or, perhaps.") is None


@pytest.mark.parametrize(
    ("settings", "response", "reward"),
    [
        ({}, "3 + 5 is 8", 1.0),
        ({}, "It is 18", 0.0),
        ({}, "I do not know", 0.0),
        ({"partial_credit": "dataset"}, "It is 18", 0.125),
        ({"partial_credit": "distance"}, "It is 18", 0.5 / 3),
        ({"partial_credit": "distance"}, "It is 3", 0.25),
        ({"partial_credit": "distance"}, "It is 8", 1.0),
        ({"answers": "line"}, "so\n8\n", 1.0),
        ({"answers": "line"}, "8\nso", 0.0),
        ({"answers": "tag"}, "<answer>7</answer> no, <answer> 8 </answer> of 9", 1.0),
        ({"answers": "tag"}, "8", 0.0),
    ],
)
def test_reasoning_gym_scores_the_answer_and_a_wrong_one_gets_what_is_set(
    monkeypatch, settings, response, reward
):
    asked = []

    class Sums(list):
        def score_answer(self, answer, entry):
            return 1.0 if answer == entry["answer"] else 0.125

    def create_dataset(name, **options):
        asked.append((name, options))
        return Sums([{"question": f"{options['seed']}?", "answer": "8"}])

    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create_dataset))
    env = ReasoningGym(options=(("max_terms", 2),), **settings)
    problem = env.generate(2**32 + 7)
    assert (problem.question, problem.answer) == ("7?", "8")
    assert asked == [("chain_sum", {"seed": 7, "size": 1, "max_terms": 2})]
    assert env.reward(problem, response, StopReason.STOP) == reward
    assert env.reward(problem, response, StopReason.LENGTH) == 0.0


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [("Paris", " Paris\n", 1.0), (" Paris ", "Paris", 1.0), ("Paris", "paris", 0.0), ("7", "It is 7", 0.0)],
)
def test_an_exact_answer_is_the_whole_response_but_for_blanks_around_it(answer, response, reward):
    env = QuestionFile(match="exact")
    assert env.reward(Problem("1", "q", answer), response, StopReason.STOP) == reward
    assert env.reward(Problem("1", "q", answer), response, StopReason.LENGTH) == 0.0


@pytest.mark.parametrize("length", [10, 2047, 2048, 5000])
def test_a_group_has_its_answers_however_long_they_are(length):
    class Sampler:
        async def sample(self, prompt, n, params):
            logprobs, versions = [-1.0] * length, VersionRange(0, 0)
            return [Completion([97 + i] * length, logprobs, versions, StopReason.LENGTH) for i in range(n)]

    prompt = Env().encode(Problem("1", "ab", "x"), Spelled())
    context = RolloutContext(Sampler(), Spelled(), SamplingParams(length), 9999)
    rollouts = asyncio.run(Env().drive(prompt, 2, context))
    assert [rollout.response for rollout in rollouts] == ["a" * length, "b" * length]
    assert [rollout.turn_lengths for rollout in rollouts] == [[length]] * 2
