"""An event loop whose clock jumps to the next timer, and which fails where everything waits for ever."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class EverythingWaits(AssertionError):
    """No task can go on, no timer is set, and no thread is at work."""


class _Clock(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_threads = 0  # at work: their answers come by the loop's own pipe

    def select(self, timeout: float | None = None) -> list:
        if self.num_threads and timeout != 0:
            return super().select(None)
        if timeout is None:
            raise EverythingWaits("every task waits, and nothing is there to wake one")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Hours pass in milliseconds. The clock stands still while a thread is at work."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, *arguments: Any) -> asyncio.Future:
        future = super().run_in_executor(*arguments)
        self._clock.num_threads += 1
        future.add_done_callback(self._returned)
        return future

    async def shutdown_default_executor(self, *timeout: Any) -> None:
        self._clock.num_threads += 1  # it joins them in one of its own
        await super().shutdown_default_executor(*timeout)

    def _returned(self, _: asyncio.Future) -> None:
        self._clock.num_threads -= 1


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    """As asyncio.run. Raises EverythingWaits in place of a hang."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
