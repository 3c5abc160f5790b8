"""What engines compute: packed rows of sequences. T tokens of a row, M targets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np


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


@dataclass(frozen=True, slots=True)
class Batch:
    """Micro-batches for each data-parallel rank: `ranks[r][i]` is rank r's i-th; all have equally many."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    # Of all ranks, so that all raise where one would.
    longest: int  # tokens of the longest sequence
    num_tokens: int  # of all rows, without filler
    num_unshared_tokens: int  # what they would be if sequences shared none
    num_cuts: int = 0  # how often tokens that could be shared are in two rows, for space or for balance

    def for_rank(self, rank: int) -> "Batch":
        """What one data-parallel rank is sent: its own micro-batches."""
        return replace(self, ranks=tuple(part if i == rank else () for i, part in enumerate(self.ranks)))

    @property
    def num_target_tokens(self) -> int:
        return sum(len(micro.targets) for rank in self.ranks for micro in rank)
