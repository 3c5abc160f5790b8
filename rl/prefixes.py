"""Which leading tokens samples share, for rows that hold them once."""

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np

from rl.micro_batch import Tree
from rl.types import Sample

_FAMILIES_PER_RANK = 8
"""At least so many, where there are as many prompts, so that ranks can be balanced."""


class NoPrefixes:
    """Of samples that are taken to share nothing."""

    num_shared = 0

    def tree(self, ids: Sequence[int]) -> Tree:
        return [(i, 0) for i in ids]

    def num_cuts(self, trees: Sequence[Tree]) -> int:
        return 0


class Prefixes(NoPrefixes):
    """Samples in lexical order: each shares more with the one before than with any earlier one."""

    def __init__(self, samples: Sequence[Sample]):
        tokens = [sample.tokens for sample in samples]
        self._order = lexical_order(tokens)
        self._place = {i: place for place, i in enumerate(self._order)}
        self._shared = [0, *(num_equal(tokens[a], tokens[b]) for a, b in pairwise(self._order))]
        self._least = _least_of_runs(self._shared)
        self.num_shared = sum(self._shared)

    def tree(self, ids: Sequence[int]) -> Tree:
        """Two samples share the least of what any two neighbours between them share."""
        places = sorted(self._place[i] for i in ids)
        shared = [0, *(self._least_between(a, b) for a, b in pairwise(places))]
        return [(self._order[place], k) for place, k in zip(places, shared, strict=False)]

    def num_cuts(self, trees: Sequence[Tree]) -> int:
        """How many neighbours that share tokens stand in different rows, which both compute them."""
        row_of = {i: row for row, tree in enumerate(trees) for i, _ in tree}
        neighbours = zip(pairwise(self._order), self._shared[1:], strict=True)
        return sum(shared > 0 and row_of[a] != row_of[b] for (a, b), shared in neighbours)

    def _least_between(self, a: int, b: int) -> int:
        level = (b - a).bit_length() - 1
        runs = self._least[level]
        return min(runs[a + 1], runs[b + 1 - (1 << level)])


def _least_of_runs(values: Sequence[int]) -> list[list[int]]:
    """[level][i]: the least of the 2^level values from i on."""
    levels = [list(values)]
    while (size := 1 << len(levels)) <= len(values):
        last, half = levels[-1], size // 2
        levels.append([min(last[i], last[i + half]) for i in range(len(values) - size + 1)])
    return levels


def lexical_order(sequences: Sequence[np.ndarray]) -> list[int]:
    """Indices; those of equal sequences in their own order. Reads little beyond where sequences differ."""

    def ordered(ids: list[int], begin: int, width: int) -> list[int]:
        """ids: of sequences that are equal before `begin`, ascending."""
        if len(ids) == 1:
            return ids
        keys = {i: sequences[i][begin : begin + width].astype(">i8").tobytes() for i in ids}
        result: list[int] = []
        for key, run in groupby(sorted(ids, key=keys.__getitem__), key=keys.__getitem__):
            equal = list(run)
            goes_on = len(key) == 8 * width
            result += ordered(equal, begin + width, 2 * width) if goes_on else equal
        return result

    return ordered(list(range(len(sequences))), 0, 64)


def num_equal(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are the same."""
    size, begin, width = min(len(a), len(b)), 0, 256
    while begin < size:
        end = min(begin + width, size)
        differ = np.flatnonzero(a[begin:end] != b[begin:end])
        if len(differ):
            return begin + int(differ[0])
        begin, width = end, 2 * width
    return size


def families(
    samples: Sequence[Sample], prefixes: NoPrefixes, num_ranks: int, max_tokens: int
) -> list[list[int]]:
    """Lists of indices: samples that share leading tokens, and are packed together.

    A family too large for a row, or for balance between ranks, is split. A sample that shares nothing is one
    by itself.
    """
    tree = prefixes.tree(range(len(samples)))
    most = sum(len(samples[i]) - shared for i, shared in tree) // (_FAMILIES_PER_RANK * num_ranks)
    together: list[list[int]] = []
    size = 0
    for i, shared in tree:
        added = len(samples[i]) - shared
        # A new one computes again what it shares with the one before.
        limit = max_tokens if num_ranks == 1 else min(max_tokens, max(most, 2 * len(samples[i])))
        if not together or not shared or size + added > limit:
            together.append([])
            size, added = 0, len(samples[i])
        together[-1].append(i)
        size += added
    return together
