"""KL, correction, shaping and their composition, against plain Python in float64."""

# holds: exact

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.errors import RunError
from rl.loss.base import LossOutput, TokenInputs
from rl.loss.clip import Clip
from rl.loss.correction import Correction
from rl.loss.kl import KL, estimate
from rl.loss.objective import Objective
from rl.loss.shaping import Shaping
from rl.types import StopReason


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def random_inputs(rng, spread=1.0):
    n = int(rng.integers(1, 30))
    generator = rng.normal(-2, 1, n)
    ids = np.sort(rng.integers(0, 4, n))
    inputs = TokenInputs(
        tensor(generator),
        tensor(rng.normal(0, 1, n)),
        tensor(rng.uniform(0, 1, n)),
        torch.from_numpy(ids),
        {
            "ref_logprobs": tensor(rng.normal(-2, 1, n)),
            "old_logprobs": tensor(generator + rng.normal(0, spread, n)),
        },
    )
    return tensor(rng.normal(-2, spread, n)).requires_grad_(), inputs


def test_kl_estimators_in_value_and_gradient():
    rng = np.random.default_rng(0)
    for spread in (0.1, 1.0, 15.0):
        policy = tensor(rng.normal(-2, spread, 50)).requires_grad_()
        reference = tensor(rng.normal(-2, spread, 50))
        for estimator in ("k1", "k2", "k3"):
            got = estimate(policy, reference, estimator)
            (gradient,) = torch.autograd.grad(got.sum(), policy)
            columns = (column.tolist() for column in (policy, reference, got, gradient))
            for p, r, value, slope in zip(*columns, strict=True):
                d = p - r
                cut = max(-20.0, min(20.0, d))
                expected = {
                    "k1": (d, 1.0),
                    "k2": (d * d / 2, d),
                    "k3": (math.exp(-cut) - 1 + cut, (1 - math.exp(-d)) if cut == d else 0.0),
                }[estimator]
                assert (value, slope) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_kl_estimators_agree_in_the_mean_with_the_divergence():
    # Over all tokens of a vocabulary of 6, weighted by the policy's probabilities: k1 and k3 are unbiased,
    # k2 is near.
    torch.manual_seed(0)
    policy = torch.randn(6, dtype=torch.float64).mul(0.1).log_softmax(0)
    reference = torch.randn(6, dtype=torch.float64).mul(0.1).log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum().item()
    means = {e: (policy.exp() * estimate(policy, reference, e)).sum().item() for e in ("k1", "k2", "k3")}
    assert means["k1"] == pytest.approx(exact) and means["k3"] == pytest.approx(exact)
    assert means["k2"] == pytest.approx(exact, rel=0.2)  # holds: meaning, k2 is biased by a few percent here


def test_correction_weights_masks_and_ratios():
    rng = np.random.default_rng(1)
    for level in ("token", "sequence"):
        for _ in range(40):
            logprobs, inputs = random_inputs(rng)
            bounds = {"tis_clip": 1.5, "mask_low": 0.3, "mask_high": 4.0}
            correction = Correction(old_logprobs="trainer", level=level, **bounds)
            got, metrics = correction(logprobs, inputs)
            old = inputs.loss_inputs["old_logprobs"].tolist()
            generator, ids = inputs.generator_logprobs.tolist(), inputs.sample_ids.tolist()
            expected, num_clipped, num_masked, importance = [], 0, 0, 0.0
            for t in range(len(old)):
                tokens = [t] if level == "token" else [s for s in range(len(old)) if ids[s] == ids[t]]
                gap = math.exp(max(-20, min(20, sum(old[s] - generator[s] for s in tokens))))
                masked = not 0.3 <= gap <= 4.0
                expected.append(0.0 if masked else min(gap, 1.5) * inputs.weights[t].item())
                num_masked += masked
                importance += min(gap, 1.5)
                num_clipped += gap > 1.5
            assert got.weights.tolist() == pytest.approx(expected, rel=1e-9)
            assert int(metrics["gap_masked:sum"]) == num_masked
            assert metrics["tis/weight:sum"].item() == pytest.approx(importance)
            assert int(metrics["tis/clipped:sum"]) == num_clipped
            assert got.old_logprobs is inputs.loss_inputs["old_logprobs"] and not got.weights.requires_grad


def test_a_gap_at_its_bound_is_neither_clipped_nor_masked():
    logprobs, inputs = random_inputs(np.random.default_rng(1))
    inputs = replace(inputs, loss_inputs={"old_logprobs": inputs.generator_logprobs})  # every gap is 1
    same, metrics = Correction("trainer", tis_clip=1.0, mask_low=1.0, mask_high=1.0)(logprobs, inputs)
    assert same.weights.equal(inputs.weights)
    assert int(metrics["tis/clipped:sum"]) == int(metrics["gap_masked:sum"]) == 0


def test_without_a_column_the_trainers_logprobs_are_those_of_this_very_update():
    logprobs, inputs = random_inputs(np.random.default_rng(2))
    bare = TokenInputs(inputs.generator_logprobs, inputs.advantages, inputs.weights, inputs.sample_ids)
    got, _ = Correction(old_logprobs="trainer")(logprobs, bare)
    assert torch.equal(got.old_logprobs, logprobs.detach())  # so every ratio is 1
    got, _ = Correction()(logprobs, bare)
    assert torch.equal(got.old_logprobs, inputs.generator_logprobs)


def test_ratios_are_taken_against_the_generator_even_where_the_trainers_are_known():
    logprobs, inputs = random_inputs(np.random.default_rng(3))
    got, _ = Correction()(logprobs, inputs)
    assert torch.equal(got.old_logprobs, inputs.generator_logprobs)


def test_truncated_importance_sampling_of_the_whole_loss_worked_by_hand():
    # generator 0, old = log 2, new = log 3, A = 1: ratio 1.5 (clipped to 1.28), weight min(2, 1.8) = 1.8.
    inputs = TokenInputs(
        tensor([0.0]),
        tensor([1.0]),
        tensor([1.0]),
        torch.zeros(1, dtype=torch.long),
        {"old_logprobs": tensor([math.log(2)])},
    )
    objective = Objective(Clip(0.2, 0.28), Correction(old_logprobs="trainer", tis_clip=1.8))
    assert objective(tensor([math.log(3)]), inputs).loss.item() == pytest.approx(-1.8 * 1.28)


def test_the_objective_adds_the_kl_with_the_tokens_weights():
    rng = np.random.default_rng(4)
    for _ in range(20):
        logprobs, inputs = random_inputs(rng)
        nothing = lambda logprobs, inputs: LossOutput(logprobs.sum() * 0, {})  # noqa: E731
        output = Objective(nothing, kl=KL(coef=0.3, estimator="k2"))(logprobs, inputs)
        (gradient,) = torch.autograd.grad(output.loss, logprobs)
        reference = inputs.loss_inputs["ref_logprobs"].tolist()
        apart = [p - r for p, r in zip(logprobs.tolist(), reference, strict=True)]
        weights = inputs.weights.tolist()
        expected = 0.3 * sum(w * d * d / 2 for w, d in zip(weights, apart, strict=True))
        assert output.loss.item() == pytest.approx(expected)
        assert gradient.tolist() == pytest.approx([0.3 * w * d for w, d in zip(weights, apart, strict=True)])
        assert Objective(nothing, kl=KL(coef=0.3, into="reward"))(logprobs, inputs).loss.item() == 0


def test_shaping_worked_by_hand():
    # DAPO: of 10 tokens the last 4 are punished: 6 or less 0, 8 half, 10 whole.
    assert Shaping(overlong_tokens=4)([1, 1, 0, 0], [5, 6, 8, 10], 10) == [0, 0, -0.5, -1.0]
    assert Shaping(overlong_tokens=4)([1], [18], 10) == [-1.0]
    weak = Shaping(overlong_tokens=4, overlong_penalty=0.2)
    assert weak([1, 1], [7, 10], 10) == pytest.approx([-0.05, -0.2])
    # Kimi: place 0.5 - (len - 2) / (6 - 2): 0.5, 0, -0.5; a wrong response gets no bonus.
    assert Shaping(length_coef=1.0)([1, 1, 1, 0], [2, 4, 6, 2], 10) == [0.5, 0.0, -0.5, 0.0]
    assert Shaping(length_coef=0.1)([1, 0], [3, 3], 10) == [0, 0]
    assert Shaping()([1, 0], [3, 9], 10) == [0, 0]
    assert Shaping()([], [], 10) == []
    assert Shaping(drop_truncated=True).drops(StopReason.LENGTH) and not Shaping().drops(StopReason.LENGTH)
    assert not Shaping(drop_truncated=True).drops(StopReason.STOP)


@pytest.mark.parametrize(
    "name",
    [
        "loss:sum",
        "tokens:max",
        "entropy:sum",
        "kl:sum",
        "grad_norm:max",
        "step:max",
        "eval/accuracy:sum",
        "tis/weight:sum",
    ],
)
def test_a_losss_own_metrics_have_names_of_their_own(name):
    logprobs, inputs = random_inputs(np.random.default_rng(0))

    def loss(logprobs, inputs):
        return LossOutput(logprobs.sum(), {"margin:sum": 1.0, "preferred:max": 2.0, name: 3.0})

    correction = Correction(old_logprobs="trainer", tis_clip=2.0)
    with pytest.raises(RunError, match=f"the loss's metric '{name}' has the name of another"):
        Objective(loss, correction)(logprobs, inputs)
    if name == "tis/weight:sum":
        assert Objective(loss)(logprobs, inputs).metrics[name] == 3.0  # nothing else has the name then
