"""What a published version consists of, and how full tensors are assembled from its shards."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch

from rl.types import LoRA, PolicyVersion

MODEL = "model"
"""The name under which the model's own weights are published; an adapter's go under the adapter's name."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A block of a tensor that this process holds.

    It is cast to `dtype` as it is copied, so that no second copy is made.
    """

    name: str  # the tensor's Hugging Face name
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]  # where the block starts, for each dimension
    data: torch.Tensor
    dtype: torch.dtype  # in which it is published


@dataclass(frozen=True, slots=True)
class Shard:
    """A published block: everything but the bytes."""

    name: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    locator: str  # where the transport finds the bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete version of the model, or of one adapter. It exists only after every rank has published."""

    version: PolicyVersion
    shards: tuple[Shard, ...]
    adapter: tuple[str, LoRA] | None = None

    @property
    def name(self) -> str:
        return self.adapter[0] if self.adapter else MODEL

    @property
    def num_bytes(self) -> int:
        return sum(shard.dtype.itemsize * torch.Size(shard.shape).numel() for shard in self.shards)


def assemble(
    fetched: Mapping[str, Iterable[tuple[Shard, torch.Tensor]]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor), one at a time. Raises ValueError if the shards do not cover one exactly."""
    for name, blocks in fetched.items():
        blocks = list(blocks)
        shape = blocks[0][0].global_shape
        covered = sum(data.numel() for _, data in blocks)
        total = torch.Size(shape).numel()
        if covered != total or any(_overlap(a, b) for (a, _), (b, _) in combinations(blocks, 2)):
            raise ValueError(
                f"the shards of {name} hold {covered} of its {total} elements, or overlap; "
                f"publish every rank's shards once"
            )
        if len(blocks) == 1:
            yield name, blocks[0][1]
            continue
        full = torch.empty(shape, dtype=blocks[0][0].dtype)
        for shard, data in blocks:
            full[tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.shape, strict=True))] = data
        yield name, full


def _overlap(a: Shard, b: Shard) -> bool:
    return all(
        a_start < b_start + b_size and b_start < a_start + a_size
        for a_start, a_size, b_start, b_size in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)
    )
