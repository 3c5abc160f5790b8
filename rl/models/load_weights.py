"""Weights, into an engine: full tensors by their names on disk, of which each rank keeps its shard."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rl.models.export import Split, named_state
from rl.models.hf import HFWeights, other_shape

VALUE_HEAD = "value_head.weight"
"""The name of a value head's weight, which no directory has: it starts at 0."""


def load_directory(
    model: nn.Module,
    model_dir: str | Path,
    name_of: Callable[[str], str],
    split: Split,
    device: torch.device,
) -> HFWeights:
    """Load what a Hugging Face directory holds, all or nothing; see load_tensors.

    Raises ConfigError where it lacks a tensor, RunError where one has another shape.
    """
    read = HFWeights(model_dir)
    for parameter, param in named_state(model):
        if (name := name_of(parameter)) == VALUE_HEAD:
            continue
        names = split(name, param.shape[0]) if param.ndim else None
        expected = tuple(param.shape if names is None else param.shape[1:])
        for each in names or [name]:
            if (shape := tuple(read.shape(each))) != expected:
                raise other_shape(each, shape, expected)
    load_tensors(model, read, name_of, split, device)
    return read


def load_tensors(
    model: nn.Module,
    read: Callable[[str], torch.Tensor],
    name_of: Callable[[str], str],
    split: Split,
    device: torch.device,
) -> None:
    """read: a name -> the full tensor. name_of: a parameter's name -> its name in checkpoints."""
    for parameter, param in named_state(model):
        name = name_of(parameter)
        if name == VALUE_HEAD:
            param.data.zero_()
            continue
        names = split(name, param.shape[0]) if param.ndim else None
        full = read(name) if names is None else torch.stack([read(n) for n in names])
        full = full.to(device, param.dtype)
        if isinstance(param, DTensor):
            full = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
        param.data.copy_(full)
