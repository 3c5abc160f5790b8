"""EpisodeHost: opens, limits and ends the processes of episodes. For one event loop."""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import cloudpickle

from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import EndedEpisode, Opening, Reply
from rl.envs.chat.process import ENDED
from rl.envs.pipes import HEADER, framed, receive, send, send_pickled
from rl.envs.verifier import START_SECONDS, NotStartedAgain, not_started
from rl.errors import EpisodeFailed, EpisodeLost, RunError
from rl.processes import kill_tree
from rl.types import Message, Problem, Score
from rl.waiting import within

_OUTPUT_BYTES = 64 * 1024  # of what an episode prints: kept in the worker's log
_STATUS_SECONDS = 5.0  # until the forking process has told how one ended, or is found to be gone itself
_OPEN_SECONDS = 30.0  # a fork, on a busy machine


class EpisodeHost:
    """See rl/envs/chat/process.py."""

    def __init__(self, env: ChatEnv, reward_seconds: float):
        """Raises RunError where the environment does not get ready."""
        self._env = env
        self._starting = asyncio.Lock()
        self.turn_seconds = env.turn_seconds
        self.episode_seconds = env.episode_seconds
        self.reward_seconds = reward_seconds
        self._ended: dict[int, int] = {}  # pid -> wait status, of open episodes
        self._closed: set[int] = set()  # episodes that are over, and whose process has not been told of
        self._is_reading = False
        self._is_cut_off = False  # a killed process's sockets close before it can be waited for
        self.num_restarts = 0
        self._host, self._process = self._start()

    def _start(self) -> tuple[socket.socket, subprocess.Popen]:
        """The process that forks, with the environment ready, and the socket to it."""
        data = cloudpickle.dumps(self._env)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-u", "-P", "-m", "rl.envs.chat.process"]  # killed, it writes nothing more
        process = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)
        theirs.close()
        try:
            send(ours.fileno(), sys.path)  # where a recipe finds the modules beside it
            send_pickled(ours.fileno(), data)
            failure = receive(ours.fileno(), START_SECONDS)
        except (OSError, EOFError) as error:
            _end(ours, process)
            raise not_started(error, "the environment", "this worker's log") from error
        if failure is not None:
            _end(ours, process)
            raise RunError(f"prepare() of the environment failed: {failure}; fix it")
        ours.setblocking(False)
        return ours, process

    def close(self) -> None:
        """End it, and with it every episode."""
        _end(self._host, self._process)

    @asynccontextmanager
    async def open(self, problem: Problem, seed: int) -> AsyncIterator["HostedEpisode"]:
        """A process of its own for the episode, ended with whatever it has started."""
        await self._be_ready()
        ours, theirs = socket.socketpair()
        output, their_output = os.pipe()
        try:
            await self._send_fds([theirs.fileno(), their_output])
        except BaseException:
            ours.close()
            os.close(output)
            raise
        finally:
            theirs.close()
            os.close(their_output)
        life = self.num_restarts
        reading = asyncio.create_task(_keep_output(output))
        reader, writer = await asyncio.open_connection(sock=ours)
        episode = HostedEpisode(self, life, reader, writer)
        try:
            await episode.start(problem, seed)
            yield episode
        finally:
            episode.kill()
            writer.close()
            reading.cancel()
            self._forget(episode.pid, life)

    def _forget(self, pid: int, life: int) -> None:
        """The number may be another episode's once the forking process has told of this one's end."""
        if self._ended.pop(pid, None) is None and pid and life == self.num_restarts:
            self._closed.add(pid)

    async def _send_fds(self, fds: Sequence[int]) -> None:
        """The socket holds a few hundred; what is beyond waits until as many have been forked."""
        for _ in range(int(_OPEN_SECONDS / 0.01)):
            try:
                socket.send_fds(self._host, [b"f"], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except OSError as error:
                self._is_cut_off = True
                raise EpisodeLost from error
        raise EpisodeFailed(f"a process did not start in {_OPEN_SECONDS:g} s", "timeout")

    async def _be_ready(self) -> None:
        """Start it again where it was killed: its episodes are lost with it, and begin again."""
        loop = asyncio.get_running_loop()
        async with self._starting:
            if self.is_gone:
                if self._host.fileno() >= 0:  # else it did not start again the last time
                    loop.remove_reader(self._host)
                    _end(self._host, self._process)
                try:
                    self._host, self._process = await asyncio.to_thread(self._start)
                except RunError as error:
                    raise NotStartedAgain(str(error)) from error
                self._is_reading = self._is_cut_off = False
                self._ended, self._closed = {}, set()
                self.num_restarts += 1
            if not self._is_reading:
                loop.add_reader(self._host, self._read_ended)
                self._is_reading = True

    def has_ended(self, pid: int) -> bool:
        """As far as the forking process has told."""
        return pid in self._ended

    @property
    def is_gone(self) -> bool:
        return self._is_cut_off or self._process.poll() is not None

    async def how_ended(self, pid: int, life: int) -> str:
        """Raises EpisodeLost where it ended because its forking process did: the one of that `life`."""
        for _ in range(int(_STATUS_SECONDS / 0.02)):
            if self.is_gone or life != self.num_restarts:
                raise EpisodeLost
            if pid in self._ended:
                break
            await asyncio.sleep(0.02)
        status = self._ended.get(pid)
        if status is None:
            return "closed its connection"
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"ended with code {os.WEXITSTATUS(status)}"

    def _read_ended(self) -> None:
        try:
            data = self._host.recv(ENDED.size * 256)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._is_cut_off = True
            asyncio.get_running_loop().remove_reader(self._host)
        for at in range(0, len(data) - len(data) % ENDED.size, ENDED.size):
            pid, status = ENDED.unpack_from(data, at)
            if pid in self._closed:
                self._closed.remove(pid)
            else:
                self._ended[pid] = status


class HostedEpisode:
    """An EpisodeProcess (rl/interfaces.py)."""

    def __init__(
        self, host: EpisodeHost, life: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ):
        """life: the host's num_restarts when it was asked for the process."""
        self.pid = 0
        self._host = host
        self._life = life
        self._reader = reader
        self._writer = writer

    async def start(self, problem: Problem, seed: int) -> None:
        self._write((problem, seed))
        try:
            async with within(_OPEN_SECONDS):
                self.pid = await self._read()
        except TimeoutError as error:
            raise EpisodeFailed(f"a process did not start in {_OPEN_SECONDS:g} s", "timeout") from error
        except (EOFError, ConnectionError) as error:
            how = await self._host.how_ended(self.pid, self._life)
            raise EpisodeFailed(f"the episode's process {how} as it started", "crashed") from error

    async def begin(self) -> Opening:
        return await self._ask("begin", (), self._host.turn_seconds, "start() took", "env.turn_seconds")

    async def step(self, message: Message, malformed: Sequence[str], tokens: Sequence[int]) -> Reply:
        called = [call["function"]["name"] for call in message.get("tool_calls", ())]
        activity = f"the tool {' and '.join(called)} took" if called else "step() took"
        turn = message, malformed, tokens
        reply = await self._ask("step", turn, self._host.turn_seconds, activity, "env.turn_seconds")
        if not reply.done:
            return reply
        try:
            score = await self.score()
        except EpisodeFailed as failure:  # the turn has been: what it did is counted
            score = Score(0.0, str(failure), cause=failure.cause)
        return replace(reply, score=score)

    async def act(self, base_url: str, api_key: str) -> None:
        seconds = self._host.episode_seconds
        await self.begin()
        await self._ask("act", (base_url, api_key), seconds, "the agent took", "env.episode_seconds")

    async def score(self, *end: Any) -> Score:
        seconds, activity = self._host.reward_seconds, "the reward function took"
        return await self._ask("score", end, seconds, activity, "reward.limit_seconds")

    async def score_group(self, members: Sequence[EndedEpisode]) -> list[Score]:
        seconds, activity = self._host.reward_seconds, "the reward function took"
        return await self._ask("score_group", (members,), seconds, activity, "reward.limit_seconds")

    def kill(self) -> None:
        """With all that it has started. Of one that ended by itself the forking process ends what is left."""
        with contextlib.suppress(ProcessLookupError):
            if self.pid and not self._host.has_ended(self.pid) and os.getsid(self.pid) == self.pid:
                kill_tree(self.pid)

    async def _ask(self, verb: str, arguments: tuple, seconds: float, activity: str, setting: str) -> Any:
        try:
            self._write((verb, arguments))
            async with within(seconds):
                answer = await self._read()
        except TimeoutError:
            self.kill()
            raise EpisodeFailed(f"{activity} over {seconds:g} s ({setting})", "timeout") from None
        except (EOFError, ConnectionError, asyncio.IncompleteReadError):
            how = await self._host.how_ended(self.pid, self._life)
            raise EpisodeFailed(f"the episode's process {how} in {verb}", "crashed") from None
        if isinstance(answer, EpisodeFailed):
            raise answer
        return answer

    def _write(self, message: object) -> None:
        self._writer.write(framed(pickle.dumps(message)))

    async def _read(self) -> Any:
        size = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
        return pickle.loads(await self._reader.readexactly(size))


def _end(host: socket.socket, process: subprocess.Popen) -> None:
    kill_tree(process.pid)
    process.wait()
    host.close()


async def _keep_output(fd: int) -> None:
    """Of an episode's output the beginning goes to the log, the rest nowhere."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb")
    )
    left = _OUTPUT_BYTES
    try:
        while data := await reader.read(65536):
            with contextlib.suppress(OSError):  # a full disk costs the log
                sys.stdout.write(data[:left].decode(errors="replace"))
                sys.stdout.flush()
            left -= len(data[:left])
    finally:
        transport.close()
