"""EpisodeHost with a forking process of the test's own: what it is told, and what it keeps of episodes that are over."""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
from types import SimpleNamespace

import pytest

from rl.envs.calculator import Calculator
from rl.envs.chat import host as host_module
from rl.envs.chat.episode import ServerLost
from rl.envs.chat.host import EpisodeHost, HostedEpisode, _keep_output
from rl.envs.chat.process import ENDED, perform
from rl.envs.pipes import framed
from rl.errors import EpisodeFailed, EpisodeLost
from rl.types import Problem

NOBODY = 2**22 + 7  # no process has this number: it is over the kernel's largest
PROBLEM = Problem("1", "q", "a")


class Forking:
    """The other end: each episode's process is this number."""

    def __init__(self, monkeypatch):
        ours, self.socket = socket.socketpair()
        ours.setblocking(False)
        self.code = None  # with which it has ended
        process = SimpleNamespace(poll=lambda: self.code, pid=NOBODY)
        monkeypatch.setattr(EpisodeHost, "_start", lambda host: (ours, process))
        self.host = EpisodeHost(Calculator(), 1.0)

    def fork(self):
        """The ends of the next episode's process: its socket, and where its output goes."""
        _, fds, _, _ = socket.recv_fds(self.socket, 1, 2)
        return socket.socket(fileno=fds[0]), fds[1]

    async def tell(self, pid, status):
        self.socket.send(ENDED.pack(pid, status))
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def episode(forking, pid=NOBODY):
    async def answer():
        while True:
            with contextlib.suppress(BlockingIOError):
                forking.socket.setblocking(False)
                theirs, output = forking.fork()
                theirs.sendall(framed(pickle.dumps(pid)))
                return theirs, output
            await asyncio.sleep(0.001)

    answering = asyncio.create_task(answer())
    async with forking.host.open(PROBLEM, 0) as opened:
        theirs, output = await answering
        try:
            yield opened, theirs, output
        finally:
            theirs.close()
            os.close(output)


def test_a_process_that_was_ended_after_its_episode_is_forgotten(monkeypatch):
    """The number may be another episode's later, which is then taken for ended, and never killed."""

    async def main():
        forking = Forking(monkeypatch)
        async with episode(forking) as (opened, _, _):
            await asyncio.sleep(0)
            assert opened.pid == NOBODY and not forking.host.has_ended(NOBODY)
        await forking.tell(NOBODY, signal.SIGKILL)  # the host ended it as the context did
        assert not forking.host.has_ended(NOBODY)
        async with episode(forking):
            assert not forking.host.has_ended(NOBODY)
            await forking.tell(NOBODY, 3 << 8)  # this one ends by itself
            assert forking.host.has_ended(NOBODY)
            assert await forking.host.how_ended(NOBODY, 0) == "ended with code 3"
        assert not forking.host.has_ended(NOBODY)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (3 << 8, "ended with code 3"),
        (signal.SIGKILL, r"was ended by SIGKILL \(out of memory\?\)"),
        (signal.SIGSEGV, "was ended by SIGSEGV"),
    ],
)
def test_how_an_episode_ended_is_told_with_what_it_was_asked(monkeypatch, status, how):
    async def main():
        forking = Forking(monkeypatch)
        async with episode(forking) as (opened, theirs, _):
            await forking.tell(NOBODY, int(status))
            theirs.shutdown(socket.SHUT_RDWR)
            with pytest.raises(EpisodeFailed, match=f"^the episode's process {how} in begin$") as failed:
                await opened.begin()
            assert failed.value.cause == "crashed"

    asyncio.run(main())


def test_a_process_that_is_gone_before_it_has_started_is_a_failure():
    class Host:
        async def how_ended(self, pid, life):
            assert life == 7
            return "ended with code 1"

        def has_ended(self, pid):
            return True

    async def main():
        reader = asyncio.StreamReader()
        reader.feed_eof()
        opened = HostedEpisode(Host(), 7, reader, SimpleNamespace(write=lambda data: None))
        with pytest.raises(EpisodeFailed, match=r"process ended with code 1 as it started$") as failed:
            await opened.start(PROBLEM, 0)
        assert failed.value.cause == "crashed"

    asyncio.run(main())


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


def test_an_episode_whose_forking_process_is_gone_begins_again_and_leaves_nothing_open(monkeypatch):
    async def main():
        forking = Forking(monkeypatch)
        async with episode(forking):
            pass
        await asyncio.sleep(0.01)
        before = open_files()
        forking.socket.close()
        for _ in range(3):
            with pytest.raises(EpisodeLost):
                async with forking.host.open(PROBLEM, 0):
                    raise AssertionError("there is no process")
            monkeypatch.setattr(EpisodeHost, "_be_ready", lambda host: asyncio.sleep(0))
        assert len(open_files()) < len(before)
        assert forking.host.is_gone

    asyncio.run(main())


def test_an_episodes_output_reaches_the_workers_log_but_no_more_than_its_beginning(monkeypatch, capsys):
    monkeypatch.setattr(host_module, "_OUTPUT_BYTES", 10)

    async def main():
        read, write = os.pipe()
        keeping = asyncio.create_task(_keep_output(read))
        for text in (b"first\n", b"second\n", b"third\n"):
            os.write(write, text)
            await asyncio.sleep(0.01)
        os.close(write)
        await keeping
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(read)

    asyncio.run(main())
    assert capsys.readouterr().out == "first\nseco"


@pytest.mark.parametrize(("error", "is_told"), [(KeyError("fruit"), True), (ServerLost("its host"), False)])
def test_an_error_of_an_environments_own_code_leaves_its_traceback_in_the_log(capsys, error, is_told):
    """The sample's record has one line of it. An outage is no fault of that code."""

    def begin():
        raise error

    runner = SimpleNamespace(begin=begin, step=None, act=None)
    assert isinstance(perform(runner, "begin", ()), EpisodeFailed)
    assert ("in begin" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_process_that_is_not_there_in_time_is_a_timeout(monkeypatch, is_busy):
    """Busy: so many are asked for that the next request finds no room in the socket."""
    monkeypatch.setattr(host_module, "_OPEN_SECONDS", 0.05)

    async def main():
        forking = Forking(monkeypatch)
        with contextlib.suppress(BlockingIOError):
            while is_busy:
                forking.host._host.send(b"x" * 4096)
        with pytest.raises(EpisodeFailed, match=r"^a process did not start in 0\.05 s$") as failed:
            async with forking.host.open(PROBLEM, 0):
                raise AssertionError("there is no process")
        assert failed.value.cause == "timeout"

    asyncio.run(main())


def test_a_process_that_closes_its_connection_and_lives_is_named(monkeypatch):
    monkeypatch.setattr(host_module, "_STATUS_SECONDS", 0.04)

    async def main():
        forking = Forking(monkeypatch)
        async with episode(forking) as (opened, theirs, _):
            theirs.shutdown(socket.SHUT_RDWR)
            words = "^the episode's process closed its connection in begin$"
            with pytest.raises(EpisodeFailed, match=words) as failed:
                await opened.begin()
            assert failed.value.cause == "crashed"

    asyncio.run(main())


def test_a_process_is_killed_after_its_episode_unless_it_has_ended(monkeypatch):
    """Its number may be another's by then."""
    killed = []
    monkeypatch.setattr(host_module, "kill_tree", killed.append)
    monkeypatch.setattr(host_module.os, "getsid", lambda pid: pid)

    async def main():
        forking = Forking(monkeypatch)
        async with episode(forking):
            await forking.tell(NOBODY, 3 << 8)
        assert killed == []
        async with episode(forking):
            pass
        assert killed == [NOBODY]

    asyncio.run(main())
