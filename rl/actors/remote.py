"""Calls to actors: each has a deadline, and fails with an error that says who did not answer and what to do."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from rl.errors import ConfigError, RunError

T = TypeVar("T")
_OWN_ERROR = re.compile(r"rl\.errors\.(?:ConfigError|RunError): (.*)")
_log = logging.getLogger(__name__)


class ProcessDied(RunError):
    """A process of a mesh is gone."""


async def call(answer: Awaitable[T], what: str, deadline_seconds: float) -> T:
    """Await what an endpoint's `.call(...)` returned.

    Raises the endpoint's own RunError or ConfigError, RunError for any other failure in it, ProcessDied where its process
    ended, and RunError when `deadline_seconds` are over.
    """

    async def wait() -> T:
        return await answer

    try:
        return await asyncio.wait_for(wait(), deadline_seconds)
    except TimeoutError:
        raise RunError(
            f"{what} did not answer within {deadline_seconds:.0f} s; see the process's log, or raise --launch.deadline_seconds"
        ) from None
    except SupervisionError as error:
        if failed := _OWN_ERROR.search(str(error)):  # what an actor's constructor raises arrives as text
            raise RunError(failed[1]) from error
        raise ProcessDied(f"the process of {what} died ({_last_line(error)}); see its log under the run's logs/") from error
    except ActorError as error:
        if isinstance(error.exception, RunError | ConfigError):
            raise error.exception from error
        raise RunError(f"{what} failed: {error.exception!r}; see its log under the run's logs/") from error
    except RunError:
        raise
    except Exception as error:  # such as an exception that does not survive pickling
        raise RunError(f"{what} failed: {error!r}; see its log under the run's logs/") from error


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


class Replicas:
    """Interchangeable actors: each call goes to the one with the least work, and past one whose process has died."""

    def __init__(self, name: str, members: Sequence[Any], deadline_seconds: float, max_in_flight: int = 1_000_000):
        """max_in_flight: calls a member gets at a time; the deadline of one that has to wait starts when its turn comes."""
        self._turns = asyncio.Semaphore(max_in_flight * len(members))
        self._name = name
        self._load = dict(enumerate([0] * len(members)))  # index of each live member -> work in flight
        self._members = members
        self._deadline = deadline_seconds

    async def call(self, invoke: Callable[[Any], Awaitable[T]], load: int = 1) -> T:
        """invoke(member) starts the call. The work must be repeatable: it is given to another member when one dies."""
        async with self._turns:
            return await self._call(invoke, load)

    async def _call(self, invoke: Callable[[Any], Awaitable[T]], load: int) -> T:
        while self._load:
            index = min(self._load, key=self._load.__getitem__)
            self._load[index] += load
            try:
                return await self._ask(index, invoke)
            except ProcessDied as death:
                self._drop(index, death)
            finally:
                if index in self._load:
                    self._load[index] -= load
        raise ProcessDied(f"every {self._name} process has died; see their logs under the run's logs/")

    async def call_all(self, invoke: Callable[[Any], Awaitable[T]]) -> list[T]:
        """Call every live member; one that dies is left out from then on."""

        async def one(index: int) -> T | None:
            try:
                return await self._ask(index, invoke)
            except ProcessDied as death:
                self._drop(index, death)
                return None

        answers = await asyncio.gather(*(one(index) for index in list(self._load)))
        return [answer for answer in answers if answer is not None]

    async def ready(self) -> None:
        """Wait until every member answers. Raises where one cannot start."""
        await asyncio.gather(*(self._ask(index, lambda member: member.ready.call_one()) for index in self._load))

    async def _ask(self, index: int, invoke: Callable[[Any], Awaitable[T]]) -> T:
        return await call(invoke(self._members[index]), f"{self._name} {index}", self._deadline)

    def _drop(self, index: int, death: ProcessDied) -> None:
        """Go on without a member. Raises its death where it was the last."""
        if self._load.pop(index, None) is not None:
            _log.warning("%s; %d %s processes left, which take over its work", death, len(self._load), self._name)
        if not self._load:
            raise death

    @property
    def num_alive(self) -> int:
        return len(self._load)
