"""What every wait is made of: a deadline of its own kind, and a signal that wakes who waits for a change."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from rl.bounds import PositiveFloat

T = TypeVar("T")


@dataclass(frozen=True)
class Deadlines:
    """Longest time, in seconds, that each kind of wait may take. Past it the run says who did not answer, and
    what to do. Trainer, critic and reference are started again where they have met the deadline before."""

    start: PositiveFloat = 300.0
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


async def in_thread(function: Callable[[], T]) -> T:
    """What the function returns or raises, computed beside the event loop. A cancelled caller does not wait.

    The result does not pass through the futures: those are chained in a cycle, which would keep it until the
    next garbage collection.
    """
    results: list[T] = []
    await asyncio.to_thread(lambda: results.append(function()))
    return results.pop()


async def together(parts: Iterable[Coroutine]) -> None:
    """Run them all. If one fails, the others are cancelled and have ended when its error is raised."""
    async with beside(*parts, until_done=True):
        pass


@asynccontextmanager
async def beside(*coroutines: Coroutine, until_done: bool = False) -> AsyncIterator[None]:
    """Run them beside the body of the context. If one fails, the body is cancelled and its error raised.

    At its end they are cancelled, or waited for (`until_done`).
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in coroutines]
            yield
            for task in running if not until_done else ():
                task.cancel()
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
