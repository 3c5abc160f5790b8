"""Launchers: on which host meshes the processes of a plan's replicas are spawned."""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rl.actors.member import Visitor
from rl.actors.remote import ProcessDied
from rl.cluster.ends import kill_those_that_log_to
from rl.cluster.hosts import check_as_planned, look_at, why_not_reached
from rl.cluster.joining import Joining, Slot
from rl.cluster.leases import Lease
from rl.cluster.monarch_worker import TIMEOUTS
from rl.errors import RunError, one_line
from rl.host_protocol import MARK, written
from rl.host_tls import transport
from rl.plan.cluster import Cluster, Host
from rl.plan.roles import ENGINE_ROLES, RoleName
from rl.plan.types import Plan, WorkerSpec
from rl.processes import OTHER_HOSTS
from rl.waiting import beside, together, within

_LOOPBACK = "127.0.0.1"
_ID = ".id"
"""A file in the run's directory that tells it from another at the same path."""
_CLOSE_SECONDS = 10.0


class Launcher(Protocol):
    """Where a plan's processes run."""

    address: str
    """Of this process, as theirs reach it, once it is open."""
    run: str
    """What other hosts call the run; empty where there are none."""

    def open(
        self, run_dir: Path, shared: Path, models: Mapping[str, Path]
    ) -> AbstractAsyncContextManager[None]:
        """While it is, processes may be spawned. After it, none is left on another host.

        shared: the directory in shared memory that each host's processes find. models: the directory of each
        model that the plan names.
        """
        ...

    async def attach(self, name: str, hosts: tuple[int, ...]) -> Any:
        """Monarch's host mesh for the processes of a mesh called `name`, before each of its starts.

        hosts: of each of its processes, its host's number in the plan's cluster. Raises ProcessDied where one
        does not answer.
        """
        ...

    async def end_log(self, log: Path, hosts: Sequence[int]) -> None:
        """End what is left of an earlier mesh on these hosts. log: of its logs, without `-RANK.log`."""
        ...

    async def release(self, paths: Sequence[str]) -> None:
        """Release these files of published weights on all other hosts."""
        ...

    async def lost(self, hosts: Collection[int], others: Collection[int]) -> frozenset[int]:
        """Those that do not answer, after `deadlines.start`; of the others, those that do not answer now."""
        ...

    def host(self, number: int) -> Host:
        """One of the plan's hosts, as it is."""
        ...

    def visitor(self, number: int) -> Visitor | None:
        """None: that host is always there."""
        ...


class ThisHost:
    """All of them here."""

    address = _LOOPBACK
    run = ""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster

    @asynccontextmanager
    async def open(self, run_dir: Path, shared: Path, models: Mapping[str, Path]) -> AsyncIterator[None]:
        yield

    async def attach(self, name: str, hosts: tuple[int, ...]) -> Any:
        from monarch.actor import this_host

        assert not any(hosts), "a plan for one host"
        return this_host()

    async def end_log(self, log: Path, hosts: Sequence[int]) -> None:
        kill_those_that_log_to(log)

    async def release(self, paths: Sequence[str]) -> None:
        pass

    async def lost(self, hosts: Collection[int], others: Collection[int]) -> frozenset[int]:
        return frozenset()

    def host(self, number: int) -> Host:
        return self._cluster.hosts[number]

    def visitor(self, number: int) -> Visitor | None:
        return None


class Hosts:
    """On hosts with an `rl worker`, of which each lends a process of Monarch's for the run.

    Each attach makes a mesh of its own: when a host dies, Monarch's other meshes go on.
    """

    def __init__(self, plan: Plan):
        self.address, self.run = "", ""
        self._plan, self._hosts, self._patience = plan, _as_needed(plan), plan.deadlines.start
        slots = {n: _slot(n, host, plan) for n, host in enumerate(self._hosts) if host.may_join}
        always_there = [host for host in self._hosts if not host.may_join]
        self._joining = Joining(slots, always_there, self._lease)
        self._sharers = sharers(plan)
        self._leases: list[Lease] = []  # of the hosts that are always there: the first

    @asynccontextmanager
    async def open(self, run_dir: Path, shared: Path, models: Mapping[str, Path]) -> AsyncIterator[None]:
        run_dir = run_dir.absolute()  # not resolved: on another host a link may lead elsewhere
        self.run, self._mark = _name_of(run_dir), uuid.uuid4().hex
        self._of_run, self._models = (run_dir, shared, self._patience), models
        self._leases = [
            self._lease(host.address, number) for number, host in enumerate(self._hosts) if not host.may_join
        ]
        (run_dir / MARK).write_text(self._mark)
        try:
            async with beside(*(lease.run() for lease in self._leases)):  # each from its own start on
                await together(lease.connect() for lease in self._leases)
                self.address = self._leases[0].own_address
                await self._check_reached()
                self._use_network()
                OTHER_HOSTS.update({lease.address: lease for lease in self._leases})
                async with beside(self._joining.run(self._leases)):
                    await together(lease.send_models() for lease in self._leases)
                    yield
        finally:
            OTHER_HOSTS.clear()
            await asyncio.shield(self._close())
            (run_dir / MARK).unlink(missing_ok=True)

    def _lease(self, address: str, number: int) -> Lease:
        """number: of the host in the plan. Who joins is not waited for where it is lost: another may take its
        place."""
        models = [self._models[name].absolute() for name in models_on(number, self._plan)]
        may_return = not self._hosts[number].may_join
        sharer = self._sharers.get(number, "")
        planned = self._hosts[number]
        return Lease(
            address, self.run, *self._of_run, models, sharer, may_return,
            lambda: check_as_planned(look_at(address), planned), self._mark,
        )  # fmt: skip

    def _lease_of(self, host: int) -> Lease:
        """Raises ProcessDied where it has left."""
        slots = self._joining.slots
        return slots[host].lease if host in slots else self._leases[host]

    @property
    def _held(self) -> list[Lease]:
        return [*self._leases, *self._joining.leases]

    async def lost(self, hosts: Collection[int], others: Collection[int]) -> frozenset[int]:
        async def is_lost(host: int) -> bool:
            try:
                await self._lease_of(host).worker(None if host in hosts else 0.0)
            except ProcessDied:
                return True
            return False

        asked = [*dict.fromkeys([*hosts, *others])]
        answers = await asyncio.gather(*map(is_lost, asked))
        return frozenset(host for host, lost in zip(asked, answers, strict=True) if lost)

    def host(self, number: int) -> Host:
        slot = self._joining.slots.get(number)
        return slot.host if slot else self._hosts[number]

    def visitor(self, number: int) -> Visitor | None:
        return self._joining.slots.get(number)

    async def _check_reached(self) -> None:
        """Raises RunError where a host does not reach this process."""
        addresses = [lease.address for lease in self._leases]
        if problems := await asyncio.to_thread(why_not_reached, self.address, addresses):
            raise RunError("\n".join(problems))

    def _use_network(self) -> None:
        """Before Monarch does anything else."""
        from monarch.actor import enable_transport
        from monarch.config import configure

        configure(**TIMEOUTS)
        enable_transport(transport(written(self.address, 0)))

    async def attach(self, name: str, hosts: tuple[int, ...]) -> Any:
        from monarch.actor import attach_to_workers

        leases = [self._lease_of(host) for host in dict.fromkeys(hosts)]
        workers = await asyncio.gather(*(lease.worker() for lease in leases))
        try:
            async with within(self._patience):
                mesh = attach_to_workers(ca="trust_all_connections", workers=workers)
                await mesh.initialized
        except Exception as error:  # Monarch's: a worker that went meanwhile
            names = ", ".join(lease.address for lease in leases)
            raise ProcessDied(
                f"{name} died in start: {names} could not be attached ({one_line(error)})"
            ) from error
        return mesh

    async def end_log(self, log: Path, hosts: Sequence[int]) -> None:
        await asyncio.gather(*(self._lease_of(host).end_log(log) for host in {*hosts}))

    async def release(self, paths: Sequence[str]) -> None:
        await asyncio.gather(*(lease.release(paths) for lease in self._held))

    async def _close(self) -> None:
        with suppress(TimeoutError):
            async with within(_CLOSE_SECONDS):
                await together(lease.close() for lease in self._held)


def _name_of(run_dir: Path) -> str:
    """The run's name for its hosts: of each controller that has this directory, one after the other.

    So a host ends what it has of a controller that is gone as soon as the next one asks for it. A copy of the
    directory has another number of a file, also at the same path of another machine.
    """
    file = run_dir / _ID
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    identity = f"{file.read_text()} {file.stat().st_ino} {run_dir}"
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def sharers(plan: Plan) -> dict[int, RoleName]:
    """Hosts that have to see the run's directory, each with a role that does.

    Engines have checkpoints in it, and a server's generators read its adapters.
    """
    roles = (*ENGINE_ROLES, *(["generator"] if plan.command == "serve" else []))
    role_of_host = {p.host: r.role for r in reversed(plan.replicas) if r.role in roles for p in r.processes}
    return {**dict.fromkeys(plan.spare_hosts, "trainer"), **role_of_host}


def models_on(host: int, plan: Plan) -> list[str]:
    """The plan's names of the models that are read there."""
    spare = ENGINE_ROLES if host in plan.spare_hosts else ()
    specs = [r.spec for r in plan.replicas if r.role in spare or host in {p.host for p in r.processes}]
    return sorted({spec.model for spec in specs if not isinstance(spec, WorkerSpec)})


def _as_needed(plan: Plan) -> list[Host]:
    """The plan's hosts. Instructions for bfloat16 are needed where that is what it computes in."""
    needed = plan.value_of("dtype") == "bfloat16"
    return [host if needed else replace(host, bfloat16=None) for host in plan.cluster.hosts]


def _slot(number: int, host: Host, plan: Plan) -> Slot:
    on_host = [replica for replica in plan.replicas if replica.processes[0].host == number]
    needed = sum(process.peak for replica in on_host for process in replica.processes) / 2**30
    return Slot(host, 0.0 if host.gpus else needed, ", ".join(replica.name for replica in on_host))
