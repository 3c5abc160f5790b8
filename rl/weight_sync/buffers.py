"""One buffer of bytes for all shards of a rank: what both transports write and read."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from rl.weight_sync.manifest import LocalShard, Manifest, Shard

_ALIGNMENT = 64  # bytes


def write_shards(
    shards: Iterable[LocalShard], key: str, allocate: Callable[[int], torch.Tensor]
) -> list[Shard]:
    """Copy shards into the buffer that `allocate(num_bytes)` returns; their locators are "key:offset"."""
    shards = list(shards)
    if not shards:
        return []
    offsets = [0]
    for shard in shards:
        num_bytes = shard.data.numel() * shard.dtype.itemsize
        offsets.append(-(-(offsets[-1] + num_bytes) // _ALIGNMENT) * _ALIGNMENT)
    buffer = allocate(offsets[-1])
    published = []
    for shard, offset in zip(shards, offsets, strict=False):
        shape = tuple(shard.data.shape)
        _copy_to_host(_view(buffer, offset, shard.dtype, shape), shard.data)
        published.append(
            Shard(shard.name, shard.dtype, shard.global_shape, shard.offsets, shape, f"{key}:{offset}")
        )
    return published


_staging = torch.empty(0, dtype=torch.uint8)
"""Pinned memory of this process, as large as its largest shard: a GPU writes there several times as fast."""


def _copy_to_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """With a cast. One shard at a time, so that the device holds one in both dtypes at most."""
    if _is_on_host(source):
        target.copy_(source)
        return
    global _staging
    num_bytes = target.numel() * target.dtype.itemsize
    if len(_staging) < num_bytes:
        _staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    staged = _view(_staging, 0, target.dtype, tuple(target.shape))
    staged.copy_(source.to(target.dtype))
    target.copy_(staged)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def keys(manifest: Manifest) -> Sequence[str]:
    """The buffers that a version consists of."""
    return list(dict.fromkeys(shard.locator.rsplit(":", 1)[0] for shard in manifest.shards))


def read_shards(
    manifest: Manifest, buffers: Mapping[str, torch.Tensor]
) -> dict[str, list[tuple[Shard, torch.Tensor]]]:
    """Tensor name -> its shards as views of the buffers."""
    fetched: dict[str, list[tuple[Shard, torch.Tensor]]] = {}
    for shard in manifest.shards:
        key, offset = shard.locator.rsplit(":", 1)
        fetched.setdefault(shard.name, []).append(
            (shard, _view(buffers[key], int(offset), shard.dtype, shard.shape))
        )
    return fetched


def _view(buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    num_bytes = dtype.itemsize * torch.Size(shape).numel()
    return buffer[offset : offset + num_bytes].view(dtype).view(shape)
