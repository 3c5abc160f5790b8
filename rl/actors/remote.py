"""Calls to actors: each has a deadline, and fails with an error that says who did not answer and what to do."""

import asyncio
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from rl.errors import ConfigError, RunError
from rl.types import ProcessInfo

T = TypeVar("T")
_OWN_ERROR = re.compile(r"rl\.errors\.(?:ConfigError|RunError): (.*)")


class ProcessDied(RunError):
    """A process of a mesh is gone, or has stopped to answer."""


@dataclass(frozen=True)
class Deadline:
    """A kind of wait, as in `waiting.Deadlines`, and its longest time."""

    kind: str
    seconds: float | None  # None: something else watches over this wait

    @property
    def remedy(self) -> str:
        return f"raise --deadlines.{self.kind}"


class Caller:
    """Makes the calls to one mesh, and knows for errors where its processes are and what they did last."""

    def __init__(self, name: str, logs: str = "logs/"):
        self.name = name
        self.processes: tuple[ProcessInfo, ...] = ()  # once they have answered for the first time
        self._last = "start"
        self._logs = logs

    async def call(
        self, answer: Awaitable[T], verb: str, deadline: Deadline, past: type[RunError] = RunError
    ) -> T:
        """Await what an endpoint's `.call(...)` returned.

        Raises the endpoint's own RunError or ConfigError, RunError for any other failure in it, ProcessDied where
        its process ended, and `past` when the deadline is over.
        """
        try:
            async with asyncio.timeout(deadline.seconds):
                result = await answer
        except TimeoutError:
            raise past(
                f"{self.name} did not finish {verb} within {deadline.seconds:.0f} s ({self._who()}; the last it finished "
                f"was {self._last}); see {self._logs}, or {deadline.remedy}"
            ) from None
        except SupervisionError as error:
            if failed := _OWN_ERROR.search(str(error)):  # what an actor's constructor raises arrives as text
                raise RunError(failed[1]) from error
            raise ProcessDied(
                f"the process of {self.name} died in {verb} ({self._who()}: {_last_line(error)}); see {self._logs}"
            ) from error
        except ActorError as error:
            if isinstance(error.exception, RunError | ConfigError):
                raise error.exception from error
            raise RunError(f"{self.name}.{verb} failed: {error.exception!r}; see {self._logs}") from error
        except (RunError, asyncio.CancelledError):
            raise
        except Exception as error:  # such as an exception that does not survive pickling
            raise RunError(f"{self.name}.{verb} failed: {error!r}; see {self._logs}") from error
        self._last = verb
        return result

    def _who(self) -> str:
        """Where its processes are."""
        return ", ".join(f"pid {p.pid} on {p.host}" for p in self.processes) or "it has not answered yet"


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
