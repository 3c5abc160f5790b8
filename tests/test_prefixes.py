"""Which leading tokens samples share, against a comparison of whole sequences."""

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rl.batching import supervised_sample
from rl.prefixes import Prefixes, lexical_order, num_equal


@st.composite
def families(draw):
    """Sequences of which many share beginnings, some longer than what is compared at a time."""
    stems = [[]]
    for _ in range(draw(st.integers(1, 6))):
        stem = draw(st.sampled_from(stems))
        token, times = draw(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 63, 64, 65, 300])))
        stems.append([*stem, *[token] * times])
    tails = st.lists(st.integers(0, 2), max_size=3)
    return [[*draw(st.sampled_from(stems)), *draw(tails)] for _ in range(draw(st.integers(0, 12)))]


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(families())
def test_the_order_is_that_of_the_whole_sequences(sequences):
    arrays = [np.array(sequence, np.int32) for sequence in sequences]
    assert lexical_order(arrays) == sorted(range(len(sequences)), key=sequences.__getitem__)


@given(families(), st.randoms(use_true_random=False))
def test_a_tree_knows_what_any_two_neighbours_share(sequences, random):
    samples = [supervised_sample([], sequence) for sequence in sequences]
    prefixes = Prefixes(samples)
    ids = [i for i in range(len(sequences)) if random.random() < 0.6]
    tree = prefixes.tree(ids)
    assert sorted(i for i, _ in tree) == ids
    assert [shared for _, shared in tree[1:]] == [
        common(sequences[a], sequences[b]) for (a, _), (b, _) in pairwise(tree)
    ]
    for a, b in pairwise(ids):
        assert num_equal(samples[a].tokens, samples[b].tokens) == common(sequences[a], sequences[b])


class Noted:
    """Tokens, and up to which of them somebody has looked."""

    def __init__(self, tokens):
        self.tokens, self.read = tokens, 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, part):
        taken = self.tokens[part]
        self.read = max(self.read, part.start + len(taken))
        return taken


def test_the_order_takes_no_look_far_beyond_where_sequences_differ():
    sequences = [Noted(np.full(100_000, token)) for token in (2, 1)]
    assert lexical_order(sequences) == [1, 0]
    assert max(sequence.read for sequence in sequences) < 1000


@pytest.mark.parametrize(
    ("rows", "cuts"),
    [([[0, 1, 2, 3]], 0), ([[0, 1, 2], [3]], 0), ([[0], [1, 2], [3]], 1), ([[0, 2], [1], [3]], 2)],
)
def test_a_cut_is_between_neighbours_that_share_tokens_and_stand_in_different_rows(rows, cuts):
    sequences = ([1, 1, 2], [1, 1, 3], [1, 4], [5])
    prefixes = Prefixes([supervised_sample([], sequence) for sequence in sequences])
    assert prefixes.num_cuts([prefixes.tree(ids) for ids in rows]) == cuts
