"""Each estimator against an implementation that shares no code with it.

That is Python's statistics and plain loops, token by token.
"""

# holds: exact

import math
import random
import re
import statistics

import numpy as np
import pytest

from rl.errors import RunError
from rl.loss.advantages.base import Trajectory, estimate
from rl.loss.advantages.gae import GAE
from rl.loss.advantages.group_mean import GroupMean
from rl.loss.advantages.reinforce_pp import ReinforcePP
from rl.loss.advantages.rloo import RLOO


def group(*rewards):
    """Rollouts of two tokens with one reward at the end."""
    return [Trajectory(np.array([0.0, float(r)]), float(r)) for r in rewards]


def random_groups(rng):
    """Groups of 1 to 6 rollouts of 0 to 7 tokens, and an empty group.

    Rewards are anywhere, or 0 and 1 at the end; some are without variance.
    """
    groups = [[]]
    for _ in range(rng.randint(1, 5)):
        kind = rng.choice(["dense", "outcome", "same"])
        members = []
        for _ in range(rng.randint(1, 6)):
            n = rng.randint(0, 7)
            rewards = [rng.gauss(0, 2) if kind == "dense" else 0.0 for _ in range(n)]
            if n:
                rewards[-1] += {"dense": 0.0, "outcome": float(rng.random() < 0.5), "same": 0.7}[kind]
            members.append(
                Trajectory(np.array(rewards), sum(rewards), np.array([rng.gauss(0, 1) for _ in range(n)]))
            )
        groups.append(members)
    return groups


def expected_group_mean(groups, divide, eps=1e-6):
    out = []
    for g in groups:
        totals = [sum(t.rewards.tolist()) for t in g]
        varies = bool(totals) and max(totals) > min(totals)
        mean = statistics.fmean(totals) if totals else 0.0
        out.append(
            [
                ((r - mean) / ((statistics.stdev(totals) + eps) if divide else 1)) if varies else 0.0
                for r in totals
            ]
        )
    return out


def expected_rloo(groups):
    out = []
    for g in groups:
        totals = [sum(t.rewards.tolist()) for t in g]
        out.append(
            [
                r - statistics.fmean(totals[:i] + totals[i + 1 :]) if len(totals) > 1 else 0.0
                for i, r in enumerate(totals)
            ]
        )
    return out


def expected_whitening(groups, eps):
    tokens = [x for g in groups for t in g for x in t]
    if len(tokens) < 2:
        return [[[0.0 for _ in t] for t in g] for g in groups]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [[[(x - mean) / math.sqrt(variance + eps) for x in t] for t in g] for g in groups]


def expected_returns(rewards, discount):
    return [
        sum(discount ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))
    ]


def expected_gae(t, discount, lam):
    r, v = t.rewards.tolist(), [*t.values.tolist(), 0.0]
    deltas = [r[i] + discount * v[i + 1] - v[i] for i in range(len(r))]
    return [sum((discount * lam) ** (s - i) * deltas[s] for s in range(i, len(r))) for i in range(len(r))]


def flat(advantages):
    return [float(x) for g in advantages for t in g for x in np.atleast_1d(t)]


def cases(groups):
    """(estimator, its advantages, what they should be)."""
    yield GroupMean(), expected_group_mean(groups, divide=True)
    yield GroupMean(eps=1e-2), expected_group_mean(groups, divide=True, eps=1e-2)
    yield GroupMean(adv_norm="none"), expected_group_mean(groups, divide=False)
    yield RLOO(), expected_rloo(groups)
    for discount in (1.0, 0.9):
        returns = [[expected_returns(t.rewards.tolist(), discount) for t in g] for g in groups]
        yield ReinforcePP(discount=discount), expected_whitening(returns, 1e-8)
    centred = []
    for g in groups:
        totals = [sum(t.rewards.tolist()) for t in g]
        centred.append(
            [[total - statistics.fmean(totals)] * len(t.rewards) for total, t in zip(totals, g, strict=True)]
        )
    yield ReinforcePP(baseline="group_mean", eps=1e-3), expected_whitening(centred, 1e-3)
    for discount, lam in ((1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (1.0, 1.0)):
        plain = [[expected_gae(t, discount, lam) for t in g] for g in groups]
        yield GAE(discount, lam, whiten=False), plain
        yield GAE(discount, lam), expected_whitening(plain, 1e-8)


def test_every_credit_equals_an_independent_implementation():
    rng = random.Random(0)
    for _ in range(100):
        groups = random_groups(rng)
        for estimator, expected in cases(groups):
            got = estimator(groups)
            assert [len(g) for g in got] == [len(g) for g in groups]
            # A difference of nearly equal rewards, divided by nearly nothing, keeps fewer digits.
            assert flat(got) == pytest.approx(flat(expected), rel=1e-6, abs=1e-6), estimator


def test_gae_returns_are_advantages_plus_values():
    rng = random.Random(1)
    for _ in range(20):
        groups = random_groups(rng)
        estimator = GAE(0.9, 0.8)
        expected = [
            [[a + v for a, v in zip(expected_gae(t, 0.9, 0.8), t.values, strict=True)] for t in g]
            for g in groups
        ]
        assert flat(estimator.returns(groups)) == pytest.approx(flat(expected), abs=1e-9)
    # With lam 1 the return does not depend on the critic at all.
    assert flat(
        GAE(1.0, 1.0).returns([[Trajectory(np.array([1.0, 2.0]), 3.0, np.array([5.0, -7.0]))]])
    ) == pytest.approx([3.0, 2.0])


def test_worked_by_hand():
    # mean 0.25; deviations -0.25 x3, 0.75; sum of squares 0.75; sample std sqrt(0.75 / 3) = 0.5
    assert GroupMean(eps=0.0)([group(0, 0, 1, 0)])[0] == pytest.approx([-0.5, -0.5, 1.5, -0.5])
    assert GroupMean(adv_norm="none")([group(0, 0, 1, 0)])[0] == pytest.approx([-0.25, -0.25, 0.75, -0.25])
    assert RLOO()([group(0, 0, 1, 0)])[0] == pytest.approx([-1 / 3, -1 / 3, 1, -1 / 3])
    # delta = (0 + 0.5 - 0.2, 1 - 0.5) = (0.3, 0.5); A = (0.3 + 0.5 * 0.5, 0.5)
    one = Trajectory(np.array([0.0, 1.0]), 1.0, np.array([0.2, 0.5]))
    assert GAE(1.0, 0.5, whiten=False)([[one]])[0][0] == pytest.approx([0.55, 0.5])


@pytest.mark.parametrize("estimator", [GroupMean(), GroupMean(adv_norm="none"), RLOO()])
def test_a_group_without_signal_has_no_advantage(estimator):
    assert estimator([group(0.1, 0.1, 0.1)]) == [[0, 0, 0]]
    assert estimator([group(1.0)]) == [[0]]
    assert estimator([[]]) == [[]]


@pytest.mark.parametrize("reward", [0.7, 1 / 3, 1.0])
def test_equal_rewards_are_no_advantage_to_anybody(reward):
    """Rounding of their mean, over the square root of eps, would be one."""
    groups = [[Trajectory(np.array([0.0] * (n - 1) + [reward]), reward) for n in (1, 3, 2)] for _ in range(4)]
    for estimator in (ReinforcePP(), ReinforcePP(baseline="group_mean"), GroupMean(), RLOO()):
        advantages = estimator(groups)
        assert all(not np.any(value) for group in advantages for value in group), estimator


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1)])
def test_an_estimate_that_is_not_one_for_each_token_is_refused(shape):
    """Two rollouts of two tokens: the first is right, the second is not."""
    groups = [group(1, 0)]

    def estimator(groups):
        return [[np.zeros(2), np.zeros(shape)]]

    with pytest.raises(
        RunError, match=rf"estimator returned {re.escape(str(shape))} advantages for \(2,\) tokens"
    ):
        estimate(estimator, groups)
    assert len(estimate(lambda groups: [[np.zeros(2), 1.0]], groups)[0]) == 2


def test_estimates_of_fewer_rollouts_or_groups_than_there_are_are_refused():
    groups = [group(1, 0), group(0, 1, 1)]
    for made, counts in (([[0.0], [0.0] * 3], r"\[1, 3\]"), ([[0.0] * 2], r"\[2\]")):

        def estimator(groups, made=made):
            return made

        with pytest.raises(RunError, match=rf"returned advantages for {counts} rollouts of \[2, 3\]"):
            estimate(estimator, groups)
