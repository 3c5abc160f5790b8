"""Losses against numbers worked by hand and against a float64 implementation that shares no code with them."""

import math

import numpy as np
import pytest
import torch

from rl.loss.logprobs import token_scores
from rl.loss.policy import Clip, CrossEntropy, TokenInputs


def inputs(old, advantages, weights=None):
    weights = [1.0] * len(old) if weights is None else weights
    dtype = torch.float64
    return TokenInputs(
        torch.tensor(old, dtype=dtype), torch.tensor(advantages, dtype=dtype), torch.tensor(weights, dtype=dtype), torch.zeros(len(old))
    )


def run(loss, logprobs, *args, **kwargs):
    logprobs = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    output = loss(logprobs, inputs(*args, **kwargs))
    output.loss.backward()
    return output, logprobs.grad.tolist()


def test_clip_worked_by_hand():
    # ratios 1, 1.5, 1.5, 0.5, 0.5 with advantages 1, 1, -1, 1, -1 and bounds [0.8, 1.28]:
    # min terms: 1, 1.28 (clipped), -1.5, 0.5, -0.8 (clipped); their sum is 0.48.
    logprobs = [0.0, math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)]
    output, gradient = run(Clip(low=0.2, high=0.28), logprobs, [0.0] * 5, [1.0, 1.0, -1.0, 1.0, -1.0])
    assert output.loss.item() == pytest.approx(-0.48)
    # d/dlogp of ratio * A is ratio * A where it is not clipped, and 0 where it is.
    assert gradient == pytest.approx([-1.0, 0.0, 1.5, -0.5, 0.0])
    assert output.metrics["clip_fraction:sum"].item() == 2


def test_clip_equals_an_independent_implementation_in_value_and_gradient():
    rng = np.random.default_rng(1)
    for _ in range(50):
        n = int(rng.integers(0, 40))
        new, old = rng.normal(-2, 1.5, n), rng.normal(-2, 1.5, n)
        advantages, weights = rng.normal(0, 2, n), rng.uniform(0, 1, n)
        low, high = rng.uniform(0.05, 0.5, 2)
        total, gradient = 0.0, []
        for new_t, old_t, a, w in zip(new, old, advantages, weights, strict=True):
            r = math.exp(new_t - old_t)
            held = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
            total -= w * a * ((1 + high if a > 0 else 1 - low) if held else r)
            gradient.append(0.0 if held else -w * a * r)
        output, got = run(Clip(low, high), new.tolist(), old.tolist(), advantages.tolist(), weights.tolist())
        assert output.loss.item() == pytest.approx(total, rel=1e-9, abs=1e-9)
        assert got == pytest.approx(gradient, rel=1e-9, abs=1e-9)


def test_the_grpo_gradient_of_a_softmax_policy_worked_by_hand():
    # Two actions with equal logits; action 0 was taken with advantage 2 and a ratio of 1.
    # d(-A logp_0)/dlogits = -A (onehot - softmax) = -2 * (0.5, -0.5)
    logits = torch.zeros(1, 2, dtype=torch.float32, requires_grad=True)
    logprobs = token_scores(logits, torch.tensor([0]))[0]
    Clip()(logprobs, TokenInputs(logprobs.detach(), torch.tensor([2.0]), torch.ones(1), torch.zeros(1))).loss.backward()
    assert logits.grad.tolist() == [[-1.0, 1.0]]


def test_cross_entropy_is_the_weighted_sum_of_negative_logprobs():
    output, gradient = run(CrossEntropy(), [-1.0, -2.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.5])
    assert output.loss.item() == 2.0
    assert gradient == [-1.0, -0.5]


def test_logprobs_and_entropy_are_fp32_whatever_the_logits():
    logits = torch.randn(5, 11).bfloat16()
    targets = torch.arange(5)
    reference = logits.double().log_softmax(-1)
    logits.requires_grad_()
    exact = logits.detach().double().requires_grad_()
    weights = torch.randn(5)
    logprobs, entropy = token_scores(logits, targets)
    expected = exact.log_softmax(-1)[torch.arange(5), targets]
    assert torch.allclose(logprobs.double(), expected, atol=1e-6)
    assert torch.allclose(entropy.double(), -(reference.exp() * reference).sum(-1), atol=1e-6)
    assert logprobs.requires_grad and not entropy.requires_grad
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)  # bf16 logits get a bf16 gradient


def test_logprobs_of_improbable_tokens_do_not_vanish():
    logits = torch.tensor([[0.0, -500.0, 3.0], [0.0, -90.0, 0.0], [0.0, 1e4, 5.0]], requires_grad=True)
    logprobs, entropy = token_scores(logits, torch.tensor([1, 1, 0]))
    expected = logits.detach().double().log_softmax(-1)
    assert torch.allclose(logprobs.double(), expected[torch.arange(3), torch.tensor([1, 1, 0])])
    assert torch.allclose(entropy.double(), -(expected.exp() * expected).nan_to_num().sum(-1), atol=1e-3)
    logprobs.sum().backward()
    assert torch.isfinite(logits.grad).all()
