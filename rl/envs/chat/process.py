"""The processes of episodes. `python -m rl.envs.chat.process` has the environment ready and forks for each.

A fork takes milliseconds and shares the memory of what is imported; it may hang, crash or be killed, and
nothing but its own episode notices. Host and forks speak rl/envs/pipes.py over a socket each.
"""

import contextlib
import gc
import os
import pickle
import random
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from rl.envs.chat.episode import EndedEpisode, EpisodeRunner
from rl.envs.chat.tools import Tool
from rl.envs.failures import described, failure_of
from rl.envs.pipes import receive, send
from rl.envs.verifier import score_of
from rl.errors import BadReturn, EpisodeFailed
from rl.observability.plain import plain
from rl.processes import adopt_orphans, end_with_parent, kill_descendants, mark_descendants
from rl.types import Score

_GIB = 2**30
ENDED = struct.Struct("<ii")  # pid, wait status: what the forking process tells its host


def _serve_episode(sock: socket.socket, env: Any, tools: Sequence[Tool]) -> None:
    """In a fork: the verbs of EpisodeRunner, until the host closes the socket."""
    problem, seed = receive(sock.fileno())
    _seed_all(seed)
    runner = EpisodeRunner(env, tools, problem, seed)
    send(sock.fileno(), os.getpid())
    while True:
        verb, arguments = receive(sock.fileno())
        answer = perform(runner, verb, arguments)
        try:
            send(sock.fileno(), answer)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            failure = EpisodeFailed(f"what the environment returned cannot be sent: {error}", "type")
            send(sock.fileno(), failure)


def _seed_all(seed: int) -> None:
    """Else all forks draw the same from numpy, and from random other numbers where a run goes on."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(seed % 2**32)


def perform(runner: EpisodeRunner, verb: str, arguments: tuple) -> Any:
    """What the verb returned, or the EpisodeFailed that it ended in."""
    verbs: dict[str, Callable[..., Any]] = {
        "begin": runner.begin,
        "step": runner.step,
        "act": runner.act,
        "score_group": lambda members: _score_group(runner, members),
        "score": lambda *end: _score(runner, *end),
    }
    try:
        return verbs[verb](*arguments)
    except Exception as error:  # the task's boundary: counted and logged by the controller
        failure = failure_of(error, "raise env.max_memory_gib")
        if failure.cause == "raised":
            traceback.print_exc()
        return failure


def _score(runner: EpisodeRunner, *end: Any) -> Score:
    score = score_of(runner.reward(*end))
    return replace(score, notes=plain(runner.episode.notes)) if runner.episode.notes else score


def _score_group(runner: EpisodeRunner, members: Sequence[EndedEpisode]) -> list[Score]:
    rewards = runner.reward_group(members)
    if not isinstance(rewards, Sequence) or len(rewards) != len(members):
        raise BadReturn(
            f"reward_group() returned {rewards!r:.60} for {len(members)} episodes; return one for each"
        )
    return [score_of(reward) for reward in rewards]


def _limit_memory(gib: float) -> None:
    """What the fork may take beside what it shares with its parent."""
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(gib * _GIB),) * 2)


def _fork(env: Any, tools: Sequence[Tool], sock: socket.socket, output: int, host: socket.socket) -> int:
    """The episode's process."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.setsid()
        end_with_parent()
        adopt_orphans()  # so that the host can end it with all that it starts
        if os.getppid() != parent:  # it ended before: no signal will tell of it
            os._exit(status)
        host.close()
        for fd in (1, 2):
            os.dup2(output, fd)
        os.close(output)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _limit_memory(env.max_memory_gib)
        _serve_episode(sock, env, tools)
    except EOFError:
        status = 0
    except BaseException as error:
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else 1
        else:
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _reap(host: socket.socket, episodes: set[int], own: Collection[int]) -> None:
    """Tell of episodes that have ended, and end what they have left.

    An episode adopts the orphans of what it starts; the orphans of this process are those of episodes that
    are gone. own: children that are neither.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] in episodes:
                episodes.remove(ended[0])
                host.sendall(ENDED.pack(*ended))
    kill_descendants(os.getpid(), but={*episodes, *own})


def main() -> None:
    """Standard input is the socket to the host, which first sends where modules are, and the environment."""
    host = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    end_with_parent()
    adopt_orphans()
    mark_descendants()
    try:
        sys.path[:] = receive(host.fileno())
        env = receive(host.fileno())
        env.prepare()
        if "numpy" in sys.modules:  # else each fork would import this, and seed it anew
            import numpy.random  # noqa: F401
        tools = env.tools()
    except Exception as error:  # the user's own code: named by the host
        traceback.print_exc()
        send(host.fileno(), described(error))
        return
    send(host.fileno(), None)
    episodes: set[int] = set()
    own = {child.pid for child in psutil.Process().children()}  # what prepare() has started
    gc.freeze()  # what is there now stays shared: no fork's collector touches it
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([host.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(host, episodes, own)
        if host.fileno() in ready:
            data, fds, _, _ = socket.recv_fds(host, 1, 2)
            if not data:
                return
            sock = socket.socket(fileno=fds[0])
            episodes.add(_fork(env, tools, sock, fds[1], host))
            sock.close()
            os.close(fds[1])


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError, ConnectionError):
        sys.exit(0)
