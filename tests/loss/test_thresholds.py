"""Clip thresholds of each token, for every loss that clips ratios: against plain Python, and the same for all tokens."""

# holds: exact, float64 on both sides

import math

import numpy as np
import pytest
import torch

from rl.loss.base import TokenInputs
from rl.loss.cispo import CISPO
from rl.loss.clip import Clip
from rl.loss.gspo import GSPO

OLD = [-1.0, -1.0, -1.0, -2.0]
NEW = [-0.5, -1.5, -1.0 + math.log(1.3), -2.0]
ADVANTAGES = [1.0, -1.0, 2.0, 3.0]
LOW = [0.9, 0.2, 0.5, 1.0]
HIGH = [1.1, 5.0, 1.2, 1.0]
LOSSES = {"ppo": Clip(0.2, 0.2), "cispo": CISPO(1.0, 3.0), "gspo": GSPO(3e-4, 4e-4, level="token")}


def run(loss, **thresholds):
    """(loss, gradient) of four tokens of one sequence."""
    logprobs = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in thresholds.items()}
    ones, ids = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    old, advantages = (torch.tensor(values, dtype=torch.float64) for values in (OLD, ADVANTAGES))
    output = loss(logprobs, TokenInputs(old, advantages, ones, ids, columns))
    output.loss.backward()
    return output.loss.item(), logprobs.grad.tolist()


def clipped(value, low, high):
    return min(max(value, low), high)


def test_each_token_has_its_own_thresholds():
    ratios = [math.exp(new - old) for new, old in zip(NEW, OLD, strict=True)]
    bounds = list(zip(ratios, ADVANTAGES, LOW, HIGH, strict=True))
    value, gradient = run(LOSSES["ppo"], clip_low_threshold=LOW, clip_high_threshold=HIGH)
    assert value == pytest.approx(-sum(min(r * a, clipped(r, low, high) * a) for r, a, low, high in bounds))
    # The first and third are clipped; the second's ratio of 0.61 is within its own 0.2.
    assert gradient[0] == gradient[2] == 0 and gradient[1] == pytest.approx(ratios[1])
    value, gradient = run(LOSSES["cispo"], clip_low_threshold=LOW, clip_high_threshold=HIGH)
    weights = [clipped(r, low, high) * a for r, a, low, high in bounds]
    assert value == pytest.approx(-sum(w * new for w, new in zip(weights, NEW, strict=True)))
    assert gradient == pytest.approx([-w for w in weights])
    of_sequence = math.exp(np.mean([new - old for new, old in zip(NEW, OLD, strict=True)]))
    value, _ = run(LOSSES["gspo"], clip_low_threshold=LOW, clip_high_threshold=HIGH)
    terms = [min(of_sequence * a, clipped(of_sequence, low, high) * a) for _, a, low, high in bounds]
    assert value == pytest.approx(-sum(terms))


@pytest.mark.parametrize("name", LOSSES)
def test_one_threshold_alone_leaves_the_other_to_the_setting(name):
    loss = LOSSES[name]
    low, high = [1 - loss.low] * 4, [1 + loss.high] * 4
    for thresholds in (
        {"clip_low_threshold": low},
        {"clip_high_threshold": high},
        {"clip_low_threshold": low, "clip_high_threshold": high},
    ):
        value, gradient = run(loss, **thresholds)
        plain_value, plain_gradient = run(loss)
        assert value == pytest.approx(plain_value) and gradient == pytest.approx(plain_gradient)
