"""DPO: preferences between two responses, without rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl.bounds import HalfShare, NonNegativeFloat
from rl.errors import RunError
from rl.fields import refuse
from rl.loss.base import LossOutput, TokenInputs, per_sequence, sequence_sums
from rl.types import DataKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization (arXiv 2305.18290, equation 7).

    Label smoothing is from its "conservative" note. Sequences 2i and 2i + 1 are the chosen and the rejected
    response to one prompt, in one micro-batch.

    margin_i = beta * (sum_t w_t (logp_t - ref_t) of the chosen, less that of the rejected)
    loss = -sum_i ((1 - label_smoothing) * log sigmoid(margin_i) + label_smoothing * log sigmoid(-margin_i)
                   + nll_coef * mean_t logp_t of the chosen)
    """

    beta: NonNegativeFloat = 0.1
    """How far the policy may move from the reference: less is further."""

    label_smoothing: HalfShare = 0.0
    """The share of preferences believed to be the wrong way round."""

    nll_coef: NonNegativeFloat = 0.0
    """Adds so much of the chosen's negative logprob, averaged over its tokens (arXiv 2404.19733, equation 1):
    it keeps the chosen from becoming less likely together with the rejected."""

    learns_from: ClassVar[DataKind] = "preferences"
    needs_reference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse(self)

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        from torch.nn.functional import logsigmoid

        num, index = per_sequence(inputs.sample_ids)
        ids = inputs.sample_ids.unique()
        if num % 2 or not (ids[::2] + 1).equal(ids[1::2]) or (ids[::2] % 2).any():
            raise RunError("DPO needs chosen and rejected side by side; pack pairs with samples_per_unit=2")
        apart = (logprobs - inputs.loss_input("ref_logprobs")) * inputs.weights
        rewards = self.beta * sequence_sums(apart, num, index)
        margin = rewards[::2] - rewards[1::2]
        right, wrong = logsigmoid(margin), logsigmoid(-margin)
        loss = -((1 - self.label_smoothing) * right + self.label_smoothing * wrong).sum()
        if self.nll_coef:
            means = sequence_sums(logprobs, num, index) / sequence_sums(
                logprobs.new_ones(logprobs.shape), num, index
            )
            loss = loss - self.nll_coef * means[::2].sum()
        metrics: dict[str, torch.Tensor | float] = {
            "dpo/pairs:sum": len(margin),
            "dpo/accuracy:sum": (margin > 0).sum(),
            "dpo/margin:sum": margin.detach().sum(),
        }
        return LossOutput(loss, metrics)
