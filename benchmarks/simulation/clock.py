"""The simulation's clock: it jumps over waits, and runs while the controller computes."""

import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from tests.virtual_time import VirtualLoop

P, R = ParamSpec("P"), TypeVar("R")


class SimulatedLoop(VirtualLoop):
    """Its time is what was waited for, and the CPU time of this process but for the simulation's own work.

    So a controller that has more to do than one core can makes the run longer, and its event loop lags, as it would.
    The controller's threads count as if they had the loop's core.
    """

    def __init__(self, speed: float = 1.0):
        """speed: of the controller's core, as a multiple of this one. 0: computing takes no time, and a seed
        decides everything."""
        super().__init__()
        self._speed, self._spared = speed, time.process_time()
        self._depth = 0
        self.charged = 0.0  # seconds of work that is not done here, but would be

    def time(self) -> float:
        return self._clock.now + self.busy

    @property
    def busy(self) -> float:
        """Seconds for which the controller's core has worked."""
        computed = (time.process_time() - self._spared) / self._speed if self._speed else 0.0
        return computed + self.charged

    def charge(self, seconds: float) -> None:
        """The controller's core does this now: so many seconds of this machine's."""
        self.charged += seconds / self._speed if self._speed else 0.0

    @contextmanager
    def spare(self) -> Iterator[None]:
        """What is computed within is the simulation's own work."""
        began, self._depth = time.process_time(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._spared += time.process_time() - began


class Spared:
    """Awaited, it runs a coroutine whose own steps are the simulation's work. What it awaits is the controller's."""

    def __init__(self, loop: SimulatedLoop, coroutine: Coroutine[Any, Any, Any]):
        self._loop, self._coroutine = loop, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        step, argument = self._coroutine.send, None
        while True:
            with self._loop.spare():
                try:
                    future = step(argument)
                except StopIteration as end:
                    return end.value
            try:
                yield future
            except BaseException as error:
                step, argument = self._coroutine.throw, error
            else:
                step, argument = self._coroutine.send, None


def spared(function: Callable[P, R]) -> Callable[P, R]:
    """A method of an object with a `loop`: the simulation's own work."""

    @wraps(function)
    def without_time(*arguments: P.args, **named: P.kwargs) -> R:
        loop: Any = arguments[0].loop
        with loop.spare():
            return function(*arguments, **named)

    return without_time
