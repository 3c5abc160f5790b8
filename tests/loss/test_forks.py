"""Rollouts that fork: the sequence of GSPO's mean and of the correction's product is a branch, not a rollout."""

# holds: exact

import asyncio
import math
from dataclasses import replace

import pytest
import torch

from configs.quickstart import quickstart
from rl.batching import pack
from rl.config.flags import override
from rl.controller.training_batch import build_training_batch
from rl.loss.correction import Correction
from rl.loss.gspo import GSPO
from rl.loss.objective import Objective
from rl.models.loss_metrics import token_inputs
from rl.types import Group, Problem, Rollout, Score, Segment, StopReason, VersionRange

# Log-ratios of trainer to generator, of the tokens that each branch samples. The first rollout's two branches
# have ratios of 2 and 1/2 in the mean, of 8 and 1/8 as products, and the whole rollout 1; the second has none.
LOG_RATIOS = [[math.log(2), 0.0, math.log(4)], [-math.log(2)] * 3, [0.0] * 3, [0.0] * 3]
ADVANTAGE = 0.5 / (math.sqrt(0.5) + 1e-6)  # of rewards 1 and 0: (1 - 1/2) / (std + eps)


def forked(reward: float) -> tuple[Rollout, Score]:
    """A turn of two tokens and one of one; a branch after the first turn, with a turn of three."""

    def context(*tokens: int) -> Segment:
        return Segment(list(tokens), False, [0.0] * len(tokens))

    def sampled(*tokens: int) -> Segment:
        return Segment(list(tokens), True, [-1.0] * len(tokens))

    first = (context(1, 2), sampled(3, 4), context(5), sampled(6))
    second = (context(1, 2), context(3, 4), context(7, 8), sampled(9, 10, 11))
    problem, score = Problem("1", "q", "a"), Score(reward)
    versions = VersionRange(0, 0)
    return Rollout(problem, first, "", StopReason.STOP, versions, forks=(second,), score=score), score


def as_a_loss_sees_them(**changes):
    """(logprobs of the trainer, inputs) of a group of two forked rollouts, whose prefixes are shared."""
    rollouts, scores = zip(forked(1.0), forked(0.0), strict=True)
    algorithm = replace(quickstart(), **changes).algorithm
    batch = asyncio.run(build_training_batch([Group(0, rollouts, scores)], algorithm, {}))
    samples = batch.groups[0].samples
    assert len(samples) == 4
    ((micro,),) = pack(samples, share_prefixes=True).ranks
    inputs = token_inputs(micro, None, torch.device("cpu"))
    inputs = replace(inputs, generator_logprobs=inputs.generator_logprobs.double())
    apart = torch.zeros(12, dtype=torch.float64)
    for branch, log_ratios in enumerate(LOG_RATIOS):
        apart[inputs.sample_ids == branch] = torch.tensor(log_ratios, dtype=torch.float64)
    return inputs.generator_logprobs + apart, inputs


def gspo_by_hand(sequences: list[list[int]]) -> float:
    """The unclipped loss, with the mean over the branches of each sequence together. Plain Python, float64."""
    total = 0.0
    for branches in sequences:
        log_ratios = [x for branch in branches for x in LOG_RATIOS[branch]]
        advantage = ADVANTAGE if branches[0] < 2 else -ADVANTAGE
        total -= len(log_ratios) * advantage * math.exp(sum(log_ratios) / len(log_ratios))
    return total


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_gspos_mean_is_over_a_branch(level):
    loss = GSPO(low=1.0, high=9.0, level=level)
    got = Objective(loss)(*as_a_loss_sees_them(loss=loss)).loss.item()
    by_branch, by_rollout = gspo_by_hand([[0], [1], [2], [3]]), gspo_by_hand([[0, 1], [2, 3]])
    # -(3 * 2 + 3 / 2) A + 6 A, and -6 A + 6 A
    assert by_branch == pytest.approx(-1.5 * ADVANTAGE) and by_rollout == pytest.approx(0.0)
    assert got == pytest.approx(by_branch, rel=1e-6)  # advantages are float32
    assert abs(got - by_rollout) > 1.0


def test_the_corrections_product_is_over_a_branch():
    logprobs, inputs = as_a_loss_sees_them()
    correction = Correction(old_logprobs="trainer", level="sequence", tis_clip=5.0)
    weights = correction(logprobs, inputs)[0].weights
    of_branches = [weights[inputs.sample_ids == branch].tolist() for branch in range(4)]
    expected = [[min(math.exp(sum(log_ratios)), 5.0)] * 3 for log_ratios in LOG_RATIOS]
    assert expected == [pytest.approx([w] * 3) for w in (5.0, 0.125, 1.0, 1.0)]  # of the rollouts: 1 and 1
    assert of_branches == [pytest.approx(weights) for weights in expected]
    masked = Correction(level="sequence", mask_low=0.5, mask_high=2.0)(logprobs, inputs)[0].weights
    kept = [masked[inputs.sample_ids == branch].tolist() for branch in range(4)]
    assert kept == [[0.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3]  # of the rollouts: all


def test_the_settings_help_says_so(capsys):
    recipe = replace(quickstart(), loss=GSPO())
    with pytest.raises(SystemExit):
        override(recipe, ["--help"], "rl")
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag in ("--loss.low", "--loss.level", "--correction.level"):
        _, _, own = words.partition(flag)
        assert "Each branch of a rollout that forks is a sequence" in own[: own.find(" --")], flag


def test_each_sampled_token_is_in_one_branch():
    _, inputs = as_a_loss_sees_them()
    assert torch.bincount(inputs.sample_ids).tolist() == [3, 3, 3, 3]  # of 6 + 9 tokens of each rollout
