"""Runs reward functions in a child process, so that one that hangs or crashes costs its own sample and no more.

`python -m rl.envs.verifier` is that child: it speaks length-prefixed pickles over its standard input and output.
"""

import contextlib
import os
import pickle
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

import cloudpickle

from rl.envs.base import Env
from rl.errors import RunError
from rl.types import Rollout, Score

_START_SECONDS = 60.0  # to start Python and import what the Env needs


class Verifier:
    """Scores rollouts one after the other in its child, which it replaces when a call outlasts `limit_seconds`."""

    def __init__(self, env: Env, limit_seconds: float):
        self._env = cloudpickle.dumps(env)
        self._limit = limit_seconds
        self._child = self._start()

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [self._score(rollout) for rollout in rollouts]

    def close(self) -> None:
        self._child.kill()
        self._child.wait()

    def _score(self, rollout: Rollout) -> Score:
        if self._child.poll() is not None:
            self._child = self._start()
        try:
            _write(self._child.stdin.fileno(), pickle.dumps((rollout.problem, rollout.response, rollout.stop)))
            return pickle.loads(_read(self._child.stdout.fileno(), self._limit))
        except TimeoutError:
            self.close()
            return Score(0.0, f"the reward function took over {self._limit:g} s (reward.limit_seconds)")
        except (EOFError, BrokenPipeError):
            code = self._child.wait()
            return Score(0.0, f"the reward function ended its process with code {code}")

    def _start(self) -> subprocess.Popen:
        child = subprocess.Popen([sys.executable, "-m", "rl.envs.verifier"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            _write(child.stdin.fileno(), self._env)
            _read(child.stdout.fileno(), _START_SECONDS)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            child.kill()
            raise RunError("the process of the reward function did not start; see the reward actor's log") from error
        return child


def _write(fd: int, payload: bytes) -> None:
    data = memoryview(struct.pack("<Q", len(payload)) + payload)
    while data:
        data = data[os.write(fd, data) :]


def _read(fd: int, limit_seconds: float | None = None) -> bytes:
    """One message. Raises TimeoutError past the limit, EOFError where the other end is gone."""
    deadline = None if limit_seconds is None else time.monotonic() + limit_seconds

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([fd], [], [], left)[0]:
                raise TimeoutError
            chunk = os.read(fd, count - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    return exactly(struct.unpack("<Q", exactly(8))[0])


def _serve() -> None:
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what a reward function prints must not mix with the answers
    _end_with_parent()
    env: Env = pickle.loads(_read(requests))
    _write(answers, b"ready")
    while True:
        problem, response, stop = pickle.loads(_read(requests))
        try:
            score = Score(float(env.reward(problem, response, stop)))
        except Exception as error:  # the task's boundary: counted and logged by the controller
            score = Score(0.0, f"{type(error).__name__}: {error}")
        _write(answers, pickle.dumps(score))


def _end_with_parent() -> None:
    """A reward function that hangs must not outlive a killed run: ask Linux to kill this process with its parent."""
    if sys.platform == "linux":
        import ctypes
        import signal

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        _serve()
