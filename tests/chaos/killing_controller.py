"""`rl`, whose controller kills its own processes at moments that no random kill would meet in a test's time.

A moment is a call that begins: who is called, with which verb, and which process dies then. MOMENTS: a JSON list of them;
each has to come before the next is waited for, with at least three optimizer steps between two. DIED: the file to which
each moment that came is written.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from rl.cli import main
from rl.observability.timeline import Timeline

STEPS_BETWEEN = 3  # more than there are between two checkpoints, so that the run gets on
_SECONDS = (0.0, 0.01, 0.03)  # from a call's begin to the death, by turns


class Moment(NamedTuple):
    """`dies`: the name of its log."""

    lane: str
    verb: str
    dies: str


class Killer:
    def __init__(self, moments: list[Moment], died: Path):
        self._moments, self._died = moments, died
        self._num_died = self._num_steps = 0
        self._is_due = False

    def see(self, lane: str, verb: str) -> None:
        """A call begins."""
        if (lane, verb) == ("trainer", "optim_step"):
            self._num_steps += 1
        if self._is_due or self._num_died == len(self._moments) or self._num_steps < STEPS_BETWEEN:
            return
        moment = self._moments[self._num_died]
        if (moment.lane, moment.verb) == (lane, verb) and self._pids(moment.dies):
            self._is_due = True
            seconds = _SECONDS[self._num_died % len(_SECONDS)]
            asyncio.get_running_loop().call_later(seconds, self._kill, moment)

    def _kill(self, moment: Moment) -> None:
        for pid in self._pids(moment.dies):
            os.kill(pid, signal.SIGKILL)
        with self._died.open("a") as file:
            file.write(json.dumps(moment) + "\n")
        self._num_died += 1
        self._num_steps, self._is_due = 0, False

    def _pids(self, name: str) -> list[int]:
        def log_of(child: psutil.Process) -> str:
            return os.path.basename(os.path.realpath(f"/proc/{child.pid}/fd/1"))

        return [child.pid for child in psutil.Process().children() if log_of(child) == f"{name}.log"]


def kill_at(moments: list[Moment], died: Path) -> None:
    """From now on, in this process."""
    killer, span = Killer(moments, died), Timeline.span

    @contextmanager
    def watched(timeline: Timeline, lane: str, verb: str) -> Iterator[None]:
        with span(timeline, lane, verb):
            killer.see(lane, verb)
            yield

    Timeline.span = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    kill_at([Moment(*each) for each in json.loads(os.environ["MOMENTS"])], Path(os.environ["DIED"]))
    main()
