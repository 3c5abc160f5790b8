import contextlib
import pickle
import pickletools
from dataclasses import fields, replace

import numpy as np
import pytest

from rl.batching import _cost, check_batch, has_branches, pack, segments_sample, supervised_sample, to_sample
from rl.errors import RunError
from rl.prefixes import Prefixes, families
from rl.types import Problem, Rollout, Sample, Segment, StopReason, VersionRange
from tests.traced_memory import traced_memory


def sample(length: int, first: int = 0):
    return supervised_sample([first], [first + i for i in range(1, length)])


def test_a_rollout_becomes_a_sample_with_its_mask_logprobs_and_one_advantage():
    segments = (
        Segment([5, 6], False, [0.0, 0.0]),
        Segment([7, 8], True, [-0.5, -0.25]),
        Segment([9], False, [0.0]),
        Segment([3], True, [-1.0]),
    )
    rollout = Rollout(Problem("p", "q", "a"), segments, "", StopReason.STOP, VersionRange(0, 0))
    got = to_sample(rollout, 2.0)
    assert got.tokens.tolist() == [5, 6, 7, 8, 9, 3]
    assert got.loss_mask.tolist() == [False, False, True, True, False, True]
    assert got.generator_logprobs.tolist() == [0, 0, -0.5, -0.25, 0, -1.0]
    assert got.advantages.tolist() == [0, 0, 2, 2, 0, 2]
    for without in (to_sample(rollout), segments_sample(segments)):
        assert not without.advantages.any()


def test_packing_keeps_every_target_token_with_its_sample_and_position():
    samples = [sample(n, first=10 * n) for n in (3, 7, 2, 5, 4)]
    batch = pack(samples, num_ranks=2, max_tokens=8, multiple_of=2)
    seen = []
    for micro in (m for rank in batch.ranks for m in rank):
        assert len(micro.tokens) % 2 == 0 and len(micro.tokens) <= 8
        starts = np.flatnonzero(micro.positions == 0)
        later = [i for i in range(1, len(micro.tokens)) if i not in starts]
        assert micro.positions[0] == 0
        assert all(micro.positions[i] == micro.positions[i - 1] + 1 for i in later)
        seen += [(int(i), int(t)) for i, t in zip(micro.sample_ids, micro.targets, strict=True)]
    expected = [(i, int(t)) for i, s in enumerate(samples) for t in s.tokens[1:]]
    assert sorted(seen) == sorted(expected)
    assert batch.num_target_tokens == len(expected)


def test_every_rank_gets_equally_many_micro_batches_and_a_balanced_load():
    lengths = np.random.default_rng(0).integers(2, 60, 64)
    batch = pack([sample(int(n)) for n in lengths], num_ranks=4, max_tokens=256)
    assert len({len(rank) for rank in batch.ranks}) == 1
    loads = [sum(len(m.tokens) for m in rank) for rank in batch.ranks]
    assert max(loads) <= 1.05 * sum(lengths) / 4  # holds: exact, token counts


def test_no_rank_waits_for_another_ranks_long_row():
    """Ranks meet after each micro-batch: those that run at the same time are of like size."""
    lengths = [90, 10, 85, 12, 20, 15, 80, 25]
    batch = pack([sample(n) for n in lengths], num_ranks=2, max_tokens=100)
    sizes = [[len(m.tokens) for m in rank] for rank in batch.ranks]
    waits = sum(abs(a - b) for a, b in zip(*sizes, strict=True))
    flat = sorted((n for rank in sizes for n in rank), reverse=True)
    least = sum(a - b for a, b in zip(flat[::2], flat[1::2], strict=True))  # no other order waits less
    assert waits == least
    assert len(sizes[0]) == 2


def test_a_rank_without_a_sequence_gets_filler_that_is_never_a_target():
    batch = pack([sample(4)], num_ranks=3, multiple_of=2)
    assert [len(rank[0].targets) for rank in batch.ranks] == [3, 0, 0]
    assert all(len(rank[0].tokens) >= 2 for rank in batch.ranks)


def test_samples_without_a_token_are_in_a_row_that_can_be_computed():
    """Of a group whose prompts were too long for a first answer, say."""
    empty = [
        replace(sample(4), tokens=sample(4).tokens[:0], loss_mask=sample(4).loss_mask[:0]) for _ in range(3)
    ]
    for batch in (pack(empty, multiple_of=2), pack(empty, share_prefixes=True)):
        rows = [row for rank in batch.ranks for row in rank]
        assert rows and all(len(row.tokens) >= 1 and not row.targets.size for row in rows)


@pytest.mark.parametrize("pads", [False, True])
def test_a_batch_of_no_samples_is_filler_for_every_rank(pads):
    batch = pack([], num_ranks=2, pads=pads)
    assert [[row.targets.size for row in rank] for rank in batch.ranks] == [[0], [0]]
    assert batch.longest == batch.num_tokens == 0


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (dict(num_ranks=2, max_seq_len=6, shares_prefixes=True), ""),
        (dict(num_ranks=2, max_seq_len=6, shares_prefixes=False), "sequences share tokens"),
        (dict(num_ranks=3, max_seq_len=6, shares_prefixes=True), "packed for 2 data-parallel ranks, of which there are 3"),
        (dict(num_ranks=2, max_seq_len=5, shares_prefixes=True), "a sequence of 6 tokens exceeds the 5 positions"),
    ],
)  # fmt: skip
def test_an_engine_refuses_a_batch_that_was_packed_for_another(engine, words):
    shared = [supervised_sample([1, 2, 3, 4], [5, last]) for last in range(4)]
    batch = pack(shared, num_ranks=2, share_prefixes=True)
    assert batch.num_tokens < batch.num_unshared_tokens
    with pytest.raises(RunError, match=words) if words else contextlib.nullcontext():
        check_batch(batch, **engine)


def test_a_first_token_is_not_a_target_because_nothing_predicts_it():
    batch = pack([supervised_sample([], [5, 6])])
    assert batch.ranks[0][0].targets.tolist() == [6]


def test_a_sequence_over_the_limit_says_what_to_change():
    with pytest.raises(
        RunError, match="9 tokens exceeds trainer.micro_batch_tokens=8; raise trainer.micro_batch_tokens"
    ):
        pack([sample(9)], max_tokens=8)


@pytest.mark.timeout(20)
def test_one_sequence_over_the_limit_is_named_beside_others_that_fit():
    for lengths in ([3, 9], [9, 3]):
        with pytest.raises(RunError, match=r"^a sequence of 9 tokens exceeds"):
            pack([sample(n) for n in lengths], max_tokens=8)
    with pytest.raises(RunError, match=r"^2 sequences that belong together, of 9 tokens exceeds"):
        pack([sample(n) for n in (2, 2, 4, 5)], max_tokens=8, samples_per_unit=2)
    assert len(pack([sample(n) for n in (8, 3, 5)], max_tokens=8).ranks[0]) == 2


def test_a_pair_that_fits_once_its_prompt_is_shared_is_packed():
    """Beside pairs that share next to nothing, for which alone rows would have no branches."""
    prompt = list(range(100, 106))
    pair = [supervised_sample(prompt, [1, 2]), supervised_sample(prompt, [3, 4])]
    others = [sample(5, first=10 * i) for i in range(40)]
    batch = pack([*pair, *others], max_tokens=10, samples_per_unit=2, share_prefixes=True)
    assert [0, 1] in [sorted({int(i) for i in micro.sample_ids}) for micro in batch.ranks[0]]
    with pytest.raises(RunError, match="2 sequences that belong together, of 16 tokens"):
        pack(pair, max_tokens=10, samples_per_unit=2)
    with pytest.raises(RunError, match="2 sequences that belong together, of 10 tokens"):
        pack(pair, max_tokens=9, samples_per_unit=2, share_prefixes=True)


def members(batch):
    """Of each micro-batch of each rank, which samples."""
    return [[sorted({int(i) for i in micro.sample_ids}) for micro in rank] for rank in batch.ranks]


def test_ranks_are_balanced_by_what_sequences_cost_and_filled_by_their_tokens():
    """Tokens alone would put 6 beside 3. With attention to pairs, 6 costs as much as three of 3."""
    samples = [sample(n) for n in (3, 3, 6, 3)]
    by_pairs = pack(samples, num_ranks=2, max_tokens=20, attention_cost=1.0)
    assert sorted(members(by_pairs)) == [[[0, 1, 3]], [[2]]]
    by_tokens = pack(samples, num_ranks=2, max_tokens=20)
    assert sorted(len(rank[0].targets) for rank in by_tokens.ranks) == [4, 7]
    (only,) = pack([sample(4), sample(4)], max_tokens=8, attention_cost=1.0).ranks
    assert len(only) == 1


@pytest.mark.parametrize(("length", "shared"), [(1, 0), (7, 0), (7, 3), (7, 6)])
def test_a_sequence_costs_its_tokens_and_what_each_attends_to(length, shared):
    counted = sum(1 + 0.25 * (position + 1) for position in range(shared, length))
    assert _cost(length, shared, 0.25) == counted


def test_who_is_taught_keeps_its_name():
    assert supervised_sample([1], [2], id="demonstration 7").id == "demonstration 7"


@pytest.mark.parametrize(
    ("num_ranks", "max_tokens", "sizes"),
    [
        (1, 42, [16]),  # 10 tokens of the prompt once, and 2 of each
        (1, 41, [15, 1]),
        (1, 24, [7, 7, 2]),
        (2, 1000, [7, 7, 2]),  # at most twice a sequence, so that ranks can be balanced
        (2, 23, [6, 6, 4]),
        (64, 1000, [7, 7, 2]),
    ],
)
def test_how_many_sequences_of_a_prompt_stay_together(num_ranks, max_tokens, sizes):
    samples = [supervised_sample([1] * 10, [number] * 2) for number in range(16)]
    together = families(samples, Prefixes(samples), num_ranks, max_tokens)
    assert [len(family) for family in together] == sizes
    assert sorted(i for family in together for i in family) == list(range(16))


def test_families_are_larger_where_each_rank_still_gets_eight():
    """810 tokens in all: a sixteenth are 50, the prompt's 10 once and 2 of each of twenty."""
    samples = [supervised_sample([1] * 10, [number] * 2) for number in range(400)]
    assert [len(family) for family in families(samples, Prefixes(samples), 2, 1000)] == [20] * 20


def test_sequences_that_share_nothing_are_no_family():
    samples = [supervised_sample([number], [2, 3]) for number in (5, 6, 5)]
    assert sorted(families(samples, Prefixes(samples), 1, 100)) == [[0, 2], [1]]


@pytest.mark.parametrize(("num_shared", "is_worth"), [(3, False), (4, True)])
def test_prefixes_are_shared_from_a_tenth_of_the_tokens_on(num_shared, is_worth):
    """Of 40. Rows with branches have slower attention."""
    samples = [supervised_sample([], [1] * num_shared + [last] * (20 - num_shared)) for last in (2, 3)]
    batch = pack(samples, max_tokens=100, share_prefixes=True)
    assert batch.num_unshared_tokens - batch.num_tokens == num_shared * is_worth


def test_rows_take_no_memory_before_they_are_computed():
    """128 million tokens, which would be 7 GB of rows."""
    tokens, ones = np.broadcast_to(np.int32(7), 2_000_000), np.broadcast_to(np.float32(1), 2_000_000)
    samples = [Sample(tokens, ones > 0, ones, ones, ones) for _ in range(64)]

    def packed():
        batch = pack(samples, num_ranks=2, max_tokens=2_000_000)
        assert [len(rank) for rank in batch.ranks] == [32, 32] and batch.num_tokens == 128_000_000

    _, peak = traced_memory(packed)
    assert peak < 10_000_000  # holds: meaning, rows would take 7 GB


def test_a_rank_is_sent_its_own_samples_alone():
    samples = [sample(n, first=10 * n) for n in (3, 7, 2, 5, 4)]
    batch = pack(samples, num_ranks=2, max_tokens=8, multiple_of=2)
    parts = [pickle.loads(pickle.dumps(batch.for_rank(rank))) for rank in range(2)]
    assert sorted([*parts[0].ranks[0].samples, *parts[1].ranks[1].samples]) == [0, 1, 2, 3, 4]
    assert sum(part.num_target_tokens for part in parts) == batch.num_target_tokens
    assert [len(parts[0].ranks[1]), len(parts[1].ranks[0])] == [0, 0]


@pytest.mark.parametrize("with_labels", [False, True])
@pytest.mark.parametrize("one_weight", [False, True])
def test_rows_are_the_same_in_another_process(with_labels, one_weight):
    rng = np.random.default_rng(0)
    samples = []
    for size in (3, 7, 2, 1, 0, 5, 4):
        values = [rng.random(size, np.float32) for _ in range(4)]
        weights = np.broadcast_to(np.float32(1 / (1 + size)), size) if one_weight else values[2]
        inputs = {"ref_logprobs": values[3]} | ({"of_some": values[3]} if size == 3 else {})
        labels = rng.integers(0, 50, size) if with_labels and size % 2 else None
        tokens = rng.integers(0, 3, size).astype(np.int32 if size % 2 else np.int64)
        mask = rng.random(size) < 0.7
        samples.append(Sample(tokens, mask, *values[:2], weights, inputs, "a name", labels))
    batch = pack(samples, num_ranks=3, max_tokens=8, multiple_of=4, share_prefixes=True)
    for rank in range(3):
        theirs = pickle.loads(pickle.dumps(batch.for_rank(rank))).ranks[rank]
        for ours, copy in zip(batch.ranks[rank], theirs, strict=True):
            assert list(ours.loss_inputs) == list(copy.loss_inputs) == ["ref_logprobs"]
            for name in (f.name for f in fields(ours) if f.name != "loss_inputs"):
                a, b = getattr(ours, name), getattr(copy, name)
                assert a.dtype == b.dtype and a.tolist() == b.tolist()
            assert ours.loss_inputs["ref_logprobs"].tolist() == copy.loss_inputs["ref_logprobs"].tolist()


def test_a_batch_of_many_samples_is_sent_as_a_few_arrays():
    samples = [sample(4) for _ in range(1000)]
    message = pickle.dumps(pack(samples, max_tokens=100).for_rank(0))
    made = sum(opcode.name == "REDUCE" for opcode, _, _ in pickletools.genops(message))
    assert made < 30  # holds: exact, arrays and their types
    assert len(message) < 60 * 4000  # holds: exact, bytes of arrays, and 25 for each sample's place


def padded_tokens(rank):
    """Of each micro-batch: sequences times the longest."""
    sizes = []
    for micro in rank:
        starts = np.flatnonzero(micro.positions == 0)
        lengths = np.diff([*starts, len(micro.positions)])
        sizes.append(len(lengths) * max(lengths))
    return sizes


@pytest.mark.parametrize("samples_per_unit", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_engine_that_pads_computes_no_more_than_a_micro_batch_may_hold(num_ranks, samples_per_unit):
    rng = np.random.default_rng(0)
    for num, longest in ((1, 40), (7, 40), (200, 40), (200, 3)):
        lengths = rng.integers(2, longest + 1, num * samples_per_unit)
        batch = pack(
            [sample(int(n)) for n in lengths], num_ranks=num_ranks, max_tokens=100,
            samples_per_unit=samples_per_unit, pads=True,
        )  # fmt: skip
        sizes = [padded_tokens(rank) for rank in batch.ranks]
        assert len({len(rank) for rank in sizes}) == 1
        computed = [size for rank in sizes for size in rank]
        assert max(computed) <= 100
        seen = sorted({int(i) for rank in batch.ranks for micro in rank for i in micro.sample_ids})
        assert seen == list(range(len(lengths)))
        for rank in members(batch):
            for micro in rank:
                assert all(i ^ 1 in micro for i in micro) or samples_per_unit == 1
        if num == 200:
            alone = (
                sum(2 * max(pair) for pair in lengths.reshape(-1, 2))
                if samples_per_unit == 2
                else sum(lengths)
            )
            assert batch.num_tokens < 1.2 * alone  # holds: meaning, those alike are together
            assert max(computed) < 2 * sum(computed) / len(computed)
    with pytest.raises(RunError, match="2 sequences that belong together, of 18 tokens"):
        pack([sample(9), sample(3)], max_tokens=15, samples_per_unit=2, pads=True)


def test_a_batch_says_how_often_what_could_be_shared_is_computed_twice():
    """Three rows of 7, 7 and 2 of a prompt's answers."""
    samples = [supervised_sample([1] * 10, [number] * 2) for number in range(16)]
    assert pack(samples, max_tokens=24, share_prefixes=True).num_cuts == 2
    assert pack(samples, max_tokens=24).num_cuts == 0


def test_the_longest_sequence_of_a_batch_is_what_an_engine_needs_positions_for():
    batch = pack([sample(n) for n in (3, 6, 4)], max_tokens=8)
    assert batch.longest == 6
    check_batch(batch, num_ranks=1, max_seq_len=6, shares_prefixes=False)
    with pytest.raises(RunError, match="a sequence of 6 tokens exceeds the 5 positions"):
        check_batch(batch, num_ranks=1, max_seq_len=5, shares_prefixes=False)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([0], False),
        ([0, 1, 2, 0, 1], False),
        ([0, 0, 0, 1], False),
        ([0, 1, 2, 3, 2, 3], True),
        ([0, 1, 1], True),
        ([0, 1, 2, 0, 1, 2, 1], True),
    ],
)
def test_a_row_has_branches_where_a_sequence_goes_on_after_part_of_another(positions, expected):
    assert has_branches(np.array(positions)) is expected


def test_prefixes_that_save_little_are_not_shared_where_the_longest_sequence_just_fits():
    samples = [sample(20, first=100), *(supervised_sample([], [7] + [last] * 9) for last in (1, 2))]
    batch = pack(samples, max_tokens=20, share_prefixes=True)
    assert batch.num_tokens == batch.num_unshared_tokens == 40
