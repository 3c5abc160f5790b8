"""Mistakes in an environment of one's own: refused where they are made, in words that name the remedy."""

import json
import os
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import openai
import pytest

from rl.config.recipes import load_recipe
from rl.envs.base import Env, checked
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.testing import play
from rl.envs.mixture import Mixture
from rl.envs.question_file import QuestionFile
from rl.errors import ConfigError
from rl.fields import check_fields, expand_paths
from rl.models.sources import TinyQwen3
from rl.models.tokenizer import HFTokenizer
from rl.type_hints import type_hints
from rl.types import Problem

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 >[](),=+?"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HFTokenizer(TinyQwen3(alphabet=ALPHABET).materialize(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (base, field.name)
        for base in (Env, ChatEnv, AgentEnv, Mixture, QuestionFile)
        for field in fields(base)
    ],
)
def test_no_field_is_set_without_a_type(base, name):
    value = next(field.default for field in fields(base) if field.name == name)
    with pytest.raises(
        ConfigError, match=rf"E sets {name} without a type.*write {name}: {type(value).__name__} ="
    ):
        type("E", (base,), {name: value})
    dataclass(frozen=True)(type("E", (base,), {name: value, "__annotations__": {name: type(value)}}))


def test_other_attributes_of_a_class_stay_what_they_are():
    class E(Env):
        LETTERS = "abc"
        made_of = property(lambda self: ())

    assert E().LETTERS == "abc"


def test_a_problem_may_have_messages_in_place_of_a_question(tokenizer):
    messages = ({"role": "user", "content": "ab"},)
    problem = checked(Problem("1", messages=messages, answer="ba"))
    prompt = Env(chat=True, prompt_prefix="xy").encode(problem, tokenizer)
    assert tokenizer.decode(prompt.tokens) == "xy>ab>"
    parts = ({"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},)
    in_parts = Env(chat=True).encode(checked(Problem("1", messages=parts)), tokenizer)
    assert tokenizer.decode(in_parts.tokens) == "ab>"
    with pytest.raises(ConfigError, match="has messages, which need env.chat=True; set it"):
        Env(chat=False).encode(problem, tokenizer)


_LONE = "\ud800"
_BAD_VALUES = {
    "surrogate": (_LONE, "half of a character"),
    "set": ({"a", "b"}, "a set, whose order differs between processes; use a sorted list"),
    "object": (object(), "another one in each process"),
}
_HOLDERS = {
    "alone": lambda value: value,
    "in a list": lambda value: [1, value],
    "in a dictionary": lambda value: {"k": (value,)},
}


@pytest.mark.parametrize(("bad", "holder"), product(_BAD_VALUES, _HOLDERS))
def test_metadata_are_the_same_in_each_process(bad, holder):
    value, words = _BAD_VALUES[bad]
    with pytest.raises(ConfigError, match=words):
        checked(Problem("1", "q", metadata={"x": _HOLDERS[holder](value)}))


@pytest.mark.parametrize("field", ["id", "question", "answer", "task"])
def test_no_text_of_a_problem_is_half_a_character(field):
    with pytest.raises(ConfigError, match="half of a character"):
        checked(Problem(**{"id": "1", "question": "q", field: f"a{_LONE}"}))


@pytest.mark.parametrize("message", ["hello", {}, {"content": "x"}, {"role": None}, None, 3])
def test_each_message_has_a_role(message):
    with pytest.raises(ConfigError, match="a message is an object with a role"):
        checked(Problem("1", messages=(message,)))


def rows(path, *given):
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return QuestionFile(path=str(path), num_eval=1, match="exact")


def test_a_file_may_have_rows_with_messages(tmp_path, tokenizer):
    talks = [[{"role": "user", "content": text}] for text in ("ab", "cd", "ab")]
    env = rows(tmp_path / "d.jsonl", *({"messages": talk, "answer": "x"} for talk in talks))
    assert env.validate() == []
    assert [problem.messages for problem in env.eval_problems()] == [tuple(talks[0])]
    assert env.train_problem(0).messages == tuple(talks[1])  # the third is held out as the first is
    assert tokenizer.decode(env.encode(env.train_problem(0), tokenizer).tokens) == "cd>"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no list of messages"),
        ("ab", "no list of messages"),
        (["ab"], "a message is an object with a role"),
        ([{"content": "ab"}], "a message is an object with a role"),
        ([{"role": "user"}], "a message without a content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "the policy reads text",
        ),
        ([{"role": "assistant", "content": "ab"}], "do not end with the user's"),
        ([{"role": "user", "content": "a\ud800"}], "half of a character"),
    ],
)
def test_a_file_says_what_is_wrong_with_messages(tmp_path, messages, words):
    (problem,) = rows(tmp_path / "d.jsonl", {"messages": messages, "answer": "x"}).validate()
    assert words in problem and "line 1" in problem


@dataclass(frozen=True)
class Asking(AgentEnv):
    def generate(self, seed):
        return Problem(str(seed), f"{seed % 1000}+1?", "x")

    def agent(self, episode, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": episode.problem.question}]
        reply = client.chat.completions.create(model="policy", messages=messages)
        episode.state["answer"] = reply.choices[0].message.content

    def reward_episode(self, episode):
        return {"right": float(episode.state["answer"] == episode.problem.answer)}


def test_play_runs_an_agent(tokenizer):
    played = play(Asking(num_eval=2), tokenizer, ["x"], Problem("1", "1+1?", "x"))
    assert played.score.reward == 1
    assert played.text == "<bos>1+1?>x<eos>"


def test_play_needs_words(tokenizer):
    with pytest.raises(ValueError, match="give at least one"):
        play(Asking(num_eval=2), tokenizer, [])


def test_fields_may_be_slots():
    @dataclass(frozen=True, slots=True)
    class Mine(Env):
        max_new_tokens: int = 7

    assert Mine().max_new_tokens == 7 and Mine().num_eval == 256


LATE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING
import rl.config as cfg
from rl.configs.quickstart import quickstart
from rl.envs.sort_letters import SortLetters
if TYPE_CHECKING:
    from nowhere import Generator

@dataclass(frozen=True)
class Mine(SortLetters):
    generator: Generator | None = None
    more: tuple[float, ...] = ()

def mine() -> cfg.RunConfig:
    from dataclasses import replace
    return replace(quickstart(), env=Mine())
"""


def test_a_type_that_only_type_checkers_know_leaves_the_other_fields_checked(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(LATE)
    _, config = load_recipe(str(path))
    hints = type_hints(type(config.env))
    assert hints["generator"] is Any and hints["more"] == tuple[float, ...]
    for settings, wrong in (
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"more": ("x",)}, "more="),
    ):
        _, (line,) = check_fields(replace(config, env=replace(config.env, **settings)))
        assert wrong in line


def test_what_lies_in_a_tuple_is_checked_and_its_paths_are_expanded():
    tasks = (("a", QuestionFile(path="~/a.jsonl")), ("b", QuestionFile(path="b.jsonl")))
    expanded = expand_paths(Mixture(tasks=tasks))
    assert expanded.tasks[0][1].path == os.path.expanduser("~/a.jsonl") and expanded.tasks[1] == tasks[1]
    _, (line,) = check_fields(Mixture(tasks=tasks, weights=(-1.0, 2.0)))
    assert "weights[0]=-1.0 must be at least 0" in line


def test_what_teaches_a_conversation_is_named_as_the_docs_have_it():
    class Silent(ChatEnv):
        pass

    with pytest.raises(
        ConfigError, match=r"Silent has no demonstrations, .*; implement chat_demonstration\(\)$"
    ):
        Silent().chat_demonstration(Problem("1", "?"), 0)
