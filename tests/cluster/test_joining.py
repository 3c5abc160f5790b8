"""Hosts that join a run and leave it: with real workers and connections, and made-up processes of Monarch's."""

import asyncio
import contextlib
import dataclasses
import itertools
import re
import socket

import pytest

from rl.actors.remote import ProcessDied
from rl.cluster import host_agent
from rl.cluster.host_agent import _flags
from rl.cluster.hosts import host_addresses, look_at
from rl.cluster.joining import Joining, Slot
from rl.cluster.leases import Lease
from rl.errors import ConfigError
from rl.host_protocol import HostUnreachable
from rl.plan.cluster import GPU, Host
from rl.processes import OTHER_HOSTS, is_gone
from tests.cluster.test_host_agent import (
    MESH,
    a_lease,
    all_of_the_run,
    an_agent,
    until,
    without_monarch,  # noqa: F401
)
from tests.virtual_time import run_virtually

PLANNED = Host(1, 0.0, may_join=True)


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(host_agent, "_JOIN_SECONDS", 0.2)
    monkeypatch.setattr("rl.cluster.joining._LOOK_SECONDS", 0.05)
    number = itertools.count()  # all of the tests' hosts are this machine
    monkeypatch.setattr("rl.cluster.machine.machine_name", lambda: f"machine {next(number)}")


@contextlib.asynccontextmanager
async def a_run(tmp_path, *planned):
    """(its first host's worker, its slots)."""
    (tmp_path / "logs").mkdir(exist_ok=True)
    async with an_agent() as first:
        lease = a_lease(first.address, tmp_path)
        await lease.connect()
        slots = {1 + i: Slot(host, 0.0, f"generator-{i}") for i, host in enumerate(planned)}
        always_there = [await asyncio.to_thread(look_at, first.address)]
        joining = Joining(
            slots, always_there, lambda address, _: a_lease(address, tmp_path, may_return=False)
        )
        keeping = [asyncio.create_task(part) for part in (lease.run(), joining.run([lease]))]
        try:
            yield first, slots
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            for held in [lease, *joining.leases]:
                await held.close()
            OTHER_HOSTS.clear()
            assert not all_of_the_run()  # while the hosts that have joined go on


@contextlib.asynccontextmanager
async def joins(first):
    async with an_agent(join=first.address) as agent:
        yield agent


def test_a_host_joins_leaves_and_another_takes_its_place(tmp_path):
    async def main():
        async with a_run(tmp_path, PLANNED) as (first, slots):
            slot = slots[1]
            assert not slot.visit
            with pytest.raises(ProcessDied, match="has left the run"):
                _ = slot.lease
            waiting = asyncio.create_task(slot.arrival(0))
            async with joins(first) as agent:
                await asyncio.wait_for(waiting, 20)
                assert slot.visit and slot.host.address == agent.address
                await until(lambda: len(slot.lease.born(MESH)) == 2)
                old = slot.lease.born(MESH)
                assert not any(map(is_gone, old))
            await until(lambda: not slot.visit)
            assert all(map(is_gone, old))
            async with joins(first) as other:
                await asyncio.wait_for(slot.arrival(0), 20)
                assert slot.host.address == other.address != agent.address
                assert all(map(is_gone, old))

    asyncio.run(main())


def test_more_hosts_than_slots_wait_for_one_to_leave(tmp_path):
    async def main():
        async with a_run(tmp_path, PLANNED) as (first, slots), joins(first) as one:
            await asyncio.wait_for(slots[1].arrival(0), 20)
            async with joins(first) as other:
                await asyncio.sleep(1.0)
                assert slots[1].host.address == one.address
                slots[1].lease._writer.close()  # the link is lost
                await until(lambda: not slots[1].visit)
                await asyncio.wait_for(slots[1].arrival(0), 20)
                assert slots[1].host.address in (one.address, other.address)

    asyncio.run(main())


SMALL = {
    "cores": (dataclasses.replace(PLANNED, num_cores=10_000), 0.0, "it has .* cores, and the plan 10000"),
    "GPUs": (dataclasses.replace(PLANNED, gpus=(GPU("H100", 79.0, (9, 0)),)), 0.0, "it has 0 GPUs .*1 x H100"),
    "shared memory": (
        dataclasses.replace(PLANNED, shared_gib=1e6), 0.0, "it has .* GiB of shared memory, and the plan 1000000.0"
    ),
    "memory": (PLANNED, 1e6, "it has .* GiB free, and the plan 1000000.0"),
}  # fmt: skip


def refusals(caplog):
    """What is said of hosts, but for the end of one; other tests' event loops may be told of, too."""
    lines = [record.getMessage() for record in caplog.records if record.name == "rl.cluster.joining"]
    return [line for line in lines if "does not answer" not in line]


@pytest.mark.parametrize("case", SMALL)
def test_a_host_that_is_smaller_than_planned_is_refused_once_by_name(case, tmp_path, caplog, monkeypatch):
    planned, needed, words = SMALL[case]

    async def main():
        async with a_run(tmp_path, planned) as (first, slots):
            slots[1].needed_gib = needed
            async with joins(first) as agent:
                await until(lambda: refusals(caplog))
                monkeypatch.setattr("rl.cluster.machine.free_memory", lambda: 3 * 2**30)
                await asyncio.sleep(0.5)
                assert not slots[1].visit
                return agent.address

    address = asyncio.run(main())
    (message,) = refusals(caplog)
    assert message.startswith(f"host {address} cannot be used: ") and "takes one as it was planned" in message
    assert re.search(words, message)


def test_a_host_that_fails_again_and_again_is_admitted_less_and_less_often(monkeypatch):
    """It fails once its models are there, say; one that was right in between begins anew."""
    monkeypatch.undo()
    attempts, fails = [], True

    class Joins:
        is_held = True
        address = "10.0.0.1:7000"
        joined = ("10.0.0.2:7000",)

        async def connect(self):
            pass

        async def send_models(self):
            if fails:
                attempts.append(asyncio.get_running_loop().time())
                raise HostUnreachable("host 10.0.0.2:7000 has no room for model.safetensors; make room there")

        async def run_until_lost(self):
            await asyncio.sleep(10.0)

        async def close(self):
            pass

    monkeypatch.setattr(
        "rl.cluster.joining.look_at", lambda address: dataclasses.replace(PLANNED, address=address)
    )

    async def main():
        nonlocal fails
        slots = {1: Slot(PLANNED, 0.0, "generator-0")}
        joining = asyncio.create_task(Joining(slots, [], lambda address, number: Joins()).run([Joins()]))
        await asyncio.sleep(600)
        pauses = [round(b - a) for a, b in itertools.pairwise(attempts)]
        assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
        fails = False
        await asyncio.sleep(65)
        assert slots[1]._num_visits > 1  # it joins, and leaves after ten seconds
        fails, attempts[:] = True, []
        await asyncio.sleep(30)
        assert [round(b - a) for a, b in itertools.pairwise(attempts)][:3] == [1, 2, 4]
        joining.cancel()
        OTHER_HOSTS.clear()

    run_virtually(main())


@pytest.mark.parametrize("where", ["first", "joined"])
def test_a_second_worker_of_a_machine_that_is_there_is_refused_by_name(where, tmp_path, caplog, monkeypatch):
    async def main():
        async with a_run(tmp_path, PLANNED, PLANNED) as (first, slots):
            name = {"first": "machine 0", "joined": "another"}[where]
            monkeypatch.setattr("rl.cluster.machine.machine_name", lambda: name)
            async with joins(first), joins(first):
                await until(lambda: "are one machine" in caplog.text)
                await asyncio.sleep(0.5)
                assert sum(bool(slot.visit) for slot in slots.values()) == (where == "joined")

    asyncio.run(main())
    assert "start one rl worker there" in caplog.text


def test_who_asks_for_a_run_that_is_not_there_asks_again(tmp_path, capsys, unused_port):
    async def main():
        async with an_agent(join=f"127.0.0.1:{unused_port}") as agent:
            await asyncio.sleep(0.7)
            async with an_agent(unused_port) as first:
                await until(lambda: first._joining() == [agent.address])
            await asyncio.sleep(0.7)
            assert first._joining() == []  # it has not said so lately

    asyncio.run(main())
    assert capsys.readouterr().out.count("it is asked again") <= 2


@pytest.fixture
def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_the_flags_of_a_worker():
    assert _flags(["--listen", "10.0.0.1:7000"]) == ("10.0.0.1:7000", "")
    assert _flags(["--join=a:1", "--listen=b:2"]) == ("b:2", "a:1")
    for wrong in (
        [],
        ["--join", "a:1"],
        ["--liste", "a:1"],
        ["--listen", "a:1", "b:1"],
    ):
        with pytest.raises(ConfigError, match="write rl worker --listen ADDRESS:PORT"):
            _flags(wrong)
    with pytest.raises(ConfigError, match="--listen is given 2 times"):
        _flags(["--listen", "a:1", "--listen", "a:1"])


@pytest.mark.parametrize("how", ["lost", "refused"])
def test_a_host_that_is_lost_as_it_joins_may_join_again(how, tmp_path, monkeypatch):
    send, asked = Lease.send_models, []

    async def lost_at_first(lease):
        asked.append(1)
        if len(asked) > 1:
            return await send(lease)
        lease._lose()
        if how == "refused":
            raise HostUnreachable("host is gone")

    monkeypatch.setattr(Lease, "send_models", lost_at_first)

    async def main():
        async with a_run(tmp_path, PLANNED) as (first, slots), joins(first):
            await asyncio.wait_for(slots[1].arrival(0), 20)
            assert len(asked) == 2

    asyncio.run(main())


def test_a_lease_of_a_host_that_has_left_does_not_come_back(tmp_path):
    """Its slot may be another's by then."""

    async def main():
        async with a_run(tmp_path, PLANNED) as (first, slots), joins(first):
            await asyncio.wait_for(slots[1].arrival(0), 20)
            lease = slots[1].lease
            lease._lose()
            with pytest.raises(ProcessDied, match="has left the run"):
                await asyncio.wait_for(lease.worker(), 1)

    asyncio.run(main())


def test_the_run_s_own_hosts_do_not_join_it():
    """By whatever name the user calls them."""
    assert host_addresses("localhost:7000, 127.0.0.1:7001") == ["127.0.0.1:7000", "127.0.0.1:7001"]
    with pytest.raises(ConfigError, match="names a host twice"):
        host_addresses("localhost:7000,127.0.0.1:7000")
