"""Rewards for each turn: named, summed by name, recorded, and refused where nothing would read them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from configs.calculator import calculator
from rl.config.rehearsal import rehearse
from rl.controller.member import scatter_reward
from rl.envs.verifier import check_parts, score_of
from rl.loss.advantages.base import Trajectory
from rl.loss.advantages.gae import GAE
from rl.loss.advantages.group_mean import GroupMean
from rl.loss.advantages.reinforce_pp import ReinforcePP
from rl.loss.advantages.rloo import RLOO
from rl.observability.rollout_log import rollout_record
from rl.types import Problem, Rewards, Rollout, Segment, StopReason, VersionRange

ESTIMATORS = [GroupMean(), GroupMean(adv_norm="none"), RLOO(), ReinforcePP(), ReinforcePP(baseline="group_mean"), GAE()]  # fmt: skip
NAMED = Rewards(turns=({"called": 0.5, "form": 0.25}, 0, {"right": 1.0, "form": 0.25}))


def rollout():
    turns = [Segment(np.array([5, 6]), True, np.zeros(2)) for _ in range(3)]
    return Rollout(Problem("1", "q"), tuple(turns), "x", StopReason.STOP, VersionRange(0, 0))


def test_parts_of_turns_are_summed_by_turn_and_by_name():
    score = check_parts(score_of(NAMED), [2, 2, 2])
    assert score.error is None and score.reward == 2.0
    assert score.parts == Rewards(turns=(0.75, 0.0, 1.25))
    assert score.components == {"called": 0.5, "form": 0.5, "right": 1.0}
    assert scatter_reward(rollout(), score).tolist() == [0, 0.75, 0, 0, 0, 1.25]


def test_they_are_recorded():
    record = rollout_record(0, rollout(), score_of(NAMED))
    assert record["turn_rewards"] == [{"called": 0.5, "form": 0.25}, {}, {"right": 1.0, "form": 0.25}]
    assert rollout_record(0, rollout(), score_of(Rewards(turns=(0.5, 1))))["turn_rewards"] == [0.5, 1.0]
    assert "turn_rewards" not in rollout_record(0, rollout(), score_of(1.0))


def test_a_number_beside_named_turns_is_a_part_too():
    assert score_of(Rewards(turns=({"a": 1.0}, 0.5))).components == {"a": 1.0, "unnamed": 0.5}


@pytest.mark.parametrize("bad", ["x", None, math.nan, math.inf, (1.0,)])
@pytest.mark.parametrize("holder", [lambda v: Rewards(turns=({"a": v},)), lambda v: Rewards(turns=(v, 1.0)), lambda v: Rewards(tokens=(v,))])  # fmt: skip
def test_what_is_no_number_costs_the_sample(bad, holder):
    assert score_of(holder(bad)).cause == "type"


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_an_estimator_reads_turns_where_it_says_so(estimator):
    """Two rollouts of one sum, of which the turns differ: whether their tokens' advantages do."""
    values = np.array([0.1, 0.2, 0.3, 0.4])
    early, late = np.array([0, 1.0, 0, 0]), np.array([0, 0, 0, 1.0])
    none = np.zeros(4)
    groups = [[Trajectory(r, float(r.sum()), values) for r in (early, late, none)]]
    of_early, of_late, _ = (np.broadcast_to(a, 4) for a in estimator(groups)[0])
    assert (of_early.tolist() != of_late.tolist()) == getattr(estimator, "reads_turns", True)


@pytest.mark.parametrize("estimator", [GroupMean(), GAE()], ids=repr)
def test_a_run_whose_turn_rewards_nothing_reads_is_refused(estimator):
    config = calculator()
    config = replace(config, env=replace(config.env, rewards="turns", num_eval=2), advantages=estimator)
    problems = rehearse(config, config.model.tokenizer()).problems
    if estimator == GAE():
        assert problems == []
    else:
        (problem,) = problems
        assert "rewards each turn, or token, which advantages GroupMean does not read" in problem
        assert "use GAE() or ReinforcePP(), or return one reward" in problem
