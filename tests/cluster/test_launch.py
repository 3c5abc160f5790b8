"""What the launcher takes of the machine: descriptors, and the ports that it listens on."""

import asyncio
import os
import resource
import shutil
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
from torch.distributed.rendezvous import rendezvous

from configs.quickstart import quickstart
from rl.actors.remote import ProcessDied
from rl.cluster.host_agent import SILENCE_SECONDS
from rl.cluster.launch import _Start, launch, launcher_of
from rl.cluster.launchers import Hosts, ThisHost
from rl.cluster.leases import Lease
from rl.cluster.spawn import GROUP_ENVIRONMENT, Procs, _prepare_process, join_group
from rl.config.settle import settle
from rl.errors import RunError
from rl.host_protocol import MARK
from rl.observability.timeline import Timeline
from rl.plan.cluster import GPU, Cluster, Host
from rl.processes import PARENT, allow_many_files
from rl.weight_sync.manifest import MODEL, Manifest, Shard
from tests.plans import AMPLE
from tests.virtual_time import run_virtually


@pytest.fixture
def few_descriptors():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("num_restarts", [3, 1000, 10**6])
def test_ports_are_taken_as_they_are_used(tmp_path, few_descriptors, num_restarts):
    config = quickstart()
    plan = settle(replace(config, trainer=replace(config.trainer, max_restarts=num_restarts)), cluster=AMPLE)
    before = psutil.Process().num_fds()
    _Start(plan, {"model": tmp_path}, tmp_path, tmp_path, config.env, Timeline(), ThisHost(plan.cluster))
    assert psutil.Process().num_fds() == before


def test_as_many_files_may_be_open_as_the_system_allows(few_descriptors):
    allow_many_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard


@pytest.mark.parametrize("started_by", ["this process", "one that is gone"])
def test_a_process_whose_parent_is_gone_before_it_has_begun_ends(tmp_path, monkeypatch, started_by):
    monkeypatch.setattr("monarch.actor.current_rank", lambda: SimpleNamespace(rank=0))
    if started_by == "one that is gone":
        monkeypatch.setenv(PARENT, "4194305")
    prepare = _prepare_process(str(tmp_path / "log"), True, [])
    child = os.fork()
    if not child:
        try:
            prepare()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (started_by == "one that is gone")
    assert (tmp_path / "log-0.log").exists() == (started_by == "this process")


def listening():
    return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_processes_of_a_mesh_meet_on_the_loopback_interface(monkeypatch, world_size):
    """And each start of a mesh has a store of its own, which goes with it."""
    places, before = [], listening()

    async def setup(procs, host, port):
        places.append({"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)})

    monkeypatch.setattr("monarch.spmd.setup_torch_elastic_env_async", setup)

    def join(place, rank):
        """As torch.distributed.init_process_group does in a rank's process."""
        with mock.patch.dict(os.environ, place | GROUP_ENVIRONMENT | {"RANK": str(rank)}):
            store, *numbers = next(rendezvous("env://", timeout=timedelta(seconds=20)))
            assert numbers == [rank, world_size]
            return store

    stores = []
    for _ in range(3):
        stores.append(asyncio.run(join_group(Procs(None), "127.0.0.1")))
        ranks = [join(places[-1], rank) for rank in range(world_size)]
        ranks[0].set("key", "value")
        assert all(rank.get("key") == b"value" for rank in ranks)
        assert {address.ip for address in listening() - before} == {"127.0.0.1"}
    assert len(listening() - before) == 3
    del ranks
    stores.clear()
    assert listening() == before


class HeldLease(Lease):
    """Of a host whose Monarch takes so many seconds to start; it ends what is silent for longer than 45 s."""

    slow = "10.0.0.2:7000"

    async def connect(self):
        await asyncio.sleep(60.0 if self.address == self.slow else 5.0)
        self._id, self.own_address, self.heard = "a lease", "10.0.0.9", asyncio.get_running_loop().time()

    async def ping(self):
        if self.is_held:
            now = asyncio.get_running_loop().time()
            assert now - self.heard < SILENCE_SECONDS
            self.heard = now

    async def send_models(self):
        await self.ping()

    async def close(self):
        self._id = ""


def test_a_host_that_is_ready_first_is_kept_until_the_slowest_is(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.cluster.launchers.Lease", HeldLease)
    monkeypatch.setattr(Hosts, "_use_network", lambda self: None)
    monkeypatch.setattr("rl.cluster.launchers.why_not_reached", lambda address, hosts: [])
    hosts = Cluster(tuple(Host(4, 64.0, address=f"10.0.0.{number}:7000") for number in (1, 2)))
    plan = settle(quickstart(), cluster=hosts)

    async def main():
        launcher = Hosts(plan)
        async with launcher.open(tmp_path, tmp_path, {"model": tmp_path}):
            assert all(lease.is_held for lease in launcher._leases) and launcher.address == "10.0.0.9"

    run_virtually(main())


def test_hosts_know_a_run_by_its_directory_and_a_controller_by_its_mark(tmp_path, monkeypatch):
    """A copy, or another directory at the same path, is another run: hosts end what they have of the same one."""

    class Held(HeldLease):
        async def connect(self):
            self._id, self.own_address, self.heard = "a lease", "10.0.0.9", asyncio.get_running_loop().time()
            asked.append((self._request["run"], self._request["mark"]))
            assert self._request["mark"] == (Path(self._request["run_dir"]) / MARK).read_text()

    monkeypatch.setattr("rl.cluster.launchers.Lease", Held)
    monkeypatch.setattr(Hosts, "_use_network", lambda self: None)
    monkeypatch.setattr("rl.cluster.launchers.why_not_reached", lambda address, hosts: [])
    plan, asked = settle(quickstart(), cluster=Cluster((Host(4, 64.0, address="10.0.0.1:7000"),))), []

    async def named(directory):
        directory.mkdir(exist_ok=True)
        launcher = Hosts(plan)
        async with launcher.open(directory, tmp_path, {"model": tmp_path}):
            assert launcher.run == asked[-1][0]
        assert not (directory / MARK).exists()
        return launcher.run

    async def main():
        first, again = await named(tmp_path / "run"), await named(tmp_path / "run")
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        copy = await named(tmp_path / "copy")
        shutil.rmtree(tmp_path / "run")
        moved = await named(
            (tmp_path / "copy").rename(tmp_path / "run")
        )  # as at the same path of another machine
        shutil.rmtree(tmp_path / "run")
        anew = await named(tmp_path / "run")
        assert first == again and len({first, copy, moved, anew}) == 4
        assert len({mark for _, mark in asked}) == 5

    run_virtually(main())


def test_a_host_that_does_not_reach_the_controller_ends_the_start_and_is_let_go(tmp_path, monkeypatch):
    closed = []

    class Held(HeldLease):
        slow = ""

        async def close(self):
            closed.append(self.address)

    def why(address, hosts):
        assert address == "10.0.0.9"
        return [f"host {host} does not reach this host" for host in hosts[1:]]

    monkeypatch.setattr("rl.cluster.launchers.Lease", Held)
    monkeypatch.setattr("rl.cluster.launchers.why_not_reached", why)
    hosts = Cluster(tuple(Host(4, 64.0, address=f"10.0.0.{number}:7000") for number in (1, 2)))
    plan = settle(quickstart(), cluster=hosts)

    async def main():
        async with Hosts(plan).open(tmp_path, tmp_path, {"model": tmp_path}):
            raise AssertionError("it is open")

    with pytest.raises(RunError, match="^host 10.0.0.2:7000 does not reach this host$"):
        run_virtually(main())
    assert closed == ["10.0.0.1:7000", "10.0.0.2:7000"]


def test_directories_are_absolute_wherever_processes_are_started(tmp_path, monkeypatch):
    class Noting(ThisHost):
        @asynccontextmanager
        async def open(self, run_dir, shared, models):
            raise RuntimeError(f"{run_dir} {models['model']}")
            yield

    monkeypatch.chdir(tmp_path)
    plan = settle(quickstart(), cluster=AMPLE)

    async def main():
        async with launch(plan, {"model": Path("a/model")}, Path("a/run"), launcher=Noting(plan.cluster)):
            pass

    for name in ("adopt_orphans", "allow_many_files"):  # of this process, for ever
        monkeypatch.setattr(f"rl.cluster.launch.{name}", lambda: None)
    monkeypatch.setattr("rl.cluster.launch.temporary_files", nullcontext)  # as the janitor of its directory
    with pytest.raises(RuntimeError, match=f"{tmp_path}/a/run {tmp_path}/a/model"):
        asyncio.run(main())


def test_a_version_that_is_freed_is_freed_on_other_hosts_too(tmp_path, monkeypatch):
    """Their shared memory holds what their generators have read."""
    here, elsewhere = [], []

    class Transport:
        def __init__(self, directory, run, with_delta):
            pass

        async def release(self, manifest):
            here.append(manifest.version)

    class Noting(ThisHost):
        async def release(self, paths):
            elsewhere.append([*paths])

    monkeypatch.setattr("rl.cluster.launch.SharedMemory", Transport)
    config = quickstart()
    plan = settle(config, cluster=AMPLE)

    def writing(version):
        shard = Shard("w", torch.float32, (1,), (0,), (1,), f"/dev/shm/x/model-v{version}-rank0.bin:0")

        async def write():
            return Manifest(version, (shard,))

        return write

    async def main():
        launcher, models = Noting(plan.cluster), {"model": tmp_path}
        start = _Start(plan, models, tmp_path, tmp_path, config.env, Timeline(), launcher)
        store = (await start.actors()).store
        for version in (1, 2):
            await store.publish(MODEL, writing(version))

    asyncio.run(main())
    assert here == [1] and elsewhere == [["/dev/shm/x/model-v1-rank0.bin"]]


def test_a_run_whose_hosts_are_named_is_started_there_and_who_joins_later_needs_what_starts_there():
    first = Host(4, 64.0, address="10.0.0.1:7000")
    alone = settle(quickstart(), cluster=Cluster((first,)))
    generator = alone.of("generator")[0]
    memory = {"generate": SimpleNamespace(total=3.0 * 2**30)}
    arrives = replace(generator.processes[0], host=1, memory=memory)
    later = replace(generator, name="generator-1", processes=(arrives,))
    plan = replace(alone, cluster=alone.cluster.with_joining(1), replicas=(*alone.replicas, later))
    launcher = launcher_of(plan)
    assert isinstance(launcher, Hosts) and launcher.visitor(0) is None
    assert (launcher.visitor(1).who, launcher.visitor(1).needed_gib) == ("generator-1", 3.0)
    joining = replace(plan.cluster.hosts[1], gpus=(GPU("H100", 79.2, (9, 0)),))
    with_gpu = launcher_of(replace(plan, cluster=Cluster((first, joining))))
    assert with_gpu.visitor(1).needed_gib == 0.0  # of the host's own memory nothing is planned with there
    assert isinstance(launcher_of(settle(quickstart(), cluster=AMPLE)), ThisHost)


def test_hosts_of_engines_are_waited_for_and_of_others_it_is_asked_whether_they_are_there_now():
    hosts = Cluster(tuple(Host(4, 64.0, address=f"10.0.0.{number}:7000") for number in (1, 2, 3)))
    launcher, asked = Hosts(settle(quickstart(), cluster=hosts)), []

    class Asked:
        def __init__(self, number, is_there):
            self.number, self.is_there = number, is_there

        async def worker(self, patience=None):
            asked.append((self.number, patience))
            if not self.is_there:
                raise ProcessDied("host does not answer")
            return "monarch"

    launcher._leases = [Asked(0, True), Asked(1, False), Asked(2, False)]
    assert asyncio.run(launcher.lost({0, 1}, [0, 1, 2])) == {1, 2}
    assert sorted(asked) == [(0, None), (1, None), (2, 0.0)]
