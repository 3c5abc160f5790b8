"""A launcher whose processes are made up: it notes what each was started with, and each may die as it starts."""

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from rl.models.generator.commands import Progress
from rl.plan.types import Plan
from rl.processes import ProcessInfo

ELSEWHERE = "a host that is not here"  # so nobody looks for these processes, or kills them


@dataclass
class Spawned:
    """One start of one mesh."""

    name: str
    hosts: tuple[int, ...]
    environments: list[dict[str, str]]  # of each process
    actors: list[tuple[type, tuple]] = field(default_factory=list)  # each class with its arguments
    stopped: bool = False


class FakeLauncher:
    """On the hosts of a plan. deaths: how often each mesh's processes die before they answer."""

    def __init__(self, plan: Plan, deaths: int = 0):
        self._hosts = plan.cluster.hosts
        self.spawned: list[Spawned] = []
        self.ended: list[
            tuple[str, tuple[int, ...], int]
        ] = []  # a mesh, its hosts, and how often it was started
        self.closed = False
        self._deaths = deaths

    address, run = "127.0.0.1", ""

    @asynccontextmanager
    async def open(self, run_dir, shared, models):
        yield
        self.closed = True

    async def attach(self, name: str, hosts: tuple[int, ...]) -> Any:
        return SimpleNamespace(spawn_procs=lambda **how: self._spawn(hosts, **how))

    async def end_log(self, log, hosts):
        self.ended.append((log.name, tuple(hosts), sum(other.name == log.name for other in self.spawned)))

    async def release(self, paths):
        pass

    async def lost(self, hosts, others):
        return frozenset()

    def host(self, number):
        return self._hosts[number]

    def visitor(self, number):
        return None

    def _spawn(self, hosts, name, per_host, bootstrap_command, **_):
        assert per_host == {"procs": hosts.count(hosts[0])} and hosts == tuple(sorted(hosts))
        points = [SimpleNamespace(rank=rank) for rank in range(len(hosts))]
        spawned = Spawned(name, hosts, [dict(bootstrap_command(point).env) for point in points])
        self.spawned.append(spawned)
        starts = sum(other.name == name for other in self.spawned)
        return Mesh(spawned, dies=starts <= self._deaths)


class Mesh:
    def __init__(self, spawned: Spawned, dies: bool):
        self._spawned, self._dies = spawned, dies

    def spawn(self, name, actor, *arguments):
        self._spawned.actors.append((actor, arguments))
        return Actors(self._spawned, self._dies, range(len(self._spawned.hosts)))

    async def stop(self, why):
        self._spawned.stopped = True


class Actors:
    """Every endpoint answers with a process, or with progress; where they die, none answers."""

    def __init__(self, spawned, dies, ranks):
        self._spawned, self._dies, self._ranks = spawned, dies, ranks

    def flatten(self, name):
        return self

    def slice(self, procs):
        return Actors(self._spawned, self._dies, [procs])

    def __getattr__(self, endpoint):
        async def call(*arguments):
            if self._dies:
                raise SupervisionError(f"the processes of {self._spawned.name} are gone")
            answer = Progress(0, 0) if endpoint == "progress" else ProcessInfo(1, ELSEWHERE, "cpu")
            return dict.fromkeys(self._ranks, answer)

        return SimpleNamespace(call=call)
