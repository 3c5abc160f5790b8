"""Rollouts -> samples -> packed batches. Pure functions over numpy arrays."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

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
    share_prefixes: bool = False,
) -> Batch:
    """Pack sequences into micro-batches of at most `max_tokens`, balanced over ranks by their token counts.

    Longest first, each into the emptiest bin; the i-th micro-batches of all ranks, which run at the same
    time, are alike. Every rank gets the same number of micro-batches, because they meet in collectives; one
    without a sequence holds only filler. Rows are filled up to `multiple_of` tokens. Each `samples_per_unit`
    consecutive samples share a micro-batch. share_prefixes: equal leading tokens stand in a row once (see
    MicroBatch), for engines that compute such rows (EngineConfig.share_prefixes).
    """
    units = [list(range(i, i + samples_per_unit)) for i in range(0, len(samples), samples_per_unit)]
    longest = max((sum(len(samples[i]) for i in unit) for unit in units), default=0)
    if longest > max_tokens:
        what = f"{samples_per_unit} sequences that belong together," if samples_per_unit > 1 else "a sequence"
        raise RunError(
            f"{what} of {longest} tokens exceeds trainer.max_tokens={max_tokens}; "
            f"raise trainer.max_tokens, or make prompts and responses shorter"
        )
    if share_prefixes and samples_per_unit == 1:
        units = _families(samples, num_ranks, max_tokens)
    lengths = [
        sum(len(samples[i]) - shared for i, shared in _tree(samples, u, share_prefixes)) for u in units
    ]
    rounds = max(1, math.ceil(sum(lengths) / (num_ranks * max_tokens)))
    while (bins := _fill(lengths, num_ranks * rounds, max_tokens)) is None:
        rounds += 1
    bins.sort(key=lambda bin: -sum(lengths[u] for u in bin))
    names = set.intersection(*(set(s.loss_inputs) for s in samples)) if samples else set()
    trees = [_tree(samples, [i for u in bin for i in units[u]], share_prefixes) for bin in bins]
    rows = [_micro_batch(samples, tree, multiple_of, sorted(names)) for tree in trees]
    longest = max(map(len, samples), default=0)
    return Batch(tuple(tuple(rows[rank::num_ranks]) for rank in range(num_ranks)), longest)


_FAMILIES_PER_RANK = 8
"""At least so many, where there are as many prompts, so that ranks can be balanced."""


def _families(samples: Sequence[Sample], num_ranks: int, max_tokens: int) -> list[list[int]]:
    """Indices of samples that share leading tokens, which are packed together."""
    tree = _tree(samples, range(len(samples)), share_prefixes=True)
    most = sum(len(samples[i]) - shared for i, shared in tree) // (_FAMILIES_PER_RANK * num_ranks)
    families: list[list[int]] = []
    size = 0
    for i, shared in tree:
        added = len(samples[i]) - shared
        # A new one computes again what it shares with the one before.
        if not families or not shared or size + added > min(max_tokens, max(most, 2 * len(samples[i]))):
            families.append([])
            size, added = 0, len(samples[i])
        families[-1].append(i)
        size += added
    return families


_Tree = list[tuple[int, int]]
"""Samples in the order of a row, each with how many leading tokens it shares with the one before."""


def _tree(samples: Sequence[Sample], ids: Iterable[int], share_prefixes: bool) -> _Tree:
    """In lexical order each sample shares more with the one before than with any earlier one."""
    if not share_prefixes:
        return [(i, 0) for i in ids]
    order = sorted(ids, key=lambda i: samples[i].tokens.astype(">i8").tobytes())
    shared = [_num_equal(samples[a].tokens, samples[b].tokens) for a, b in pairwise(order)]
    return list(zip(order, [0, *shared], strict=False))


def _num_equal(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are the same."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


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
    samples: Sequence[Sample], tree: _Tree, multiple_of: int, names: Sequence[str]
) -> MicroBatch:
    places: list[np.ndarray] = []  # of each sample's tokens in the row
    num_tokens = 0
    for i, shared in tree:
        own = np.arange(num_tokens, num_tokens + len(samples[i]) - shared)
        places.append(np.concatenate([places[-1][:shared], own]) if shared else own)
        num_tokens += len(own)
    filler = max(-num_tokens % multiple_of, 0 if tree else multiple_of)

    def join(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)

    ids = [i for i, _ in tree]
    targets = [np.flatnonzero(samples[i].target_mask) for i in ids]

    def column(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return join([array[at] for array, at in zip(arrays, targets, strict=True)], np.float32)

    def place(offset: int) -> np.ndarray:
        return join([there[at + offset] for there, at in zip(places, targets, strict=True)], np.int64)

    return MicroBatch(
        tokens=join([*(samples[i].tokens[shared:] for i, shared in tree), np.zeros(filler)], np.int64),
        positions=join([*(np.arange(k, len(samples[i])) for i, k in tree), np.arange(filler)], np.int64),
        targets=place(0),
        predictors=place(-1),
        sample_ids=join([np.full(len(at), i) for i, at in zip(ids, targets, strict=True)], np.int64),
        generator_logprobs=column(samples[i].generator_logprobs for i in ids),
        advantages=column(samples[i].advantages for i in ids),
        weights=column(samples[i].weights for i in ids),
        loss_inputs={name: column(samples[i].loss_inputs[name] for i in ids) for name in names},
    )
