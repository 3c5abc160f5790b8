"""Rollouts -> samples -> packed batches. Pure functions over numpy arrays."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from rl.errors import RunError
from rl.types import Batch, MicroBatch, Rollout, Sample


def to_sample(rollout: Rollout, advantages: float | np.ndarray = 0.0, id: str = "") -> Sample:
    """advantages: [M] of its sampled tokens, or one for all of them. Weight 1 each."""
    sampled = [np.full(len(s.tokens), s.sampled) for s in rollout.segments]
    loss_mask = np.concatenate(sampled)
    per_token = np.zeros(len(loss_mask), np.float32)
    per_token[loss_mask] = advantages
    return Sample(
        tokens=np.concatenate([np.asarray(s.tokens, np.int64) for s in rollout.segments]),
        loss_mask=loss_mask,
        generator_logprobs=np.concatenate([np.asarray(s.logprobs, np.float32) for s in rollout.segments]),
        advantages=per_token,
        weights=loss_mask.astype(np.float32),
        id=id,
    )


def supervised_sample(prompt: Sequence[int], target: Sequence[int], id: str = "") -> Sample:
    """A sequence whose `target` tokens are taught by cross entropy."""
    tokens = np.asarray([*prompt, *target], np.int64)
    loss_mask = np.arange(len(tokens)) >= len(prompt)
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens, loss_mask, zeros, zeros, loss_mask.astype(np.float32), id=id)


def pack(
    samples: Sequence[Sample],
    *,
    num_ranks: int = 1,
    max_tokens: int = 8192,
    multiple_of: int = 1,
    samples_per_unit: int = 1,
) -> Batch:
    """Pack sequences into micro-batches of at most `max_tokens`, balanced over ranks by their token counts.

    Longest first, each into the emptiest bin; the i-th micro-batches of all ranks, which run at the same
    time, are alike. Every rank gets the same number of micro-batches, because they meet in collectives; one
    without a sequence holds only filler. Rows are filled up to `multiple_of` tokens. Each `samples_per_unit`
    consecutive samples share a micro-batch.
    """
    units = [list(range(i, i + samples_per_unit)) for i in range(0, len(samples), samples_per_unit)]
    lengths = [sum(len(samples[i]) for i in unit) for unit in units]
    longest = max(lengths, default=0)
    if longest > max_tokens:
        what = f"{samples_per_unit} sequences that belong together," if samples_per_unit > 1 else "a sequence"
        raise RunError(
            f"{what} of {longest} tokens exceeds trainer.max_tokens={max_tokens}; "
            f"raise trainer.max_tokens, or make prompts and responses shorter"
        )
    rounds = max(1, math.ceil(sum(lengths) / (num_ranks * max_tokens)))
    while (bins := _fill(lengths, num_ranks * rounds, max_tokens)) is None:
        rounds += 1
    bins.sort(key=lambda bin: -sum(lengths[u] for u in bin))
    names = set.intersection(*(set(s.loss_inputs) for s in samples)) if samples else set()
    ids = [[i for u in bin for i in units[u]] for bin in bins]
    rows = [_micro_batch(samples, row, multiple_of, sorted(names)) for row in ids]
    longest = max(map(len, samples), default=0)
    return Batch(tuple(tuple(rows[rank::num_ranks]) for rank in range(num_ranks)), longest)


def check_batch(batch: Batch, num_ranks: int, max_seq_len: int) -> None:
    """Raises RunError where a batch does not suit an engine of so many data-parallel ranks and positions."""
    if len(batch.ranks) != num_ranks:
        raise RunError(
            f"a batch packed for {len(batch.ranks)} data-parallel ranks, of which there are {num_ranks}; "
            f"pack with num_ranks=layout.data_parallel"
        )
    if batch.longest > max_seq_len:
        raise RunError(
            f"a sequence of {batch.longest} tokens exceeds the {max_seq_len} positions of the engine (the "
            f"model's, or EngineConfig.max_seq_len where that is less); make it shorter"
        )


def _fill(lengths: Sequence[int], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Indices for each bin, or None where some length fits into none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    used = [0] * num_bins
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        emptiest = min(range(num_bins), key=used.__getitem__)
        if used[emptiest] + lengths[i] > max_tokens:
            return None
        bins[emptiest].append(i)
        used[emptiest] += lengths[i]
    return bins


def _micro_batch(
    samples: Sequence[Sample], ids: list[int], multiple_of: int, names: Sequence[str]
) -> MicroBatch:
    lengths = [len(samples[i]) for i in ids]
    filler = max(-sum(lengths) % multiple_of, 0 if ids else multiple_of)
    starts = np.cumsum([0, *lengths])[:-1]

    def join(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)

    masks = [samples[i].target_mask for i in ids]

    def column(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return join([array[mask] for array, mask in zip(arrays, masks, strict=True)], np.float32)

    return MicroBatch(
        tokens=join([*(samples[i].tokens for i in ids), np.zeros(filler)], np.int64),
        positions=join([*(np.arange(n) for n in lengths), np.arange(filler)], np.int64),
        targets=join([start + np.flatnonzero(m) for start, m in zip(starts, masks, strict=True)], np.int64),
        sample_ids=join([np.full(m.sum(), i) for i, m in zip(ids, masks, strict=True)], np.int64),
        generator_logprobs=column(samples[i].generator_logprobs for i in ids),
        advantages=column(samples[i].advantages for i in ids),
        weights=column(samples[i].weights for i in ids),
        loss_inputs={name: column(samples[i].loss_inputs[name] for i in ids) for name in names},
    )
