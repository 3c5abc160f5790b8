"""A judge of the run's own: what keeps it, or an environment that asks for one, from starting."""

from dataclasses import dataclass, replace

import pytest

from configs.quickstart import quickstart
from rl.config import JudgeConfig, RewardConfig
from rl.config.judge_rules import check_judge
from rl.config.settle import model_dirs, settle
from rl.envs.chat.env import ChatEnv
from rl.envs.judge import Judge
from rl.models.sources import ModelDir, TinyQwen3
from tests.plans import AMPLE
from tests.tiny import write_model


@dataclass(frozen=True)
class Judged(ChatEnv):
    judge: Judge = Judge()


@dataclass(frozen=True)
class Panel(ChatEnv):
    judges: tuple[Judge, ...] = (Judge("http://somewhere/v1"), Judge("http://elsewhere/v1", rubric="x"))


PATIENT = {"reward": RewardConfig(limit_seconds=60.0)}

CASES = [
    ({}, [], []),
    ({"env": Judged(judge=Judge("http://somewhere/v1"))}, [], []),
    ({"env": Judged()}, [], ["env.judge.base_url is empty and the run has no judge"]),
    (
        {},
        {"num_replicas": 2, "max_tokens": 7},
        ["judge.num_replicas has no effect", "judge.max_tokens has no"],
    ),
    (
        {"env": Judged(judge=Judge("http://somewhere/v1"))},
        {"model": ModelDir("nowhere")},
        ["env.judge.base_url is set, so nobody asks judge.model"],
    ),
    (
        {"env": Judged(judge=Judge("http://somewhere/v1")), "reward": RewardConfig()},
        [],
        ["reward.limit_seconds=5 is not over env.judge.seconds=30"],
    ),
    (
        {"env": Judged(judge=Judge("http://somewhere/v1", seconds=60.0))},
        [],
        ["reward.limit_seconds=60 is not over env.judge.seconds=60"],
    ),
    ({"env": Panel()}, [], []),
    (
        {"env": Panel(), "reward": RewardConfig(limit_seconds=30.0)},
        [],
        ["reward.limit_seconds=30 is not over env.judges.seconds=30"] * 2,
    ),
    ({}, {"model": TinyQwen3("abc")}, ["judge.model has random weights"]),
    ({}, {"model": ModelDir("nowhere")}, ["judge.model: "]),
]


@pytest.mark.parametrize(("run", "judge", "expected"), CASES)
def test_what_is_wrong_with_a_judge(run, judge, expected):
    config = replace(quickstart(), **PATIENT | run, judge=JudgeConfig(**dict(judge)))
    found = check_judge(config)
    assert len(found) == len(expected) and all(
        f.startswith(e) for f, e in zip(found, expected, strict=True)
    ), found


def test_a_judge_is_a_role_with_weights_of_its_own(tmp_path):
    write_model(tmp_path, "llama")
    judge = JudgeConfig(model=ModelDir(str(tmp_path)), num_replicas=2)
    config = replace(quickstart(), env=Judged(), judge=judge)
    plan = settle(config, cluster=AMPLE)
    assert plan.roles["judge"] == 2 and "judge" not in settle(quickstart(), cluster=AMPLE).roles
    spec, own = plan.of("judge")[0].spec, plan.of("generator")[0].spec
    assert spec.model == "judge" and spec.config.weights == "directory"
    assert own.model == "model" and own.config.weights == "published"
    dirs = model_dirs(config, plan, tmp_path / "run")
    assert dirs["judge"] == tmp_path and dirs["model"] != tmp_path
    assert [replica.name for replica in plan.of("judge")] == ["judge-0", "judge-1"]
