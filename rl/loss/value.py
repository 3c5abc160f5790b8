"""ClippedValue: what a critic learns by."""

from dataclasses import dataclass

import torch

from rl.bounds import NonNegativeFloat
from rl.fields import refuse
from rl.loss.base import LossOutput, TokenInputs


@dataclass(frozen=True)
class ClippedValue:
    """The value loss of PPO's implementations (arXiv 2005.12729, section 3).

    It is that of the value or of its clipped form, whichever is worse.

    loss = sum_t w_t / 2 * max((v_t - R_t)^2, (clip(v_t, old_t - clip, old_t + clip) - R_t)^2)

    Called with the critic's values in place of logprobs; reads the loss inputs `values` (old_t) and `returns`
    (R_t).
    """

    clip: NonNegativeFloat = 0.2
    """How far values may move from those the advantages were computed with; 0 is no clip."""

    def __post_init__(self) -> None:
        refuse(self)

    def __call__(self, values: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        old, returns = inputs.loss_input("values"), inputs.loss_input("returns")
        squares = (values - returns).square()
        metrics = {
            "error:sum": (values - returns).detach().square().sum(),
            "return:sum": returns.sum(),
            "return_squared:sum": returns.square().sum(),
        }
        if self.clip:
            held = (torch.clamp(values, old - self.clip, old + self.clip) - returns).square()
            metrics["clip_fraction:sum"] = (held > squares).sum()
            squares = torch.maximum(squares, held)
        return LossOutput((squares * inputs.weights).sum() / 2, metrics)
