"""A host that does not see the run's directory: what is sent there, what comes back, and that nothing is left."""

import asyncio
import os

import pytest

from rl.cluster import unshared
from rl.cluster.unshared import OwnDirectory, send_files
from rl.host_protocol import HostRefuses, HostUnreachable, ask
from tests.cluster.test_host_agent import a_lease, an_agent, until, without_monarch  # noqa: F401


def a_lease_of_its_own(address, tmp_path, **how):
    """The host's directory is `elsewhere`, though its path would be the controller's."""
    lease = a_lease(address, tmp_path, **how)
    lease._request["run_dir"] = str(tmp_path / "elsewhere")
    return lease


def test_logs_come_back_and_the_directory_goes(tmp_path):
    there, here = tmp_path / "elsewhere" / "logs", tmp_path / "logs"

    async def main():
        async with an_agent() as agent:
            lease = a_lease_of_its_own(agent.address, tmp_path)
            await lease.connect()
            keeping = asyncio.create_task(lease.run())
            (there / "reward-0.log").touch()
            (there / "generator-0.log").write_bytes(b"a line\n" * 100_000)
            await until(lambda: (here / "generator-0.log").exists())
            with (there / "generator-0.log").open("ab") as file:
                file.write(b"and \xff another\n")
            text = b"a line\n" * 100_000 + b"and \xff another\n"
            await until(lambda: (here / "generator-0.log").read_bytes() == text)
            with (there / "generator-0.log").open("ab") as file:
                file.write(b"the last\n")  # before any ping
            keeping.cancel()
            await lease.close()
            assert (here / "generator-0.log").read_bytes() == text + b"the last\n"
            assert (here / "reward-0.log").read_bytes() == b""
        assert not there.parent.exists()

    asyncio.run(main())


def test_a_controller_that_is_gone_leaves_no_directory(tmp_path):
    async def main():
        async with an_agent() as agent:
            lease = a_lease_of_its_own(agent.address, tmp_path)
            await lease.connect()
            assert (tmp_path / "elsewhere" / "logs").is_dir()
            lease._writer.transport.abort()
            await until(lambda: not (tmp_path / "elsewhere").exists())

    asyncio.run(main())


def test_an_engine_needs_the_directory(tmp_path):
    async def main():
        async with an_agent() as agent:
            lease = a_lease_of_its_own(agent.address, tmp_path, sharer="trainer")
            words = "which trainer reads and writes; put .* share: --run_dir; or name other hosts: --trainer.hosts"
            with pytest.raises(HostRefuses, match=f"host {agent.address} does not see .*elsewhere, {words}"):
                await lease.connect()

    asyncio.run(main())


def test_what_is_somebody_elses_is_not_taken(tmp_path):
    own, others = tmp_path / "elsewhere", tmp_path / "elsewhere" / "thesis.tex"
    own.mkdir()
    others.write_text("years")

    async def main():
        async with an_agent() as agent:
            lease = a_lease_of_its_own(agent.address, tmp_path)
            with pytest.raises(HostRefuses, match="does not see the run's directory, and cannot make its own .*other files.*give a --run_dir that is free"):  # fmt: skip
                await lease.connect()

    asyncio.run(main())
    assert others.read_text() == "years"


def test_another_runs_directory_is_not_taken_and_a_dead_workers_is(tmp_path):
    first = OwnDirectory(tmp_path / "own")
    (tmp_path / "own" / "logs" / "old.log").write_text("of before")
    with pytest.raises(FileExistsError, match="is another run's"):
        OwnDirectory(tmp_path / "own")
    first._kept.close()  # as where its process is killed
    second = OwnDirectory(tmp_path / "own")
    assert second.news() == []
    second.remove()
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1])
def test_a_file_arrives_whole(size, tmp_path):
    content, target = os.urandom(size), tmp_path / "models" / "one" / "model.safetensors"

    def put(address):
        answer, connection = ask(
            address, {"do": "put", "run": "run", "path": str(target), "size": size, "time": 10**18}, 10
        )
        with connection:
            if answer["wanted"]:
                connection.sendall(content)
                assert connection.recv(1) == b"\n"
            return answer["wanted"]

    async def main():
        async with an_agent() as agent:
            with pytest.raises(HostRefuses, match="knows no such run"):
                await asyncio.to_thread(put, agent.address)
            lease = a_lease_of_its_own(agent.address, tmp_path)
            await lease.connect()
            assert await asyncio.to_thread(put, agent.address)
            assert target.read_bytes() == content
            assert not await asyncio.to_thread(put, agent.address) and target.stat().st_mtime_ns == 10**18
            assert await asyncio.to_thread(send_files, agent.address, "run", target.parent) == 0
            await lease.close()
        assert target.read_bytes() == content  # what is not in the run's directory stays

    asyncio.run(main())


def test_a_file_that_stops_half_way_is_not_there(tmp_path):
    target = tmp_path / "models" / "model.safetensors"

    async def main():
        async with an_agent() as agent:
            lease = a_lease_of_its_own(agent.address, tmp_path)
            await lease.connect()
            request = {"do": "put", "run": "run", "path": str(target), "size": 100, "time": 10**18}
            _, connection = await asyncio.to_thread(ask, agent.address, request, 10)
            connection.sendall(b"half")
            await asyncio.sleep(0.2)
            connection.close()
            await asyncio.sleep(0.2)
            assert not target.exists() and lease.is_held

    asyncio.run(main())


def test_a_lease_is_lost_where_models_do_not_arrive(tmp_path, monkeypatch):
    asked = []

    def send(address, run, model):
        asked.append(model.name)
        if model.name == "gone":
            raise HostUnreachable("host does not answer")
        return 10**9

    monkeypatch.setattr("rl.cluster.leases.send_files", send)

    async def main():
        async with an_agent() as agent:
            for names in (["one", "two"], ["one", "gone"]):
                models = [tmp_path / name for name in names]
                lease = a_lease_of_its_own(agent.address, tmp_path, models=models)
                await lease.connect()
                if "gone" in names:
                    with pytest.raises(HostUnreachable):
                        await lease.send_models()
                else:
                    await lease.send_models()
                assert lease.is_held == ("gone" not in names)
                await lease.close()
            models = [tmp_path / "seen", tmp_path.parent / "unseen"]
            sees = a_lease(agent.address, tmp_path, models=models)
            await sees.connect()
            await sees.send_models()
            await sees.close()

    asyncio.run(main())
    assert asked == ["one", "two", "one", "gone", "unseen"]


def test_another_file_of_the_same_size_is_neither_taken_nor_overwritten(tmp_path, monkeypatch):
    """A model that was trained again has the same sizes."""
    ours, theirs = tmp_path / "ours" / "model.safetensors", tmp_path / "theirs" / "model.safetensors"
    for path, content in ((ours, b"new"), (theirs, b"old")):
        path.parent.mkdir()
        path.write_bytes(content)
    asking = unshared.ask

    def ask_for_theirs(address, request, seconds):
        return asking(address, {**request, "path": str(theirs)}, seconds)

    monkeypatch.setattr(unshared, "ask", ask_for_theirs)

    async def main():
        async with an_agent() as agent:
            lease = a_lease_of_its_own(agent.address, tmp_path)
            await lease.connect()
            words = f"host {agent.address} has another {ours}, which the run would send; remove it there"
            with pytest.raises(HostRefuses, match=words):
                await asyncio.to_thread(send_files, agent.address, "run", ours.parent)
            theirs.write_bytes(b"new")
            assert await asyncio.to_thread(send_files, agent.address, "run", ours.parent) == 0
            await lease.close()

    asyncio.run(main())
