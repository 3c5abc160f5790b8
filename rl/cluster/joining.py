"""Joining: hosts that come to a run while it goes on, and leave it again."""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence

from rl.actors.remote import ProcessDied
from rl.cluster.hosts import check_as_planned, check_machine, look_at
from rl.cluster.leases import Lease
from rl.errors import ConfigError
from rl.host_protocol import HostUnreachable
from rl.plan.cluster import Host
from rl.processes import OTHER_HOSTS
from rl.waiting import Signal

_LOOK_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_log = logging.getLogger(__name__)


class Slot:
    """A host of the plan that may join: one after the other may take it. A Visitor (rl/actors/member.py)."""

    def __init__(self, planned: Host, needed_gib: float, who: str):
        """needed_gib: of a host's own memory. who: starts there, for people."""
        self.planned, self.needed_gib, self.who = planned, needed_gib, who
        self.host = planned
        self._lease: Lease | None = None
        self._num_visits = 0
        self._changed = Signal()

    @property
    def is_free(self) -> bool:
        return self._lease is None

    @property
    def visit(self) -> int:
        return self._num_visits if self._lease is not None and self._lease.is_held else 0

    async def arrival(self, last: int) -> None:
        await self._changed.wait_for(lambda: self.visit not in (0, last))

    @property
    def lease(self) -> Lease:
        """Raises ProcessDied while no host is there."""
        if self._lease is None or not self._lease.is_held:
            raise ProcessDied("its host has left the run")
        return self._lease

    def take(self, lease: Lease, host: Host) -> None:
        self._lease, self.host = lease, host
        self._num_visits += 1
        OTHER_HOSTS[host.address] = lease  # to its end: who asks for a process there learns that it is gone
        _log.warning("host %s has joined the run; %s starts there", host.address, self.who)
        self._changed.notify()

    async def keep(self) -> None:
        """Until its host is lost."""
        if self._lease is not None:
            await self._lease.run_until_lost()
        self._lease = None
        _log.warning("host %s has left the run", self.host.address)


class Joining:
    """Gives hosts that ask for it to the slots that are free."""

    def __init__(
        self,
        slots: Mapping[int, Slot],
        always_there: Sequence[Host],
        make_lease: Callable[[str, int], Lease],
    ):
        """slots: by the host's number in the plan. make_lease: of an address and a number."""
        self.slots = slots
        self._always_there = always_there
        self._make_lease = make_lease
        self._made: list[Lease] = []
        self._refused: dict[str, str] = {}  # address -> why, without numbers
        self._pauses: dict[str, tuple[float, float]] = {}  # address -> seconds, and when they are over

    async def run(self, leases: Sequence[Lease]) -> None:
        """Until cancelled. leases: of the hosts that are always there, which are asked who would join."""
        if not self.slots:
            return
        async with asyncio.TaskGroup() as tasks:
            while True:
                taken = {lease.address for lease in leases}
                taken |= {slot.host.address for slot in self.slots.values() if not slot.is_free}
                for address in dict.fromkeys(address for lease in leases for address in lease.joined):
                    free = next((n for n, slot in self.slots.items() if slot.is_free), None)
                    if address not in taken and free is not None and not self._is_pausing(address):
                        await self._admit(address, free, tasks)
                await asyncio.sleep(_LOOK_SECONDS)

    async def _admit(self, address: str, number: int, tasks: asyncio.TaskGroup) -> None:
        slot, lease = self.slots[number], self._make_lease(address, number)
        self._made = [*self.leases, lease]
        try:
            host = await asyncio.to_thread(look_at, address)
            check_machine(
                host, [*self._always_there, *(s.host for s in self.slots.values() if not s.is_free)]
            )
            check_as_planned(host, slot.planned, slot.needed_gib)
            await lease.connect()
            kept = tasks.create_task(lease.run_until_lost())
            await lease.send_models()
            kept.cancel()
            if not lease.is_held:
                raise HostUnreachable(f"host {address} was lost as it joined")
        except (ConfigError, HostUnreachable) as error:
            reason = re.sub(r"[\d.]+", "", str(error))  # free memory differs from time to time
            if self._refused.get(address) != reason:
                _log.warning("%s", error)
            self._refused[address] = reason
            self._pause(address)
            await lease.close()
            return
        self._refused.pop(address, None)
        self._pauses.pop(address, None)
        slot.take(lease, host)
        tasks.create_task(slot.keep())

    def _pause(self, address: str) -> None:
        """Each time twice as long: what fails late, as where a disk fills up, has moved gigabytes."""
        seconds = min(2 * self._pauses.get(address, (_LOOK_SECONDS / 2, 0.0))[0], _LONGEST_PAUSE_SECONDS)
        self._pauses[address] = seconds, asyncio.get_running_loop().time() + seconds

    def _is_pausing(self, address: str) -> bool:
        _, until = self._pauses.get(address, (0.0, 0.0))
        return asyncio.get_running_loop().time() < until

    @property
    def leases(self) -> list[Lease]:
        """All that are held, also where no task keeps them any more."""
        return [lease for lease in self._made if lease.is_held]
