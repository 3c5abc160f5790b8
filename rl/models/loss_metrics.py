"""What `forward_backward` gives a loss and measures beside the gradient, and its check for finite losses."""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rl.errors import NotFinite
from rl.interfaces import Loss
from rl.loss.base import LossOutput, TokenInputs
from rl.micro_batch import MicroBatch
from rl.models.agreement import fail_together


def token_inputs(micro: MicroBatch, entropy: torch.Tensor | None, device: torch.device) -> TokenInputs:
    """A micro-batch as a loss sees it."""

    def tensor(column: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(column).to(device)

    return TokenInputs(
        generator_logprobs=tensor(micro.generator_logprobs),
        advantages=tensor(micro.advantages),
        weights=tensor(micro.weights),
        sample_ids=tensor(micro.sample_ids),
        loss_inputs={name: tensor(column) for name, column in micro.loss_inputs.items()},
        entropy=entropy,
    )


def by_sample(values: torch.Tensor, micro: MicroBatch) -> dict[int, np.ndarray]:
    """[M] of a micro-batch's target tokens -> sample index -> [target tokens of the sample]."""
    array = values.detach().cpu().numpy()
    return {int(i): array[micro.sample_ids == i] for i in np.unique(micro.sample_ids)}


def check_finite(losses: list[torch.Tensor], device: torch.device) -> None:
    """Raises NotFinite on every rank where a loss, a scalar, is not finite on one. A collective.

    Called once for all micro-batches: it waits for the device.
    """
    worst = sum(losses, torch.zeros((), device=device))  # not finite where one of them is not
    good = torch.isfinite(worst).float()
    if dist.get_world_size() > 1:
        dist.all_reduce(good, op=dist.ReduceOp.MIN)
    if good:
        return
    bad = [value for value in torch.stack(losses).tolist() if not math.isfinite(value)] if losses else []
    failure = NotFinite(f"the loss is {bad[0]}", "loss") if bad else None
    fail_together(failure)


def loss_of(loss: Loss, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
    """Of a rank's filler, which has no target token, 0: a loss need not be able to compute one."""
    return loss(logprobs, inputs) if len(logprobs) else LossOutput(logprobs.sum(), {})


def measure(output: LossOutput, logprobs: torch.Tensor, inputs: TokenInputs) -> dict[str, Any]:
    """The metrics of a micro-batch. A value head gives neither entropy nor logprobs."""
    measured = {**output.metrics, "loss:sum": output.loss.detach(), "tokens:sum": len(inputs.weights)}
    if inputs.entropy is not None:
        entropy = inputs.entropy.detach().sum()
        measured |= _parity(logprobs, inputs.generator_logprobs) | {"entropy:sum": entropy}
    return measured


def _parity(logprobs: torch.Tensor, generator_logprobs: torch.Tensor) -> dict[str, torch.Tensor | float]:
    """How far the trainer is from the generator on the same tokens."""
    diff = (logprobs - generator_logprobs).abs()
    ratio = (logprobs - generator_logprobs).exp()
    return {
        "logprob_diff:sum": diff.sum(),
        "logprob_diff:max": diff.max() if len(diff) else 0.0,
        "ratio_outside:sum": ((ratio < 0.9) | (ratio > 1.1)).sum(),
    }


class LossMetrics:
    """Adds up the metrics of micro-batches, on the device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._totals: dict[str, torch.Tensor] = {}

    def add(self, measured: dict[str, Any]) -> None:
        """measured: scalars named `name:sum` or `name:max`."""
        for name, value in measured.items():
            value = torch.as_tensor(value, dtype=torch.float32, device=self._device)
            if name in self._totals:
                total = self._totals[name]
                value = torch.maximum(total, value) if name.endswith(":max") else total + value
            self._totals[name] = value

    def totals(self) -> dict[str, float]:
        """With one copy to the host."""
        values = torch.stack(list(self._totals.values())).tolist()
        return dict(zip(self._totals, values, strict=True))
