"""Rollouts -> samples -> packed batches. Pure functions over numpy arrays."""

from collections.abc import Sequence

import numpy as np

from rl.bins import fill_padded, fill_rounds
from rl.errors import RunError
from rl.micro_batch import Batch, Rows, Tree
from rl.prefixes import NoPrefixes, Prefixes, families
from rl.sequences import joined
from rl.types import Rollout, Sample, Segment


def to_sample(rollout: Rollout, advantages: float | np.ndarray = 0.0, id: str = "") -> Sample:
    """Of a rollout without forks. advantages: [M] of its sampled tokens, or one for all. Weight 1 each."""
    return segments_sample(rollout.segments, advantages, id)


def segments_sample(
    segments: Sequence[Segment], advantages: float | np.ndarray = 0.0, id: str = ""
) -> Sample:
    """One sequence. advantages: [M] of its sampled tokens, or one for all of them. Weight 1 each."""
    segments = segments or [Segment.unsampled([])]
    tokens = joined([segment.tokens for segment in segments])
    loss_mask = np.repeat([segment.sampled for segment in segments], [len(s.tokens) for s in segments])
    weights = np.broadcast_to(np.float32(1), len(tokens))
    logprobs = joined([segment.logprobs for segment in segments])
    sample = Sample(tokens, loss_mask, logprobs, np.zeros(len(tokens), np.float32), weights, id=id)
    sample.advantages[loss_mask] = advantages
    return sample


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
    pads: bool = False,
) -> Batch:
    """Pack sequences into micro-batches of at most `max_tokens`, balanced over ranks by what they cost.

    Dearest first, each into the cheapest bin; the i-th micro-batches of all ranks, which run at the same
    time, are alike. Every rank gets the same number of micro-batches, because they meet in collectives; one
    without a sequence holds only filler. Rows are filled up to `multiple_of` tokens. Each `samples_per_unit`
    consecutive samples share a micro-batch. share_prefixes: equal leading tokens stand in a row once (see
    MicroBatch), for engines that compute such rows (Engine.packing); not where that saves next to nothing.
    attention_cost: what it costs a token to attend to another, where all else that it costs is 1. pads: the
    engine pads the sequences of a micro-batch to the longest; `max_tokens` bounds what it then computes.
    """
    units = [list(range(i, i + samples_per_unit)) for i in range(0, len(samples), samples_per_unit)]
    apart = max((sum(len(samples[i]) for i in unit) for unit in units), default=0)
    prefixes = Prefixes(samples) if share_prefixes else NoPrefixes()
    if prefixes.num_shared < _WORTH_SHARING * sum(map(len, samples)) and apart <= max_tokens:
        prefixes = NoPrefixes()
    if prefixes.num_shared and samples_per_unit == 1:
        units = families(samples, prefixes, num_ranks, max_tokens)
    trees = [prefixes.tree(unit) for unit in units]

    def computed(tree: Tree) -> int:
        if pads:
            return len(tree) * max((len(samples[i]) for i, _ in tree), default=0)
        return sum(len(samples[i]) - shared for i, shared in tree)

    lengths = list(map(computed, trees))
    if (longest := max(lengths, default=0)) > max_tokens:
        subject = (
            f"{samples_per_unit} sequences that belong together," if samples_per_unit > 1 else "a sequence"
        )
        raise RunError(
            f"{subject} of {longest} tokens exceeds trainer.micro_batch_tokens={max_tokens}; "
            f"raise trainer.micro_batch_tokens, or make prompts and responses shorter"
        )
    costs = [sum(_cost(len(samples[i]), shared, attention_cost) for i, shared in tree) for tree in trees]
    if pads:
        widths = [max(len(samples[i]) for i in unit) for unit in units]
        bins = fill_padded(list(map(len, units)), widths, num_ranks, max_tokens)
    else:
        bins = fill_rounds(lengths, costs, num_ranks, max_tokens)
    bins.sort(key=lambda bin: -sum(costs[u] for u in bin))
    names = set.intersection(*(set(s.loss_inputs) for s in samples)) if samples else set()
    trees = [prefixes.tree([i for u in bin for i in units[u]]) for bin in bins]

    def rows(trees: Sequence[Tree]) -> Rows:
        members = {i: samples[i] for tree in trees for i, _ in tree}
        return Rows(members, tuple(trees), multiple_of, tuple(sorted(names)))

    return Batch(
        ranks=tuple(rows(trees[rank::num_ranks]) for rank in range(num_ranks)),
        longest=max(map(len, samples), default=0),
        num_tokens=sum(map(computed, trees)),
        num_unshared_tokens=sum(map(len, samples)),
        num_cuts=prefixes.num_cuts(trees),
    )


def _cost(length: int, shared: int, attention_cost: float) -> float:
    """Of a sequence's tokens after the first `shared`; the token at position p attends to p + 1."""
    pairs = (length * (length + 1) - shared * (shared + 1)) / 2
    return length - shared + attention_cost * pairs


_WORTH_SHARING = 0.1
"""Share of the tokens that prefixes have to save. Rows without branches have faster attention.

With 8% saved, a step that shares took longer on a CPU than one that does not.
"""


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
            f"model's, or max_seq_len where that is less); make it shorter"
        )
