"""What Linux offers so that no process outlives a run; elsewhere these do nothing. And where a process is."""

import asyncio
import atexit
import ctypes
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from rl.host_protocol import own_host

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP_SECONDS = 2.0
_REAP_SECONDS = 2.0
_MARK = 2**62 + int.from_bytes(b"rl")
_MAX_ROUNDS = 100  # for what starts processes as it is being ended
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_with_parent() -> None:
    """Have this process killed when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def outlive_interrupts() -> None:
    """Signals that ask a run to end do nothing to this process. What it starts is ended by them as ever.

    A scheduler may send them to all of a job, and the controller needs this process to save a checkpoint.
    From any thread: Python sets handlers in the main one alone. The handler is libc's abs, which does
    nothing. A program begins without handlers; that a signal is ignored would be handed on to it.
    """
    libc = ctypes.CDLL(None)
    handler = ctypes.cast(libc.abs, ctypes.c_void_p)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    for number in INTERRUPTS:
        libc.signal(number, handler)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended, so that they can be found and ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_tree(pid: int) -> None:
    """Kill a process that adopts orphans, and all that descends from it in whatever session.

    Once it is stopped it starts nothing more. As long as it is there, it has its descendants' orphans.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)
        kill_descendants(pid)
        os.kill(pid, signal.SIGKILL)


def kill_descendants(pid: int, but: Collection[int] = ()) -> None:
    """but: children that are left alone, with all that descends from them."""
    killed: set[int] = set()
    for _ in range(_MAX_ROUNDS):
        left = [process for process in _descendants(pid, but) if process.pid not in killed]
        if not left:
            return
        for process in left:
            killed.add(process.pid)
            with suppress(psutil.Error):
                process.kill()


def _descendants(pid: int, but: Collection[int]) -> list[psutil.Process]:
    try:
        children = _children(pid)
    except OSError:  # the kernel has no such file, or the process is gone
        children = []
        with suppress(psutil.Error):
            children = [child.pid for child in psutil.Process(pid).children()]
    processes = []
    for child in children:
        with suppress(psutil.Error):
            if child not in but:
                process = psutil.Process(child)
                processes += [process, *process.children(recursive=True)]
    return processes


def _children(pid: int) -> list[int]:
    """Without a look at all processes of the host."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def allow_many_files() -> None:
    """As many open files and sockets as the system lets this process have: the soft limit is often 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # it is not allowed: the limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def mark_descendants() -> None:
    """Mark this process and all that it will start, so that a Reaper knows them, also as zombies.

    The mark is a limit of so many microseconds that nothing reaches, on what only real-time processes have.
    """
    if sys.platform == "linux":
        _, most = resource.getrlimit(resource.RLIMIT_RTTIME)
        with suppress(ValueError, OSError):  # a lower limit is set: they are known by other facts alone
            resource.setrlimit(resource.RLIMIT_RTTIME, (_MARK, most))


class Reaper:
    """Ends zombies that this process has adopted, never a child that it started itself.

    Whoever started a child (subprocess, asyncio, Monarch) waits for it, and would miss its exit status. Each
    of three facts shows that another process started a zombie. It has a mark that this process lacks. It is
    in the session of a third process, where only that process's descendants are born. Or it was seen as
    another's child.
    """

    def __init__(self) -> None:
        self._born_elsewhere: set[tuple[int, float]] = set()  # pid, and time of birth

    def reap(self) -> None:
        """Looks at all processes of the host, 0.05 ms for each."""
        this, born_elsewhere = psutil.Process(), set()
        for process in this.children(recursive=True):
            with suppress(psutil.Error, OSError):  # it is gone in the meantime
                birth = process.pid, process.create_time()
                if process.ppid() != this.pid:
                    born_elsewhere.add(birth)
                elif birth in self._born_elsewhere or _has_other_origin(process.pid):
                    born_elsewhere.add(birth)
                    if process.status() == psutil.STATUS_ZOMBIE:
                        os.waitpid(process.pid, os.WNOHANG)
        self._born_elsewhere = born_elsewhere


def _has_other_origin(child: int) -> bool:
    """By its session or its mark, which it has by birth."""
    if os.getsid(child) not in (0, os.getsid(0), child):
        return True
    this_limit, child_limit = (
        resource.prlimit(pid, resource.RLIMIT_RTTIME)[0] for pid in (os.getpid(), child)
    )
    return child_limit == _MARK != this_limit


async def reap_orphans() -> None:
    """Until cancelled. Takes at most about a hundredth of a core."""
    reaper = Reaper()
    while True:
        began = time.monotonic()
        await asyncio.to_thread(reaper.reap)
        await asyncio.sleep(min(max(_REAP_SECONDS, 100 * (time.monotonic() - began)), 60.0))


def on_interrupt(handle: Callable[[int], None]) -> None:
    """Have the running event loop call it with the number of each SIGINT, SIGTERM and SIGHUP.

    A signal that is ignored stays ignored: `nohup`, and a shell's `&`, start a process so.
    """
    for number in INTERRUPTS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, handle, number)


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Where an actor lives, for people who look for it. lease: by which a run has that host, if by one."""

    pid: int
    host: str
    device: str
    lease: str = ""

    @property
    def place(self) -> str:
        return f"pid {self.pid} on {self.host}"


def process_info(device: str = "cpu") -> ProcessInfo:
    """Of this process."""
    return ProcessInfo(os.getpid(), own_host(), device, os.environ.get(LEASE, ""))


LEASE = "RL_LEASE"
"""In the environment of processes on a host that a run has by a lease."""


PARENT = "RL_PARENT"
"""In the environment of processes that Monarch starts elsewhere: the number of the process that does."""


class OtherHost(Protocol):
    """Who knows the processes of this run on a host that is not this one, by its name."""

    def born(self, mesh: str) -> list[ProcessInfo]:
        """Those that were started for the mesh, as far as is known."""
        ...

    def status(self, process: ProcessInfo) -> str | None:
        """psutil's word for it, a zombie where it is gone; None where it is not known yet."""
        ...

    async def kill(self, processes: Sequence[ProcessInfo]) -> None: ...


OTHER_HOSTS: dict[str, OtherHost] = {}
"""Those of the running run."""


@contextmanager
def importing() -> Iterator[None]:
    """The garbage collector rests: it would look through all modules many times, and free nothing.

    Seconds of CPU that vLLM's 6,000 modules take: 4.5 in place of 6.0. Afterwards it leaves them alone.
    """
    gc.disable()
    try:
        yield
    finally:
        _freeze()
        gc.enable()


def freeze_heap() -> None:
    """Once all that stays is there: the garbage collector no longer looks at it.

    The 400,000 objects of torch, Monarch and transformers take it 0.2 s each time, in the middle of a step.
    """
    gc.collect()
    _freeze()


def _freeze() -> None:
    gc.freeze()
    atexit.register(gc.unfreeze)  # else nanobind takes what is never freed for leaks, and says so


def is_stopped(process: ProcessInfo) -> bool:
    """Whether a process stands still by SIGSTOP, or under a debugger."""
    return _status(process) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def is_gone(process: ProcessInfo) -> bool:
    """Whether a process has ended, as a zombie has. False where another host's process is not known."""
    return _status(process) == psutil.STATUS_ZOMBIE


def _status(process: ProcessInfo) -> str | None:
    """psutil's word for it, a zombie where it is no longer there; None for another host's that is unknown."""
    if process.host != own_host():
        host = OTHER_HOSTS.get(process.host)
        return host.status(process) if host else None
    try:
        return psutil.Process(process.pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


async def kill_processes(mesh: Any, processes: Sequence[ProcessInfo]) -> None:
    """End the processes of a mesh that may hang.

    First by force, because a mesh whose ranks do not answer cannot be stopped.
    """
    for process in processes:
        if process.host == own_host():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    for host in {process.host for process in processes} & OTHER_HOSTS.keys():
        await OTHER_HOSTS[host].kill([process for process in processes if process.host == host])
    with suppress(Exception):  # what is dead cannot be asked to stop
        await asyncio.wait_for(_stopped(mesh), _STOP_SECONDS)


async def _stopped(mesh: Any) -> None:
    await mesh.stop("it is replaced")
