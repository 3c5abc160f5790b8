"""The rollout buffer and the loop over it: random timings, failures and filters, against a serial loop."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.config.learning import Pace
from rl.controller.buffer import BufferState, Finished, RolloutBuffer, Taken
from rl.controller.loop import train
from rl.controller.schedule import Schedule
from rl.errors import RunError
from rl.types import Group, Problem, Rollout, Score, Segment, StopReason, VersionRange
from rl.waiting import Signal, beside
from tests.virtual_time import run_virtually

P = 3


def group(index, version, kind):
    """kind: differ (a signal), same (none), fail (no reward), half (one of two has none)."""
    segments = (Segment([1], False, [0.0]), Segment([2], True, [-1.0]))
    rollout = Rollout(
        Problem(str(index), "q", "a"), segments, "", StopReason.STOP, VersionRange(version, version)
    )
    failed = {"fail": 2, "half": 1}.get(kind, 0)
    scores = [Score(float(i and kind == "differ"), "failed" if i < failed else None) for i in range(2)]
    return Group(index, (rollout,) * 2, tuple(scores))


class Killed(Exception):
    """Right after a checkpoint."""


class World:
    """The stages of a run whose processes take as long as `rng` says."""

    def __init__(
        self,
        rng,
        k,
        num_steps,
        max_filtered=0,
        kinds=("differ",),
        served_late=True,
        part=None,
        done=0,
        state=None,
    ):
        self.rng, self.k, self.num_steps, self.kinds, self.part = rng, k, num_steps, kinds, part
        self.changed, self.served, self.newest, self.done = Signal(), None, done, done
        self.save_at, self.stop_in_step, self.saved = None, None, None
        self.served_late = served_late
        self.started, self.batches, self.most_ahead = Counter(), {}, 0
        pace = Pace(P, num_steps, k, max_filtered)
        self.buffer = RolloutBuffer(
            self.generate, pace, keep=lambda g: g.has_signal, num_steps_done=done, state=state
        )

    async def pause(self, most=6):
        for _ in range(self.rng.randint(0, most)):
            await asyncio.sleep(0)

    async def generate(self, index, version):
        self.started[index] += 1
        # A generator that died is back some time later: until then older versions are served, or nothing is.
        await self.changed.wait_for(lambda: self.served is not None and self.served >= version)
        sampled_by = self.served
        slow = 60 if self.rng.random() < 0.15 else 6
        await self.pause(slow)
        return group(index, sampled_by, self.kind(index))

    def kind(self, index):
        return random.Random(index).choice(self.kinds)

    async def serve(self):
        """Generators take over the newest version some time after it was published."""
        while True:
            await self.changed.wait_for(lambda: self.served != self.newest)
            if self.served_late:
                await self.pause()
            self.served = self.newest
            self.changed.notify()
            if self.rng.random() < 0.2:
                await self.pause()
                self.served = self.rng.choice([None, *range(self.newest)])
                self.changed.notify()
                await self.pause()

    async def next_batch(self, step):
        taken = await self.buffer.take(step - 1, self.part)
        while len(taken.groups) < P:
            await self.pause()  # the part is trained on
            more = await self.buffer.take(step - 1, self.part)
            taken = Taken((*taken.groups, *more.groups), ())
        self.batches[step] = taken
        return taken

    async def update(self, batch, step):
        await self.pause(60 if step == self.stop_in_step else 6)
        if step == self.stop_in_step:
            self.saved = self.buffer.state_before_step
            raise Killed
        return {}

    async def publish(self, step):
        await self.pause()
        self.newest = step
        self.changed.notify()

    async def refresh_reference(self, step):
        pass

    async def save(self, step):
        if step == self.save_at:
            self.saved = self.buffer.state
            raise Killed

    async def evaluate(self, step):
        await self.pause()

    def record(self, step, batch, learned):
        pass

    async def run(self):
        schedule = Schedule(
            self.done + 1, self.num_steps, eval_every=2, save_every=1, evaluate_beside=self.k > 0
        )
        async with beside(self.serve(), self.buffer.follow(lambda: self.served, self.changed)):
            await train(schedule, self)

    def indices(self):
        return {step: [g.index for g in taken.groups] for step, taken in self.batches.items()}


def run(world):
    run_virtually(world.run())
    return world


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(0, 4),
    num_steps=st.integers(1, 8),
    max_filtered=st.sampled_from([0, P, 2 * P]),
    kinds=st.sampled_from([("differ",), ("differ", "same"), ("differ", "same", "fail", "half"), ("same",)]),
    streamed=st.booleans(),
)
def test_whatever_happens_the_bound_holds_every_prompt_ends_once_and_nothing_waits_for_ever(
    seed, k, num_steps, max_filtered, kinds, streamed
):
    part = 1 if streamed and not max_filtered else None
    world = run(World(random.Random(seed), k, num_steps, max_filtered, kinds, part=part))
    trained, filtered = [], []
    for step, taken in world.batches.items():
        assert len(taken.groups) == P
        trained += [g.index for g in taken.groups]
        filtered += [g.index for g in taken.filtered]
        assert len(taken.filtered) <= max_filtered
        for g in taken.groups:
            assert 0 <= (step - 1) - g.oldest_version <= k  # the hard bound
    assert set(world.started.values()) == {1}
    ended = Counter(trained) + Counter(filtered)
    assert set(ended.values()) == {1} and set(ended) == set(world.started)
    assert len(trained) == num_steps * P
    counts = world.buffer.ends
    assert counts.total() == len(ended) and counts["filtered"] == len(filtered)
    assert counts["failed"] == sum(world.kind(i) == "fail" for i in trained)
    assert set(ended) == set(range(len(ended)))  # no index is left out


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(0, 4),
    at=st.integers(1, 5),
    max_filtered=st.sampled_from([0, P, 2 * P]),
    kinds=st.sampled_from([("differ",), ("differ", "same"), ("differ", "same", "fail")]),
)
def test_a_run_that_goes_on_from_a_checkpoint_trains_on_every_prompt_once_and_keeps_what_was_finished(
    seed, k, at, max_filtered, kinds
):
    num_steps = 6
    killed = World(random.Random(seed), k, num_steps, max_filtered, kinds)
    killed.save_at = at
    with pytest.raises(Killed):
        run(killed)
    whole = World(random.Random(seed + 1), k, num_steps, max_filtered, kinds, done=at, state=killed.saved)
    run(whole)
    taken = [t for world in (killed, whole) for t in world.batches.values()]
    ended = Counter(g.index for t in taken for g in (*t.groups, *t.filtered))
    assert set(ended.values()) == {1} and set(ended) == set(range(len(ended)))
    assert sum(len(t.groups) for t in taken) == num_steps * P
    for step, t in whole.batches.items():
        assert all(0 <= (step - 1) - g.oldest_version <= k for g in t.groups)
    assert set(whole.started.values()) <= {1}
    assert not set(whole.started) & {prompt.index for prompt in killed.saved.held}


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(0, 4),
    new_k=st.integers(0, 4),
    at=st.integers(1, 5),
    max_filtered=st.sampled_from([0, P, 2 * P]),
    new_max_filtered=st.sampled_from([0, P, 2 * P]),
    kinds=st.sampled_from([("differ",), ("differ", "same"), ("differ", "same", "fail"), ("same",)]),
)
def test_a_run_that_stopped_at_any_moment_goes_on_under_any_bound_and_filter(
    seed, k, new_k, at, max_filtered, new_max_filtered, kinds
):
    """Also one whose step had been taken and was not learned from: its prompts come back."""
    num_steps = 6
    stopped = World(random.Random(seed), k, num_steps, max_filtered, kinds)
    stopped.stop_in_step = at
    with pytest.raises(Killed):
        run(stopped)
    del stopped.batches[at]
    resumed = World(
        random.Random(seed + 1), new_k, num_steps, new_max_filtered, kinds, done=at - 1, state=stopped.saved
    )
    run(resumed)
    taken = [t for world in (stopped, resumed) for t in world.batches.values()]
    ended = Counter(g.index for t in taken for g in (*t.groups, *t.filtered))
    assert set(ended.values()) == {1}
    never = set(range(max(ended) + 1)) - set(ended)  # another filter takes fewer of them in all
    assert never <= set(stopped.saved.unfinished)
    assert sum(len(t.groups) for t in taken) == num_steps * P
    for step, t in resumed.batches.items():
        assert all(0 <= (step - 1) - g.oldest_version <= new_k for g in t.groups)
        assert len(t.filtered) <= new_max_filtered
    if (k, max_filtered) == (new_k, new_max_filtered) and not max_filtered:  # all of them have a place
        assert not set(resumed.started) & {prompt.index for prompt in stopped.saved.held}


def test_a_finished_group_that_is_too_old_for_a_smaller_bound_is_generated_again():
    async def main():
        started = []

        async def generate(index, version):
            started.append(index)
            return group(index, version, "differ")

        held = [Finished(7, 2, group(7, 2, "differ")), Finished(8, 1, group(8, 1, "differ"))]
        state = BufferState(9, [7, 8], held)
        pace = Pace(3, 5, max_offpolicy_steps=1)
        buffer = RolloutBuffer(generate, pace, keep=lambda g: True, num_steps_done=3, state=state)
        async with beside(buffer.follow(lambda: 3, Signal())):
            taken = await asyncio.wait_for(buffer.take(3), 1)
        assert [g.index for g in taken.groups] == [7, 8, 9] and started[:2] == [8, 9]

    asyncio.run(main())


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kinds=st.sampled_from(
        [("differ",), ("differ", "same", "fail"), ("differ", "same", "same", "fail", "fail")]
    ),
)
def test_with_bound_0_the_result_is_that_of_the_serial_loop(seed, kinds):
    """One prompt after the other, each step's until P have a signal or the filter's bound is reached.

    Then the first of those without a signal take the places that are left.
    """
    steps, bound = 5, 2 * P
    serial, index = {}, 0
    for step in range(1, steps + 1):
        kept, others = [], []
        while len(kept) < P and len(kept) + len(others) < P + bound:
            has_signal = World.kind(SimpleNamespace(kinds=kinds), index) == "differ"
            (kept if has_signal else others).append(index)
            index += 1
        missing = P - len(kept)
        serial[step] = sorted(kept + others[:missing]), others[missing:]
    world = run(World(random.Random(seed), 0, steps, bound, kinds))
    for step, taken in world.batches.items():
        assert ([g.index for g in taken.groups], [g.index for g in taken.filtered]) == serial[step]
        assert {g.oldest_version for g in taken.groups} == {step - 1}


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_with_bound_0_parts_of_a_batch_follow_the_order_of_prompts(seed):
    world = run(World(random.Random(seed), 0, 4, part=1))
    assert world.indices() == {step: [3 * step - 3, 3 * step - 2, 3 * step - 1] for step in range(1, 5)}


def test_a_slow_group_holds_back_no_other_until_it_is_due():
    async def main():
        served, changed, release = [0], Signal(), asyncio.Event()

        async def generate(index, version):
            if index == 0:
                await release.wait()
            return group(index, served[0], "differ")

        buffer = RolloutBuffer(generate, Pace(2, 10, max_offpolicy_steps=2), keep=lambda g: True)
        async with beside(buffer.follow(lambda: served[0], changed)):
            took = []
            for version in (0, 1):
                took.append([g.index for g in (await asyncio.wait_for(buffer.take(version), 1)).groups])
                served[0] = version + 1
                changed.notify()
                await asyncio.sleep(0.01)
            assert took == [[1, 2], [3, 4]]
            third = asyncio.create_task(buffer.take(2))  # prompt 0 began at version 0: this is its last step
            await asyncio.sleep(0.01)
            assert not third.done() and buffer.state.unfinished[0] == 0
            release.set()
            assert [g.index for g in (await asyncio.wait_for(third, 1)).groups] == [0, 5]

    asyncio.run(main())


def test_prompts_that_had_not_ended_at_a_checkpoint_are_started_again_first():
    async def main():
        started = []

        async def generate(index, version):
            started.append(index)
            return group(index, 0, "differ")

        state = BufferState(12, [7, 10])
        buffer = RolloutBuffer(generate, Pace(3, 5), keep=lambda g: True, num_steps_done=3, state=state)
        async with beside(buffer.follow(lambda: 3, Signal())):
            taken = await asyncio.wait_for(buffer.take(3), 1)
        assert started[:3] == [7, 10, 12] == [g.index for g in taken.groups]
        assert buffer.state == BufferState(13, [])
        before = buffer.state_before_step
        assert before.unfinished == [7, 10, 12] == [prompt.index for prompt in before.held]

    asyncio.run(main())


def held_buffer(pace, held, **options):
    """A buffer with groups that were finished before, as a checkpoint holds them; nothing new is generated."""

    async def generate(index, version):
        await asyncio.Event().wait()

    finished = [Finished(index, begun, group(index, begun, kind)) for index, begun, kind in held]
    state = BufferState(20, [prompt.index for prompt in finished], finished)
    return RolloutBuffer(generate, pace, keep=lambda g: g.has_signal, state=state, **options)


def test_a_batch_is_in_the_order_of_prompts_whenever_they_began():
    """Prompt 3 was started again, later than 5."""

    async def main():
        buffer = held_buffer(Pace(2, 9, 1), [(5, 0, "differ"), (3, 1, "differ")], num_steps_done=1)
        return [g.index for g in (await asyncio.wait_for(buffer.take(1), 1)).groups]

    assert asyncio.run(main()) == [3, 5]


def test_what_was_filtered_is_in_the_order_of_prompts_too():
    async def main():
        held = [(1, 1, "differ"), (0, 0, "same"), (2, 1, "same")]
        buffer = held_buffer(Pace(1, 9, 1, 2), held, num_steps_done=1)
        taken = await asyncio.wait_for(buffer.take(1), 1)
        assert buffer.ends == {"filtered": 2, "trained on": 1}
        return [g.index for g in taken.groups], [g.index for g in taken.filtered]

    assert asyncio.run(main()) == ([1], [0, 2])


def test_a_step_that_is_taken_again_is_the_last_one_alone():
    async def main():
        served = [0]
        changed = Signal()

        async def generate(index, version):
            return group(index, version, "differ")

        buffer = RolloutBuffer(generate, Pace(2, 5), keep=lambda g: True)
        async with beside(buffer.follow(lambda: served[0], changed)):
            for version in range(3):
                parts = [await asyncio.wait_for(buffer.take(version, 1), 1) for _ in range(2)]
                of_step = [2 * version, 2 * version + 1]
                before = buffer.state_before_step
                assert [g.index for part in parts for g in part.groups] == of_step
                assert before.unfinished == [p.index for p in before.held] == of_step
                assert not buffer.state.unfinished
                assert buffer.coming == range(2 * version + 2, 2 * version + 4)
                served[0] = version + 1
                changed.notify()
                await asyncio.sleep(0.01)
        assert not buffer._tasks  # of prompts that have ended

    asyncio.run(main())


def test_more_steps_ahead_are_started_with_a_larger_bound_and_none_past_the_end():
    async def started(k, num_steps):
        seen = []

        async def generate(index, version):
            seen.append(index)
            await asyncio.Event().wait()

        buffer = RolloutBuffer(generate, Pace(P, num_steps, k), keep=lambda g: True)
        async with beside(buffer.follow(lambda: 0, Signal())):
            await asyncio.sleep(0.01)
        buffer.close()
        return len(seen)

    counts = [asyncio.run(started(k, 3)) for k in range(5)]
    assert counts == [P, 2 * P, 3 * P, 3 * P, 3 * P]


def test_of_the_groups_that_were_held_those_with_a_signal_are_trained_on_and_the_others_filtered():
    async def main():
        async def generate(index, version):
            return group(index, version, "differ")

        held = [Finished(7, 2, group(7, 2, "differ")), Finished(8, 2, group(8, 2, "same"))]
        pace = Pace(2, 5, max_offpolicy_steps=1, max_filtered_per_step=2)
        state = BufferState(9, [7, 8], held)
        buffer = RolloutBuffer(generate, pace, keep=lambda g: g.has_signal, num_steps_done=3, state=state)
        async with beside(buffer.follow(lambda: 3, Signal())):
            taken = await asyncio.wait_for(buffer.take(3), 1)
        assert ([g.index for g in taken.groups], [g.index for g in taken.filtered]) == ([7, 9], [8])

    asyncio.run(main())


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_prompt_that_its_environment_cancels_ends_the_run_unless_it_ends_anyway(is_closed):
    async def main():
        async def generate(index, version):
            if not is_closed:
                raise asyncio.CancelledError
            await asyncio.Event().wait()

        buffer = RolloutBuffer(generate, Pace(2, 3), keep=lambda g: True)
        async with beside(buffer.follow(lambda: 0, Signal())):
            taking = asyncio.create_task(buffer.take(0))
            await asyncio.sleep(0.01)
            if is_closed:
                buffer.close()
                await asyncio.sleep(0.01)
                assert not taking.done() and taking.cancel()
            else:
                with pytest.raises(RunError, match="prompt 0 was cancelled before its end; its environment"):
                    await asyncio.wait_for(taking, 1)

    asyncio.run(main())


def test_a_failure_of_the_processes_reaches_who_waits_for_the_batch():
    async def main():
        async def generate(index, version):
            raise RunError("every generator has died for good")

        buffer = RolloutBuffer(generate, Pace(2, 3), keep=lambda g: True)
        async with beside(buffer.follow(lambda: 0, Signal())):
            with pytest.raises(RunError, match="every generator has died for good"):
                await asyncio.wait_for(buffer.take(0), 1)

    asyncio.run(main())


def test_a_filter_that_raises_ends_the_run():
    """So does whatever comes after a group was generated: whoever takes the batch hears of it."""

    async def main():
        async def generate(index, version):
            return group(index, version, "differ")

        buffer = RolloutBuffer(generate, Pace(P, 3, 0, 0), keep=lambda g: g.scores < 3, num_steps_done=0)
        changed = Signal()
        async with beside(buffer.follow(lambda: 0, changed)):
            with pytest.raises(TypeError, match="not supported"):
                await buffer.take(0, P)

    run_virtually(main())


def test_a_checkpoint_has_the_prompts_in_their_order_and_what_may_be_trained_on_again():
    """Not those whose rewards all failed: who resumes may have mended that."""

    async def main():
        async def generate(index, version):
            if index == 1:
                await asyncio.Event().wait()
            return group(index, version, "half" if index == 0 else "fail")

        buffer = RolloutBuffer(generate, Pace(3, 5), keep=lambda g: True)
        async with beside(buffer.follow(lambda: 0, Signal())):
            await asyncio.sleep(0.01)
            assert buffer.metrics == {"buffer/running": 1, "buffer/finished": 2}
            state = buffer.state
            buffer.close()
        return state

    state = asyncio.run(main())
    assert (state.next, state.unfinished) == (3, [0, 1, 2])
    assert [prompt.index for prompt in state.held] == [0]
