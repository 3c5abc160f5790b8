"""Births: the processes of a mesh from the fork on. Monarch watches over them once they have an actor."""

import asyncio
import os
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from itertools import count
from typing import TypeVar

import psutil

from rl.actors.remote import Caller, ProcessDied
from rl.host_protocol import own_host
from rl.observability.timeline import Timeline
from rl.processes import OTHER_HOSTS, ProcessInfo, is_gone
from rl.waiting import beside

T = TypeVar("T")
_VARIABLE = "RL_MESH"  # in a process's environment: which mesh it is of
_LOOK_SECONDS = 0.1
_PATIENCE_SECONDS = 5.0  # Monarch may know why, and says so a second or two later
_NUMBERS = count()


class Births:
    """Of one mesh, which may be spawned again and again under its name."""

    def __init__(self, name: str, timeline: Timeline | None = None):
        """timeline: what is told of the wait for them."""
        self._name = name
        self._timeline = timeline or Timeline()
        self._mesh = ""
        self._num_procs = 0
        self._born: list[ProcessInfo] = []

    def expect(self, num_procs: int) -> Mapping[str, str]:
        """What the processes of the next spawn must have in their environment."""
        self._mesh, self._num_procs, self._born = f"{os.getpid()}-{next(_NUMBERS)}", num_procs, []
        self._caller = Caller(self._name, f"logs/{self._name}*.log of the run")  # counts deaths from here on
        return {_VARIABLE: self._mesh}

    async def watching(self, starting: Awaitable[T]) -> T:
        """What `starting` gives. Raises ProcessDied where a process is gone before that."""
        with self._timeline.starting(self._name):
            async with beside(self.until_one_dies()):
                return await starting

    async def until_one_dies(self, verb: str = "start") -> None:
        """Never returns; raises ProcessDied. verb: what they do."""
        while (process := self._one_that_is_gone()) is None:
            await asyncio.sleep(_LOOK_SECONDS)
        await asyncio.sleep(_PATIENCE_SECONDS)
        raise ProcessDied(self._caller.death(self._name, verb, process.place))

    def _one_that_is_gone(self) -> ProcessInfo | None:
        if len(self._born) < self._num_procs:
            known = {process.pid for process in self._born if process.host == own_host()}
            children = (child for child in psutil.Process().children() if child.pid not in known)
            born = [ProcessInfo(c.pid, own_host(), "") for c in children if mesh_of(c) == self._mesh]
            for host in OTHER_HOSTS.values():
                born += host.born(self._mesh)
            self._born += [process for process in born if process not in self._born]
            del self._born[self._num_procs :]  # orphans of theirs that were adopted
        return next(filter(is_gone, self._born), None)


def mesh_of(process: psutil.Process) -> str | None:
    """Which mesh it was started for: the number of its controller's process, a dash and a count."""
    with suppress(psutil.Error, OSError):
        return process.environ().get(_VARIABLE)
    return None
