"""The losses and estimators for whoever has padded tensors [B, T], as trainers of TRL and verl do.

B sequences of up to T tokens. Nothing of a run is needed: `from rl.loss import Clip, GroupMean, padded_loss`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np

from rl.errors import RunError
from rl.interfaces import AdvantageEstimator, Loss
from rl.loss.advantages.base import Trajectory, estimate
from rl.loss.aggregate import LossAgg, denominator, token_divisor
from rl.loss.base import TokenInputs
from rl.loss.objective import Objective

if TYPE_CHECKING:
    import torch

_LOSS_INPUTS = (
    *("ref_logprobs", "old_logprobs", "values", "returns"),
    *("sequence_ratio_mask", "clip_low_threshold", "clip_high_threshold"),
)


class PaddedLoss(NamedTuple):
    loss: torch.Tensor  # scalar, with gradient
    metrics: dict[str, float]  # by name: the mean over the tokens that count, or the largest value


def padded_loss(
    loss: Loss,
    logprobs: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    *,
    sampling_logprobs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    loss_agg: LossAgg = "token_mean",
    max_new_tokens: int = 0,
    **loss_inputs: torch.Tensor,
) -> PaddedLoss:
    """One of rl.loss, or an Objective, over padded rows.

    logprobs: [B, T] of the tokens, in nats, with gradient. mask: [B, T], 1 where a token counts. advantages:
    [B, T], or [B] for all tokens of a sequence. sampling_logprobs: [B, T], of the policy that sampled; none
    where those are old_logprobs, or the policy is still that one. entropy: [B, T] in nats. loss_agg,
    max_new_tokens: see `aggregate.denominator`. loss_inputs: [B, T] each, such as ref_logprobs for a KL
    penalty, or old_logprobs. What stands where the mask is 0 is not read. DPO, whose rows 2i and 2i + 1 are
    the chosen and the rejected response to a prompt, gives the mean over pairs, and its metrics too, and has
    no loss_agg.

    What has fewer bits is computed in fp32: sums over long sequences need them.

    Raises RunError where a shape is another, for a name that no loss of rl.loss reads, and where an Objective
    would leave out its KL penalty or old_logprobs. Other inputs that this loss does not read are left out.
    """
    import torch

    own = loss.loss if isinstance(loss, Objective) else loss
    of_pairs = getattr(own, "learns_from", "") == "preferences"
    if of_pairs and loss_agg != "token_mean":
        name = getattr(own, "__name__", type(own).__name__)
        raise RunError(f"loss_agg={loss_agg!r} has no effect on {name}, the mean over pairs; leave it out")
    if loss_agg == "constant" and max_new_tokens < 1:
        raise RunError("loss_agg='constant' divides by max_new_tokens; give it")
    if loss_agg not in get_args(LossAgg):
        raise RunError(f"loss_agg={loss_agg!r}; use one of {', '.join(get_args(LossAgg))}")
    unknown = sorted(loss_inputs.keys() - {*_LOSS_INPUTS})
    if unknown and type(own).__module__.startswith("rl.loss."):
        raise RunError(f"no loss of rl.loss reads {', '.join(unknown)}; use {', '.join(_LOSS_INPUTS)}")
    if why := _why_unread(loss, sampling_logprobs is not None and "old_logprobs" in loss_inputs):
        raise RunError(why)
    if sampling_logprobs is None:
        sampling_logprobs = loss_inputs.get("old_logprobs")
    keep = mask.bool()
    named = {"mask": mask, "sampling_logprobs": sampling_logprobs, "entropy": entropy, **loss_inputs}
    if advantages.ndim == 1 and len(advantages) == len(logprobs):
        advantages = advantages[:, None].expand_as(logprobs)
    for name, tensor in {"advantages": advantages, **named}.items():
        if tensor is not None and tensor.shape != logprobs.shape:
            raise RunError(f"{name} has the shape {[*tensor.shape]}, and logprobs {[*logprobs.shape]}")

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[keep].to(torch.promote_types(tensor.dtype, torch.float32))

    policy = kept(logprobs)
    rows = torch.arange(len(mask), device=mask.device)[:, None].expand_as(keep)[keep]
    of_rows = [token_divisor(loss_agg, n) for n in keep.sum(1).tolist()]
    divisors = torch.tensor(of_rows, dtype=policy.dtype, device=policy.device)
    inputs = TokenInputs(
        generator_logprobs=policy.detach() if sampling_logprobs is None else kept(sampling_logprobs),
        advantages=kept(advantages),
        weights=1 / divisors[rows],
        sample_ids=rows,
        loss_inputs={name: kept(tensor) for name, tensor in loss_inputs.items()},
        entropy=None if entropy is None else kept(entropy),
    )
    num_tokens = int(keep.sum())
    total, metrics = loss(policy, inputs)
    if of_pairs:
        divisor = count = max(1, len(mask) / 2)
    else:
        divisor, count = denominator(loss_agg, num_tokens, len(mask), max_new_tokens), max(1, num_tokens)
    values: dict[str, float] = {}
    for metric, value in metrics.items():
        name, _, reduction = metric.partition(":")
        values[name] = float(value) / (count if reduction == "sum" else 1)
    values.pop("dpo/pairs", None)  # of each pair one
    return PaddedLoss(total / divisor, values)


def _why_unread(loss: Loss, has_both: bool) -> str:
    """What an Objective would leave out. has_both: sampling_logprobs and old_logprobs are there."""
    if not isinstance(loss, Objective):
        return ""
    if loss.kl.coef and not loss.kl.in_loss:
        return "KL(into='reward') is no part of a loss; take it off the rewards, or set into='loss'"
    if has_both and not loss.correction.reads_the_trainers and not loss.correction.tis_clip:
        return (
            "Correction(old_logprobs='generator') takes ratios against sampling_logprobs, and nothing reads "
            "old_logprobs; set Correction(old_logprobs='trainer'), or leave one of them out"
        )
    return ""


def padded_advantages(
    estimator: AdvantageEstimator, rewards: torch.Tensor, mask: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Advantages [B, T], 0 where the mask is 0.

    rewards: [B], of whole sequences, of which each group_size in a row are of one prompt; or [B, T], where in
    a sequence they were earned. mask: [B, T], 1 at the tokens that were sampled. A reward where it is 0 goes
    to the last sampled token before it, else to the first. Raises RunError where a reward is not finite, and
    for an estimator that needs a critic's values.
    """
    import torch

    if getattr(estimator, "needs_critic", False):
        raise RunError(
            f"{type(estimator).__name__} needs a critic's values; use an estimator without a critic"
        )
    keep = mask.bool()
    if rewards.shape not in (keep.shape[:1], keep.shape):
        raise RunError(f"rewards have the shape {[*rewards.shape]}, and mask {[*keep.shape]}")
    if group_size < 1 or len(keep) % group_size:
        raise RunError(f"{len(keep)} sequences are no groups of {group_size}")
    members = [_trajectory(rewards[i], keep[i]) for i in range(len(keep))]
    groups = [members[i : i + group_size] for i in range(0, len(members), group_size)]
    advantages = torch.zeros(keep.shape, device=mask.device)
    for i, value in enumerate(value for group in estimate(estimator, groups) for value in group):
        advantages[i, keep[i]] = torch.as_tensor(value).to(advantages)
    return advantages


def _trajectory(rewards: torch.Tensor, keep: torch.Tensor) -> Trajectory:
    """rewards: of one sequence, whole or [T]. keep: [T]."""
    of_tokens = np.zeros(int(keep.sum()))
    if rewards.ndim:
        if len(of_tokens):
            at = (keep.cumsum(0) - 1).clamp(min=0).cpu().numpy()
            np.add.at(of_tokens, at, rewards.double().cpu().numpy())
        return Trajectory(of_tokens, float(rewards.double().sum()))
    of_tokens[-1:] = float(rewards)
    return Trajectory(of_tokens, float(rewards))
