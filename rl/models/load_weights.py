"""Weights, into an engine: full tensors by their names on disk, of which each rank keeps its shard."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rl.errors import RunError
from rl.models.export import Split, named_state

VALUE_HEAD = "value_head.weight"
"""The name of a value head's weight, which no directory has: it starts at 0."""


def load_tensors(
    model: nn.Module,
    read: Callable[[str], torch.Tensor],
    name_of: Callable[[str], str],
    split: Split,
    device: torch.device,
) -> None:
    """read: a name -> the full tensor. name_of: a parameter's name -> its name in checkpoints.

    Raises RunError where a tensor has another shape than the parameter.
    """
    for parameter, param in named_state(model):
        name = name_of(parameter)
        if name == VALUE_HEAD:
            param.data.zero_()
            continue
        names = split(name, param.shape[0]) if param.ndim else None
        full = read(name) if names is None else torch.stack([read(n) for n in names])
        full = full.to(device, param.dtype)
        if full.shape != param.shape:
            raise RunError(
                f"{name} has shape {tuple(full.shape)} in the weights but {tuple(param.shape)} by config.json"
            )
        if isinstance(param, DTensor):
            full = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
        param.data.copy_(full)
