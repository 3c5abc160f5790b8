"""What the launcher takes of the machine: descriptors, and the ports that it listens on."""

import asyncio
import os
import resource
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
from torch.distributed.rendezvous import rendezvous

from configs.quickstart import quickstart
from rl.cluster.launch import _Start
from rl.cluster.launchers import ThisHost
from rl.cluster.spawn import GROUP_ENVIRONMENT, Procs, _prepare_process, join_group
from rl.config.settle import settle
from rl.observability.timeline import Timeline
from rl.processes import PARENT, allow_many_files
from tests.plans import AMPLE


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
