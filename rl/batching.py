"""Rollouts -> samples -> packed batches. Pure functions over numpy arrays."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from rl.errors import RunError
from rl.micro_batch import Batch, MicroBatch
from rl.types import Rollout, Sample, Segment


def to_sample(rollout: Rollout, advantages: float | np.ndarray = 0.0, id: str = "") -> Sample:
    """Of a rollout without forks. advantages: [M] of its sampled tokens, or one for all. Weight 1 each."""
    return segments_sample(rollout.segments, advantages, id)


def segments_sample(
    segments: Sequence[Segment], advantages: float | np.ndarray = 0.0, id: str = ""
) -> Sample:
    """One sequence. advantages: [M] of its sampled tokens, or one for all of them. Weight 1 each."""
    tokens: list[int] = []
    logprobs: list[float] = []
    sampled: list[bool] = []
    for segment in segments:
        tokens += segment.tokens
        logprobs += segment.logprobs
        sampled += [segment.sampled] * len(segment.tokens)
    loss_mask = np.array(sampled, bool)
    per_token = np.zeros(len(loss_mask), np.float32)
    per_token[loss_mask] = advantages
    return Sample(
        tokens=np.array(tokens, np.int64),
        loss_mask=loss_mask,
        generator_logprobs=np.array(logprobs, np.float32),
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
    attention_cost: float = 0.0,
) -> Batch:
    """Pack sequences into micro-batches of at most `max_tokens`, balanced over ranks by what they cost.

    Dearest first, each into the cheapest bin; the i-th micro-batches of all ranks, which run at the same
    time, are alike. Every rank gets the same number of micro-batches, because they meet in collectives; one
    without a sequence holds only filler. Rows are filled up to `multiple_of` tokens. Each `samples_per_unit`
    consecutive samples share a micro-batch. share_prefixes: equal leading tokens stand in a row once (see
    MicroBatch), for engines that compute such rows (Engine.packing); not where that saves next to nothing.
    attention_cost: what it costs a token to attend to another, where all else that it costs is 1.
    """
    units = [list(range(i, i + samples_per_unit)) for i in range(0, len(samples), samples_per_unit)]
    longest = max((sum(len(samples[i]) for i in unit) for unit in units), default=0)
    if longest > max_tokens:
        what = f"{samples_per_unit} sequences that belong together," if samples_per_unit > 1 else "a sequence"
        raise RunError(
            f"{what} of {longest} tokens exceeds trainer.max_tokens={max_tokens}; "
            f"raise trainer.max_tokens, or make prompts and responses shorter"
        )
    prefixes = _Prefixes(samples) if share_prefixes else _NoPrefixes()
    if prefixes.num_shared < _WORTH_SHARING * sum(map(len, samples)):
        prefixes = _NoPrefixes()
    if prefixes.num_shared and samples_per_unit == 1:
        units = _families(samples, prefixes, num_ranks, max_tokens)
    trees = [prefixes.tree(unit) for unit in units]
    lengths = [sum(len(samples[i]) - shared for i, shared in tree) for tree in trees]
    costs = [sum(_cost(len(samples[i]), shared, attention_cost) for i, shared in tree) for tree in trees]
    rounds = max(1, math.ceil(sum(lengths) / (num_ranks * max_tokens)))
    while (bins := _fill(lengths, costs, num_ranks * rounds, max_tokens)) is None:
        rounds += 1
    bins.sort(key=lambda bin: -sum(costs[u] for u in bin))
    names = set.intersection(*(set(s.loss_inputs) for s in samples)) if samples else set()
    trees = [prefixes.tree([i for u in bin for i in units[u]]) for bin in bins]
    rows = [_micro_batch(samples, tree, multiple_of, sorted(names)) for tree in trees]
    return Batch(
        ranks=tuple(tuple(rows[rank::num_ranks]) for rank in range(num_ranks)),
        longest=max(map(len, samples), default=0),
        num_tokens=sum(len(samples[i]) - shared for tree in trees for i, shared in tree),
        num_unshared_tokens=sum(map(len, samples)),
        num_cuts=prefixes.num_cuts(trees),
    )


def _cost(length: int, shared: int, attention_cost: float) -> float:
    """Of a sequence's tokens after the first `shared`; the token at position p attends to p + 1."""
    pairs = (length * (length + 1) - shared * (shared + 1)) / 2
    return length - shared + attention_cost * pairs


_WORTH_SHARING = 0.1
"""Share of the tokens that prefixes have to save. Rows without branches have faster attention.

On a CPU a step was 0.92 times as fast with 8% saved, 1.24 times with 14%: benchmarks/prefix_trees.py.
"""

_FAMILIES_PER_RANK = 8
"""At least so many, where there are as many prompts, so that ranks can be balanced."""

_Tree = list[tuple[int, int]]
"""Samples in the order of a row, each with how many leading tokens it shares with the one before."""


class _NoPrefixes:
    num_shared = 0

    def tree(self, ids: Sequence[int]) -> _Tree:
        return [(i, 0) for i in ids]

    def num_cuts(self, trees: Sequence[_Tree]) -> int:
        return 0


class _Prefixes(_NoPrefixes):
    """Samples in lexical order: each shares more with the one before than with any earlier one."""

    def __init__(self, samples: Sequence[Sample]):
        keys = [sample.tokens.astype(">i8").tobytes() for sample in samples]
        self._order = sorted(range(len(samples)), key=keys.__getitem__)
        self._place = {i: place for place, i in enumerate(self._order)}
        pairs = pairwise(self._order)
        self._shared = [0, *(_num_equal(samples[a].tokens, samples[b].tokens) for a, b in pairs)]
        self.num_shared = sum(self._shared)

    def tree(self, ids: Sequence[int]) -> _Tree:
        """Two samples share the least of what any two neighbours between them share."""
        places = sorted(self._place[i] for i in ids)
        shared = [min(self._shared[a + 1 : b + 1]) for a, b in pairwise(places)]
        return [(self._order[at], k) for at, k in zip(places, [0, *shared], strict=False)]

    def num_cuts(self, trees: Sequence[_Tree]) -> int:
        """How many neighbours that share tokens stand in different rows, which both compute them."""
        row_of = {i: row for row, tree in enumerate(trees) for i, _ in tree}
        neighbours = zip(pairwise(self._order), self._shared[1:], strict=True)
        return sum(shared > 0 and row_of[a] != row_of[b] for (a, b), shared in neighbours)


def _families(
    samples: Sequence[Sample], prefixes: _NoPrefixes, num_ranks: int, max_tokens: int
) -> list[list[int]]:
    """Indices of samples that share leading tokens, which are packed together."""
    tree = prefixes.tree(range(len(samples)))
    most = sum(len(samples[i]) - shared for i, shared in tree) // (_FAMILIES_PER_RANK * num_ranks)
    families: list[list[int]] = []
    size = 0
    for i, shared in tree:
        added = len(samples[i]) - shared
        # A new one computes again what it shares with the one before.
        limit = max_tokens if num_ranks == 1 else min(max_tokens, max(most, 2 * len(samples[i])))
        if not families or not shared or size + added > limit:
            families.append([])
            size, added = 0, len(samples[i])
        families[-1].append(i)
        size += added
    return families


def _num_equal(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are the same."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


def has_branches(positions: np.ndarray) -> bool:
    """Of a MicroBatch: whether a sequence goes on after tokens of another."""
    return bool(((np.diff(positions) != 1) & (positions[1:] != 0)).any())


def check_batch(batch: Batch, num_ranks: int, max_seq_len: int, shares_prefixes: bool) -> None:
    """Raises RunError where a batch does not suit an engine of so many data-parallel ranks and positions."""
    if batch.num_tokens < batch.num_unshared_tokens and not shares_prefixes:
        raise RunError(
            "a batch in which sequences share tokens, which this engine does not compute; "
            "pack with **engine.packing"
        )
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


def _fill(
    lengths: Sequence[int], costs: Sequence[float], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Indices for each bin, or None where some length fits into none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    used, spent = [0] * num_bins, [0.0] * num_bins
    for i in sorted(range(len(lengths)), key=lambda i: -costs[i]):
        with_room = [bin for bin in range(num_bins) if used[bin] + lengths[i] <= max_tokens]
        if not with_room:
            return None
        cheapest = min(with_room, key=spent.__getitem__)
        bins[cheapest].append(i)
        used[cheapest] += lengths[i]
        spent[cheapest] += costs[i]
    return bins


def _micro_batch(
    samples: Sequence[Sample], tree: _Tree, multiple_of: int, names: Sequence[str]
) -> MicroBatch:
    ids = [i for i, _ in tree]
    lengths = np.array([len(samples[i]) for i in ids], np.int64)
    num_shared = np.array([shared for _, shared in tree], np.int64)

    def every(arrays: Iterable[np.ndarray], dtype: type) -> np.ndarray:
        """Of all tokens of the samples, the shared ones as often as they are shared."""
        return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype, casting="unsafe")

    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    own = positions >= np.repeat(num_shared, lengths)
    targets = np.flatnonzero(every((samples[i].loss_mask for i in ids), bool) & (positions > 0))
    filler = max(-int(own.sum()) % multiple_of, 0 if tree else multiple_of)

    def row(values: np.ndarray, filled: np.ndarray) -> np.ndarray:
        return np.concatenate([values[own], filled])

    def column(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return every(arrays, np.float32)[targets]

    return MicroBatch(
        tokens=row(every((samples[i].tokens for i in ids), np.int64), np.zeros(filler, np.int64)),
        positions=row(positions, np.arange(filler)),
        targets=every((_scored(samples[i]) for i in ids), np.int64)[targets],
        predictors=every(_places(tree, lengths), np.int64)[targets - 1],
        sample_ids=np.repeat(np.array(ids, np.int64), lengths)[targets],
        generator_logprobs=column(samples[i].generator_logprobs for i in ids),
        advantages=column(samples[i].advantages for i in ids),
        weights=column(samples[i].weights for i in ids),
        loss_inputs={name: column(samples[i].loss_inputs[name] for i in ids) for name in names},
    )


def _places(tree: _Tree, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """[T] of each sample: where in the row its tokens stand."""
    path = np.zeros(lengths.max(initial=0), np.int64)  # the sample's places, those of the one before after it
    num_tokens = 0
    for (_, shared), length in zip(tree, lengths.tolist(), strict=True):
        path[shared:length] = np.arange(num_tokens, num_tokens + length - shared)
        num_tokens += length - shared
        yield path[:length].copy()


def _scored(sample: Sample) -> np.ndarray:
    """[T]"""
    return sample.tokens if sample.labels is None else sample.labels
