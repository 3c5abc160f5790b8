"""Whether a process died because the kernel killed it for lack of memory, and what would have helped."""

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from rl.cgroups import memory_limit, num_killed
from rl.plan.roles import ROLES

_LOOK_SECONDS = 5.0


class MemoryWatch:
    """Of the processes behind one name: their size and the kernel's count when they last answered."""

    def __init__(self, name: str):
        self._name = name
        self._num_killed = num_killed()
        self._resident = 0  # bytes, of all of them
        self._next_look = 0.0

    def look(self, pids: Iterable[int]) -> None:
        """They have answered. Called often: it looks every few seconds."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            self._num_killed = num_killed()
            self._resident = sum(map(_resident, pids))

    def why_died(self) -> str:
        """That memory ran out, what each process of the run took, and how to need less; else empty.

        The kernel counts the processes that it kills, of a cgroup or of the host, and not which.
        """
        before, self._num_killed = self._num_killed, num_killed()
        if self._num_killed <= before:
            return ""
        sizes = residents()
        ranks = [name for name in sizes if re.fullmatch(re.escape(self._name) + r"(-\d+)?", name)]
        sizes[self._name] = max(sum(sizes.pop(name) for name in ranks), self._resident)
        largest = sorted(sizes, key=lambda name: -sizes[name])
        took = ", ".join(f"{name} {sizes[name] / 2**30:.1f}" for name in largest)
        room = min(memory_limit(), psutil.virtual_memory().total) / 2**30
        names = dict.fromkeys(name.split("-")[0] for name in largest)
        lower_by = [role.lower_by for name in names for of, role in ROLES.items() if of == name]
        lower = " and ".join(lower_by[:2]) or "what the run needs"
        num_killed_since = self._num_killed - before
        killed = "a process" if num_killed_since == 1 else f"{num_killed_since} processes"
        return (
            f"memory ran out: since {self._name} last answered, the kernel killed {killed} for it; of "
            f"{room:.1f} GiB the run took, in GiB: {took}; lower {lower}, or end other programs"
        )


def residents() -> dict[str, int]:
    """Resident bytes of this process and of its descendants, by the name of the log that each writes to."""
    sizes, own_output = {"controller": _resident(os.getpid())}, _output(os.getpid())
    for process in psutil.Process().children(recursive=True):
        output = _output(process.pid)
        name = output.stem if output.suffix == ".log" else "others"
        name = "controller" if output == own_output else name
        sizes[name] = sizes.get(name, 0) + _resident(process.pid)
    return sizes


def _output(pid: int) -> Path:
    with suppress(OSError):
        return Path(os.readlink(f"/proc/{pid}/fd/1"))
    return Path()


def _resident(pid: int) -> int:
    with suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return 0
