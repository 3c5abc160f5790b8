"""Which units share a row: the same as by trying everything, in far less time."""

import math
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rl.batching import pack, supervised_sample
from rl.bins import fewest_bins, fill, fill_padded, fill_rounds


def try_every_bin(lengths, costs, num_bins, max_tokens):
    bins = [[] for _ in range(num_bins)]
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


def try_every_number_of_rounds(lengths, costs, num_ranks, max_tokens):
    rounds = max(1, math.ceil(sum(lengths) / (num_ranks * max_tokens)))
    while (bins := try_every_bin(lengths, costs, num_ranks * rounds, max_tokens)) is None:
        rounds += 1
    return bins


@st.composite
def units(draw, attention_costs=(0.0, 0.01, 0.3)):
    """Lengths, costs, tokens of a bin; lengths of a narrow or a wide range, many of them equal."""
    max_tokens = draw(st.integers(1, 60))
    least = draw(st.integers(0, max_tokens))
    most = draw(st.integers(least, max_tokens))
    lengths = draw(st.lists(st.integers(least, most), max_size=40))
    attention = draw(st.sampled_from(attention_costs))
    return lengths, [n + attention * n * (n + 1) / 2 for n in lengths], max_tokens


@given(units(), st.integers(1, 5))
def test_bins_are_those_of_trying_every_number_of_rounds_and_every_bin(units, num_ranks):
    lengths, costs, max_tokens = units
    expected = try_every_number_of_rounds(lengths, costs, num_ranks, max_tokens)
    assert fill_rounds(lengths, costs, num_ranks, max_tokens) == expected


@given(units(), st.randoms(use_true_random=False), st.integers(1, 30))
def test_the_cheapest_bin_with_room_is_taken_whatever_units_cost(units, random, num_bins):
    """As units that share tokens cost: not in the order of their lengths."""
    lengths, costs, max_tokens = units
    random.shuffle(costs)
    assert fill(lengths, costs, num_bins, max_tokens) == try_every_bin(lengths, costs, num_bins, max_tokens)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 50)), min_size=10, max_size=40),
    st.integers(2, 6),
    st.sampled_from([1.0, 1.05, 1.2]),
)
def test_the_cheapest_bin_is_left_where_a_dearer_one_has_room(units, num_bins, slack):
    """Bins so tight that the cheapest is often too full for a unit."""
    lengths, costs = (list(column) for column in zip(*units, strict=True))
    max_tokens = max(12, math.ceil(slack * sum(lengths) / num_bins))
    assert fill(lengths, costs, num_bins, max_tokens) == try_every_bin(lengths, costs, num_bins, max_tokens)


@given(units(attention_costs=[0.0]), st.integers(1, 3))
def test_without_the_work_to_try_every_number_the_rounds_are_the_fewest_all_the_same(units, num_ranks):
    lengths, costs, max_tokens = units
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl.bins._EXACT_WORK", 0)
        few_tries = fill_rounds(lengths, costs, num_ranks, max_tokens)
    assert few_tries == try_every_number_of_rounds(lengths, costs, num_ranks, max_tokens)


@given(units())
def test_no_fill_has_fewer_bins_than_the_bound(units):
    lengths, costs, max_tokens = units
    bound = fewest_bins(lengths, max_tokens)
    assert bound >= sum(2 * n > max_tokens for n in lengths) and bound * max_tokens >= sum(lengths)
    if bound:
        assert try_every_bin(lengths, costs, bound - 1, max_tokens) is None


@st.composite
def rectangles(draw):
    """Sequences of each unit, tokens of its longest, tokens of a bin."""
    max_tokens = draw(st.integers(1, 60))
    widths = draw(st.lists(st.integers(1, max_tokens), max_size=12))
    return [draw(st.integers(1, max_tokens // width)) for width in widths], widths, max_tokens


def least_largest_area(counts, widths, num_bins):
    """Of neighbours in the order of their widths, cut into at most so many bins: every cut tried."""
    order = sorted(range(len(widths)), key=lambda i: -widths[i])
    best = [0] + [math.inf] * len(order)  # of the first so many units
    for _ in range(num_bins):
        best = [
            min(
                (max(best[cut], widths[order[cut]] * sum(counts[i] for i in order[cut:end])) for cut in range(end)),
                default=0,
            )
            for end in range(len(order) + 1)
        ]  # fmt: skip
    return best[-1]


@given(rectangles(), st.integers(1, 4))
def test_padded_bins_are_as_few_rounds_as_fit_and_as_even_as_any_cut_of_those(rectangles, num_ranks):
    counts, widths, max_tokens = rectangles
    bins = fill_padded(counts, widths, num_ranks, max_tokens)
    assert [i for units in bins for i in units] == sorted(range(len(widths)), key=lambda i: -widths[i])
    rounds = 1
    while least_largest_area(counts, widths, rounds * num_ranks) > max_tokens:
        rounds += 1
    assert len(bins) == rounds * num_ranks
    areas = [widths[units[0]] * sum(counts[i] for i in units) for units in bins if units]
    assert max(areas, default=0) == least_largest_area(counts, widths, len(bins))


class TooMuchWork(Exception):
    pass


def operations(call, limit=math.inf):
    """Bytecodes that it runs. Raises TooMuchWork past the limit."""
    num = 0

    def trace(frame, event, _):
        nonlocal num
        frame.f_trace_opcodes = True
        num += event == "opcode"
        if num > limit:  # holds: exact, bytecodes
            raise TooMuchWork
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num


@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize("few", [64, 1024])
def test_eight_times_the_samples_take_at_most_ten_times_the_work(few, num_ranks):
    """Of over half a row each, which no two fit into. How long a sequence is does not matter here."""
    rng = np.random.default_rng(0)
    samples = [supervised_sample([0], [0] * (n - 1)) for n in rng.integers(17, 33, 8 * few)]
    work, more_work = (
        lambda: pack(samples[:few], num_ranks=num_ranks, max_tokens=32),
        lambda: pack(samples, num_ranks=num_ranks, max_tokens=32),
    )
    operations(work)  # what is done once; and Python 3.12 does not count all the first time
    assert operations(more_work, limit=10 * operations(work)) > 0
