"""Replica: processes that can be replaced, as those of a generator or of a reward worker; and their pool.

A Replica owns a mesh from its spawning to its end, however that comes. What dies, or stops answering, is
ended and spawned again; whoever waited for it is told, and asks another. The pool shares out work.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, Generic, TypeVar

from rl.actors.member import Member, Visitor
from rl.actors.remote import EarlyDeaths, ProcessDied, ProcessSilent
from rl.causes import note_outage
from rl.errors import RunError
from rl.waiting import Signal

T = TypeVar("T")
_HEARTBEAT_SECONDS = 1.0
_LASTING_SECONDS = 3600.0
_log = logging.getLogger(__name__)


class State(StrEnum):
    STARTING = "starting"  # its processes are being spawned
    LOADING = "loading"  # they answer, and have no weights yet
    SERVING = "serving"  # they take work
    SUSPENDED = "suspended"  # they are not on their devices, or not even spawned: it is not their turn
    DRAINING = "draining"  # they finish what they have, and take no more for now
    ABSENT = "absent"  # their host has not joined the run, has left it, or they died there too often
    DEAD = "dead"  # they died more often than allowed


_ENDS = (State.ABSENT, State.DEAD)
"""Of those that do not serve, and need not ever."""


M = TypeVar("M", bound=Member)


class Replica(Generic[M]):
    """Invariants: it gets work only while it is SERVING; work it holds when it dies raises ProcessDied."""

    def __init__(
        self,
        name: str,
        spawn: Callable[[], Awaitable[M]],
        max_restarts: int,
        changed: Signal,
        host: Visitor | None = None,
    ):
        """max_restarts: in a row; the count begins anew with processes that served for an hour.

        host: of its processes, where it may leave; nothing that happens there ends the run. None: it is
        always there.
        """
        self.name = name
        self.state = State.STARTING
        self.load = 0  # work in flight
        self.num_restarts = 0
        self._num_in_a_row = 0
        self.final_death: ProcessDied | None = None  # after which it was given up
        self._spawn = spawn
        self._max_restarts = max_restarts
        self._changed = changed
        self._host = host
        self._failed_visit = 0  # the visit on which it died more often than allowed
        self.has_lived = False
        self._has_served = False
        self._served_from: float | None = None  # the present processes, by the loop's clock
        self._early_deaths = EarlyDeaths()
        self._member: M | None = None
        self._lost: asyncio.Future[ProcessDied] | None = None  # of the present member

    async def run(self) -> None:
        """Until cancelled, or dead for good. Raises RunError where the processes do not start, twice, or die
        in the same way again and again before they serve."""
        visit = 0
        while True:
            if self._host is not None and self._host.visit in (0, self._failed_visit):
                self._enter(State.ABSENT)
                await self._host.arrival(self._failed_visit)
            if self._host is not None and self._host.visit != visit:
                visit, self._num_in_a_row = self._host.visit, 0
            self._enter(State.STARTING)
            self._served_from = None
            may_end_run = not self.has_lived and self._host is None
            try:
                member = await self._spawn()
            except ProcessDied as error:
                # A process may be killed at any moment. One that never starts is the machine's or the
                # config's.
                if may_end_run and (self.num_restarts or isinstance(error, ProcessSilent)):
                    raise RunError(f"{error}; it did not even start") from error
                death = error
            except RunError as error:
                if may_end_run:
                    raise
                death = ProcessDied(str(error))  # it has run before, so what keeps it from starting may pass
            else:
                self.has_lived = True
                try:
                    death = await self._live(member)
                except RunError as error:
                    if self._host is None:
                        raise
                    death = ProcessDied(str(error))
            if self._host is not None and self._host.visit != visit:
                _log.warning("%s; it goes on where a host joins", death)
                continue
            if not self._has_served and self._host is None:
                self._early_deaths.count(death)
            if self._has_lasted:
                self._num_in_a_row = 0
            if self._num_in_a_row == self._max_restarts:
                times = self._num_in_a_row + 1
                _log.warning("%s; it was started %d times in a row and is given up", death, times)
                self.final_death = death
                if self._host is not None:
                    self._failed_visit = visit
                    continue
                self._enter(State.DEAD)
                return
            self._num_in_a_row += 1
            self.num_restarts += 1
            _log.warning("%s; it is started again (%d of %d)", death, self._num_in_a_row, self._max_restarts)

    async def ask(self, invoke: Callable[[M], Awaitable[T]], load: int = 1) -> T:
        """Only while SERVING. Raises ProcessDied if it dies or stops answering before the work is done."""
        member, lost = self._member, self._lost
        assert member is not None and lost is not None  # it serves
        self.load += load
        work = asyncio.ensure_future(invoke(member))
        try:
            ends: set[asyncio.Future[Any]] = {work, lost}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise lost.result()
            return await work
        except ProcessDied as death:
            self._report(lost, death)
            raise
        finally:
            work.cancel()
            self.load -= load
            # All that anyone waits for: else each answer would wake every replica of a pool.
            if not self.load:
                self._changed.notify()

    async def _live(self, member: M) -> ProcessDied:
        """Serve until the processes die."""
        lost: asyncio.Future[ProcessDied] = asyncio.get_running_loop().create_future()
        self._member, self._lost = member, lost
        helpers = [asyncio.create_task(part) for part in (self._watch(member), self.serve(member))]
        try:
            ends: set[asyncio.Future[Any]] = {*helpers, lost}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for helper in filter(asyncio.Task.done, helpers):
                if isinstance(error := helper.exception(), ProcessDied):
                    self._report(lost, error)
                else:
                    helper.result()  # not a death: the run's own error
            return lost.result()
        finally:
            for helper in helpers:
                helper.cancel()
            self._report(lost, ProcessDied(f"{self.name} was ended"))
            self._enter(State.STARTING)
            await asyncio.shield(member.kill())

    async def _watch(self, member: M) -> None:
        while True:
            await member.check()
            await asyncio.sleep(_HEARTBEAT_SECONDS)

    async def serve(self, member: M) -> None:
        """What it does beside the work that it is asked for. Never returns."""
        self._enter(State.SERVING)
        await asyncio.Event().wait()

    @property
    def takes_work(self) -> bool:
        """It serves, and is not known to be lost: its state follows a turn of the loop later."""
        return self.state is State.SERVING and self._lost is not None and not self._lost.done()

    @property
    def starts_again(self) -> bool:
        """Where it died, and not for the first time on a host that has just come."""
        return self.state is State.STARTING and self._num_in_a_row > 0

    def _report(self, lost: asyncio.Future[ProcessDied], death: ProcessDied) -> None:
        if not lost.done():
            lost.set_result(death)

    def _enter(self, state: State) -> None:
        self.state = state
        if state is State.SERVING:
            self._has_served = True
            if self._served_from is None:
                self._served_from = asyncio.get_running_loop().time()
        self._changed.notify()

    @property
    def _has_lasted(self) -> bool:
        """The present processes, or the last ones."""
        since = self._served_from
        return since is not None and asyncio.get_running_loop().time() - since >= _LASTING_SECONDS


R = TypeVar("R", bound=Replica)


class Pool(Generic[R]):
    """Interchangeable replicas: work goes to the one with the least of it, and to another where one dies."""

    def __init__(self, name: str, replicas: Sequence[R], changed: Signal):
        self._name = name
        self.replicas = tuple(replicas)
        self.changed = changed  # the states, or who has nothing to do
        self._last_death = ""

    async def run(self) -> None:
        """Keep every replica alive, until cancelled, or until all are dead for good.

        Raises an ExceptionGroup with the RunError of one that does not start.
        """
        async with asyncio.TaskGroup() as tasks:
            for replica in self.replicas:
                tasks.create_task(replica.run())

    async def started(self) -> None:
        """Every replica's processes have answered for the first time."""
        await self.changed.wait_for(
            lambda: all(r.has_lived or r.num_restarts or r.state in _ENDS for r in self.replicas)
        )

    async def ask(
        self,
        invoke: Callable[[R], Awaitable[T]],
        takes: Callable[[R], bool] = lambda replica: True,
        prefer: R | None = None,
        max_deaths: int | None = None,
    ) -> T:
        """invoke(replica) does the work, which must be repeatable.

        `prefer`: the replica to use, unless it has far more to do than others. Waits while none that `takes`
        it is serving. Raises ProcessDied once all are dead for good, or so many died of this work or beside
        it.
        """
        num_deaths = 0
        while True:
            chosen = self._choose(takes, prefer)
            if chosen is None:
                self.check_alive()
                if any(r.starts_again for r in self.replicas):
                    note_outage(f"no {self._name} serves: its processes start again")
                await self.changed.wait()
                continue
            try:
                return await invoke(chosen)
            except ProcessDied as death:
                note_outage(str(death))
                num_deaths += 1
                if num_deaths == max_deaths:
                    raise
                if str(death) != self._last_death:  # each that waited for it comes here
                    self._last_death = str(death)
                    _log.warning("%s; its work goes to another %s", death, self._name)

    def check_alive(self) -> None:
        """Raises ProcessDied once all are dead for good."""
        if self.num_alive == 0:
            deaths = [str(r.final_death) for r in self.replicas if r.final_death is not None]
            how = deaths[-1] if deaths else "see their logs under the run's logs/"
            raise ProcessDied(f"every {self._name} has died for good; {how}")

    async def until_dead(self) -> None:
        """Raises ProcessDied once all are dead for good. Never returns: for who waits for what they do."""
        await self.changed.wait_for(lambda: self.num_alive == 0)
        self.check_alive()

    def _choose(self, takes: Callable[[R], bool], prefer: R | None) -> R | None:
        idlest = None
        for replica in self.replicas:
            is_idler = idlest is None or replica.load < idlest.load
            if is_idler and replica.takes_work and takes(replica):
                idlest = replica
        if idlest is None or prefer is None or not prefer.takes_work or not takes(prefer):
            return idlest
        return prefer if prefer.load <= 2 * idlest.load + 8 else idlest

    @property
    def num_alive(self) -> int:
        """Those that serve, or will again."""
        return sum(replica.state not in _ENDS for replica in self.replicas)

    @property
    def num_serving(self) -> int:
        return sum(replica.state == State.SERVING for replica in self.replicas)
