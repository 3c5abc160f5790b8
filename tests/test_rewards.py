"""Rewards are floats: which are equal, which are success, and who says so."""

# holds: exact

import math

import numpy as np
import pytest

from rl.controller.evaluate import measures
from rl.envs.chat.loop import _sum
from rl.envs.verifier import score_of
from rl.loss.advantages.base import Trajectory
from rl.loss.advantages.group_mean import GroupMean
from rl.loss.advantages.rloo import RLOO
from rl.loss.shaping import Shaping
from rl.observability.metrics import eval_metrics
from rl.rewards import all_equal, is_success
from rl.types import Group, Problem, Rewards, Rollout, Score, Segment, StopReason, Verdict, VersionRange

PARTS = {"answer": 0.7, "format": 0.2, "tools": 0.1}
# Added one after the other, as sum() does before Python 3.12: 1 - 1e-16, and two numbers that differ by one ulp.
NEARLY_ONE = 0.7 + 0.2 + 0.1
THIRDS = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]


def group(*scores):
    segments = (Segment([1], False, [0.0]), Segment([2, 3], True, [-1.0, -1.0]))
    rollout = Rollout(Problem("1", "q", "a"), segments, "", StopReason.STOP, VersionRange(0, 0))
    return Group(0, (rollout,) * len(scores), scores)


def test_parts_that_sum_to_one_are_right():
    assert NEARLY_ONE < 1 and Score(NEARLY_ONE).correct
    score = score_of(PARTS)
    assert score.correct
    assert eval_metrics([group(score)])["eval/accuracy"] == 1.0
    assert measures([group(score)], [group(score, Score(0.0))])["pass@2"] == 1.0


@pytest.mark.parametrize(
    ("reward", "right"),
    [
        (1.0, True),
        (1.5, True),
        (float(np.float32(0.7) + np.float32(0.3)), True),
        (0.999, False),
        (-1.0, False),
    ],
)
def test_success_is_a_reward_of_one_but_for_rounding(reward, right):
    assert is_success(reward) is right is Score(reward).correct


@pytest.mark.parametrize("reward", [0.25, PARTS, Rewards(turns=(0.5, 2.0)), -3])
@pytest.mark.parametrize("correct", [True, False])
def test_an_environment_has_the_last_word_on_success(reward, correct):
    plain, score = score_of(reward), score_of(Verdict(reward, correct))
    assert score.correct is correct
    assert (score.reward, score.parts, score.components) == (plain.reward, plain.parts, plain.components)


def test_what_failed_is_never_right():
    assert not Score(1.0, "it raised").correct and not Score(0.0, "it raised", verdict=True).correct
    for nonsense in (Verdict(1.0, None), Verdict(Verdict(0.1, False), True)):
        assert "correct=True or False" in score_of(nonsense).error
    assert score_of(Verdict("one", True)).error and not score_of(Verdict(math.nan, True)).correct


def test_rewards_that_differ_by_rounding_are_no_signal():
    assert THIRDS[0] != THIRDS[1]
    assert not group(*map(Score, THIRDS)).has_signal
    assert group(Score(0.6), Score(0.601)).has_signal
    assert group(Score(1e-8), Score(3e-8)).has_signal  # small rewards are compared by their size
    assert group(Score(1e6), Score(1e6 + 0.5)).has_signal
    assert not group(Score(0.1 + 0.2 - 0.3), Score(0.0)).has_signal
    assert all_equal([]) and all_equal([2.0]) and not all_equal([-1.0, 1.0])


@pytest.mark.parametrize("estimator", [GroupMean(), GroupMean(adv_norm="none"), RLOO()])
def test_rewards_that_differ_by_rounding_have_no_advantage(estimator):
    def advantages(rewards):
        return estimator([[Trajectory(np.array([reward]), reward) for reward in rewards]])[0]

    assert advantages(THIRDS) == [0.0, 0.0]
    assert advantages([0.6, 0.601])[1] > 0


def test_short_right_answers_are_told_by_the_verdict_and_not_by_the_reward():
    shaping = Shaping(length_coef=1.0)
    assert shaping([True, True], [2, 4], 8) == [0.5, -0.5]
    assert shaping([False, True], [2, 4], 8) == [0.0, -0.5]  # a short wrong answer earns nothing


def test_a_comparison_makes_nothing_right_or_wrong_but_by_a_verdict():
    assert _sum(score_of(0.3), score_of(Verdict(0.2, True))).correct
    assert not _sum(score_of(Verdict(1.0, False)), score_of(0.5)).correct
    assert not _sum(score_of(0.5), score_of(0.5)).correct
    assert _sum(score_of(1.0), score_of(-0.5)).correct
