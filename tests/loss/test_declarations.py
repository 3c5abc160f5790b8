"""What parts of an algorithm declare of themselves (rl/interfaces.py) is what they do."""

# holds: exact

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import rl.loss
from rl.loss import CISPO, DRO, GAE, GSPO, RLOO, Clip, GroupMean, ImportanceSampling, ReinforcePP
from rl.loss.advantages.base import Trajectory
from rl.loss.base import TokenInputs
from rl.loss.distillation import Distillation

LOSSES = [
    Clip(),
    Clip(dual=3.0),
    GSPO(),
    GSPO(level="token"),
    CISPO(),
    DRO(),
    ImportanceSampling(),
    Distillation(),
]
ESTIMATORS = [
    GroupMean(),
    GroupMean(adv_norm="none"),
    RLOO(),
    ReinforcePP(),
    ReinforcePP(baseline="group_mean"),
    GAE(),
]


def gradient(loss, advantages):
    """Of four tokens of two sequences, whose policy has moved a little."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -1.5], requires_grad=True)
    inputs = TokenInputs(
        generator_logprobs=logprobs.detach() - 1e-4,
        advantages=torch.tensor(advantages),
        weights=torch.ones(4),
        sample_ids=torch.tensor([0, 0, 1, 1]),
        loss_inputs={"ref_logprobs": torch.tensor([-1.2, -1.8, -0.9, -1.0])},
    )
    return torch.autograd.grad(loss(logprobs, inputs).loss, logprobs)[0].tolist()


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_a_loss_drops_samples_without_an_advantage_where_they_have_no_gradient(loss):
    has_gradient = any(gradient(loss, [0.0] * 4))
    assert getattr(loss, "drops_zero_advantages", False) == (not has_gradient)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_a_loss_needs_rewards_where_its_gradient_depends_on_advantages(loss):
    depends = gradient(loss, [1.0, 1.0, -1.0, -1.0]) != gradient(loss, [2.0, 2.0, 0.5, 0.5])
    assert getattr(loss, "needs_rewards", True) == depends


def trajectory(rewards, values):
    return Trajectory(np.array(rewards), sum(rewards), np.array(values))


FIRST = [trajectory([0.0, 1.0], [0.3, 0.1]), trajectory([0.0, 0.0], [0.2, 0.4])]
SECOND = [trajectory([0.0, 5.0], [0.0, 0.0]), trajectory([0.0, -7.0], [0.5, 0.0])]


def of_first(estimator, *others):
    return [np.broadcast_to(value, 2).tolist() for value in estimator([FIRST, *others])[0]]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_an_estimator_goes_group_by_group_where_no_other_group_changes_its_advantages(estimator):
    is_alone = of_first(estimator) == of_first(estimator, SECOND)
    assert getattr(estimator, "group_by_group", False) == is_alone


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_an_estimator_compares_in_groups_where_a_group_of_one_teaches_nothing(estimator):
    alone = estimator([FIRST[:1], FIRST[1:], SECOND[:1]])
    teaches = any(np.any(value) for group in alone for value in group)
    assert getattr(estimator, "compares_in_groups", False) == (not teaches)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_an_estimator_needs_a_critic_where_values_change_its_advantages(estimator):
    without = [[replace(t, values=np.zeros(2)) for t in FIRST]]
    depends = of_first(estimator) != [np.broadcast_to(v, 2).tolist() for v in estimator(without)[0]]
    assert getattr(estimator, "needs_critic", False) == depends


def test_the_first_row_of_each_in_the_docs_is_it_with_its_defaults():
    page = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
    first: dict[str, str] = {}
    for call, name in re.findall(r"^\| `(([A-Z]\w+)\(.*?\))` ", page, re.MULTILINE):
        first.setdefault(name, call)
    assert len(first) == 12
    for name, call in first.items():
        kind = getattr(rl.loss, name)
        assert eval(call, {name: kind}) == kind(), call
