"""`within`: a deadline that counts the time in which the event loop ran, on a loop whose time is made up."""

# holds: exact, seconds of a clock that is made up

import ast
import asyncio
import contextlib
import selectors
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from rl.actors.remote import Caller, Deadline, ProcessDied
from rl.errors import RunError
from rl.waiting import beside, finish_all, in_thread, together, within

ROOT = Path(__file__).parent.parent
SLACK_SECONDS = 0.5  # for a last look, also in pieces
TICK_SECONDS = 0.05  # of each block at most this much is counted
ROUNDING = 1e-9


class Clock(selectors.DefaultSelector):
    """Where nothing is to be done, the time of the next timer comes at once."""

    now = 0.0

    def select(self, timeout=None):
        events = super().select(0)
        assert self.now < 10_000, "nothing is left that could end this"
        if not events:
            self.now += timeout
        return events


class Loop(asyncio.SelectorEventLoop):
    def __init__(self):
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self):
        return self.clock.now

    def block(self, seconds):
        """As a callback that computes for so long."""
        self.clock.now += seconds


def run(main):
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)


async def nested(future, depth):
    """An answer that goes from task to task."""
    if not depth:
        return await future
    return await asyncio.ensure_future(nested(future, depth - 1))


@settings(max_examples=200, deadline=None)
@given(
    seconds=st.floats(0.2, 20),
    blocks=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 30)), max_size=6),
    answer=st.one_of(st.none(), st.floats(0, 60)),
    depth=st.integers(0, 3),
)
def test_a_deadline_counts_the_time_in_which_the_loop_ran(seconds, blocks, answer, depth):
    """blocks: (pause before it, its length), from the start on. answer: when it arrives, blocked or not."""

    async def main():
        loop = asyncio.get_running_loop()
        future, stood_still = loop.create_future(), 0.0

        async def block():
            nonlocal stood_still
            for pause, length in blocks:
                await asyncio.sleep(pause)
                loop.block(length)
                stood_still += length

        blocking = asyncio.create_task(block())
        if answer is not None:
            loop.call_at(answer, lambda: future.done() or future.set_result("answer"))
        try:
            async with within(seconds):
                result = await nested(future, depth)
        except TimeoutError:
            result = None
        ran, total = loop.time() - stood_still, loop.time()
        blocking.cancel()
        return result, ran, total

    result, ran, total = run(main())
    if result is None:
        assert seconds - TICK_SECONDS * len(blocks) - ROUNDING <= ran <= seconds + SLACK_SECONDS
        assert answer is None or answer > seconds
    else:
        assert answer <= total + ROUNDING


@pytest.mark.parametrize("length", [0.01, 0.3, 5.0, 500.0])
@pytest.mark.parametrize("begins", [0.0, 0.5, 0.99, 1.0, 1.05])
@pytest.mark.parametrize("depth", range(4))
def test_what_arrives_while_the_loop_is_blocked_wins(length, begins, depth):
    """Whenever the block begins, up to the last look; the answer is there when it ends."""

    async def main():
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def block():
            loop.block(length)
            loop.call_soon(future.set_result, "answer")  # as what comes from another thread

        loop.call_later(begins, block)
        async with within(1.0):
            return await nested(future, depth)

    assert run(main()) == "answer"


def test_a_block_is_not_counted():
    async def main():
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, loop.block, 100.0)
        async with within(1.0):
            await asyncio.sleep(100.5)
        loop.call_later(0.2, loop.block, 100.0)
        with pytest.raises(TimeoutError):
            async with within(1.0):
                await asyncio.sleep(105.0)
        return loop.time()

    assert 201.5 <= run(main()) <= 201.5 + SLACK_SECONDS


def test_nothing_of_a_deadline_stays_and_without_one_there_is_none():
    async def main():
        loop = asyncio.get_running_loop()
        async with within(None):
            await asyncio.sleep(1000.0)
        async with within(5.0), within(3.0):
            await asyncio.sleep(1.0)
        for error in (ValueError, asyncio.CancelledError, TimeoutError):
            with pytest.raises(error):
                async with within(5.0), within(3.0):
                    await asyncio.sleep(1.0)
                    raise error
        assert round(loop.time()) == 1004
        await asyncio.sleep(0)
        assert len([handle for handle in loop._scheduled if not handle.cancelled()]) == 1  # the next tick
        with pytest.raises(TimeoutError):
            async with within(5.0):
                await asyncio.sleep(1000.0)

    run(main())


def test_who_waited_for_parts_of_which_one_failed_is_not_counted_as_cancelled():
    """An interrupt is known by that count."""

    async def fails(turns):
        for _ in range(turns):
            await asyncio.sleep(0)
        raise RunError("it fails")

    async def main():
        for turns in range(4):
            for parts in ([fails(turns)], [fails(turns), asyncio.sleep(9)], [fails(turns), fails(1)]):
                with pytest.raises(RunError):
                    await together(parts)
                assert not asyncio.current_task().cancelling()
            for body in (0, 9):
                with contextlib.suppress(RunError):
                    async with beside(fails(turns)):
                        await asyncio.sleep(body)
                assert not asyncio.current_task().cancelling()

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(1, 7))
def test_an_interrupt_that_meets_a_failure_of_a_part_stays_an_interrupt(turns):
    async def fails():
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise RunError("it fails")

    async def cleans_up(body):
        try:
            await body
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # as a run that is interrupted saves its checkpoint
            cleaned.append(body)
            raise

    async def main():
        for body in (together([fails(), asyncio.sleep(9)]), alone(beside(fails()))):
            task = asyncio.create_task(cleans_up(body))
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.done():  # the failure came first
                task.exception()
                continue
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert cleaned.pop() is body

    cleaned = []

    async def alone(context):
        async with context:
            await asyncio.sleep(9)

    asyncio.run(main())


def test_who_is_cancelled_is_cancelled():
    async def main():
        async def wait():
            async with within(5.0):
                await asyncio.sleep(1000.0)

        task = asyncio.create_task(wait())
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def call(answer, seconds):
    caller = Caller("generator-0")
    return caller.call(answer, "status", Deadline("progress", seconds))


def test_a_call_whose_answer_came_while_the_loop_was_blocked_does_not_fail():
    """In the time of a real clock, from a real thread."""

    async def main():
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def block():
            thread = threading.Thread(target=loop.call_soon_threadsafe, args=(future.set_result, "well"))
            thread.start()
            time.sleep(0.3)
            thread.join()

        loop.call_soon(block)
        return await call(future, 0.05)

    assert asyncio.run(main()) == "well"


def test_a_call_without_an_answer_fails_after_a_block_too():
    async def main():
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, loop.block, 100.0)
        with pytest.raises(RunError, match="generator-0 did not finish status within 2 s"):
            await call(loop.create_future(), 2.0)
        return loop.time()

    assert 102.0 <= run(main()) <= 102.0 + SLACK_SECONDS


def test_a_rank_that_died_is_named_though_the_loop_was_blocked_when_it_was_noticed():
    """The others' collectives fail first; the patience for the death's report does not pass in a block."""

    async def main():
        loop = asyncio.get_running_loop()

        async def other_rank():
            raise OSError("a collective failed")

        async def dead_rank():
            loop.call_soon(loop.block, 60.0)
            await asyncio.sleep(61.0)
            raise SupervisionError("its process is gone")

        with pytest.raises(ProcessDied, match="the process of trainer rank 1 died in step"):
            await Caller("trainer").call_ranks([other_rank(), dead_rank()], "step", Deadline("train", 100.0))
        return loop.time()

    assert run(main()) < 62.0


@pytest.mark.parametrize("answers", ["never", "late"])
def test_who_calls_ranks_knows_whether_one_still_has_not_answered(answers):
    """One raises; another waits for it in a collective, or ends by the same error."""

    async def main():
        async def fails(after):
            await asyncio.sleep(after)
            raise OSError("out of memory")

        caller = Caller("trainer")
        other = asyncio.Event().wait() if answers == "never" else fails(0.5)
        with pytest.raises(RunError, match="out of memory"):
            await caller.call_ranks([fails(0), other], "forward", Deadline("train", 1000.0))
        return caller.is_stuck

    assert run(main()) == (answers == "never")


def test_all_are_finished_before_the_first_error_is_raised():
    ended = []

    async def call(name, seconds, error=None):
        await asyncio.sleep(seconds)
        ended.append(name)
        if error is not None:
            raise error
        return name

    async def main():
        assert await finish_all([call("a", 2), call("b", 1)]) == ["a", "b"]
        ended.clear()
        with pytest.raises(RunError, match="first"):
            await finish_all(
                [call("a", 3), call("b", 2, RunError("first")), call("c", 1, RunError("second"))]
            )
        assert ended == ["c", "b", "a"]

    run(main())


NO_PROCESS = {
    "rl/actors/generator_replica.py",  # the others that load the same version
    "rl/cluster/launch.py",  # past it what is left is killed, answer or not
    "rl/processes.py",
    "rl/envs/judge.py",  # a verdict over HTTP, by the clock
    "rl/observability/writer.py",  # a disk or a server, by the clock
    "rl/tinker/requests.py",  # how long a client waits before it asks again
    "rl/tinker/training.py",  # for a client that may send its next request
    "rl/waiting.py",
}


def test_deadlines_for_processes_are_these():
    uses = set()
    for path in (ROOT / "rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "asyncio.timeout",
                "asyncio.wait_for",
            ):
                uses.add(str(path.relative_to(ROOT)))
            is_wait = isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.wait"
            if is_wait and any(keyword.arg == "timeout" for keyword in node.keywords):
                uses.add(str(path.relative_to(ROOT)))
    assert uses == NO_PROCESS


def test_a_deadline_after_an_interrupt_is_a_deadline(monkeypatch):
    """Up to 3.11.2 Python's own timeout takes it for another interrupt."""

    async def of_3_11_2(self, kind, error, trace):
        if self._timeout_handler is not None:
            self._timeout_handler.cancel()
            self._timeout_handler = None
        if self._state is not asyncio.timeouts._State.EXPIRING:
            self._state = asyncio.timeouts._State.EXITED
            return
        self._state = asyncio.timeouts._State.EXPIRED
        if self._task.uncancel() <= 0 and kind is asyncio.CancelledError:
            raise TimeoutError

    async def interrupted():
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            async with within(0.01):
                await asyncio.Event().wait()
        async with within(5.0):
            await asyncio.sleep(0)

    async def main():
        for owner in (None, of_3_11_2):
            if owner is not None:
                monkeypatch.setattr(asyncio.Timeout, "__aexit__", owner)
            task = asyncio.create_task(interrupted())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            task.result()

    asyncio.run(main())


def test_stop_iteration_in_a_thread_ends_the_wait():
    """As of `next()` on an empty iterator in a user's own function: no future takes it."""

    async def main():
        with pytest.raises(RuntimeError, match="a function raised StopIteration"):
            async with asyncio.timeout(10):
                await in_thread(next, iter([]))
        assert await in_thread(max, 1, 3) == 3

    asyncio.run(main())
