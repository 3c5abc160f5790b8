"""Where our numbers and those of other frameworks part, and by how much.

Each test takes one input through our code and through the other framework's arithmetic, stated anew here.
Numbers that are called recorded come from the framework's own function, run on that input. The numbers are
equal, or they differ as docs/algorithms.md says. Versions and commits:

verl 0.10.0.dev (1dda039b9), NeMo-RL 0.6.0 (7ea279abf), SkyRL (a9564572e), prime-rl 0.8.1.dev67 (559b44772),
OpenRLHF 0.11.0 (3c3be623), slime 0.3.1 (624b824a8), TuFT (102eefd), TRL 1.16.0, transformers 5.19.0
"""

# holds: exact

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.quickstart import quickstart
from rl.config.flags import FOREIGN_NAMES, override
from rl.config.learning import LRSchedule
from rl.controller.training_batch import TrainingGroup
from rl.controller.update import denominator
from rl.loss.advantages.base import Trajectory
from rl.loss.advantages.group_mean import GroupMean
from rl.loss.advantages.reinforce_pp import ReinforcePP
from rl.loss.advantages.rloo import RLOO
from rl.loss.base import LossOutput, TokenInputs
from rl.loss.correction import Correction
from rl.loss.dpo import DPO
from rl.loss.dro import DRO
from rl.loss.gspo import GSPO
from rl.loss.kl import estimate
from rl.loss.objective import Objective

DOCS = " ".join((Path(__file__).parents[2] / "docs/algorithms.md").read_text().split())


def documented(*phrases: str) -> None:
    """The page on algorithms has these words."""
    for phrase in phrases:
        assert phrase in DOCS, phrase


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs_of(
    generator: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor | None = None,
    ids=None,
    **columns,
) -> TokenInputs:
    ids = torch.zeros(len(generator), dtype=torch.long) if ids is None else torch.tensor(ids)
    weights = torch.ones_like(generator) if weights is None else weights
    return TokenInputs(generator, advantages, weights, ids, columns)


# GSPO: at what log-ratio it is cut


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_gspo_is_cut_at_20_nats_and_at_10_in_verl_and_skyrl(level):
    # verl trainer/ppo/core_algos.py:compute_policy_loss_gspo and SkyRL utils/ppo_utils.py:gspo_policy_loss cut
    # the mean log-ratio at 10 from above. Recorded from verl for a mean of 15 and advantage -1: 22026.4657.
    recorded = {9.0: 8103.0839, 15.0: 22026.4657}
    for mean, theirs in recorded.items():
        assert math.exp(min(mean, 10.0)) == pytest.approx(theirs, rel=1e-7)
        logprobs = tensor(mean - 1, mean + 1).requires_grad_()
        output = GSPO(0.2, 0.2, level=level)(logprobs, inputs_of(tensor(0, 0), tensor(-1, -1)))
        (gradient,) = torch.autograd.grad(output.loss, logprobs)
        ours = output.loss.item() / 2
        if mean <= 10:
            assert ours == pytest.approx(theirs, rel=1e-7)
        else:
            assert ours == pytest.approx(3_269_017.37, rel=1e-8)
        assert gradient.tolist() == pytest.approx([ours, ours])  # theirs is 0 over 10
    documented("their `gspo` at 10 from above", "3,269,017 here and 22,026 there", "have no cut")


# Correction: of which ratio the bounds are


def weights_left(correction: Correction, log_gap: list[float], ids: list[int]) -> list[float]:
    trainer = tensor(*log_gap)
    inputs = inputs_of(torch.zeros_like(trainer), torch.ones_like(trainer), ids=ids, old_logprobs=trainer)
    return correction(trainer, inputs)[0].weights.tolist()


RATIOS = [0.4, 0.6, 1.0, 1.5, 2.5, 4.0]  # trainer / generator


def test_verls_rejection_bounds_are_of_generator_over_trainer():
    # verl trainer/ppo/rollout_corr_helper.py:compute_rollout_rejection_mask: k1 is minus the log-ratio of
    # trainer to generator, and is kept within the logs of the bounds. Recorded for token_k1 and "0.5_3.0":
    recorded = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert [float(0.5 <= 1 / ratio <= 3.0) for ratio in RATIOS] == recorded
    gaps, ids = [math.log(ratio) for ratio in RATIOS], list(range(len(RATIOS)))
    copied = weights_left(Correction(mask_low=0.5, mask_high=3.0), gaps, ids)
    assert copied == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]  # copied bounds mask other tokens
    on_both_bounds = weights_left(Correction(mask_low=1.0, mask_high=1.0), [0.0, 1e-3], [0, 1])
    assert on_both_bounds == [1.0, 0.0]  # what is on a bound stays
    assert weights_left(Correction(mask_low=1 / 3.0, mask_high=1 / 0.5), gaps, ids) == recorded
    documented("`mask_low=1/upper`, `mask_high=1/lower`")


def test_verls_rejection_of_sequences_is_of_the_product_of_generator_over_trainer():
    # The same function with seq_sum_k1 and "0.5_3.0". Recorded for log-ratios of trainer to generator:
    sequences = {(0.2, 0.3): 1.0, (-0.2, -0.3): 1.0, (0.6, 0.6): 0.0, (-0.6, -0.6): 0.0, (0.4, 0.4): 0.0}
    for gaps, recorded in sequences.items():
        assert float(0.5 <= math.exp(-sum(gaps)) <= 3.0) == recorded
        converted = Correction(mask_low=1 / 3.0, mask_high=1 / 0.5, level="sequence")
        assert weights_left(converted, list(gaps), [0, 0]) == [recorded] * 2
    copied = Correction(mask_low=0.5, mask_high=3.0, level="sequence")
    assert weights_left(copied, [0.4, 0.4], [0, 0]) == [1.0, 1.0]
    documented("`rollout_rs` with `token_k1`, `seq_sum_k1` bounds 1/g")


def test_icepop_keeps_the_ratio_within_its_bounds_and_our_masks_alone_keep_1():
    # verl, the same file, compute_rollout_correction_weights with "0.5_3" (of trainer over generator), NeMo-RL
    # loss_functions.py and OpenRLHF models/loss.py with "icepop", slime loss.py:icepop_function. Recorded from verl:
    recorded = [0.0, 0.6, 1.0, 1.5, 2.5, 0.0]
    assert [ratio * (0.5 <= ratio <= 3) for ratio in RATIOS] == recorded
    gaps, ids = [math.log(ratio) for ratio in RATIOS], list(range(len(RATIOS)))
    icepop = Correction(old_logprobs="trainer", mask_low=0.5, mask_high=3.0, tis_clip=3.0)
    assert weights_left(icepop, gaps, ids) == pytest.approx(recorded)
    alone = Correction(old_logprobs="trainer", mask_low=0.5, mask_high=3.0)
    assert weights_left(alone, gaps, ids) == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    documented("IcePop weighs those that are kept by g: set `tis_clip` to `mask_high`")


# DPO with a supervised term


def nll_term(chosen: list[float]) -> float:
    """What DPO(nll_coef=1) adds to the loss of one pair."""
    logprobs, rejected = tensor(*chosen), tensor(-1.0)
    both = torch.cat([logprobs, rejected])
    ids = [0] * len(chosen) + [1]
    inputs = inputs_of(both, torch.zeros_like(both), ids=ids, ref_logprobs=both)
    return (DPO(nll_coef=1.0)(both, inputs).loss - DPO()(both, inputs).loss).item()


def test_nemos_supervised_term_of_dpo_is_a_sum_by_default_and_ours_a_mean():
    # NeMo-RL algorithms/loss/loss_functions.py:NLLLossFn with dpo_loss=True. Recorded, with its default
    # sft_average_log_probs=False and with True:
    recorded = {(-1.0, -2.0, -3.0): (6.0, 2.0), (-0.5, -0.5, -0.5): (1.5, 0.5)}
    for chosen, (summed, averaged) in recorded.items():
        assert (-sum(chosen), -sum(chosen) / len(chosen)) == (summed, averaged)
        assert nll_term(list(chosen)) == pytest.approx(averaged)
    # OpenRLHF trainer/dpo_trainer.py:concatenated_forward: the mean over pairs of each chosen's mean, as here.
    documented("`sft_loss_weight` weighs the chosen's sum", "`sft_average_log_probs`")


def test_the_answer_to_nemos_name_says_the_difference():
    assert FOREIGN_NAMES["sft_loss_weight"] == "loss.nll_coef"
    (line,) = override(replace(quickstart(), loss=DPO()), ["--sft_loss_weight", "0.1"], "rl")[1]
    assert "it is called --loss.nll_coef here" in line
    assert "weighs the mean over the chosen's tokens; NeMo-RL's weighs their sum, by default" in line


# Advantages


def rollouts(*rewards: float, num_tokens: int = 2) -> list[Trajectory]:
    return [Trajectory(np.array([0.0] * (num_tokens - 1) + [reward]), reward) for reward in rewards]


def flat(advantages) -> list[float]:
    return [float(np.atleast_1d(a)[0]) for group in advantages for a in group]


def whitened(values: list[float], divisor: int) -> list[float]:
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / divisor
    return [(v - mean) / math.sqrt(variance) for v in values]


def test_a_group_of_one_under_reinforce_pp_baseline():
    # Rewards 1 of a group of one, and 1 and 0 of a group of two; two tokens each.
    ours = flat(ReinforcePP(baseline="group_mean")([rollouts(1.0), rollouts(1.0, 0.0)]))
    # verl core_algos.py:compute_reinforce_plus_plus_baseline_outcome_advantage: its mean counts as 0. Recorded:
    verl = [0.9759000641, 0.2439750166, -1.2198750783]
    assert whitened([1.0, 1.0, 0.5, 0.5, -0.5, -0.5], 5)[::2] == pytest.approx(verl, rel=1e-7)
    # NeMo-RL advantage_estimator.py:ReinforcePlusPlusAdvantageEstimator: its mean is its reward, as here, and
    # the variance has the divisor n. Recorded:
    nemo = [0.0, 1.2247447968, -1.2247447968]
    assert whitened([0.0, 0.0, 0.5, 0.5, -0.5, -0.5], 6)[::2] == pytest.approx(nemo, rel=1e-7)
    assert ours == pytest.approx([a * math.sqrt(5 / 6) for a in nemo], rel=1e-6)
    documented("A group of one: 0 before whitening, as in NeMo-RL; verl keeps its reward")


def test_a_group_of_one_in_verl_keeps_its_reward():
    # verl core_algos.py:compute_grpo_outcome_advantage (mean 0, std 1) and compute_rloo_outcome_advantage.
    # SkyRL's compute_rloo_outcome_advantage and NeMo-RL's GRPOAdvantageEstimator give 0.
    for estimator in (GroupMean(), GroupMean(adv_norm="none"), RLOO()):
        assert estimator([rollouts(1.0)]) == [[0.0]]
    documented(
        "has advantage 0, as in NeMo-RL (verl, SkyRL: its reward)", "verl's group of one keeps its reward"
    )


def test_whitening_one_token_leaves_nothing():
    # NeMo-RL advantage_estimator.py and OpenRLHF ppo_utils/experience_maker.py subtract the mean, and divide by
    # at least 1e-4: 0. verl's utils/torch_functional.py:masked_var and SkyRL's refuse one token.
    assert (3.0 - 3.0) * max(0.0, 1e-8) ** -0.5 == 0.0
    assert flat(ReinforcePP()([rollouts(3.0, num_tokens=1)])) == [0.0]
    documented("A batch of one token has advantage 0, as in OpenRLHF and NeMo-RL; verl refuses it")


# Aggregation


def test_the_entropy_under_seq_mean_is_each_rollouts_mean():
    # Rollouts of one and of three tokens, with entropies 1 and 2.
    entropy, weights = tensor(1, 2, 2, 2), tensor(1, 1 / 3, 1 / 3, 1 / 3)
    inputs = TokenInputs(*[torch.zeros(4)] * 2, weights, torch.tensor([0, 1, 1, 1]), entropy=entropy)
    nothing = lambda logprobs, inputs: LossOutput(logprobs.sum() * 0, {})  # noqa: E731
    ours = -Objective(nothing, entropy_coef=1.0)(torch.zeros(4), inputs).loss.item() / 2
    # verl workers/utils/losses.py:ppo_loss and slime megatron_utils/loss.py:policy_loss_function aggregate the
    # entropy as the loss. TRL grpo_trainer.py, SkyRL workers/worker.py and OpenRLHF trainer/ray/ppo_actor.py take
    # its mean over tokens always.
    assert ours == pytest.approx((1.0 + (2.0 + 2.0 + 2.0) / 3) / 2) == pytest.approx(1.5)
    assert entropy.mean().item() == 1.75
    documented(
        "TRL, SkyRL and OpenRLHF: its mean over tokens whatever the loss's, 1.75 where `seq_mean` gives 1.5"
    )


def test_dr_grpo_in_verl_is_divided_by_rollouts_and_width_as_here():
    # verl core_algos.py:agg_loss, seq-mean-token-sum-norm, two rollouts of 2 and 3 tokens in a width of 4.
    losses, width, recorded = [[1.0, 2.0], [3.0, 4.0, 5.0]], 4, 1.875
    assert sum(map(sum, losses)) / len(losses) / width == recorded
    algorithm = replace(quickstart(), loss_agg="constant").algorithm
    algorithm = replace(algorithm, max_new_tokens=width)
    groups = [TrainingGroup([], num_tokens=5, num_sequences=2)]
    assert sum(map(sum, losses)) / denominator(groups, algorithm) == recorded
    documented("by the rollouts and by the padded width", "0.7.0 did not divide by the rollouts")


def test_dro_is_verls_and_tufts():
    # verl core_algos.py:compute_policy_loss_dro with dro_beta 0.05 and token-mean; TuFT loss_fn/dro.py is its
    # sum. Recorded from verl, value and gradient:
    recorded, slopes = -0.9916875, [-0.24375, -0.2525, 0.5025, 0.4875]
    new, old, advantages = [-1.0, -2.0, -0.5, -3.0], [-1.5, -1.8, -0.7, -2.0], [1.0, 1.0, -2.0, -2.0]
    rows = list(zip(new, old, advantages, strict=True))
    assert sum(-(n * a - 0.025 * (n - o) ** 2) for n, o, a in rows) / 4 == pytest.approx(recorded)
    logprobs = tensor(*new).requires_grad_()
    output = DRO(beta=0.05)(logprobs, inputs_of(tensor(*old), tensor(*advantages)))
    assert output.loss.item() / 4 == pytest.approx(recorded, rel=1e-9)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    assert (gradient / 4).tolist() == pytest.approx(slopes, rel=1e-9)
    documented(
        "verl `dro` since 0.9 (`dro_beta`, which has no default) and TuFT `dro` (0.01): the same formula"
    )


def test_k3_is_cut_at_10_in_verl_nemo_and_skyrl():
    # verl core_algos.py:kl_penalty_forward, recorded for logp - ref = -4: 10.
    assert min(math.exp(4) - 1 - 4, 10.0) == 10.0
    ours = estimate(tensor(-4.0), tensor(0.0), "k3").item()
    assert ours == pytest.approx(math.exp(4) - 5) == pytest.approx(49.598, abs=1e-3)
    documented("cut k3 at 10", "49.6 here where logp - ref = -4")


# The learning rate


def test_the_first_step_of_a_warm_up_has_one_nth_and_elsewhere_none():
    # verl utils/torch_functional.py:get_constant_schedule_with_warmup, and transformers' get_scheduler
    # (TRL, OpenRLHF, SkyRL), recorded for 4 steps of warm-up:
    recorded = [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert [min(1.0, step / 4) for step in range(6)] == recorded
    ours = [LRSchedule("constant", num_steps=6, warmup_steps=4)(step) for step in range(1, 7)]
    assert ours == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0] == [*recorded[1:], 1.0]
    documented("verl and transformers' schedules (TRL, OpenRLHF, SkyRL) are one step behind")


def test_wsd_goes_down_linearly_here_and_by_a_cosine_in_verl_and_transformers():
    # verl utils/torch_functional.py:get_wsd_schedule_with_warmup and transformers'
    # optimization.py:_get_wsd_scheduler_lambda, recorded for the last 4 of 10 steps:
    recorded = [1.0, 0.853553, 0.5, 0.146447]
    assert [(1 + math.cos(math.pi * done / 4)) / 2 for done in range(4)] == pytest.approx(recorded, abs=1e-6)
    ours = [LRSchedule("wsd", num_steps=10, decay_ratio=0.4)(step) for step in range(6, 11)]
    assert ours == [
        1.0,
        1.0,
        0.75,
        0.5,
        0.25,
    ]  # prime-rl trainer/scheduler.py:setup_linear_scheduler is linear
    documented("a quarter of the way down it has 0.75 here and 0.854 there")
