"""Several tasks in one run."""

# holds: exact

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from configs.quickstart import quickstart
from rl.config import RunConfig, WarmupConfig
from rl.config.codec import from_json, to_json
from rl.config.validate import validate
from rl.envs.base import Env, RolloutContext
from rl.envs.chat.env import ChatEnv
from rl.envs.mixture import Mixture
from rl.envs.sort_letters import SortLetters
from rl.models.tokenizer import HFTokenizer
from rl.types import Completion, Problem, SamplingParams, StopReason, VersionRange
from tests.controller.fakes import run_fakes


@dataclass(frozen=True)
class Echo(Env):
    """Say it again, up to a `z`."""

    max_new_tokens: int = 3
    stop: tuple[str, ...] = ("z",)
    num_eval: int = 3

    def generate(self, seed: int) -> Problem:
        return Problem(str(seed), "abcdefgh"[seed % 8] + "ab"[seed % 2], "x")

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        return 0.25

    def demonstration(self, problem: Problem, seed: int) -> str:
        return problem.question


BOTH = Mixture(max_new_tokens=8, tasks=(("echo", Echo()), ("sort", SortLetters(num_eval=2))))


def config(env: Env = BOTH) -> RunConfig:
    return replace(
        quickstart(), env=env, warmup=WarmupConfig(steps=1, batch_size=4), steps=2, prompts_per_step=4, group_size=2,
        eval_every=1,
    )  # fmt: skip


def test_problems_are_drawn_by_weight_and_are_their_tasks_own():
    drawn = Counter(BOTH.train_problem(seed).task for seed in range(1000))
    assert 400 < drawn["echo"] < 600 and drawn.total() == 1000
    three = replace(BOTH, weights=(3.0, 1.0))
    assert 700 < Counter(three.train_problem(seed).task for seed in range(1000))["echo"] < 800
    held_out = replace(BOTH, weights=(0.0, 1.0))
    assert {held_out.train_problem(seed).task for seed in range(100)} == {"sort"}
    assert [problem.task for problem in held_out.eval_problems()] == ["echo"] * 3 + ["sort"] * 2
    letters = held_out.train_problem(0)
    assert BOTH.reward(letters, letters.answer, StopReason.STOP) == 1.0
    assert BOTH.reward(BOTH.eval_problems()[0], "?", StopReason.STOP) == 0.25
    assert BOTH.train_problem(5) == BOTH.train_problem(5)


def test_each_task_has_its_own_budget_and_stops(tmp_path):
    tokenizer = HFTokenizer(config().model.materialize(tmp_path))
    asked = []

    async def sample(prompt, n, params):
        asked.append(params)
        return [Completion([1], [-1.0], VersionRange(0, 0), StopReason.STOP)] * n

    context = RolloutContext(
        SimpleNamespace(sample=sample), tokenizer, SamplingParams(8, stop_token_ids=(tokenizer.eos_id,)), 64
    )
    for problem in BOTH.eval_problems()[2:4]:
        asyncio.run(BOTH.drive(BOTH.encode(problem, tokenizer), 1, context))
    z = tokenizer.encode_plain("z")[0]
    assert [params.max_new_tokens for params in asked] == [3, 8]
    assert [params.stop_token_ids for params in asked] == [(tokenizer.eos_id, z), (tokenizer.eos_id,)]


def test_a_run_names_the_accuracy_of_each(tmp_path):
    assert not validate(config())
    _, recorder = run_fakes(config(), tmp_path)
    for metrics in recorder.evaluations.values():
        assert {name for name in metrics if name.startswith("eval/accuracy/")} == {
            "eval/accuracy/echo", "eval/accuracy/sort",
        }  # fmt: skip
        mean = (3 * metrics["eval/accuracy/echo"] + 2 * metrics["eval/accuracy/sort"]) / 5
        assert metrics["eval/accuracy"] == pytest.approx(mean)
    groups = [group for groups in recorder.groups.values() for group in groups]
    assert {r.problem.task for group in groups for r in group.rollouts} == {"echo", "sort"}


def test_the_run_can_be_started_again_from_its_config():
    assert from_json(to_json(config()), "config.json") == config()


@dataclass(frozen=True)
class Chat(ChatEnv):
    def generate(self, seed: int) -> Problem:
        return Problem(str(seed), "hello")

    def reward_episode(self, episode) -> float:
        return 1.0


@dataclass(frozen=True)
class Nothing(Env):
    pass


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tasks": ()}, "env.tasks must be pairs of a name and an Env"),
        ({"tasks": (("a", 3),)}, "env.tasks must be pairs"),
        ({"tasks": (("a", Echo()), ("a", Echo()))}, "give each one of its own"),
        ({"tasks": (("a", Chat()),)}, "a Chat, a task of several turns"),
        ({"tasks": (("a", Nothing()),)}, "env Nothing has no generate"),
        ({"weights": (1.0,)}, "must be 2 numbers"),
        ({"weights": (0.0, 0.0)}, "not all 0"),
        ({"weights": (-1.0, 1.0)}, "env.weights"),
        ({"num_eval": 7}, "env.num_eval has no effect on a Mixture"),
        ({"stop": ("a",)}, "env.stop has no effect on a Mixture"),
        ({"max_new_tokens": 5}, "less than the 8 of the task 'sort'; raise it to that"),
        ({"tasks": (("a", SortLetters(min_letters=9)),)}, "env.tasks, a: env.min_letters=9"),
        ({"tasks": (("a", Echo(max_new_tokens=0)),)}, "env.tasks, a: max_new_tokens"),
        ({"tasks": (("a", Echo(stop=("ab",))),)}, "which is not one token"),
        ({"tasks": (("a", SortLetters(chat=True)),)}, "env.chat=True but the model's tokenizer"),
    ],
)
def test_what_is_wrong_is_said(changes, match):
    found = validate(config(replace(BOTH, **changes)))
    assert any(match in line for line in found), found
