"""The entropy bonus and its control, worked by hand; a policy under it, against the same without."""

# holds: exact

import math

import pytest
import torch

from rl.loss.base import LossOutput, TokenInputs
from rl.loss.entropy import EntropyBonus, EntropyControl
from rl.loss.logprobs import logprobs_and_entropy
from rl.loss.objective import Objective


def test_the_objective_takes_the_weighted_entropy_off():
    nothing = lambda logprobs, inputs: LossOutput(logprobs.sum() * 0, {})  # noqa: E731
    ids = torch.zeros(2, dtype=torch.long)
    entropy = torch.tensor([0.5, 2.0], requires_grad=True)
    inputs = TokenInputs(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, 0.25]), ids, entropy=entropy)
    output = Objective(nothing, entropy_coef=0.1)(torch.zeros(2, requires_grad=True), inputs)
    assert output.loss.item() == pytest.approx(-0.1 * (0.5 + 0.25 * 2.0))
    (gradient,) = torch.autograd.grad(output.loss, entropy)
    assert gradient.tolist() == pytest.approx([-0.1, -0.025])


@pytest.mark.parametrize(
    ("bonus", "used"),
    [
        (EntropyBonus(), False),
        (EntropyBonus(coef=0.01), True),
        (EntropyBonus(target=0.01), True),
        (EntropyBonus(coef=0.01, target=0.01), True),
    ],
)
def test_entropy_is_computed_where_a_coefficient_or_a_target_asks_for_it(bonus, used):
    assert bonus.used == used


def test_a_fixed_coefficient_stays():
    control = EntropyControl(EntropyBonus(coef=0.1))
    for entropy in (5.0, 0.0, math.nan):
        control.observe(entropy)
        assert control.coef == 0.1


def test_the_coefficient_rises_under_the_target_and_acts_only_there():
    control = EntropyControl(EntropyBonus(coef=0.0, target=0.3, adapt=0.01))
    used = []
    for entropy in (1.0, 0.2, 0.1, math.nan, 0.25, 0.4, 0.2):
        used.append(control.coef)
        control.observe(entropy)
    #   after:        1.0  0.2   0.1   nan   0.25  0.4
    assert used == [
        0.0,
        0.0,
        pytest.approx(0.01),
        pytest.approx(0.02),
        pytest.approx(0.02),
        pytest.approx(0.03),
        0.0,
    ]
    again = EntropyControl(EntropyBonus(target=0.3, adapt=0.01), control.state)
    assert again.coef == control.coef == pytest.approx(0.03)


def test_a_step_with_just_the_targets_entropy_lowers_the_coefficient():
    control = EntropyControl(EntropyBonus(coef=0.5, target=0.3, adapt=0.125))
    control.observe(0.3)
    assert control.state["coef"] == 0.375 and control.coef == 0.0


def test_a_resumed_run_with_another_bonus_begins_its_control_anew():
    before = EntropyControl(EntropyBonus(coef=0.2, target=0.3, adapt=0.01))
    before.observe(0.1)
    assert EntropyControl(EntropyBonus(coef=0.2, target=0.3, adapt=0.01), before.state).coef == pytest.approx(
        0.21
    )
    other = EntropyControl(EntropyBonus(coef=0.1, target=0.3, adapt=0.01), before.state)
    assert other.coef == 0.0  # no step has had less entropy than its target
    other.observe(0.1)
    assert other.coef == pytest.approx(0.11)
    without_bonus = {"coef": 0.4, "entropy": 0.1}  # of an earlier version
    assert EntropyControl(EntropyBonus(target=0.3), without_bonus).coef == 0.4


def test_a_policy_that_is_rewarded_for_one_token_keeps_its_entropy():
    """A bandit of four arms: without the bonus it ends at the best arm alone, with it near the target."""

    def train(bonus):
        logits = torch.zeros(1, 4, requires_grad=True)
        control, optimizer = EntropyControl(bonus), torch.optim.SGD([logits], lr=1.0)
        for _ in range(400):
            _, entropy = logprobs_and_entropy(logits, torch.tensor([0]))
            loss = -logits.softmax(-1)[0, 0] - control.coef * entropy.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            control.observe(entropy.item())
        return entropy.item()

    assert train(EntropyBonus()) < 0.05  # holds: meaning, without a target the entropy collapses
    # holds: meaning, with one it stays near
    assert train(EntropyBonus(target=0.5, adapt=0.02)) == pytest.approx(0.5, abs=0.15)
