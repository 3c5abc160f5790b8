"""Turns: the one owner of who is on its devices.

A Plan's stays say who is there in each phase. The controller enters phases. Whoever may not stay leaves
first, and only then whoever is needed comes: no memory of a device is promised twice. Where everybody stays
in every phase, nothing here waits.

What waits, for what, and for how long:

- `enter` waits until generators that may not stay have left. Each finishes what it has (its watch ends one
  that decodes nothing), and has `deadlines.load` to leave. One that dies on the way has left.
- `enter` waits for engines, which have `deadlines.load`, and raises EngineDied for one that died.
- A generator waits for a phase in which it may be there. One that died is not even spawned before.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rl.actors.engine import EngineHandle
from rl.plan.types import Phase, Stay
from rl.waiting import Signal, together


class Turns:
    """`phase`: the one that was entered last. A run begins with its engines, in "score"."""

    def __init__(
        self, stays: Iterable[Stay], engines: Sequence[EngineHandle], directory: Path, changed: Signal
    ):
        """directory: for what engines hold while they are away, if their device is the host. changed: the
        weight store's, for generators wait for weights and for their turn at once."""
        self.phase: Phase = "score"
        self.changed = changed
        self._stays: Mapping[Phase, frozenset[str]] = {stay.phase: frozenset(stay.whole) for stay in stays}
        self._engines = engines
        self._directory = str(directory)
        self._has_left = True  # whoever may not be there in this phase
        self._on_devices: set[str] = set()  # generators, those on their way to or from them too

    @property
    def alternate(self) -> bool:
        """Whether anybody ever has to leave."""
        return len({*self._stays.values()}) > 1

    def may_stay(self, name: str) -> bool:
        return not self.alternate or name in self._stays[self.phase]

    async def enter(self, phase: Phase) -> None:
        """Raises EngineDied where an engine died."""
        if not self.alternate:
            return
        await self.leave_to(phase)
        leaving = [e for e in self._engines if not self.may_stay(e.name) and e.is_there is not False]
        await together([engine.suspend(self._directory) for engine in leaving])
        self._has_left = True
        self.changed.notify()
        coming = [e for e in self._engines if self.may_stay(e.name) and e.is_there is not True]
        await together([engine.resume() for engine in coming])

    async def leave_to(self, phase: Phase) -> None:
        """The first half of `enter`: until generators that may not stay have left. Engines may be dead."""
        if self.alternate:
            self.phase, self._has_left = phase, False
            self.changed.notify()
            await self.changed.wait_for(lambda: all(map(self.may_stay, self._on_devices)))

    async def come(self, name: str) -> None:
        """Of a generator that has not been spawned, or has left: wait until it may be there; it then is."""
        await self.changed.wait_for(lambda: self._has_left and self.may_stay(name))
        self._on_devices.add(name)

    def left(self, name: str) -> None:
        """Of a generator: it has left its devices, or is dead."""
        self._on_devices.discard(name)
        self.changed.notify()
