"""Weights, into an engine: tensors by their names on disk, of which each rank reads its shard."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from rl.models.export import Split, named_state, placed
from rl.models.hf import HFWeights, other_shape
from rl.models.learner import local

Read = Callable[[str, tuple[slice, ...]], torch.Tensor]
"""(name on disk, a slice of each dimension) -> that part of the tensor."""

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
    read: Read,
    name_of: Callable[[str], str],
    split: Split,
    device: torch.device,
) -> None:
    """Each rank reads what it keeps. name_of: a parameter's name -> its name in checkpoints."""
    for parameter, param in named_state(model):
        name = name_of(parameter)
        if name == VALUE_HEAD:
            param.data.zero_()
            continue
        shape, offsets = placed(param)
        shard = local(param.detach())
        if not shard.numel():
            continue
        part = tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))
        names = split(name, param.shape[0]) if param.ndim else None
        targets = (
            [(name, part, shard)]
            if names is None
            else [(names[i], part[1:], tensor) for i, tensor in enumerate(shard, offsets[0])]
        )
        for each, of_each, target in targets:  # cast on the device: there it takes no time
            target.copy_(read(each, of_each).to(device))
