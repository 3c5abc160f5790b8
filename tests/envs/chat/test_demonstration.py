"""Demonstrations of conversations, and pairs of answers in them."""

from dataclasses import dataclass

import pytest

from rl.controller.supervised import SupervisedData
from rl.envs.base import Env
from rl.envs.calculator import ALPHABET, Calculator
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.demonstration import chat_sample
from rl.envs.chat.env import ChatEnv
from rl.models.sources import TinyQwen3
from rl.models.tokenizer import HFTokenizer
from rl.types import Completion, Problem, StopReason, VersionRange
from tests.envs.chat.playing import play_here
from tests.envs.chat.templates import NAMES, make_tokenizer

ASKED = []


@dataclass(frozen=True)
class Counting(Calculator):
    def tools(self):
        ASKED.append(self.max_digits)
        return super().tools()


def test_tools_are_described_once_for_a_task_however_many_its_demonstrations(tmp_path):
    """A description takes longer than the rest of a demonstration, and an MCP server's takes its start."""
    tokenizer = HFTokenizer(TinyQwen3(ALPHABET).materialize(tmp_path))
    for digits in (1, 2):
        env = Counting(max_digits=digits, num_eval=4)
        for seed in range(5):
            assert len(chat_sample(env, env.train_problem(seed), seed, tokenizer).tokens) > 3
    assert ASKED == [1, 2]


class Repeater:
    """A policy that writes these tokens, one turn after the other."""

    def __init__(self, turns):
        self.turns = list(turns)

    async def sample(self, prompt, n, params):
        tokens = self.turns.pop(0)
        return [Completion(tokens, [0.0] * len(tokens), VersionRange(0, 0), StopReason.STOP)]


def test_a_demonstration_has_the_tokens_of_a_rollout_with_its_turns(tmp_path):
    """The question, the call and its result included."""
    tokenizer = HFTokenizer(TinyQwen3(ALPHABET).materialize(tmp_path))
    for corruption in (0.0, 1.0):
        env = Calculator(corruption=corruption)
        problem = env.train_problem(3)
        taught = chat_sample(env, problem, 3, tokenizer)
        starts = [
            i for i in range(1, len(taught.tokens)) if taught.loss_mask[i] and not taught.loss_mask[i - 1]
        ]
        ends = [
            next((j for j in range(i, len(taught.tokens)) if not taught.loss_mask[j]), None) for i in starts
        ]
        turns = [taught.tokens[i:end].tolist() for i, end in zip(starts, ends, strict=True)]
        (rollout,) = play_here(env, tokenizer, Repeater(turns), problem)
        assert len(turns) == (1 if corruption else 2) and rollout.score.correct == (not corruption)
        assert taught.tokens.tolist() == [token for segment in rollout.segments for token in segment.tokens]
        masks = [segment.sampled for segment in rollout.segments for _ in segment.tokens]
        assert taught.loss_mask.tolist() == masks


@dataclass(frozen=True)
class Asking(AgentEnv):
    def generate(self, seed):
        return Problem("1", "7", "7")

    def chat_demonstration(self, problem, seed):
        return [{"role": "user", "content": "7"}, {"role": "assistant", "content": "8"}]


def test_an_agents_demonstration_begins_with_what_the_agent_asks(tmp_path):
    """Whatever the problem says."""
    tokenizer = HFTokenizer(TinyQwen3(ALPHABET).materialize(tmp_path))
    taught = chat_sample(Asking(), Asking().generate(0), 0, tokenizer)
    text = tokenizer.decode(taught.tokens)
    learned = tokenizer.decode(taught.tokens[taught.loss_mask])
    assert text.count("7") == 1 and "8" in learned and "7" not in learned


class Preferring:
    def generate(self, seed):
        return Problem(str(seed), f"2+2? {seed}", "4")

    def preference(self, problem, seed):
        return "4", "5"

    def demonstration(self, problem, seed):
        return "4"


@dataclass(frozen=True)
class InChat(Preferring, ChatEnv):
    prompt_prefix: str = "Be brief."


@dataclass(frozen=True)
class InOneTurn(Preferring, Env):
    chat: bool = True
    prompt_prefix: str = "Be brief."


@pytest.mark.parametrize("env", [InChat(num_eval=1), InOneTurn(num_eval=1)], ids=["ChatEnv", "chat=True"])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_taught_behind_their_question_and_end_as_turns_do(env, name, tmp_path):
    """Of a pair and of a demonstration, in the model's own template, whatever the tokenizer's EOS is."""
    tokenizer, (end, _) = make_tokenizer(name, tmp_path), NAMES[name]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": env.train_problem(0).question},
    ]
    before = tokenizer.render(turns, (), True)
    data = SupervisedData(env, tokenizer, 0)
    for sample, answer in zip([*data.pair(0), data.demonstration(0)], ("4", "5", "4"), strict=True):
        taught = sample.tokens[sample.loss_mask.astype(bool)].tolist()
        assert tokenizer.decode_with_special(sample.tokens[: -len(taught)].tolist()) == before
        assert tokenizer.decode_with_special(taught) == answer + end
    assert tokenizer.encode_plain(end)[0] in env.stop_ids(env.generate(0), tokenizer)
