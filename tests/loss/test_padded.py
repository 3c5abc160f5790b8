"""Losses over padded rows: equal to formulas written out, and to what a run computes of the same samples."""

# holds: exact

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.errors import RunError
from rl.loss import (
    CISPO,
    DPO,
    DRO,
    GAE,
    GSPO,
    KL,
    RLOO,
    Clip,
    Correction,
    GroupMean,
    ImportanceSampling,
    Objective,
    ReinforcePP,
    padded_advantages,
    padded_loss,
)
from rl.loss.base import LossOutput

LOSSES = [Clip(), Clip(dual=3.0), GSPO(), CISPO(), DRO(), ImportanceSampling()]


def rows(seed, lengths, width):
    """logprobs, sampling_logprobs, ref_logprobs [B, T], mask [B, T]; NaN where the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    made = [-torch.rand(len(lengths), width, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [tensor.masked_fill(~mask, math.nan) for tensor in made], mask


@pytest.mark.parametrize("loss_agg", ["token_mean", "seq_mean", "constant"])
def test_the_clipped_surrogate_is_what_its_formula_says(loss_agg):
    (logprobs, sampling, reference), mask = rows(0, [5, 1, 3, 4], 6)
    logprobs.requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.1], dtype=torch.float64)
    objective = Objective(Clip(low=0.1, high=0.2), kl=KL(coef=0.3))
    done = padded_loss(
        objective, logprobs, mask, advantages, sampling_logprobs=sampling, ref_logprobs=reference,
        loss_agg=loss_agg, max_new_tokens=6,
    )  # fmt: skip
    own = logprobs.detach().clone().requires_grad_()
    terms = []
    for b in range(4):
        here = own[b][mask[b]]
        ratio = (here - sampling[b][mask[b]]).exp()
        gap = reference[b][mask[b]] - here
        surrogate = torch.minimum(ratio * advantages[b], ratio.clamp(0.9, 1.2) * advantages[b])
        terms.append(-surrogate + 0.3 * (gap.exp() - gap - 1))
    by_hand = {
        "token_mean": torch.cat(terms).mean(),
        "seq_mean": torch.stack([term.mean() for term in terms]).mean(),
        "constant": torch.cat(terms).sum() / (4 * 6),
    }[loss_agg]
    torch.testing.assert_close(done.loss, by_hand)
    done.loss.backward()
    by_hand.backward()
    torch.testing.assert_close(logprobs.grad[mask], own.grad[mask])
    assert not logprobs.grad[~mask].any() and 0 < done.metrics["clip_fraction"] < 1


@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    loss=st.sampled_from(LOSSES),
    agg=st.sampled_from(["token_mean", "seq_mean", "constant"]),
    more=st.integers(0, 3),
)
def test_neither_padding_nor_rows_without_tokens_change_the_sum(seed, lengths, loss, agg, more):
    (logprobs, sampling, _), mask = rows(seed, lengths, 5)
    advantages = torch.linspace(-1, 1, len(lengths), dtype=torch.float64)

    def value(width):
        grown = [torch.nn.functional.pad(t, (0, width), value=math.nan) for t in (logprobs, sampling)]
        wide = torch.nn.functional.pad(mask, (0, width))
        return padded_loss(
            loss, grown[0], wide, advantages, sampling_logprobs=grown[1], loss_agg=agg, max_new_tokens=5
        ).loss  # fmt: skip

    assert value(0).isfinite() and value(0) == value(more)


def test_without_sampling_logprobs_the_policy_is_the_one_that_sampled():
    (logprobs, _, _), mask = rows(1, [3, 2], 3)
    logprobs.requires_grad_()
    done = padded_loss(Clip(), logprobs, mask, torch.tensor([1.0, 1.0], dtype=torch.float64))
    done.loss.backward()
    assert done.loss == -1 and torch.allclose(logprobs.grad[mask], torch.tensor(-1 / 5, dtype=torch.float64))


@pytest.mark.parametrize("estimator", [GroupMean(), GroupMean(adv_norm="none"), RLOO(), ReinforcePP()])
def test_advantages_of_rewards_are_the_estimators(estimator):
    rewards, mask = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.25, 0.0]), torch.ones(6, 4, dtype=torch.long)
    mask[1, 2:] = 0
    advantages = padded_advantages(estimator, rewards, mask, group_size=3)
    assert advantages.shape == (6, 4) and not advantages[1, 2:].any()
    if isinstance(estimator, GroupMean):
        scale = 1.0 if estimator.adv_norm == "none" else 1 / (np.std([1, 0, 0], ddof=1) + 1e-6)
        assert advantages[0].tolist() == pytest.approx([2 / 3 * scale] * 4)
    if isinstance(estimator, RLOO):
        assert advantages[3].tolist() == pytest.approx([0.5 - 0.125] * 4)


def test_rewards_of_tokens_are_read_where_they_were_earned():
    mask = torch.ones(2, 3)
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    early, late = padded_advantages(ReinforcePP(), rewards, mask, group_size=1)
    assert early[1] < early[0] and late[2] == pytest.approx(late[0])


LONG = [GSPO(), DPO(), Objective(Clip(), Correction(old_logprobs="trainer", level="sequence", tis_clip=5.0))]


@pytest.mark.parametrize("loss", LONG)
def test_long_rows_in_bfloat16_are_summed_in_fp32(loss):
    """A count of ones stops at 256 in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    drawn = (-torch.rand(1, 2, 3000, generator=generator) / 100).bfloat16()
    apart = torch.tensor([[0.0, 0.0], [-(2**-11), -(2**-11)], [-(2**-8), 2**-8]])  # of the others, by row
    drawn = drawn + apart[:, :, None].bfloat16()
    advantages, mask = torch.ones(2), torch.ones(2, 3000)

    def gradient_and_loss(dtype):
        logprobs, sampling, reference = drawn.to(dtype).unbind()
        logprobs = logprobs.clone().requires_grad_()
        others = {"sampling_logprobs": sampling, "ref_logprobs": reference}
        done = padded_loss(loss, logprobs, mask, advantages, **others)
        done.loss.backward()
        return logprobs.grad.float().sum().item(), done.loss.item()

    # holds: meaning, sums in bfloat16 are off by a half and more
    assert gradient_and_loss(torch.bfloat16) == pytest.approx(
        gradient_and_loss(torch.float32), rel=2e-2, abs=2e-2
    )


@pytest.mark.parametrize("wrap", [lambda loss: loss, Objective])
def test_ratios_are_against_the_old_logprobs_that_are_passed(wrap):
    (logprobs, old, _), mask = rows(0, [5, 3], 6)
    against_old = padded_loss(wrap(Clip()), logprobs, mask, torch.ones(2), old_logprobs=old)
    sampled = padded_loss(wrap(Clip()), logprobs, mask, torch.ones(2), sampling_logprobs=old)
    alone = padded_loss(wrap(Clip()), logprobs, mask, torch.ones(2))
    assert against_old.loss == sampled.loss != alone.loss
    assert against_old.metrics["clip_fraction"] == sampled.metrics["clip_fraction"] > 0


def test_both_old_logprobs_and_the_samplers_are_read_or_refused():
    (logprobs, old, sampled), mask = rows(0, [5, 3], 6)
    both = {"old_logprobs": old, "sampling_logprobs": sampled}
    bare = padded_loss(Clip(), logprobs, mask, torch.ones(2), **both)
    objective = Objective(Clip(), Correction(old_logprobs="trainer"))
    assert padded_loss(objective, logprobs, mask, torch.ones(2), **both).loss == bare.loss
    with pytest.raises(RunError, match="nothing reads old_logprobs; set .*old_logprobs='trainer'"):
        padded_loss(Objective(Clip()), logprobs, mask, torch.ones(2), **both)
    weighed = Objective(Clip(), Correction(old_logprobs="trainer", tis_clip=2.0))
    assert "tis/weight" in padded_loss(weighed, logprobs, mask, torch.ones(2), **both).metrics


def test_metrics_that_are_sums_become_means_of_a_token_and_others_stay():
    def loss(logprobs, inputs):
        size = float(len(logprobs))
        return LossOutput(logprobs.sum(), {"a:sum": 2 * size, "b:max": 7.0, "c:min": -7.0, "d": 5.0})

    (logprobs, _, _), mask = rows(0, [3, 1], 4)
    done = padded_loss(loss, logprobs, mask, torch.ones(2))
    assert done.metrics == {"a": 2.0, "b": 7.0, "c": -7.0, "d": 5.0}


@pytest.mark.parametrize("loss_agg", ["token_mean", "seq_mean", "constant"])
def test_the_mean_of_one_token_is_its_term(loss_agg):
    logprobs, mask = torch.full((1, 3), -1.0), torch.tensor([[0, 1, 0]])
    done = padded_loss(Clip(), logprobs, mask, torch.tensor([2.0]), loss_agg=loss_agg, max_new_tokens=1)
    assert done.loss == -2.0


def test_the_entropy_bonus_is_of_the_tokens_that_count():
    (logprobs, _, _), mask = rows(0, [3, 1], 4)
    advantages = torch.zeros(2, dtype=torch.float64)
    entropy = torch.full((2, 4), math.nan, dtype=torch.float64)
    entropy[mask] = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    entropy.requires_grad_()
    done = padded_loss(Objective(Clip(), entropy_coef=0.1), logprobs, mask, advantages, entropy=entropy)
    assert done.loss.item() == pytest.approx(-0.1 * 3.0)
    done.loss.backward()
    assert entropy.grad[mask].tolist() == pytest.approx([-0.1 / 4] * 4)
    with pytest.raises(RunError, match=r"entropy has the shape \[2, 3\], and logprobs \[2, 4\]"):
        padded_loss(Clip(), logprobs, mask, advantages, entropy=torch.zeros(2, 3))


def test_what_would_be_ignored_is_refused():
    (logprobs, old, _), mask = rows(0, [5, 3], 6)
    with pytest.raises(RunError, match=r"KL\(into='reward'\) is no part of a loss; take it off the rewards"):
        of_rewards = Objective(Clip(), kl=KL(coef=1.0, into="reward"))
        padded_loss(of_rewards, logprobs, mask, torch.ones(2), ref_logprobs=old)
    with pytest.raises(
        RunError, match="no loss of rl.loss reads old_per_token_logps; use ref_logprobs, old_"
    ):
        padded_loss(Clip(), logprobs, mask, torch.ones(2), old_per_token_logps=old)
    several = dict.fromkeys(("e", "c", "a", "d", "b"), old)
    with pytest.raises(RunError, match="no loss of rl.loss reads a, b, c, d, e; use"):
        padded_loss(Clip(), logprobs, mask, torch.ones(2), **several)
    with pytest.raises(RunError, match="loss_agg='dapo'; use one of token_mean, seq_mean, constant"):
        padded_loss(Clip(), logprobs, mask, torch.ones(2), loss_agg="dapo")
    with pytest.raises(RunError, match="an entropy bonus needs the tokens' entropy; pass entropy"):
        padded_loss(Objective(Clip(), entropy_coef=0.1), logprobs, mask, torch.ones(2))
    with pytest.raises(RunError, match="GAE needs a critic's values"):
        padded_advantages(GAE(), torch.ones(2), mask, 2)


def test_what_does_not_fit_is_refused():
    logprobs, mask = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(RunError, match=r"advantages has the shape \[3\], and logprobs \[2, 3\]"):
        padded_loss(Clip(), logprobs, mask, torch.zeros(3))
    with pytest.raises(RunError, match=r"ref_logprobs has the shape \[2, 4\]"):
        padded_loss(Clip(), logprobs, mask, torch.zeros(2), ref_logprobs=torch.zeros(2, 4))
    with pytest.raises(RunError, match="divides by max_new_tokens; give it"):
        padded_loss(Clip(), logprobs, mask, torch.zeros(2), loss_agg="constant")
    with pytest.raises(RunError, match="the loss reads 'ref_logprobs', which the samples do not carry"):
        padded_loss(Objective(Clip(), kl=KL(coef=0.1)), logprobs, mask, torch.zeros(2))
    with pytest.raises(RunError, match=r"rewards have the shape \[3\], and mask \[2, 3\]"):
        padded_advantages(GroupMean(), torch.zeros(3), mask, 2)
    with pytest.raises(RunError, match="2 sequences are no groups of 3"):
        padded_advantages(GroupMean(), torch.zeros(2), mask, 3)
    for reward in (math.nan, math.inf):
        with pytest.raises(RunError, match="of a group are not finite"):
            padded_advantages(GroupMean(), torch.tensor([reward, 1.0]), mask, 2)


@pytest.mark.parametrize("loss", [*LOSSES, DPO()])
def test_it_computes_where_the_logprobs_are(loss):
    """A tensor that is made without a device lands on the default one, as on a GPU's host: here one without data."""
    (logprobs, sampling, reference), mask = rows(0, [5, 3, 4, 2], 6)
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.1], dtype=torch.float64)
    of_rollouts = {"sampling_logprobs": sampling, "loss_agg": "seq_mean"} if loss in LOSSES else {}
    objective = Objective(loss, kl=KL(coef=0.1 if of_rollouts else 0.0))

    def value():
        done = padded_loss(objective, logprobs, mask, advantages, ref_logprobs=reference, **of_rollouts)
        return done.loss.item()

    expected = value()
    with torch.device("meta"):
        assert value() == expected


def test_the_docs_example_runs_and_says_what_it_gives():
    page = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    scope: dict = {}
    exec(example, scope)
    assert f"# metrics: {scope['metrics']}" in example and scope["logprobs"].grad.any()


def test_the_mean_over_one_pair_is_that_pairs():
    (logprobs, _, reference), mask = rows(0, [5, 3], 6)
    advantages = torch.zeros(2, dtype=torch.float64)
    once = padded_loss(DPO(), logprobs, mask, advantages, ref_logprobs=reference).loss.item()
    twice = [torch.cat([tensor, tensor]) for tensor in (logprobs, mask, advantages)]
    both = padded_loss(DPO(), *twice, ref_logprobs=torch.cat([reference] * 2)).loss.item()
    assert once == pytest.approx(both)


@pytest.mark.parametrize("objective", [DPO(beta=0.3), Objective(DPO(beta=0.3))])
def test_dpo_is_the_mean_over_pairs(objective):
    """Equation 7 of arXiv 2305.18290."""
    (logprobs, _, reference), mask = rows(0, [5, 1, 3, 4, 6, 2], 6)
    logprobs.requires_grad_()
    done = padded_loss(objective, logprobs, mask, torch.zeros(6, dtype=torch.float64), ref_logprobs=reference)
    own = logprobs.detach().clone().requires_grad_()
    rewards = [0.3 * (own[b] - reference[b])[mask[b]].sum() for b in range(6)]
    margins = torch.stack(rewards[::2]) - torch.stack(rewards[1::2])
    expected = -torch.nn.functional.logsigmoid(margins).mean()
    assert done.loss.item() == pytest.approx(expected.item())
    for loss, leaf in ((done.loss, logprobs), (expected, own)):
        (leaf.grad,) = torch.autograd.grad(loss, leaf)
    assert torch.allclose(logprobs.grad.nan_to_num(), own.grad.nan_to_num())
    accuracy, margin = (margins > 0).double().mean().item(), margins.mean().item()
    assert done.metrics == {"dpo/accuracy": pytest.approx(accuracy), "dpo/margin": pytest.approx(margin)}
    with pytest.raises(RunError, match="loss_agg='seq_mean' has no effect on DPO"):
        padded_loss(objective, logprobs, mask, torch.zeros(6), ref_logprobs=reference, loss_agg="seq_mean")


def test_an_own_loss_of_pairs_is_the_mean_over_pairs_too():
    def own(logprobs, inputs):
        return DPO(beta=0.3)(logprobs, inputs)

    (logprobs, _, reference), mask = rows(0, [5, 1, 3, 4, 6, 2], 6)
    of_tokens, no_advantages = own, torch.zeros(6, dtype=torch.float64)
    without = padded_loss(of_tokens, logprobs, mask, no_advantages, ref_logprobs=reference).loss
    own.learns_from = "preferences"
    expected = padded_loss(DPO(beta=0.3), logprobs, mask, no_advantages, ref_logprobs=reference).loss
    assert padded_loss(own, logprobs, mask, no_advantages, ref_logprobs=reference).loss == expected != without
    with pytest.raises(RunError, match="loss_agg='seq_mean' has no effect on own, the mean over pairs"):
        padded_loss(own, logprobs, mask, no_advantages, ref_logprobs=reference, loss_agg="seq_mean")


def test_a_reward_where_nothing_was_sampled_goes_to_the_token_before():
    """As at the end of a tool's answer. One before all tokens goes to the first."""
    mask = torch.tensor([[0, 1, 1, 0, 1, 0]] * 2)
    at_end, at_begin, whole = torch.zeros(2, 6), torch.zeros(2, 6), torch.tensor([1.0, 0.0])
    at_end[0, 5] = at_begin[0, 0] = 1.0
    expected = padded_advantages(GroupMean(), whole, mask, 2)
    assert expected.abs().sum() > 0
    for rewards in (at_end, at_begin):
        assert torch.equal(padded_advantages(GroupMean(), rewards, mask, 2), expected)
    discounted = padded_advantages(ReinforcePP(discount=0.5), at_end, mask, 2)
    assert discounted[0, 4] > discounted[0, 2] > discounted[0, 1]


def test_what_losses_read_besides_may_be_given():
    (logprobs, sampling, _), mask = rows(2, [3, 2], 3)
    advantages, ones = (
        torch.tensor([1.0, -1.0], dtype=torch.float64),
        torch.ones_like(mask, dtype=torch.float64),
    )
    plain = padded_loss(GSPO(), logprobs, mask, advantages, sampling_logprobs=sampling).loss
    told = padded_loss(
        GSPO(), logprobs, mask, advantages, sampling_logprobs=sampling, sequence_ratio_mask=ones
    )
    assert told.loss == plain
    wide = {"clip_low_threshold": 1e-9 * ones, "clip_high_threshold": 1e9 * ones}
    unclipped = padded_loss(Clip(), logprobs, mask, advantages, sampling_logprobs=sampling, **wide)
    by_hand = -((logprobs - sampling).exp() * advantages[:, None])[mask].mean()
    torch.testing.assert_close(unclipped.loss, by_hand)
