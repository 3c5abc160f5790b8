"""What a rehearsal prints: answers that the model can write, the parts of rewards, a judge that is not there."""

# holds: exact

from dataclasses import dataclass, replace

import pytest

from rl.config import JudgeConfig, RunConfig, WarmupConfig
from rl.config.rehearsal import _arguments, rehearse
from rl.configs.calculator import calculator
from rl.configs.quickstart import quickstart
from rl.envs.base import Env
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.tools import tool
from rl.envs.judge import Judge
from rl.loss.advantages.reinforce_pp import ReinforcePP
from rl.models.sources import ModelDir, TinyQwen3
from rl.types import Problem, Rewards


@dataclass(frozen=True)
class Lookup(ChatEnv):
    max_turns: int = 2
    num_eval: int = 2
    names: bool = True

    def generate(self, seed):
        return Problem(str(seed), "ab"[seed % 2], str(seed % 90 + 10))

    @tool
    def get(self, key: str) -> int:
        """The number of a letter.

        Args:
            key: the letter.
        """
        return {"a": 1, "b": 2}[key]

    def reward_episode(self, episode):
        called = any(not result.failed for result in episode.tool_results)
        right = episode.response == episode.problem.answer
        turns = ({"called": 0.25 * called}, {"right": 0.75 * right}) if self.names else (0.25 * called, 0.0)
        return Rewards(turns=turns[: len(episode.turn_tokens)])


def notes(env: Env, **changes) -> list[str]:
    model = TinyQwen3(alphabet="abgetky0123456789>[](),='")
    config = replace(quickstart(), model=model, warmup=WarmupConfig(), env=env, **changes)
    assert isinstance(config, RunConfig)
    rehearsal = rehearse(config, config.model.tokenizer())
    assert rehearsal.problems == []
    return rehearsal.notes


def test_a_tool_is_called_with_what_the_model_can_write():
    lines = notes(Lookup(), advantages=ReinforcePP())
    asked = lines[0].removeprefix("asked ")
    assert f"  to {asked}: reward 0 (turn 1: called 0)" in lines
    assert not any("Error" in line for line in lines)
    (called,) = [line for line in lines if "get(key=" in line]
    assert called.endswith(": reward 1 (turn 1: called 0.25; turn 2: right 0.75)")


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer"}, 1),
        ({"type": ["string", "null"]}, "x"),
        ({"type": ["null", "array"]}, None),
        ({"enum": []}, "x"),
        ({"enum": [7, 8]}, 7),
        ({"const": 5}, 5),
        ({"anyOf": []}, "x"),
        ({"anyOf": [{"type": "number"}]}, 1.5),
        ({"oneOf": [True, {"type": "number"}]}, "x"),
        ({"type": []}, "x"),
        ({}, "x"),
        (True, "x"),
    ],
)
def test_a_tools_schema_may_have_any_form(schema, value):
    """As servers of MCP write it."""
    function = {"name": "get", "parameters": {"properties": {"key": schema}, "required": ["key"]}}
    assert _arguments(function, "x") == {"key": value}
    assert _arguments({"name": "now"}, "x") == {}


def test_each_tool_is_called_though_an_episode_has_turns_for_one():
    config = calculator()
    lines = rehearse(config, config.model.tokenizer()).notes
    assert all(any(f"[{name}(" in line for line in lines) for name in ("add", "mul"))


def test_rewards_of_turns_without_names_are_shown():
    lines = notes(Lookup(names=False), advantages=ReinforcePP())
    assert lines[-1].endswith(": reward 0.25 (of turns: 0.25, 0)")


@dataclass(frozen=True)
class Judged(Env):
    num_eval: int = 2
    max_new_tokens: int = 8
    judge: Judge = Judge()

    def generate(self, seed):
        return Problem(str(seed), f"{seed % 90 + 10}", "7")

    def reward(self, problem, response, stop):
        return self.judge.grade(problem.question, response).grade


def test_a_judge_of_the_runs_own_is_not_missed():
    lines = notes(Judged(), judge=JudgeConfig(model=ModelDir("nowhere")))
    told = [line.partition(": ") for line in lines if "judge" in line]
    assert [words for _, _, words in told] == 2 * [
        "its judge starts with the run, so the reward was not tried to its end"
    ]
    assert told[0][0] == "  to '7'" and not any("fails" in line for line in lines)
