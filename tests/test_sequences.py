"""Tokens are arrays from the generator to what is trained on."""

import asyncio
import gc
import pickle
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from configs.quickstart import quickstart
from rl.batching import segments_sample
from rl.controller.training_batch import build_training_batch
from rl.envs.base import Env, RolloutContext
from rl.sequences import Sample, Segment, joined, lay_out
from rl.types import Completion, Group, Problem, Prompt, SamplingParams, Score, StopReason, VersionRange
from tests.traced_memory import traced_memory

NUM_TOKENS = 20_000


class Tokenizer:
    eos_id = 0

    def decode(self, tokens):
        assert all(type(token) is int for token in tokens[:3])  # what an environment's author sees
        return ""


class Generator:
    """Sends its completions as a process does."""

    async def sample(self, prompt, n, params):
        rng = np.random.default_rng(0)
        lists = [
            (rng.integers(1000, 150_000, NUM_TOKENS).tolist(), rng.random(NUM_TOKENS).tolist())
            for _ in range(n)
        ]
        messages = [
            pickle.dumps(Completion(*pair, VersionRange(0, 1), StopReason.STOP, [0, 1] * (NUM_TOKENS // 2)))
            for pair in lists
        ]
        assert len(messages[0]) < 13 * NUM_TOKENS  # holds: exact, three arrays of 4 bytes a token
        return [pickle.loads(message) for message in messages]


@pytest.mark.parametrize("num_at_once", [1, 10**6])
@pytest.mark.parametrize("loss_agg", ["token_mean", "seq_mean"])
def test_rollouts_and_what_is_trained_on_take_under_16_bytes_a_token(monkeypatch, loss_agg, num_at_once):
    """In a thread too. The prompt's tokens are a group's own, and are not counted."""
    monkeypatch.setattr("rl.controller.training_batch._MANY_TOKENS", num_at_once)
    algorithm = quickstart().algorithm
    object.__setattr__(algorithm, "loss_agg", loss_agg)
    prompt = Prompt(Problem("1", "q", "a"), tuple(range(1000, 3000)))
    context = RolloutContext(Generator(), Tokenizer(), SamplingParams(NUM_TOKENS), 10**6)
    asyncio.run(Env().drive(prompt, 1, context))  # what is made once

    def groups_and_batch():
        rollouts = asyncio.run(Env().drive(prompt, 4, context))
        groups = [Group(0, tuple(rollouts), tuple(map(Score, (0.0, 1.0, 0.0, 1.0))))]
        gc.disable()
        batch = asyncio.run(build_training_batch(groups, algorithm, {}))
        assert len(batch.groups[0].samples) == 4
        return groups, batch

    num_bytes, _ = traced_memory(groups_and_batch)
    assert num_bytes / (4 * (NUM_TOKENS + 2000)) < 16  # holds: exact, bytes of arrays


def test_long_texts_are_decoded_beside_the_event_loop():
    asked, may_end = threading.Event(), threading.Event()

    class SlowTokenizer:
        eos_id = 0

        def decode(self, tokens):
            asked.set()
            assert may_end.wait(10)
            return "text"

    async def main():
        context = RolloutContext(Generator(), SlowTokenizer(), SamplingParams(NUM_TOKENS), 10**6)
        driving = asyncio.create_task(Env().drive(Prompt(Problem("1", "q", "a"), (5,)), 1, context))
        while not asked.is_set():
            await asyncio.sleep(0.001)
        may_end.set()
        assert [rollout.response for rollout in await driving] == ["text"]

    asyncio.run(main())


segments = st.lists(
    st.tuples(st.lists(st.integers(0, 2**31 - 1), max_size=5), st.booleans()), min_size=1, max_size=6
).map(
    lambda parts: [Segment(tokens, sampled, [-0.25 * len(tokens)] * len(tokens)) for tokens, sampled in parts]
)


@given(segments)
def test_segments_side_by_side_are_the_same_and_joined_without_a_copy(segments):
    placed = lay_out(segments)
    assert list(placed) == segments
    for parts, copies in ((placed, False), (pickle.loads(pickle.dumps(placed)), True), (segments, True)):
        whole = joined([segment.tokens for segment in parts])
        assert whole.tolist() == [token for segment in segments for token in segment.tokens.tolist()]
        assert copies or not len(whole) or any(segment.tokens.base is whole for segment in placed)


def test_a_buffer_is_not_given_back_as_numbers_of_another_type():
    buffer = np.arange(4, dtype=np.int32)
    parts = [buffer[:2].view(np.float32), buffer[2:].view(np.float32)]
    assert joined(parts).dtype == np.float32


@given(segments, st.randoms(use_true_random=False))
def test_other_parts_of_one_buffer_are_not_taken_for_all_of_it(segments, random):
    placed = list(lay_out(segments))
    random.shuffle(placed)
    placed = placed[: random.randint(1, len(placed))]
    expected = [token for segment in placed for token in segment.tokens.tolist()]
    assert joined([segment.tokens for segment in placed]).tolist() == expected
    assert segments_sample(placed).tokens.tolist() == expected


def test_lists_become_arrays_and_equal_ones_are_equal():
    one = Completion([5, 6], [-1.0, -0.5], VersionRange(0, 0), StopReason.STOP)
    assert (one.tokens.dtype, one.logprobs.dtype, one.token_versions.dtype) == (
        np.int32,
        np.float32,
        np.int32,
    )
    assert one == Completion(np.array([5, 6]), [-1.0, -0.5], VersionRange(0, 0), StopReason.STOP)
    assert one != Completion([5, 7], [-1.0, -0.5], VersionRange(0, 0), StopReason.STOP)
    assert one != Completion([5, 6, 7], [-1.0, -0.5, 0.0], VersionRange(0, 0), StopReason.STOP)
    assert Segment([1], True, [0.0]) == Segment([1], True, [0.0]) != Segment([1], False, [0.0])
    assert segments_sample([]).tokens.tolist() == []


@pytest.mark.parametrize(
    "weights",
    [np.array([0.0, 1.0, 4.0], np.float32), np.broadcast_to(np.float32(2), 3)],
    ids=["each its own", "one for all"],
)
def test_a_smaller_share_in_the_loss_is_that_of_each_token(weights):
    column = np.zeros(3, np.float32)
    sample = Sample(np.array([5, 6, 7]), np.array([False, True, True]), column, column, weights)
    smaller = sample.with_weights_divided(4).weights
    assert smaller.tolist() == [weight / 4 for weight in weights.tolist()]
    assert (smaller.dtype, smaller.strides) == (np.float32, weights.strides)  # one number stays one
