"""What every wait is made of: a deadline of its own kind, and a signal that wakes who waits for a change."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from rl.bounds import AtLeastOne, PositiveFloat

T = TypeVar("T")
_TICK_SECONDS = 0.05
_LAST_LOOK_SECONDS = 0.1  # for an answer that came while the loop was blocked to be handed on
_SHORTEST_SECONDS = 0.001
_LAST_LOOK_TURNS = 8  # of the loop, which hand it from task to task


@dataclass(frozen=True)
class Deadlines:
    """Longest time, in seconds, that each kind of wait may take. Past it the run says who did not answer, and
    what to do. Trainer, critic and reference are started again where they have met the deadline before."""

    start: AtLeastOne = 300.0
    """A process, from its spawning until its engine is built."""
    load: PositiveFloat = 600.0
    """A version of the weights, into a generator."""
    progress: PositiveFloat = 120.0
    """A generator with requests, from one decoding step to the next. A long sample is not cut off."""
    train: PositiveFloat = 1800.0
    """One forward, forward_backward or optim_step."""
    sync: PositiveFloat = 600.0
    """The trainer, to publish its weights; and a slow reader, to make room for them."""
    checkpoint: PositiveFloat = 1800.0
    """A checkpoint or an export, to be written or loaded."""


class Signal:
    """Wakes all who wait whenever something they may wait for has changed. For one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Until the next `notify`."""
        await self._event.wait()

    async def wait_for(self, holds: Callable[[], bool]) -> None:
        """Returns once `holds()`; it is asked again after each `notify`."""
        while not holds():
            await self.wait()


def give_way_often() -> None:
    """A thread of this process lets its event loop go on after 1 ms, not 5: several of them add up."""
    sys.setswitchinterval(0.001)


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """What the function returns or raises, computed beside the event loop. A cancelled caller does not wait.

    The result does not pass through the futures: those are chained in a cycle, which would keep it until the
    next garbage collection. Nor does StopIteration, as of `next()` on an empty iterator: a future that is
    given it never ends. It is a RuntimeError, as where a coroutine raises it.
    """
    results: list[T] = []

    def run() -> None:
        try:
            results.append(function(*arguments))
        except StopIteration as error:
            raise RuntimeError("a function raised StopIteration") from error

    await asyncio.to_thread(run)
    return results.pop()


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """What it returns or raises, from an event loop in a thread of its own: the caller may have a loop.

    A thread of the coroutine's own, as the look-up of a host's name, is not waited for: it may take a minute.
    """

    def run() -> T:
        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(_NotWaitedFor())
            return runner.run(coroutine)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


class _NotWaitedFor(ThreadPoolExecutor):
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


async def finish_all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Their results, once each has ended. Raises the error of the first that failed, by their order.

    So nothing is still running in an engine that is started again because of the error.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(list[T], results)


def num_interrupts() -> int:
    """How often the running task has been asked to end by others than its own parts."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def together(parts: Iterable[Coroutine]) -> None:
    """Run them all. If one fails, the others are cancelled and have ended when its error is raised."""
    async with beside(*parts, until_done=True):
        pass


async def results_of(parts: Iterable[Coroutine]) -> list[Any]:
    """What each of them returns, in their order; else as `together`."""
    coroutines = list(parts)
    results: list[Any] = [None] * len(coroutines)

    async def keep(index: int) -> None:
        results[index] = await coroutines[index]

    try:
        await together(map(keep, range(len(coroutines))))
    finally:
        for coroutine in coroutines:
            coroutine.close()  # one that was cancelled before it began would warn
    return results


@asynccontextmanager
async def beside(*coroutines: Coroutine, until_done: bool = False) -> AsyncIterator[None]:
    """Run them beside the body of the context. If one fails, the body is cancelled and its error raised.

    At its end they are cancelled, or waited for (`until_done`). An interrupt that meets a failure stays one.
    """
    interrupts = num_interrupts()
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in coroutines]
            yield
            for task in running if not until_done else ():
                task.cancel()
            if running:  # here, not in the group's end: that leaves the task counted as cancelled before 3.13
                await asyncio.wait(running)
    except BaseExceptionGroup as group:
        if num_interrupts() > interrupts:
            with suppress(asyncio.CancelledError):  # from 3.13 on the group has its task cancelled once more
                await asyncio.sleep(0)
            raise asyncio.CancelledError from group
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


@asynccontextmanager
async def within(seconds: float | None) -> AsyncIterator[None]:
    """A deadline for the body, which is cancelled past it; then this raises TimeoutError. None: no deadline.

    It counts the time in which the event loop ran: while a callback blocks the loop, nobody can see an
    answer. An answer that has arrived by the end wins, also where the loop was blocked past the end.
    """
    if seconds is None:
        yield
        return
    loop, interrupts, is_past = asyncio.get_running_loop(), num_interrupts(), False
    try:
        async with asyncio.timeout(None) as timeout:

            def end() -> None:
                nonlocal is_past
                is_past = True
                timeout.reschedule(loop.time())

            deadline = _Deadline(seconds, end)
            try:
                yield
            finally:
                deadline.cancel()
    except asyncio.CancelledError as error:
        # Python up to 3.11.2 takes the deadline of a task that was interrupted before for another interrupt.
        if is_past and num_interrupts() == interrupts:
            raise TimeoutError from error
        raise


def loop_seconds() -> float:
    """A clock of the running event loop that stands still, but for a tick, while a callback blocks the loop.

    It runs from the first call on.
    """
    loop = asyncio.get_running_loop()
    if loop not in _clocks:
        _clocks[loop] = _LoopClock()
    return _clocks[loop].time()


class _LoopClock:
    """See `loop_seconds`. It refers to no loop, which would keep its own entry in `_clocks` alive."""

    def __init__(self) -> None:
        self._stood_still = 0.0
        self._due = 0.0  # when the next tick is due; it comes late where the loop is blocked
        self._schedule()

    def time(self) -> float:
        now = asyncio.get_running_loop().time()
        return now - self._stood_still - max(0.0, now - self._due)

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + _TICK_SECONDS
        loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self._stood_still += max(0.0, asyncio.get_running_loop().time() - self._due)
        self._schedule()


_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopClock] = WeakKeyDictionary()
"""One for each event loop, which is as global."""


class _Deadline:
    """Calls `past` once the loop has run for so long and has had time to hand on what has arrived."""

    def __init__(self, seconds: float, past: Callable[[], None]):
        self._end = loop_seconds() + seconds
        self._past = past
        self._is_last_look = False
        self._turns_left = _LAST_LOOK_TURNS
        self._next: asyncio.Handle = asyncio.get_running_loop().call_later(seconds, self._look)

    def cancel(self) -> None:
        self._next.cancel()

    def _look(self) -> None:
        loop, left = asyncio.get_running_loop(), self._end - loop_seconds()
        if left <= 0 and not self._is_last_look:
            self._is_last_look, self._end, left = (
                True,
                self._end - left + _LAST_LOOK_SECONDS,
                _LAST_LOOK_SECONDS,
            )
        if left > 0:
            self._next = loop.call_later(max(left, _SHORTEST_SECONDS), self._look)
        elif self._turns_left:
            self._turns_left -= 1
            self._next = loop.call_soon(self._look)
        else:
            self._past()
