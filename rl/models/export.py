"""Weights, out of an engine: this rank's shards for weight sync, or whole tensors for a directory."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl.models.agreement import agreed, not_written
from rl.models.layout import Layout
from rl.models.learner import local, whole
from rl.models.lora import Adapter
from rl.weight_sync.manifest import LocalShard

Split = Callable[[str, int], list[str] | None]
"""(name, size of the first dimension) -> the names of the tensors stacked along it; None: just one."""


def named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a model is made of, each tensor once: its parameters, then its persistent buffers."""
    yield from model.named_parameters()
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def shards(
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    layout: Layout,
    split: Split,
    merge: Adapter | None = None,
) -> Iterator[LocalShard]:
    """Every replica's shard is yielded by one rank; `merge` is added on the way.

    dtype: of parameters. Buffers keep their own.
    """
    for name, param in tensors.items():
        shape, offsets = placed(param)
        data = local(param).detach()
        delta = merge.delta(name, offsets, shape) if merge else None  # a collective: on every rank
        if not data.numel() or not _speaks_for(param, layout):
            continue
        data = data if delta is None else data.float() + delta
        names, kept_dtype = _stacked(split, name, param), _dtype(param, dtype)
        if names is None:
            yield LocalShard(name, tuple(param.shape), offsets, data, kept_dtype)
        else:
            for i, part in enumerate(data, offsets[0]):
                yield LocalShard(names[i], tuple(param.shape[1:]), offsets[1:], part, kept_dtype)


def placed(param: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's shard of a tensor, and where in it that begins."""
    if not isinstance(param, DTensor):
        return tuple(param.shape), (0,) * param.ndim
    return _placed(tuple(param.shape), param.device_mesh, param.placements)


@lru_cache(4096)  # torch takes 20 us for it, of each tensor of each version
def _placed(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    own, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(own), tuple(offsets)


def whole_tensors(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, split: Split, merge: Adapter | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """On the host; gathers one tensor at a time, on every rank. dtype: of parameters.

    What fails on this rank alone, as memory that runs out, is raised after the last gather.
    """
    failure: Exception | None = None
    for name, param in tensors.items():
        full = whole(param.detach())
        delta = merge.delta(name, (0,) * full.ndim, tuple(full.shape)) if merge else None
        if failure is not None:
            continue
        try:
            full = full if delta is None else full.float() + delta
            full = full.to(_dtype(param, dtype)).cpu().contiguous()
            names = _stacked(split, name, full)
            parts = [(name, full)] if names is None else [*zip(names, full.clone().unbind(), strict=True)]
        except Exception as error:
            failure = error
            continue
        yield from parts
    if failure is not None:
        raise failure


def _dtype(tensor: torch.Tensor, of_parameters: torch.dtype) -> torch.dtype:
    return of_parameters if isinstance(tensor, nn.Parameter) else tensor.dtype


def _stacked(split: Split, name: str, tensor: torch.Tensor) -> list[str] | None:
    return split(name, tensor.shape[0]) if tensor.ndim else None


def write_directory(
    out_dir: Path,
    tensors: Iterator[tuple[str, torch.Tensor]],
    write: Callable[[Path, Iterator[tuple[str, torch.Tensor]]], None],
) -> None:
    """Have rank 0 write what `whole_tensors` yields. Raises RunError on every rank where that fails."""
    with agreed(not_written(out_dir)):
        try:
            if dist.get_rank() == 0:
                write(out_dir, tensors)
        finally:
            for _ in tensors:  # every rank takes part in every gather, whatever happens on the first
                pass


def _speaks_for(param: torch.Tensor, layout: Layout) -> bool:
    """Whether this rank is the one of those with the same shard that exports it."""
    if not isinstance(param, DTensor):
        return dist.get_rank() == 0
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank is in its tensors' mesh
    first = all(coordinate[axis] == 0 for axis, p in enumerate(param.placements) if p.is_replicate())
    # An adapter's mesh is its tensor-parallel group; there is one for each data-parallel rank.
    only_mesh = param.device_mesh.size() == dist.get_world_size()
    return first and (only_mesh or dist.get_rank() < layout.tensor_parallel)
