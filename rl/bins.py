"""Which units share a row: each into the cheapest bin that has room for it. U units of whole sequences."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

_NO_BIN = (math.inf, -1)

_EXACT_WORK = 1 << 15
"""Units to place while every number of rounds is tried, one after the other: 64 rounds of 512 units."""


def fill_rounds(
    lengths: Sequence[int], costs: Sequence[float], num_ranks: int, max_tokens: int
) -> list[list[int]]:
    """Indices of the units of each bin. `num_ranks` bins are a round; there are as few rounds as it takes.

    lengths: [U] tokens, each at most max_tokens. costs: [U].

    The rounds are the fewest that `fill` can do with. `fewest_bins` is a bound that no packing undercuts.
    From there on one round after the other is tried, until `_EXACT_WORK` is used up; then steps grow, and the
    last one is bisected. Where costs are proportional to lengths, that gives the same: a fill that works
    with some bins works with more (list scheduling: with one bin more, the fullest bins, in order, hold no
    more than before, after each unit). With other costs it may differ where that work was not enough and
    where a fill fails with more bins than another one needed; no batch of sequences is known where one does.
    """
    rounds = max(1, math.ceil(fewest_bins(lengths, max_tokens) / num_ranks))
    one_by_one = max(1, _EXACT_WORK // max(1, len(lengths)))
    step, tries, too_few = 1, 0, rounds - 1
    while (bins := fill(lengths, costs, num_ranks * rounds, max_tokens)) is None:
        too_few, tries = rounds, tries + 1
        step = 1 if tries < one_by_one else 4 * step
        rounds += step
    while rounds - too_few > 1:
        middle = (rounds + too_few) // 2
        fewer = fill(lengths, costs, num_ranks * middle, max_tokens)
        if fewer is None:
            too_few = middle
        else:
            rounds, bins = middle, fewer
    return bins


def fill_padded(
    counts: Sequence[int], widths: Sequence[int], num_ranks: int, max_tokens: int
) -> list[list[int]]:
    """Indices of the units of each bin, whose sequences are padded to the longest in it.

    counts: [U] sequences of each unit. widths: [U] tokens of its longest. Their product: at most max_tokens.

    Units that are alike share a bin. There are as few rounds of `num_ranks` bins as that takes, and in those
    the largest bin computes as little as it can.
    """
    order = sorted(range(len(widths)), key=lambda i: -widths[i])

    def bins_of(limit: int) -> list[list[int]]:
        bins: list[list[int]] = []
        num_sequences = width = 0
        for i in order:
            if not bins or (num_sequences + counts[i]) * width > limit:
                bins.append([])
                num_sequences, width = 0, widths[i]
            bins[-1].append(i)
            num_sequences += counts[i]
        return bins

    rounds = max(1, math.ceil(len(bins_of(max_tokens)) / num_ranks))
    least, most = max((c * w for c, w in zip(counts, widths, strict=True)), default=0), max_tokens
    while least < most:
        limit = (least + most) // 2
        if len(bins_of(limit)) <= rounds * num_ranks:
            most = limit
        else:
            least = limit + 1
    bins = bins_of(most)
    return bins + [[] for _ in range(rounds * num_ranks - len(bins))]


def fewest_bins(lengths: Sequence[int], max_tokens: int) -> int:
    """A lower bound of the bins of any packing: L2 of Martello and Toth (Knapsack Problems, 1990, chapter 8).

    For a size k of at most half a bin: units of over max_tokens - k have a bin each, beside which nothing of
    at least k has room; the others of over half have a bin each; what is left of those bins, and then more
    bins, take the units from k to half.
    """
    ordered = np.sort(np.asarray(lengths, np.int64))
    sums = np.concatenate([[0], np.cumsum(ordered)])
    half = np.searchsorted(ordered, max_tokens // 2, "right")
    sizes = np.unique(np.append(ordered[:half], 0))
    alone = np.searchsorted(
        ordered, max_tokens - sizes, "right"
    )  # where the units begin that have no company
    smaller = sums[half] - sums[np.searchsorted(ordered, sizes)]
    room = (alone - half) * max_tokens - (sums[alone] - sums[half])
    more = np.maximum(0, -((room - smaller) // max_tokens))
    return int((len(ordered) - half + more).max())


def fill(
    lengths: Sequence[int], costs: Sequence[float], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Indices of the units of each bin, or None where some unit fits into none.

    Dearest first, each into the cheapest bin that has room; of equally cheap ones, into the first.
    """
    order = sorted(range(len(lengths)), key=lambda i: -costs[i])
    alone = [i for i in order[:num_bins] if costs[i] > 0]  # each finds an empty bin, the cheapest there is
    remaining = order[len(alone) :]
    bins = [[i] for i in alone] + [[] for _ in range(num_bins - len(alone))]
    used = [sum(lengths[i] for i in bin) for bin in bins]
    open_bins = _OpenBins(
        sorted({lengths[i] for i in remaining}),
        [max_tokens - tokens for tokens in used],
        [sum((costs[i] for i in bin), 0.0) for bin in bins],
    )
    for i in remaining:
        spent, number = open_bins.take_cheapest(lengths[i])
        if number < 0:
            return None
        bins[number].append(i)
        used[number] += lengths[i]
        open_bins.put(spent + costs[i], number, max_tokens - used[number])
    return bins


class _OpenBins:
    """Bins by the longest unit that has room in them.

    It takes O(log U) to take the cheapest of those with room, or to put one back. A leaf of the tree for each
    length, with the bins that have room for it and not for the next; a node knows the cheapest bin below it.
    """

    def __init__(self, lengths: Sequence[int], rooms: Sequence[int], spent: Sequence[float]):
        """lengths: of the units to come, ascending, each once. rooms, spent: of each bin."""
        self._lengths = lengths
        self._first_leaf = {length: leaf for leaf, length in enumerate(lengths)}
        self._num_leaves = 1 << max(0, len(lengths) - 1).bit_length()
        self._leaf_of = [bisect_right(lengths, room) - 1 for room in rooms]
        self._heaps: list[list[tuple[float, int]]] = [[] for _ in range(self._num_leaves)]
        for number, leaf in enumerate(self._leaf_of):
            if leaf >= 0:
                self._heaps[leaf].append((spent[number], number))
        for heap in self._heaps:
            heapify(heap)
        self._cheapest = [_NO_BIN] * (2 * self._num_leaves)
        for node in range(2 * self._num_leaves - 1, 0, -1):
            self._update(node)

    def take_cheapest(self, length: int) -> tuple[float, int]:
        """What is spent on it, and its number, which is -1 where no bin has room for the length."""
        first = self._first_leaf[length]
        cheapest = self._cheapest[1]
        if cheapest[1] < 0:
            return cheapest
        if self._leaf_of[cheapest[1]] < first:
            cheapest = self._cheapest_from(first)
            if cheapest[1] < 0:
                return cheapest
        leaf = self._leaf_of[cheapest[1]]
        heappop(self._heaps[leaf])
        node = self._num_leaves + leaf
        self._update(node)
        tree = self._cheapest
        while node := node >> 1:
            left, right = tree[2 * node], tree[2 * node + 1]
            tree[node] = left if left < right else right
        return cheapest

    def put(self, spent: float, number: int, room: int) -> None:
        """One that was taken. It is left out for good where it has no room for any unit."""
        leaf = bisect_right(self._lengths, room) - 1
        if leaf < 0:
            return
        self._leaf_of[number] = leaf
        entry = spent, number
        heappush(self._heaps[leaf], entry)
        node = self._num_leaves + leaf
        while node and entry < self._cheapest[node]:
            self._cheapest[node] = entry
            node >>= 1

    def _cheapest_from(self, leaf: int) -> tuple[float, int]:
        node, end, cheapest = self._num_leaves + leaf, 2 * self._num_leaves, _NO_BIN
        while node < end:
            if node & 1:
                cheapest = min(cheapest, self._cheapest[node])
                node += 1
            node >>= 1
            end >>= 1
        return cheapest

    def _update(self, node: int) -> None:
        if node < self._num_leaves:
            left, right = self._cheapest[2 * node], self._cheapest[2 * node + 1]
            self._cheapest[node] = left if left < right else right
        else:
            heap = self._heaps[node - self._num_leaves]
            self._cheapest[node] = heap[0] if heap else _NO_BIN
