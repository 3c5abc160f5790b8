"""Objective: what the trainer is given in each step: loss, correction, KL penalty and entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl.bounds import NonNegativeFloat
from rl.errors import RunError
from rl.fields import refuse
from rl.interfaces import Loss
from rl.loss.base import LossOutput, TokenInputs
from rl.loss.correction import Correction
from rl.loss.kl import KL, estimate

if TYPE_CHECKING:
    import torch

_RESERVED = {
    *("step", "loss", "tokens", "computed", "unshared", "cuts", "entropy", "kl"),
    *("logprob_diff", "ratio_outside", "grad_norm", "lr", "updates", "denominator"),
}
"""Metrics of every step."""
_RESERVED_GROUPS = ("eval/", "reward/", "time/")


@dataclass(frozen=True)
class Objective:
    """loss(corrected inputs) + kl.coef * sum_t c_t * kl_t - entropy_coef * sum_t w_t * entropy_t.

    w_t: the token's weight; c_t: the same, corrected. The KL term is there where the penalty goes into the
    loss.
    """

    loss: Loss
    correction: Correction = Correction()
    kl: KL = KL()
    entropy_coef: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        refuse(self)

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        corrected, of_correction = self.correction(logprobs, inputs)
        loss, own = self.loss(logprobs, corrected)
        for name in own:
            if not name.endswith((":sum", ":max")):
                raise RunError(
                    f"the loss's metric {name!r} does not say how tokens are combined; "
                    f"call it {name}:sum or {name}:max"
                )
            is_reserved = name.rpartition(":")[0] in _RESERVED or name.startswith(_RESERVED_GROUPS)
            if name in of_correction or is_reserved:
                raise RunError(f"the loss's metric {name!r} has the name of another; call it otherwise")
        metrics = {**of_correction, **own}
        if self.kl.in_loss:
            kl = estimate(logprobs, inputs.loss_input("ref_logprobs"), self.kl.estimator)
            loss = loss + self.kl.coef * (kl * corrected.weights).sum()
            metrics["kl:sum"] = kl.detach().sum()
        if self.entropy_coef:
            if inputs.entropy is None:
                raise RunError("an entropy bonus needs the tokens' entropy; pass entropy, in nats")
            loss = loss - self.entropy_coef * (inputs.entropy * inputs.weights).sum()
        return LossOutput(loss, metrics)
