import random
import statistics

import pytest

from rl.loss.credit.group_mean import GroupMean


def test_worked_by_hand():
    # mean 0.25; deviations -0.25 x3, 0.75; sum of squares 0.75; sample std sqrt(0.75 / 3) = 0.5
    assert GroupMean(eps=0.0)([0, 0, 1, 0]) == pytest.approx([-0.5, -0.5, 1.5, -0.5])
    assert GroupMean(adv_norm="none")([0, 0, 1, 0]) == pytest.approx([-0.25, -0.25, 0.75, -0.25])


def test_equals_an_independent_implementation():
    rng = random.Random(0)
    for _ in range(100):
        rewards = [rng.gauss(0, 3) for _ in range(rng.randint(2, 16))]
        expected = [(r - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6) for r in rewards]
        assert GroupMean()(rewards) == pytest.approx(expected, abs=1e-9)


def test_a_group_without_signal_has_no_advantage():
    assert GroupMean()([0.1, 0.1, 0.1]) == [0, 0, 0]
    assert GroupMean()([1.0]) == [0]
