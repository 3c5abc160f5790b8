"""A host that does not see the run's directory: what is sent there, what comes back, and that nothing is left."""

import asyncio
import base64
import json
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from rl.cluster import unshared
from rl.cluster.unshared import OwnDirectory, send_files
from rl.host_protocol import LONGEST_LINE, HostRefuses, HostUnreachable, ask, read_line
from tests.cluster.test_host_agent import a_lease, an_agent, until, without_monarch  # noqa: F401

HOST = socket.gethostname()


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


def test_the_next_controller_of_a_run_has_its_directory_at_once(tmp_path):
    async def main():
        async with an_agent() as agent:
            gone, following, stranger = (
                a_lease_of_its_own(agent.address, tmp_path, run=name) for name in ("run", "run", "another")
            )
            await gone.connect()
            (tmp_path / "elsewhere" / "logs" / "generator-0.log").write_text("of before")
            with pytest.raises(HostRefuses, match="is another run's"):
                await stranger.connect()
            async with asyncio.timeout(10):
                await following.connect()
            assert not (tmp_path / "elsewhere" / "logs" / "generator-0.log").exists()
            await following.close()
        assert not (tmp_path / "elsewhere").exists()

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
    first = OwnDirectory(tmp_path / "own", "a run")
    (tmp_path / "own" / "logs" / "old.log").write_text("of before")
    with pytest.raises(FileExistsError, match="is another run's"):
        OwnDirectory(tmp_path / "own", "another")
    first._kept.close()  # as where its process is killed
    second = OwnDirectory(tmp_path / "own", "a run")
    assert second.news() == []
    second.remove()
    assert not (tmp_path / "own").exists()


def test_hosts_that_share_a_directory_without_the_controller_are_told(tmp_path, monkeypatch):
    """Some file systems lock for each host alone."""
    first = OwnDirectory(tmp_path / "own", "a run")
    monkeypatch.setattr(unshared, "lock", lambda file: True)
    monkeypatch.setattr(unshared.socket, "gethostname", lambda: "second")
    (tmp_path / "own" / "logs" / "generator-0.log").write_text("of the first")
    with pytest.raises(
        FileExistsError, match=f"{HOST} of this run has .*own, too, and the controller has not"
    ):
        OwnDirectory(tmp_path / "own", "a run")
    assert (tmp_path / "own" / "logs" / "generator-0.log").read_text() == "of the first"
    first.remove()


def test_what_was_mounted_over_the_directory_meanwhile_stays(tmp_path):
    own = OwnDirectory(tmp_path / "own", "a run")
    (tmp_path / "own").rename(tmp_path / "below the mount")
    (tmp_path / "own" / "checkpoints").mkdir(parents=True)
    own.remove()
    assert (tmp_path / "own" / "checkpoints").is_dir()
    own = OwnDirectory(tmp_path / "two", "a run")
    (tmp_path / "two").rename(tmp_path / "below, too")
    other = OwnDirectory(tmp_path / "two", "a run")
    own.remove()
    assert (tmp_path / "two" / "logs").is_dir()
    other.remove()


def test_a_directory_that_is_not_seen_at_first_is_looked_at(tmp_path, monkeypatch):
    """NFS remembers for a while that there was nothing."""
    (tmp_path / "own" / "checkpoints").mkdir(parents=True)
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path != tmp_path / "own" and real(path))
    with pytest.raises(FileExistsError, match="is there and has other files"):
        OwnDirectory(tmp_path / "own", "a run")
    assert (tmp_path / "own" / "checkpoints").is_dir()


def test_a_worker_that_was_killed_and_has_another_name_now_takes_its_directory(tmp_path):
    """As in a container that was started again: the run is the same, its controller another."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".sent").write_text("before another-name\n")

    async def main():
        async with an_agent() as agent:
            lease = a_lease_of_its_own(agent.address, tmp_path, mark="now")
            await lease.connect()
            assert (tmp_path / "elsewhere" / ".sent").read_text() == f"now {HOST}\n"
            await lease.close()

    asyncio.run(main())


def test_of_a_long_log_a_part_comes_at_a_time(tmp_path):
    own = OwnDirectory(tmp_path / "own", "a run")
    text = bytes(range(256)) * 1200
    (tmp_path / "own" / "logs" / "generator-0.log").write_bytes(text)
    parts = [base64.b64decode(part) for _ in range(3) for _, part in own.news()]
    assert list(map(len, parts)) == [2**18, 300 * 2**10 - 2**18] and b"".join(parts) == text
    own.remove()


def test_many_logs_come_in_answers_that_are_no_longer_than_a_line_may_be(tmp_path):
    own = OwnDirectory(tmp_path / "own", "a run")
    texts = {f"reward-{i}.log": bytes([i]) * 2**18 for i in range(80)}
    for name, text in texts.items():
        (tmp_path / "own" / "logs" / name).write_bytes(text)
    received, answers = dict.fromkeys(texts, b""), 0
    while received != texts:
        news, answers = own.news(), answers + 1
        assert 0 < len(json.dumps(news)) < LONGEST_LINE / 2 and answers < 20
        for name, text in news:
            received[name] += base64.b64decode(text)
    own.remove()


def put(address, run, path, size):
    """The connection of a file that is wanted there."""
    request = {"do": "put", "run": run, "path": str(path), "size": size, "time": 10**18}
    answer, connection = ask(address, request, 10)
    assert answer == {"wanted": True}
    return connection


def test_hosts_that_share_a_file_system_take_the_same_file_at_once(tmp_path):
    content, target = os.urandom(2**20), tmp_path / "models" / "model.safetensors"

    def both(*addresses):
        one, other = (put(address, "run", target, len(content)) for address in addresses)
        with one, other:
            one.sendall(content[:9])
            other.sendall(content)
            assert read_line(other) == b"{}\n" and target.read_bytes() == content
            one.sendall(content[9:])
            assert read_line(one) == b"{}\n" and target.read_bytes() == content

    async def main():
        async with an_agent() as one, an_agent() as other:
            leases = []
            for number, agent in enumerate((one, other)):
                (tmp_path / str(number)).mkdir()
                leases.append(a_lease(agent.address, tmp_path / str(number)))
                await leases[-1].connect()
            await asyncio.to_thread(both, one.address, other.address)
            for lease in leases:
                await lease.close()

    asyncio.run(main())
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("problem", ["room", "directory"])
def test_a_host_that_cannot_take_a_file_says_why(problem, tmp_path, monkeypatch):
    target = tmp_path / "models" / "model.safetensors"
    if problem == "directory":
        target.parent.write_text("a file")
        words = f"cannot take {target} .*; make room, or permit it, there"
    else:
        monkeypatch.setattr(unshared.shutil, "disk_usage", lambda _: SimpleNamespace(free=99))
        words = f"has no room for {target} .*; make room there"

    async def main():
        async with an_agent() as agent:
            lease = a_lease_of_its_own(agent.address, tmp_path)
            await lease.connect()
            with pytest.raises(HostRefuses, match=f"host {agent.address} {words}"):
                await asyncio.to_thread(put, agent.address, "run", target, 100)
            assert lease.is_held
            await lease.close()

    asyncio.run(main())


def test_a_disk_that_fills_as_a_file_arrives_is_said(tmp_path, monkeypatch):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "model.safetensors").write_bytes(b"x" * 2**24)
    asking, opening = unshared.ask, Path.open

    def ask_elsewhere(address, request, *more):
        return asking(address, {**request, "path": str(tmp_path / "theirs" / "model.safetensors")}, *more)

    def full(path, mode="r", *more, **how):
        file = opening(path, mode, *more, **how)
        if mode == "xb":
            file = mock.MagicMock(wraps=file)
            file.write.side_effect = OSError(28, "No space left on device")
        return file

    monkeypatch.setattr(unshared, "ask", ask_elsewhere)
    monkeypatch.setattr(Path, "open", full)

    async def main():
        async with an_agent() as agent:
            lease = a_lease_of_its_own(agent.address, tmp_path)
            await lease.connect()
            words = f"host {agent.address} cannot take .* .No space left on device.; make room"
            with pytest.raises(HostRefuses, match=words):
                await asyncio.to_thread(send_files, agent.address, "run", tmp_path / "ours")
            assert lease.is_held
            await lease.close()

    asyncio.run(main())
    assert not any((tmp_path / "theirs").iterdir())


@pytest.mark.parametrize("end", ["lost", "cancelled"])
def test_a_host_that_takes_nothing_holds_nobody_up(end, tmp_path):
    """Whoever sends it a model, once its lease is lost, or the run ends."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x" * 2**20)

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            lease = a_lease(f"127.0.0.1:{listener.getsockname()[1]}", tmp_path, models=[tmp_path / "model"])
            lease._id, lease._writer, lease._sees_directory = "held", mock.Mock(), False
            sending = asyncio.create_task(lease.send_models())
            connection, _ = await asyncio.to_thread(listener.accept)
            with connection:
                connection.sendall(b'{"nonce": "12"}\n')
                await asyncio.sleep(0.2)
                assert not sending.done()
                if end == "lost":
                    lease._lose()
                    with pytest.raises(HostUnreachable):
                        await asyncio.wait_for(sending, 10)
                else:
                    sending.cancel()
                    await asyncio.wait([sending], timeout=10)
                    assert sending.cancelled()
                connection.settimeout(10)
                while connection.recv(2**16):  # until the other end is closed
                    pass

    asyncio.run(main())


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
                assert read_line(connection) == b"{}\n"
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
            assert not target.exists() and not any(target.parent.iterdir()) and lease.is_held

    asyncio.run(main())


def test_a_lease_is_lost_where_models_do_not_arrive(tmp_path, monkeypatch):
    asked = []

    def send(address, run, model, connected):
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

    def ask_for_theirs(address, request, *more):
        return asking(address, {**request, "path": str(theirs)}, *more)

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


def test_a_file_that_cannot_be_read_here_is_not_the_other_hosts_fault(tmp_path):
    """As where it goes while others are sent."""
    with pytest.raises(
        HostUnreachable, match=r"gone, which host 127.0.0.1:9 needs, cannot be read here \(No such file"
    ):
        unshared._send("127.0.0.1:9", "run", tmp_path / "gone", lambda _: None)


def test_what_a_killed_transfer_left_is_removed_and_what_another_still_writes_is_not(tmp_path):
    now = time.time()
    for name, age in (
        ("model[1].st.a.partial", 7200),
        ("model[1].st.b.partial", 10),
        ("model1.st.c.partial", 7200),
    ):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - age, now - age))
    unshared._remove_left(tmp_path / "model[1].st")
    assert sorted(os.listdir(tmp_path)) == ["model1.st.c.partial", "model[1].st.b.partial"]
