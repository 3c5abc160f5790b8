"""Learner: parameters that learn together, their accumulated gradient and their optimizer."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rl.errors import NotFinite, RunError
from rl.types import OptimParams

_MOMENTS = ("exp_avg", "exp_avg_sq")
_EMBEDDING = re.compile(r"embed|\bw[tp]e\b")
"""In the names of parameters."""


class Learner:
    """AdamW over named parameters. The learning rate and all else come with each step."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        reduce_over: dist.ProcessGroup | None = None,
        undo: bool = False,
    ):
        """tensors: parameters, and buffers, which do not learn but are part of `state`.

        reduce_over: ranks with the same parameters and other tokens, where nothing else adds gradients.
        undo: a step that leaves weights that are not finite is undone, for a copy of `state` at each step.
        """
        self.parameters = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter)}
        self._buffers = {name: t for name, t in tensors.items() if name not in self.parameters}
        self._reduce_over = reduce_over
        self._undo = undo
        self.reset()

    def reset(self) -> None:
        """Forget the moments and the accumulated gradient."""
        spared = [p for name, p in self.parameters.items() if p.ndim < 2 or _EMBEDDING.search(name)]
        decayed = [p for p in self.parameters.values() if not any(p is q for q in spared)]
        groups = [{"params": decayed, "spared": False}, {"params": spared, "spared": True}]
        self._optimizer = torch.optim.AdamW([group for group in groups if group["params"]], fused=True)
        self.clear()

    def clear(self) -> None:
        """Forget the accumulated gradient."""
        self._optimizer.zero_grad()

    def step(self, params: OptimParams) -> dict[str, float]:
        """Scale, clip and apply the accumulated gradient, then clear it.

        Returns `grad_norm`, before clipping. Raises RunError where there is no gradient, and NotFinite where
        it is not finite; the parameters are then as they were. Raises NotFinite with the metric "weights"
        where they are not finite after the step, which is undone with `undo`.
        """
        parameters = [p for p in self.parameters.values() if p.grad is not None]
        if not parameters:
            raise RunError("optim_step without a gradient; call forward_backward first")
        for p in parameters:
            # A sum may still have to be made over tensor-parallel ranks.
            if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
        placed = [p.grad for p in parameters if p.grad is not None]
        gradients = [local(gradient) for gradient in placed]
        if self._reduce_over is not None:
            _sum_over(gradients, self._reduce_over)
        unscaled = torch.nn.utils.get_total_norm(placed, foreach=True)
        norm = whole(unscaled) * params.grad_scale
        if not torch.isfinite(norm):
            self.clear()
            raise NotFinite(f"the gradient norm is {norm.item()}; the step was not applied", "grad_norm")
        clip = (params.max_grad_norm / (norm + 1e-6)).clamp(max=1.0) if params.max_grad_norm else 1.0
        torch._foreach_mul_(gradients, params.grad_scale * clip)
        for group in self._optimizer.param_groups:
            group |= {"lr": params.lr, "betas": params.betas, "eps": params.eps}
            group["weight_decay"] = params.weight_decay if params.decay_all or not group["spared"] else 0.0
        before = self._copied_state() if self._undo else {}
        self._optimizer.step()
        self.clear()
        if not torch.isfinite(whole(torch.nn.utils.get_total_norm(parameters, foreach=True))):
            self._restore(before)
            raise NotFinite(
                f"the weights are not finite after an update with lr={params.lr:g}, eps={params.eps:g} and "
                f"weight_decay={params.weight_decay:g}{', which was undone' if before else ''}; lower the "
                f"learning rate, or raise eps",
                "weights",
            )
        return {"grad_norm": norm.item()}

    def state(self) -> dict[str, Any]:
        """Name -> a parameter with its moments, or a buffer: what a checkpoint holds and loads into."""
        learned = {name: {"value": p.detach(), **self._moments(p)} for name, p in self.parameters.items()}
        return learned | {name: {"value": buffer} for name, buffer in self._buffers.items()}

    def _copied_state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: {key: t.clone() for key, t in part.items()} for name, part in self.state().items()}

    @torch.no_grad()
    def _restore(self, copied: dict[str, dict[str, torch.Tensor]]) -> None:
        state = self.state()
        for name, part in copied.items():
            for key, tensor in part.items():
                state[name][key].copy_(tensor)

    def _moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        state = self._optimizer.state[parameter]
        if not state:  # what AdamW would make at its first step
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: torch.zeros_like(parameter, requires_grad=False) for name in _MOMENTS}
        return {name: state[name] for name in ("step", *_MOMENTS)}

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it holds: parameters, gradients and moments."""
        for parameter in self.parameters.values():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        for state in self._optimizer.state.values():
            yield from state.values()


def _sum_over(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
