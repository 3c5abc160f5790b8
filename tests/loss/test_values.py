"""What losses measure and leave out, worked by hand."""

# holds: exact, a few numbers of fp32

from dataclasses import replace

import pytest
import torch

from configs.quickstart import quickstart
from rl.loss.base import TokenInputs, sequence_means
from rl.loss.cispo import CISPO
from rl.loss.clip import Clip
from rl.loss.distillation import Distillation
from rl.loss.dro import DRO
from rl.loss.gspo import GSPO
from rl.loss.importance_sampling import ImportanceSampling
from rl.loss.kl import KL
from rl.loss.value import ClippedValue
from tests.controller.fakes import build
from tests.controller.test_training_batch import group


def inputs(generator_logprobs=(0.0, 0.0), **columns):
    size = len(generator_logprobs)
    return TokenInputs(
        generator_logprobs=torch.tensor(generator_logprobs),
        advantages=torch.tensor(columns.pop("advantages", [1.0] * size)),
        weights=torch.tensor(columns.pop("weights", [1.0] * size)),
        sample_ids=torch.zeros(size, dtype=torch.int64),
        loss_inputs={name: torch.tensor(values) for name, values in columns.items()},
    )


def numbers(output):
    return {name: float(value) for name, value in output.metrics.items()}


def test_a_critics_error_and_its_clip():
    """Values 1 and 3 for returns of 2 and 1. Held to 0.2 around 1.5, they are 1.3 and 1.7: the first is better then."""
    given = inputs(values=[1.5, 1.5], returns=[2.0, 1.0], weights=[1.0, 2.0])
    output = ClippedValue(0.2)(torch.tensor([1.0, 3.0]), given)
    assert float(output.loss) == (1 + 2 * 4) / 2
    assert numbers(output) == {
        "error:sum": 5.0,
        "return:sum": 3.0,
        "return_squared:sum": 5.0,
        "clip_fraction:sum": 0,
    }
    output = ClippedValue(0.2)(torch.tensor([2.0, 1.0]), given)  # right already, and held back
    assert float(output.loss) == pytest.approx((0.3**2 + 2 * 0.3**2) / 2)
    assert numbers(output)["clip_fraction:sum"] == 2 and numbers(output)["error:sum"] == 0
    assert "clip_fraction:sum" not in ClippedValue(0.0)(torch.tensor([2.0, 1.0]), given).metrics


def test_how_far_a_policy_is_from_its_teacher():
    given = inputs((-1.0, -2.0), ref_logprobs=[-1.5, -4.0])
    output = Distillation()(torch.tensor([-1.0, -2.0]), given)
    assert numbers(output) == {"reverse_kl:sum": 2.5} and float(output.loss) == 2.5


def test_a_mean_over_some_tokens_of_each_sequence():
    ids = torch.tensor([0, 0, 0, 1, 1])
    values, mask = torch.tensor([1.0, 3.0, 9.0, 5.0, 7.0]), torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    assert sequence_means(values, ids, mask).tolist() == [2.0, 2.0, 2.0, 0.0, 0.0]
    assert sequence_means(values, ids).tolist() == pytest.approx([13 / 3] * 3 + [6.0] * 2)


@pytest.mark.parametrize(
    ("kl", "in_loss", "in_reward"),
    [
        (KL(), False, False), (KL(into="reward"), False, False),
        (KL(coef=0.1), True, False), (KL(coef=0.1, into="reward"), False, True),
    ],
)  # fmt: skip
def test_a_penalty_is_in_the_loss_or_in_the_reward_and_nowhere_without_a_weight(kl, in_loss, in_reward):
    assert (kl.in_loss, kl.in_reward) == (in_loss, in_reward)


@pytest.mark.parametrize(
    "loss", [Clip(), GSPO(), CISPO(), ImportanceSampling()], ids=lambda loss: type(loss).__name__
)
def test_samples_without_an_advantage_are_not_computed_where_they_have_no_gradient(loss, tmp_path):
    batch, _ = build([group(1, 1), group(0, 1)], replace(quickstart(), loss=loss), tmp_path)
    assert [len(g.samples) for g in batch.groups] == [0, 2]


def test_where_they_have_one_they_are(tmp_path):
    """DRO draws the policy to where it was, whatever the advantage."""
    batch, _ = build([group(1, 1), group(0, 1)], replace(quickstart(), loss=DRO()), tmp_path)
    assert [len(g.samples) for g in batch.groups] == [2, 2]
