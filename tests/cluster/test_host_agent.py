"""A host's worker and who has it by a lease: real connections and processes, but for Monarch's."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rl.actors.births import Births
from rl.actors.remote import ProcessDied
from rl.cluster import host_agent, hosted_run, hosts
from rl.cluster.host_agent import HostAgent
from rl.cluster.hosts import look_at
from rl.cluster.leases import Lease
from rl.errors import ConfigError, RunError
from rl.host_protocol import MARK, HostRefuses, HostUnreachable, ask, signed
from rl.owned_directory import is_owned
from rl.processes import LEASE, OTHER_HOSTS, ProcessInfo, is_gone, is_stopped, kill_processes
from rl.weight_sync.remote_files import fetch_file

# Two processes of a mesh and one that is nobody's, each in a session of its own; then it waits, as Monarch's does.
MONARCH = """
import os, subprocess, sys, time
for mesh in (os.environ["TEST_MESH"], os.environ["TEST_MESH"], ""):
    env = {**os.environ, "RL_MESH": mesh}
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env, start_new_session=True)
print("monarch-" + str(os.getpid()), flush=True)
time.sleep(600)
"""
MESH = "7-mesh"
LOOK_AT_GPUS = host_agent._look_at_gpus


@pytest.fixture(autouse=True)
def without_monarch(monkeypatch):
    async def no_gpus():
        return []

    async def for_ever():
        await asyncio.Event().wait()

    monkeypatch.setattr(host_agent, "_look_at_gpus", no_gpus)
    monkeypatch.setattr(host_agent, "reap_orphans", for_ever)
    monkeypatch.setattr(hosted_run, "MONARCH", ("-c", MONARCH))
    monkeypatch.setattr("rl.cluster.leases._PING_SECONDS", 0.1)
    monkeypatch.setattr("rl.cluster.leases._AGAIN_SECONDS", 0.2)
    monkeypatch.setenv("TEST_MESH", MESH)


@contextlib.asynccontextmanager
async def an_agent(port=0, join=""):
    agent = HostAgent("127.0.0.1", port, join)
    serving = asyncio.create_task(agent.serve())
    try:
        while not agent.address:
            await asyncio.sleep(0.01)
            assert not serving.done(), await serving
        yield agent
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def a_lease(address, tmp_path, run="run", patience=5.0, **how):
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / MARK).write_text("run")
    return Lease(address, run, tmp_path, shared(tmp_path), patience, **how)


def shared(tmp_path):
    return tmp_path / f"rl-{os.getuid()}" / "1-abc"


@contextlib.asynccontextmanager
async def a_run(tmp_path, port=0):
    """(agent, lease), kept."""
    async with an_agent(port) as agent:
        lease = a_lease(agent.address, tmp_path)
        await lease.connect()
        keeping = asyncio.create_task(lease.run())
        OTHER_HOSTS[lease.address] = lease
        try:
            await until(lambda: len(lease.born(MESH)) == 2)
            yield agent, lease
        finally:
            OTHER_HOSTS.clear()
            keeping.cancel()
            await lease.close()


async def until(holds, seconds=20.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


def all_of_the_run():
    """Processes with a lease that still run."""
    there = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if LEASE in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                there.append(process)
    return there


def process_leases():
    return [process.environ()[LEASE] for process in all_of_the_run()]


def have_processes(*leases):
    """Whether each has its four processes. One that is about to run its program has its parent's variables, or none."""
    return all(process_leases().count(lease._id) == 4 for lease in leases)


def test_a_lease_knows_the_processes_of_its_run_and_nothing_is_left_of_them(tmp_path):
    async def main():
        async with a_run(tmp_path) as (agent, lease):
            assert (await lease.worker()).startswith("monarch-")
            await until(lambda: have_processes(lease))
            assert shared(tmp_path).is_dir()
            one, other = lease.born(MESH)
            assert (one.host, is_gone(one), is_stopped(one)) == (agent.address, False, False)
            os.kill(one.pid, signal.SIGSTOP)
            await until(lambda: is_stopped(one))
            await kill_processes(None, [one])
            await until(lambda: is_gone(one))
            assert not is_gone(other) and lease.own_address == "127.0.0.1"
        assert not all_of_the_run() and not shared(tmp_path).exists()
        assert is_gone(ProcessInfo(1, "no host", "cpu")) is False  # nobody knows

    asyncio.run(main())


def test_births_on_another_host_are_seen_and_their_deaths(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.actors.births._PATIENCE_SECONDS", 0.0)

    async def main():
        async with a_run(tmp_path) as (_, lease):
            births = Births("trainer")
            births.expect(2)
            births._mesh = MESH

            async def killed():
                await asyncio.sleep(0.5)
                os.kill(lease.born(MESH)[1].pid, signal.SIGKILL)
                await asyncio.sleep(30)

            with pytest.raises(ProcessDied, match=f"trainer died in start .pid .* on {lease.address}"):
                await births.watching(killed())

    asyncio.run(main())


def test_a_controller_that_is_gone_leaves_nothing(tmp_path):
    async def main():
        async with a_run(tmp_path) as (_, lease):
            lease._writer.transport.abort()
            await until(lambda: not all_of_the_run())
            await until(lambda: not shared(tmp_path).exists())

    asyncio.run(main())


def test_a_controller_that_is_silent_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(host_agent, "SILENCE_SECONDS", 0.5)

    async def main():
        async with an_agent() as agent:
            await a_lease(agent.address, tmp_path).connect()
            assert all_of_the_run()
            await until(lambda: not all_of_the_run())

    asyncio.run(main())


def test_the_next_controller_of_a_run_has_its_hosts_at_once(tmp_path):
    """The one before lost its power: its connection is open, and says nothing. If it lives, it asks in vain."""

    async def main():
        async with an_agent() as agent:
            gone, other, following = (
                a_lease(agent.address, tmp_path, name, mark=mark)
                for name, mark in (("run", "first"), ("another", "other"), ("run", "next"))
            )

            async def connect(lease):
                (tmp_path / MARK).write_text(lease._request["mark"])
                await lease.connect()

            for lease in (gone, other):
                await connect(lease)
            await until(lambda: have_processes(gone, other))
            async with asyncio.timeout(10):  # and silence is 45 s
                await connect(following)
            assert gone._id not in process_leases()
            await until(lambda: have_processes(other))
            with pytest.raises(HostUnreachable):
                await gone._ask({"do": "worker"})
            with pytest.raises(HostRefuses, match="is another controller's of this run by now"):
                await gone.connect()
            await until(lambda: have_processes(following))  # which that has not touched
            for lease in (following, other):
                await lease._ask({"do": "ping"})
            await until(lambda: have_processes(following, other))
            for lease in (following, other):
                await lease.close()

    asyncio.run(main())


def test_what_monarch_starts_from_is_started_again_and_what_it_had_is_gone(tmp_path):
    async def main():
        async with a_run(tmp_path) as (_, lease):
            before, old = await lease.worker(), lease.born(MESH)
            os.kill(int(before.partition("-")[2]), signal.SIGKILL)
            await until(lambda: all(map(is_gone, old)))
            after = await lease.worker()
            assert after != before
            await until(lambda: len(lease.born(MESH)) == 2)
            assert not {process.pid for process in old} & {process.pid for process in lease.born(MESH)}

    asyncio.run(main())


def test_a_host_that_comes_back_is_leased_anew(tmp_path):
    """What was there before is gone, whatever numbers its processes had."""

    async def main():
        async with an_agent() as first:
            lease = a_lease(first.address, tmp_path)
            await lease.connect()
            keeping = asyncio.create_task(lease.run())
            await until(lambda: len(lease.born(MESH)) == 2)
            OTHER_HOSTS[lease.address] = lease
            old = lease.born(MESH)
        await until(lambda: all(map(is_gone, old)))
        assert not lease.born(MESH)
        waiting = asyncio.create_task(lease.worker())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        async with an_agent(int(first.address.rpartition(":")[2])):
            assert (await waiting).startswith("monarch-")
            await until(lambda: len(lease.born(MESH)) == 2)
            again = ProcessInfo(lease.born(MESH)[0].pid, lease.address, "", old[0].lease)
            assert is_gone(again)
            keeping.cancel()
            await lease.close()
        OTHER_HOSTS.clear()
        assert not all_of_the_run()

    asyncio.run(main())


@pytest.mark.parametrize("is_gone_again", [False, True])
def test_a_host_that_comes_back_as_another_is_lost(tmp_path, is_gone_again):
    """It has fewer GPUs than planned: it is refused at once. One that is gone again is waited for."""
    checks = []

    def check():
        checks.append(len(checks))
        if is_gone_again and len(checks) == 1:
            raise ConfigError("it does not answer") from HostUnreachable("it does not answer")
        if not is_gone_again:
            raise ConfigError("it has 7 GPUs, and the plan 8")

    async def main():
        async with an_agent() as first:
            lease = a_lease(first.address, tmp_path, check=check)
            await lease.connect()
            assert not checks
            keeping = asyncio.create_task(lease.run())
        await until(lambda: not lease.is_held)
        async with an_agent(int(first.address.rpartition(":")[2])):
            if is_gone_again:
                assert (await lease.worker()).startswith("monarch-") and len(checks) == 2
            else:
                with pytest.raises(ProcessDied, match="it has 7 GPUs, and the plan 8"):
                    await lease.worker()
                assert len(checks) == 1 and not lease.is_held
            keeping.cancel()
            await lease.close()
            await until(lambda: not all_of_the_run())

    asyncio.run(main())


def test_a_host_that_refuses_after_it_came_back_is_waited_for(tmp_path):
    """As one that has booted, and does not see the run's directory yet; before the first lease it is an error."""

    async def main():
        async with an_agent() as first:
            lease = a_lease(first.address, tmp_path, sharer="trainer", patience=20.0)
            (tmp_path / MARK).rename(tmp_path / "hidden")
            with pytest.raises(HostRefuses, match="does not see"):
                await lease.connect()
            with pytest.raises(ProcessDied, match="does not see"):
                await lease.worker()
            (tmp_path / "hidden").rename(tmp_path / MARK)
            await lease.connect()
            keeping = asyncio.create_task(lease.run())
        await until(lambda: not lease.is_held)
        (tmp_path / MARK).rename(tmp_path / "hidden")
        async with an_agent(int(first.address.rpartition(":")[2])):
            waiting = asyncio.create_task(lease.worker())
            await asyncio.sleep(0.5)
            assert not waiting.done()
            (tmp_path / "hidden").rename(tmp_path / MARK)
            assert (await waiting).startswith("monarch-")
            keeping.cancel()
            await lease.close()
            await until(lambda: not all_of_the_run())

    asyncio.run(main())


def test_a_release_is_over_once_the_host_has_done_it(tmp_path, monkeypatch):
    """Else a file that is made anew under the same name would be taken for the old one."""
    monkeypatch.setattr("rl.cluster.leases._TELL_SECONDS", 0.1)

    async def main():
        async with a_run(tmp_path) as (_, lease):
            path = shared(tmp_path) / "model-v7-rank0.bin"
            path.write_bytes(b"old")
            busy = asyncio.get_running_loop().call_later(0.05, time.sleep, 1.0)  # the worker's loop, and this
            await asyncio.sleep(0)
            await lease.release([str(path)])
            assert not path.exists() and lease.is_held
            busy.cancel()

    asyncio.run(main())


def test_a_run_that_ends_keeps_no_other_waiting(tmp_path, monkeypatch):
    """Gigabytes of shared memory take seconds to remove."""
    removing, looked = threading.Event(), threading.Event()

    def slowly(self):
        removing.set()
        looked.wait(1.0)
        self._kept.close()

    async def main():
        async with an_agent() as agent:
            for name in ("one", "other"):
                (tmp_path / name).mkdir()
            lease, other = (a_lease(agent.address, tmp_path / name, name) for name in ("one", "other"))
            for name in ("one", "other"):
                (tmp_path / name / MARK).write_text(name)
            await lease.connect()
            await other.connect()
            monkeypatch.setattr(hosted_run.HostedRun, "_remove", slowly)
            closing = asyncio.create_task(lease.close())
            while not removing.is_set():
                await asyncio.sleep(0.01)
            began = time.monotonic()
            await other.ping()
            assert other.is_held and time.monotonic() - began < 0.8  # holds: clock, it is not waited for
            looked.set()
            await closing
            await other.close()
            await until(lambda: not all_of_the_run())

    asyncio.run(main())


def test_a_directory_whose_owner_is_gone_is_not_shared_but_taken(tmp_path):
    """Two workers of one host share a run's directory as long as one of them owns it."""

    async def main():
        shared(tmp_path).mkdir(parents=True)
        (shared(tmp_path) / "owner").write_text("of a stranger")  # it is not locked, and not ours to remove
        async with an_agent() as agent:
            lease = a_lease(agent.address, tmp_path)
            with pytest.raises(HostRefuses, match="cannot be used"):
                await lease.connect()
            (shared(tmp_path) / "owner").unlink()
            await lease.connect()
            assert is_owned(shared(tmp_path))
            await lease.close()
            await until(lambda: not all_of_the_run())
        assert not shared(tmp_path).exists()

    asyncio.run(main())


def test_the_wait_for_a_host_ends(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

    async def main():
        lease = a_lease(address, tmp_path, patience=0.1)
        words = f"host {address} does not answer .*; start there: rl worker --listen {address}"
        with pytest.raises(ProcessDied, match=words):
            await lease.worker()
        await kill_processes(None, [ProcessInfo(1, address, "cpu")])
        await lease.close()

    asyncio.run(main())


def test_all_who_wait_for_a_host_are_told_at_the_same_time(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

    async def main():
        lease = a_lease(address, tmp_path, patience=2.5)
        began = time.monotonic()
        waiting = [asyncio.create_task(lease.worker()) for _ in range(5)]
        await asyncio.sleep(0.1)
        with pytest.raises(ProcessDied):
            await lease.worker(0.0)  # whether it is there now
        assert time.monotonic() - began < 2
        assert {type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)} == {
            ProcessDied
        }
        assert time.monotonic() - began < 9  # one after the other, they would take 12 s

    asyncio.run(main())


def test_who_asks_may_be_cancelled_and_the_lease_holds(tmp_path):
    async def main():
        async with a_run(tmp_path) as (_, lease):
            born = lease.born(MESH)
            for _ in range(50):
                asking = asyncio.create_task(lease.worker())
                await asyncio.sleep(0)
                asking.cancel()
            assert await lease.worker() and lease.born(MESH) == born

    asyncio.run(main())


REFUSED = {
    "the directory is not shared": (
        dict(mark="another", sharer="trainer"),
        "does not see .*; put the run's directory on a file system",
    ),
    "python is elsewhere": (
        dict(python="/no/python"),
        "has no /no/python; install in the same directory on all",
    ),
    "shared memory cannot be used": (dict(shared=f"/proc/1/rl-{os.getuid()}/x"), "cannot be used: .*"),
    "another user": (
        dict(shared="/dev/shm/rl-424242/1-abc"),
        "runs its rl worker as another user than the run's .*; start it as a user with the same number",
    ),
    "no name of a directory": (
        dict(run_dir="/tmp/" + "x" * 300),
        "cannot read /tmp/x* .File name too long.; let",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_host_that_cannot_be_used_says_why(case, tmp_path):
    changes, words = REFUSED[case]

    async def main():
        async with an_agent() as agent:
            lease = a_lease(agent.address, tmp_path)
            lease._request |= changes
            with pytest.raises(HostRefuses, match=f"host {agent.address} {words}"):
                await lease.connect()
            with pytest.raises(ProcessDied, match=words):  # at once: to ask again would change nothing
                await asyncio.wait_for(lease.worker(), 3)

    asyncio.run(main())
    assert not all_of_the_run()


def test_a_host_that_cannot_write_to_the_runs_directory_says_so(tmp_path):
    """As where it is mounted to be read alone, or the worker is another user's: root may write anywhere else."""
    (tmp_path / "run").mkdir()

    async def main():
        async with an_agent() as agent:
            lease = a_lease(agent.address, tmp_path / "run")
            (tmp_path / "run" / "logs").rmdir()
            (tmp_path / "run" / "logs").write_text("")
            words = "cannot write to .*/run/logs .Not a directory.; let the user of its rl worker write there"
            with pytest.raises(HostRefuses, match=f"host {agent.address} {words}"):
                await lease.connect()

    asyncio.run(main())
    assert not all_of_the_run()


def test_a_controller_that_takes_no_answers_leaves_nothing(tmp_path, monkeypatch):
    """As where a link is cut while a large answer is on its way."""
    monkeypatch.setattr(host_agent, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(host_agent, "_CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(hosted_run.HostedRun, "_news", lambda _: [["x.log", "A" * 2**23]] * 4)
    (tmp_path / "logs").mkdir()

    async def main():
        async with an_agent() as agent:
            request = a_lease(agent.address, tmp_path)._request | {"lease": "one"}
            _, connection = await asyncio.to_thread(ask, agent.address, request, 20)
            with connection:
                connection.sendall(b'{"do": "ping"}\n' * 8)
                await until(lambda: not agent._runs and not agent._answering, 10)

    asyncio.run(main())
    assert not all_of_the_run()


@pytest.mark.parametrize(("theirs", "ours", "works"), [("", "", True), ("key", "key", True), ("key", "", False), ("key", "other", False), ("", "key", False)])  # fmt: skip
def test_a_key_is_the_same_on_both_sides(theirs, ours, works, monkeypatch):
    asked = []

    def request():
        monkeypatch.setenv("RL_WORKER_KEY", ours)
        made = signed({"do": "look"}, b'{"nonce": "12"}\n')
        monkeypatch.setenv("RL_WORKER_KEY", theirs)
        asked.append(made)
        return host_agent.request_of(made, "12")

    if works:
        assert request() == {"do": "look"}
    else:
        with pytest.raises(PermissionError):
            request()
    with pytest.raises(PermissionError):  # of another greeting
        host_agent.request_of(asked[0], "13")


BAD = [
    b"",
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"[]\n",
    b"{}\n",
    b'{"request": 1}\n',
    b"\xff\xfe\n",
    b"\x80\x04\x95.",
]


def test_what_is_no_request_disturbs_nobody(tmp_path):
    async def main():
        async with a_run(tmp_path) as (agent, lease):
            for text in BAD:
                host, port = agent.address.split(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                await reader.readline()
                writer.write(text)
                if b"\n" not in text:
                    writer.write_eof()
                answer = await asyncio.wait_for(reader.read(), 20)
                assert not answer or json.loads(answer).keys() == {"error"}
                writer.close()
            for request in ({"do": "nothing"}, {"do": "file", "run": "run", "path": "/etc/passwd"},
                            {"do": "file", "run": "other", "path": str(shared(tmp_path) / "x")},
                            {"do": "file", "run": "run", "path": str(shared(tmp_path) / "model-rank0.bin.lock")},
                            {"do": "file", "run": "run", "path": str(shared(tmp_path) / "model-v2-rank0.bin"), "base": "/etc/model-v1-rank0.bin"}):  # fmt: skip
                with pytest.raises(HostRefuses, match="knows no request|has no file"):
                    await asyncio.to_thread(ask, agent.address, request, 10)
            for request in (
                {"do": "lease"},
                {"do": "lease", "run": "run", "shared": 7},
                {"do": "file", "run": "run"},
            ):
                with pytest.raises(
                    HostRefuses, match="is asked as another rl does .*install the same on all hosts"
                ):
                    await asyncio.to_thread(ask, agent.address, request, 10)
            assert len(lease.born(MESH)) == 2 and await lease.worker()

    asyncio.run(main())


@pytest.mark.parametrize("size", [1, 4096, 2**22, 2**22 + 1, 2**24 + 3])
def test_a_file_arrives_as_it_was_and_once(size, tmp_path):
    """Whatever its size, and however many processes of the host ask for it at the same time."""
    content, there = os.urandom(size), tmp_path / "here"
    there.mkdir()

    def reserve(path, num_bytes, keep):
        reserved.append(num_bytes)
        Path(path).write_bytes(bytes(num_bytes))

    async def main():
        async with a_run(tmp_path) as (agent, _):
            source = shared(tmp_path) / "model-v3-rank0.bin"
            source.write_bytes(content)
            moved = Path(str(source).replace("1-abc", "1-abc"))

            def fetch():
                fetch_file(agent.address, "run", str(moved), reserve)

            source.rename(hidden := source.with_suffix(".hidden"))
            with pytest.raises(RunError, match="has released"):
                await asyncio.to_thread(fetch)
            hidden.rename(source)
            # This host's own file has the path: it is taken as it is.
            await asyncio.to_thread(fetch)
            assert not reserved

    reserved = []
    asyncio.run(main())
    served = {}

    async def over():
        """From a worker whose run has another directory."""
        async with a_run(tmp_path) as (agent, _):
            source = shared(tmp_path) / "model-v3-rank0.bin"
            source.write_bytes(content)
            real = ask

            def elsewhere(address, request, seconds):
                served[request["begin"]] = request["count"]
                return real(address, {**request, "path": str(source)}, seconds)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("rl.weight_sync.remote_files.ask", elsewhere)
                target = str(there / "model-v3-rank0.bin")
                await asyncio.gather(
                    *(asyncio.to_thread(fetch_file, agent.address, "run", target, reserve) for _ in range(3))
                )
            assert Path(target).read_bytes() == content and reserved == [size]

    asyncio.run(over())
    assert len(served) == {1: 1, 4096: 1, 2**22: 1, 2**22 + 1: 2, 2**24 + 3: 5}[size]


def test_a_host_that_goes_while_it_sends_is_an_error_and_leaves_no_file(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def half():
            connection, _ = listener.accept()
            connection.sendall(b'{"nonce": "1"}\n')
            connection.recv(4096)
            connection.sendall(b'{"size": 100}\n' + bytes(50))
            connection.close()

        import threading

        threading.Thread(target=half, daemon=True).start()
        path = tmp_path / "model-v1-rank0.bin"
        with pytest.raises(RunError, match="could not be fetched from host .*: it closed the connection"):
            fetch_file(
                f"127.0.0.1:{listener.getsockname()[1]}",
                "run",
                str(path),
                lambda p, n, _: Path(p).write_bytes(bytes(n)),
            )
        assert not path.exists()


def test_nothing_listens_on_every_address_and_bad_words_are_one_line(monkeypatch):
    for name in ("adopt_orphans", "allow_many_files"):  # of this process, for ever
        monkeypatch.setattr(host_agent, name, lambda: None)
    for words, message in [
        ([], "write rl worker --listen ADDRESS:PORT"),
        (["--listen"], "--listen has no value; write --listen 10.0.0.2:7000"),
        (["--listen", "7000"], "is no address; write host:port"),
        (["--listen", "0.0.0.0:0"], "give the address of one network"),
        (["--listen", "[::]:0"], "give the address of one network"),
        (["--listen", "no-such-host.invalid:1"], "is not known .*; give its IP address"),
        (["--listen", "192.0.2.1:1"], "give a free port of an address of this host"),
        (["--join", "x"], "write rl worker --listen"),
    ]:
        with pytest.raises(host_agent.ConfigError, match=message):
            host_agent.worker(words)


def test_a_name_that_is_each_hosts_own_is_refused(monkeypatch):
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))],
    )
    with pytest.raises(host_agent.ConfigError, match="node-1 is 127.0.1.1, which is each host's own"):
        host_agent.address_of("node-1")
    assert host_agent.address_of("localhost") == host_agent.address_of("127.0.1.1") == "127.0.1.1"


def test_processes_find_the_network_of_their_hosts_address(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")  # a user's own
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    address = next(
        each.address
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET and name == "lo"
    )
    environment = hosted_run.environment_of(address)
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("lo", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    assert hosted_run.environment_of(address)["NCCL_SOCKET_IFNAME"] == "=lo"  # and none that begins so
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & environment.keys()
    with pytest.raises(hosted_run.Refusal, match=r"has no network interface with the address 192.0.2.1"):
        hosted_run.environment_of("192.0.2.1")


def test_no_worker_answers_at_an_address_without_one():
    with pytest.raises(HostUnreachable, match="start there: rl worker --listen 127.0.0.1:1"):
        ask("127.0.0.1:1", {"do": "look"}, 2)
    assert sys.executable


def test_the_doctor_measures_between_hosts_and_names_what_keeps_a_run_away(capsys, monkeypatch):
    monkeypatch.setattr("rl.cluster.machine.machine_name", map(str, itertools.count()).__next__)
    from rl.cluster.hosts import look_at_hosts
    from rl.doctor import doctor_of_hosts

    async def main(*more):
        look_at_hosts.cache_clear()
        async with an_agent() as one, an_agent() as other:
            text = ",".join([one.address, other.address, *more])
            return await asyncio.to_thread(doctor_of_hosts, text), one.address, other.address

    code, one, other = asyncio.run(main())
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and lines[-1] == "a run can use all of them"
    for source, target in ((one, other), (other, one)):
        (line,) = [line for line in lines if line.startswith(f"{source} to {target}: ")]
        assert float(line.split()[3]) > 0 and line.endswith("GB/s over one connection")
    code, one, other = asyncio.run(main("127.0.0.1:1"))
    lines = capsys.readouterr().out.splitlines()
    assert code == 1 and lines[-1] == "a run cannot use all of them"
    problems = [line for line in lines if line.startswith("problem: ")]
    assert sum("host 127.0.0.1:1 does not answer" in line for line in problems) == len(problems) == 1
    (here,) = [line for line in lines if line.startswith("versions here: python 3.")]
    assert ", torchmonarch 0." in here
    assert sum(line.startswith(one) and line.endswith("shared memory, no GPU") for line in lines) == 1
    listening = HostAgent._listen

    async def behind_a_firewall(agent, port):
        server, address = await listening(agent, port)
        if agent.address:  # but for the worker's own
            server.close()
        return server, address

    with monkeypatch.context() as patch:
        patch.setattr(HostAgent, "_listen", behind_a_firewall)
        code, one, other = asyncio.run(main())
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert code == 1 and [line.startswith(f"problem: host {b} does not reach host {a} at the port of a new process")
                          for line, (a, b) in zip(problems, [(one, other), (other, one)], strict=True)] == [True, True]  # fmt: skip
    assert all(line.endswith("; let hosts connect to each other on any port") for line in problems)
    monkeypatch.setattr("rl.cluster.machine.machine_name", lambda: "one")
    code, one, other = asyncio.run(main())
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert code == 1 and [f"hosts {one} and {other} are one machine" in line for line in problems] == [True]
    look_at_hosts.cache_clear()


def test_a_port_is_open_while_who_asked_is_connected_and_hosts_reach_the_controller():
    async def main():
        async with an_agent() as agent:
            answer, connection = await asyncio.to_thread(ask, agent.address, {"do": "open"}, 5.0)
            port = answer["address"]
            assert port != agent.address and port.startswith("127.0.0.1:")
            (await asyncio.to_thread(ask, port, {"do": "noise", "count": 8}, 5.0))[1].close()
            assert await asyncio.to_thread(hosts.why_not_reached, "127.0.0.1", [agent.address]) == []
            connection.close()
            for _ in range(100):
                try:
                    (await asyncio.to_thread(ask, port, {"do": "noise", "count": 8}, 5.0))[1].close()
                except HostUnreachable:
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("it is still open")

    asyncio.run(main())


def test_hosts_that_do_not_reach_the_controller_are_named(monkeypatch):
    """Each, and who reaches it is not. By TLS it would take a certificate for the address."""

    def measure(address, count, streams):
        assert count <= 2**20 and streams == 1
        reaches = measured.append(address) or len(measured) == 1
        return (
            {"size": count, "seconds": 0.1}
            if reaches
            else {"unreachable": f"host {address} does not answer (timed out); start"}
        )

    monkeypatch.setattr(host_agent, "measure", measure)
    measured = []

    async def main():
        async with an_agent() as one, an_agent() as other:
            return await asyncio.to_thread(hosts.why_not_reached, "127.0.0.1", [one.address, other.address])

    (problem,) = asyncio.run(main())
    assert re.fullmatch(
        r"host 127.0.0.1:\d+ does not reach this host, where the run is started, at the port of a new process "
        r"\(host 127.0.0.1:\d+ does not answer \(timed out\)\); let hosts connect to each other on any port",
        problem,
    )
    assert measured[0] == measured[1]  # the one port of this process
    monkeypatch.setattr(hosts, "is_on", lambda: True)
    assert asyncio.run(main()) == []


def test_a_driver_that_comes_after_the_worker_is_seen(monkeypatch):
    """A host that boots starts both. Without a driver nothing is looked at again."""
    gpu = {"name": "H100", "gib": 78.8, "capability": [9, 0], "visible": "0"}
    answers = [[], [gpu]]
    has_driver = False

    async def look():
        return answers.pop(0)

    monkeypatch.setattr(host_agent, "_look_at_gpus", look)
    monkeypatch.setattr(host_agent, "has_driver", lambda: has_driver)

    async def gpus(agent):
        return (await asyncio.to_thread(look_at, agent.address)).gpus

    async def main():
        nonlocal has_driver
        async with an_agent() as agent:
            assert await gpus(agent) == () and len(answers) == 1
            has_driver = True
            for _ in range(2):
                assert [card.name for card in await gpus(agent)] == ["H100"]

    asyncio.run(main())


def test_gpus_that_do_not_answer_end_the_worker(monkeypatch, tmp_path):
    """Whose start others wait for."""
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(host_agent.sys, "executable", str(hangs))
    monkeypatch.setattr(host_agent, "_LOOK_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=r"GPUs did not answer within 0 s; see whether nvidia-smi does"):
        asyncio.run(LOOK_AT_GPUS())


def test_a_lease_keeps_its_directory_whoever_asked_beside_it_while_one_before_ended(tmp_path, monkeypatch):
    """To remove gigabytes of shared memory takes a second; a caller that is cancelled meanwhile asks no more."""
    remove = hosted_run.HostedRun._remove

    def slowly(run):
        if run._kept._exit_callbacks:
            time.sleep(0.4)
        remove(run)

    monkeypatch.setattr(hosted_run.HostedRun, "_remove", slowly)

    async def main():
        async with an_agent() as agent:
            first, cancelled, last = (a_lease(agent.address, tmp_path) for _ in range(3))
            await first.connect()
            first._writer.close()
            await asyncio.sleep(0.1)
            asking = asyncio.create_task(cancelled.connect())
            await asyncio.sleep(0.1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await last.connect()
            for _ in range(8):
                await last.ping()
                await asyncio.sleep(0.15)
            assert last.is_held and shared(tmp_path).is_dir() and is_owned(shared(tmp_path))
            await last.close()
            async with asyncio.timeout(10):
                while shared(tmp_path).exists():
                    await asyncio.sleep(0.05)

    asyncio.run(main())


def test_a_runs_file_system_that_hangs_holds_up_no_other_run(tmp_path, monkeypatch):
    init, hangs, looked = hosted_run.HostedRun.__init__, threading.Event(), threading.Event()

    def slowly(run, request, *arguments):
        if request["run"] == "slow":
            hangs.set()
            looked.wait(3)
        init(run, request, *arguments)

    monkeypatch.setattr(hosted_run.HostedRun, "__init__", slowly)

    async def main():
        async with an_agent() as agent:
            healthy = a_lease(agent.address, tmp_path)
            await healthy.connect()
            began = time.monotonic()
            slow = asyncio.create_task(a_lease(agent.address, tmp_path, "slow").connect())
            while not hangs.is_set():
                await asyncio.sleep(0.01)
            await healthy.ping()
            assert time.monotonic() - began < 1.5  # holds: clock, the file system hangs for 3 s
            looked.set()
            await asyncio.gather(slow, return_exceptions=True)
            await healthy.close()

    asyncio.run(main())
