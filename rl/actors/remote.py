"""Calls to actors: each has a deadline, and its error says who did not answer and what to do."""

import asyncio
import re
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from rl.actors.out_of_memory import MemoryWatch
from rl.errors import ConfigError, RunError
from rl.processes import ProcessInfo, is_gone
from rl.waiting import loop_seconds, within

T = TypeVar("T")
_PATIENCE_SECONDS = 5.0
_SILENCE_SECONDS = 2.5  # after a death on this host; Monarch tells of nearly all of them in less
_LOOK_SECONDS = 1.0
_MAX_ALIKE = 3
_NOT_SPAWNED = "error spawning"  # so begins what Monarch raises where a process ends before it has an actor
_OWN_ERROR = re.compile(r"rl\.errors\.(?:ConfigError|RunError): (.*)")


class ProcessDied(RunError):
    """A process of a mesh is gone, or has stopped to answer."""


async def quietly(call: Awaitable[None]) -> None:
    """A process that does not answer is its watch's to notice."""
    with suppress(RunError):
        await call


class ProcessSilent(ProcessDied):
    """It did not answer within its deadline."""


class EngineDied(ProcessDied):
    """One of the trainer's, the critic's or the reference's: what has been learned since the last checkpoint
    is lost."""


class EarlyDeaths:
    """Deaths of what has not worked yet. Where they are alike, another start would end like them."""

    def __init__(self) -> None:
        self._cause = ""
        self._count = 0  # in a row, of this cause

    def count(self, death: ProcessDied) -> None:
        """Raises RunError where it died so a few times. Process numbers and sizes make no other cause."""
        cause = re.sub(r"\d+", "", str(death))
        self._count = self._count + 1 if cause == self._cause else 1
        self._cause = cause
        if self._count == _MAX_ALIKE:
            raise RunError(f"{death}; it died so {self._count} times before it ever worked") from death


@dataclass(frozen=True)
class Deadline:
    """A wait's longest time, and which setting that is: one of `waiting.Deadlines`, or with its section."""

    kind: str
    seconds: float | None  # None: something else watches over this wait

    @property
    def remedy(self) -> str:
        return f"raise --{self.kind if '.' in self.kind else f'deadlines.{self.kind}'}"


class _RankDied(Exception):
    """Which rank a SupervisionError is about."""

    def __init__(self, rank: int, cause: SupervisionError):
        super().__init__(rank)
        self.rank = rank
        self.cause = cause


async def only(answer: Awaitable[Any]) -> Any:
    """What `.call(...)` returned on a mesh of one process.

    Monarch 0.7.0 never frees 0.8 KiB of each `.call_one`, and 0.1 to 0.5 KiB of each `.call`.
    """
    return next(iter((await answer).values()))


class Caller:
    """Makes the calls to one mesh, and knows for errors where its processes are and what they did last."""

    def __init__(self, name: str, logs: str = "logs/"):
        self.name = name
        self.processes: tuple[ProcessInfo, ...] = ()  # once they have answered for the first time
        self.is_stuck = False  # a rank did not answer after another had failed, or in time
        self._last = "start"
        self._memory = MemoryWatch(name)
        self._logs = logs

    async def call(
        self, answer: Awaitable[T], verb: str, deadline: Deadline, past: type[RunError] = RunError
    ) -> T:
        """Await what an endpoint's `.call(...)` returned.

        Raises the endpoint's own RunError or ConfigError, RunError for any other failure in it, ProcessDied
        where its process ended, and `past` when the deadline is over.
        """
        try:
            async with within(deadline.seconds):
                result = await answer
        except TimeoutError:
            raise past(
                f"{self.name} did not finish {verb} within {deadline.seconds:.0f} s ({self._who()}; the last "
                f"it finished was {self._last}); see {self._logs}, or {deadline.remedy}"
            ) from None
        except SupervisionError as error:
            raise self._died(self.name, self._who(), verb, error) from error
        except ActorError as error:
            if isinstance(error.exception, RunError | ConfigError):
                raise error.exception from error
            raise RunError(f"{self.name}.{verb} failed: {error.exception!r}; see {self._logs}") from error
        except (RunError, asyncio.CancelledError, _RankDied):
            raise
        except Exception as error:  # such as an exception that does not survive pickling
            if str(error).startswith(_NOT_SPAWNED):
                cause = str(error).splitlines()[0]  # a backtrace of Rust's follows
                raise ProcessDied(
                    f"the processes of {self.name} did not all start ({cause}){self._memory_words()}; see "
                    f"{self._logs}"
                ) from error
            raise RunError(f"{self.name}.{verb} failed: {error!r}; see {self._logs}") from error
        self._last = verb
        if not self._may_be_elsewhere:
            self._memory.look(process.pid for process in self.processes)
        return result

    async def call_ranks(
        self,
        answers: Sequence[Awaitable[Any]],
        verb: str,
        deadline: Deadline,
        past: type[RunError] = RunError,
    ) -> list[Any]:
        """Await what `.call(...)` returned on each rank's slice.

        As `call`; where a rank died, that is what is raised. The others' collectives fail at once, and
        Monarch notices the death a second later: hence the patience.
        """

        async def named(rank: int, answer: Awaitable[Any]) -> Any:
            try:
                return await only(answer)
            except SupervisionError as error:
                raise _RankDied(rank, error) from error

        num_waiting = 0

        async def all_of_them() -> list[Any]:
            nonlocal num_waiting
            tasks = [asyncio.ensure_future(named(rank, answer)) for rank, answer in enumerate(answers)]
            try:
                _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                if pending:
                    with suppress(TimeoutError):
                        async with within(_PATIENCE_SECONDS):
                            await asyncio.wait(pending)
                errors = [error for task in tasks if task.done() and (error := task.exception())]
                for error in sorted(errors, key=lambda error: not isinstance(error, _RankDied)):
                    raise error
                return [task.result() for task in tasks]
            finally:
                num_waiting = sum(not task.done() for task in tasks)
                for task in tasks:
                    task.cancel()

        try:
            return await self.call(all_of_them(), verb, deadline, past)
        except RunError:
            self.is_stuck = num_waiting > 0
            raise
        except _RankDied as death:
            rank = f"{self.name} rank {death.rank}" if len(answers) > 1 else self.name
            where = self._where(self.processes[death.rank : death.rank + 1])
            raise self._died(rank, where, verb, death.cause) from death.cause

    async def until_gone(self, verb: str) -> None:
        """Raises ProcessDied once a process is gone. Never returns.

        Monarch takes a minute to notice that a host is lost; whoever has it by a lease knows sooner. Of a
        death on this host Monarch says more, within two seconds, and sometimes never anything.
        """
        complete = loop_seconds()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            gone = [process for process in self.processes if is_gone(process)]
            complete = complete if gone else loop_seconds()
            is_late = loop_seconds() - complete > _SILENCE_SECONDS
            for process in gone:
                if process.lease or is_late:
                    raise ProcessDied(self.death(self.name, verb, process.place))

    def _died(self, process_name: str, where: str, verb: str, error: SupervisionError) -> RunError:
        if failed := _OWN_ERROR.search(str(error)):  # what an actor's constructor raises arrives as text
            return RunError(failed[1])
        return ProcessDied(self.death(process_name, verb, f"{where}: {_last_line(error)}"))

    def death(self, process_name: str, verb: str, where: str) -> str:
        """What is known of it, and what to do."""
        return (
            f"the process of {process_name} died in {verb} ({where}){self._memory_words()}; see {self._logs}"
        )

    @property
    def _may_be_elsewhere(self) -> bool:
        """Whether they are on a leased host, whose memory nobody here knows."""
        return any(process.lease for process in self.processes)

    def _memory_words(self) -> str:
        why = "" if self._may_be_elsewhere else self._memory.why_died()
        return f"; {why}" if why else ""

    def _who(self) -> str:
        return self._where(self.processes)

    def _where(self, processes: Sequence[ProcessInfo]) -> str:
        return ", ".join(process.place for process in processes) or "it has not answered yet"


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
