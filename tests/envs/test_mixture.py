"""Several tasks in one run."""

# holds: exact

import asyncio
import string
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
from rl.envs.question_file import QuestionFile
from rl.envs.remake import some_problems
from rl.envs.sort_letters import SortLetters
from rl.errors import ConfigError
from rl.loss.shaping import Shaping
from rl.models.sources import TinyQwen3
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
        ({"tasks": (("a", Echo(max_new_tokens=0)),)}, "env.tasks[0][1].max_new_tokens=0 must be at least 1"),
        ({"tasks": (("a", Echo(stop=("ab",))),)}, "which is not one token"),
        ({"tasks": (("a", SortLetters(chat=True)),)}, "env.chat=True but the model's tokenizer"),
    ],
)
def test_what_is_wrong_is_said(changes, match):
    found = validate(config(replace(BOTH, **changes)))
    assert any(match in line for line in found), found


def test_a_punishment_of_long_answers_that_a_task_never_reaches_is_refused():
    punished = replace(config(), shaping=Shaping(overlong_tokens=4))
    words = "shaping.overlong_tokens=4 counts from env.max_new_tokens=8, which a Echo with 3 never reaches"
    assert any(line.startswith(words) for line in validate(punished)), validate(punished)
    assert validate(replace(punished, env=replace(BOTH, weights=(0.0, 1.0)))) == []  # held out as a whole
    alike = tuple((name, replace(env, max_new_tokens=BOTH.max_new_tokens)) for name, env in BOTH.tasks)
    assert validate(replace(punished, env=replace(BOTH, tasks=alike))) == []


@dataclass(frozen=True)
class Hard(Env):
    """Half of its problems have a task, which its reward reads."""

    max_new_tokens: int = 8
    num_eval: int = 6

    def generate(self, seed: int) -> Problem:
        return Problem(str(seed), f"problem {seed}", "7", task="hard" if seed % 2 else "")

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        return {"hard": 1.0, "": 0.5}[problem.task]

    def demonstration(self, problem: Problem, seed: int) -> str:
        return f"of {problem.task!r}"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_tasks_own_tasks_reach_it_as_it_named_them(depth):
    env: Env = Hard()
    for name in ("t", "outer")[:depth]:
        env = Mixture(max_new_tokens=8, tasks=((name, env), (f"{name}-2", Echo(num_eval=2))))
    assert env.validate() == [] and len(env.made_of) == depth + 1
    path = "/".join(("outer", "t")[2 - depth :])
    held_out = [problem for problem in env.eval_problems() if problem.question.startswith("problem")]
    assert {problem.task for problem in held_out} == {path, f"{path}/hard"}
    for problem in held_out:
        own = "hard" if problem.task.endswith("hard") else ""
        assert env.reward(problem, "", StopReason.STOP) == {"hard": 1.0, "": 0.5}[own]
        assert env.demonstration(problem, 0) == f"of {own!r}"


def test_accuracies_of_a_tasks_own_tasks_are_measured_too(tmp_path):
    env = Mixture(max_new_tokens=8, tasks=(("t", Hard()), ("echo", Echo(num_eval=2))))
    settings = replace(config(env), model=TinyQwen3(alphabet=string.printable), warmup=WarmupConfig())
    _, recorder = run_fakes(settings, tmp_path)
    names = {name.removeprefix("eval/accuracy") for name in recorder.evaluations[0] if "accuracy" in name}
    assert names == {"", "/t", "/t/hard", "/echo"}


def test_what_one_task_holds_out_no_other_trains_on(tmp_path):
    """A file asked in two ways, with as many held out as its first lines, and more."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"question": "{i} + 1", "answer": "{i + 1}"}}\n' for i in range(60)))
    plain, thinking = (
        QuestionFile(path=str(path), num_eval=n, prompt_prefix=p) for n, p in ((40, ""), (5, "Think. "))
    )
    mixture = Mixture(max_new_tokens=64, tasks=(("plain", plain), ("thinking", thinking)))
    held_out = {problem.question for problem in mixture.eval_problems()}
    drawn = [mixture.train_problem(seed) for seed in range(400)]
    assert not held_out & {problem.question for problem in drawn}
    assert {problem.task for problem in drawn} == {"plain", "thinking"}
    assert drawn == [mixture.train_problem(seed) for seed in range(400)]
    all_of_them = ("plain", replace(plain, num_eval=60)), ("thinking", thinking)
    with pytest.raises(ConfigError, match="thinking: other tasks hold out nearly all of its problems; lower"):
        Mixture(max_new_tokens=64, tasks=all_of_them, weights=(0.0, 1.0)).train_problem(0)


def test_a_task_of_weight_0_holds_out_all_that_it_has(tmp_path):
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(f'{{"question": "{i} + 1", "answer": "{i + 1}"}}\n' for i in range(8)))
    bench = QuestionFile(path=str(path), num_eval=8)
    mixture = Mixture(max_new_tokens=64, tasks=(("bench", bench), ("echo", Echo())), weights=(0.0, 1.0))
    assert mixture.validate() == [] and len(mixture.eval_problems()) == 11
    assert len(some_problems(mixture, anew=True)) == 3 + 4
    (line,) = replace(mixture, weights=(1.0, 1.0)).validate()
    assert "has 8 lines, all of them held out; lower env.num_eval=8" in line
    (line,) = replace(mixture, tasks=(("bench", replace(bench, num_eval=9)), ("echo", Echo()))).validate()
    assert "has 8 lines; lower env.num_eval=9" in line
