"""What engines compute: packed rows of sequences. T tokens of a row, M targets."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl.types import Sample

Tree = list[tuple[int, int]]
"""Samples in the order of a row, each with how many leading tokens it shares with the one before."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences packed without padding into one row; the [M] arrays hold only their target tokens.

    Sequences may share leading tokens, which then stand in the row once: a sequence whose first token has
    position p > 0 goes on after the first p tokens of the sequence before it. So a row is trees, depth first.
    Trailing filler tokens form a sequence of their own and are never targets.
    """

    tokens: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    targets: np.ndarray  # [M] int64, tokens; one that sequences share is there for each of them
    predictors: np.ndarray  # [M] int64, indices into T: the hidden state there predicts the target
    sample_ids: np.ndarray  # [M] int64, indices into the samples that were packed
    generator_logprobs: np.ndarray  # [M] float32
    advantages: np.ndarray  # [M] float32
    weights: np.ndarray  # [M] float32
    loss_inputs: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # [M] float32 each: those that every sample has


_COLUMNS = ("tokens", "loss_mask", "generator_logprobs", "advantages", "weights")


@dataclass(frozen=True, slots=True)
class Column:
    """An array of each of several samples, one after the other."""

    values: np.ndarray
    one_each: bool  # values has one number for each sample, which is that of all its tokens

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> "Column":
        """arrays: [T] of each sample."""
        if all(array.strides == (0,) and len(array) for array in arrays):
            return cls(np.array([array[0] for array in arrays]), True)
        return cls(np.concatenate(arrays), False)

    def split(self, lengths: np.ndarray) -> list[np.ndarray]:
        """[T] of each sample. lengths: T of each."""
        sizes = lengths.tolist()
        if self.one_each:
            return [np.broadcast_to(value, size) for value, size in zip(self.values, sizes, strict=True)]
        ends = np.cumsum(lengths).tolist()
        return [self.values[end - size : end] for end, size in zip(ends, sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class Rows:
    """The micro-batches of one data-parallel rank, each made when it is asked for.

    A row takes up to four times the memory of its samples; so it exists only where and while it is computed.
    """

    samples: Mapping[int, Sample]  # of these rows, by their index among the samples that were packed
    trees: tuple[Tree, ...]  # one for each micro-batch
    multiple_of: int  # rows are filled up to a multiple of so many tokens
    names: tuple[str, ...]  # of the loss inputs

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, index: int) -> MicroBatch:
        return _micro_batch(self.samples, self.trees[index], self.multiple_of, self.names)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process go a few long arrays, in place of several of each sample."""
        if not self.samples:
            return Rows, ({}, self.trees, self.multiple_of, self.names)
        samples = list(self.samples.values())
        columns = {name: Column.of([getattr(s, name) for s in samples]) for name in _COLUMNS}
        if any(sample.labels is not None for sample in samples):
            columns["labels"] = Column.of([_scored(sample) for sample in samples])
        loss_inputs = {name: Column.of([s.loss_inputs[name] for s in samples]) for name in self.names}
        lengths = np.array([len(sample) for sample in samples])
        return _rows, (list(self.samples), lengths, columns, loss_inputs, self.trees, self.multiple_of)


@dataclass(frozen=True, slots=True)
class Batch:
    """Micro-batches for each data-parallel rank: `ranks[r][i]` is rank r's i-th.

    All ranks have equally many, but for what `for_rank` returns.
    """

    ranks: tuple[Rows, ...]
    # Of all ranks, so that all raise where one would.
    longest: int  # tokens of the longest sequence
    num_tokens: int  # of all rows, without filler; with the padding of an engine that pads them
    num_unshared_tokens: int  # what they would be if sequences shared none
    num_cuts: int = 0  # how often tokens that could be shared are in two rows, for space or for balance

    def for_rank(self, rank: int) -> "Batch":
        """What one data-parallel rank is sent: its own micro-batches."""
        ranks = [rows if i == rank else Rows({}, (), 1, ()) for i, rows in enumerate(self.ranks)]
        return replace(self, ranks=tuple(ranks))

    @property
    def num_target_tokens(self) -> int:
        return sum(sample.num_targets for rows in self.ranks for sample in rows.samples.values())


def _rows(
    ids: Sequence[int],
    lengths: np.ndarray,
    columns: Mapping[str, Column],
    loss_inputs: Mapping[str, Column],
    trees: tuple[Tree, ...],
    multiple_of: int,
) -> Rows:
    """What `Rows.__reduce__` took apart; samples are without what no row reads."""
    inputs = {name: column.split(lengths) for name, column in loss_inputs.items()}
    arrays = {name: column.split(lengths) for name, column in columns.items()}
    samples: dict[int, Sample] = {}
    for at, i in enumerate(ids):
        of_sample: dict[str, Any] = {name: parts[at] for name, parts in arrays.items()}
        samples[i] = Sample(**of_sample, loss_inputs={name: parts[at] for name, parts in inputs.items()})
    return Rows(samples, trees, multiple_of, tuple(loss_inputs))


def _micro_batch(
    samples: Mapping[int, Sample], tree: Tree, multiple_of: int, names: Sequence[str]
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
    num_own = int(own.sum())  # 0 also where no sample of the tree has a token
    filler = -num_own % multiple_of if num_own else multiple_of

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


def _places(tree: Tree, lengths: np.ndarray) -> Iterator[np.ndarray]:
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
