"""HostedRun: what one run has on a host that is not its controller's."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from rl.actors.births import mesh_of
from rl.cluster.ends import kill_those_that_log_to
from rl.cluster.environment import kernel_cache
from rl.cluster.unshared import OwnDirectory
from rl.errors import ConfigError
from rl.host_protocol import MARK, OWN_HOST, Refusal
from rl.owned_directory import is_owned, owned_directory, temporary_base
from rl.processes import LEASE, kill_tree
from rl.waiting import within
from rl.weight_sync.files import release_version

MONARCH = ("-m", "rl.cluster.monarch_worker")
"""The process that Monarch starts a run's from: prints its address, then waits."""
_START_SECONDS = 60.0
_LAUNCHERS = "TORCHELASTIC_"
_OF_LAUNCHERS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
}
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class HostedRun:
    """A run's part on this host: a process of Monarch's with all that it starts, and two directories."""

    def __init__(self, request: dict[str, Any], host: str, address: str):
        self.shared, directory = Path(request["shared"]), Path(request["run_dir"])
        self._logs = directory / "logs"
        self.worker_address = ""
        self._host, self._lease, self.mark = host, str(request["lease"]), str(request["mark"])
        self._kept, self._removing = ExitStack(), threading.Lock()
        self._worker: asyncio.subprocess.Process | None = None
        self._meshes: dict[tuple[int, float], str] = {}  # (pid, time of birth) -> mesh
        mark = directory / MARK
        try:
            self.sees_directory = mark.is_file() and mark.read_text() == request["mark"]
        except OSError as error:
            raise Refusal(
                f"cannot read {directory} ({error.strerror}); let the user of its rl worker read and write "
                f"there, or give another --run_dir"
            ) from None
        if not self.sees_directory and (sharer := request["sharer"]):
            raise Refusal(
                f"does not see {directory}, which {sharer} reads and writes; put the run's directory on "
                f"a file system that all hosts share: --run_dir; or name other hosts: --{sharer}.hosts"
            )
        if not os.path.exists(request["python"]):
            raise Refusal(f"has no {request['python']}; install in the same directory on all hosts")
        base = self.shared.parent.parent
        if (theirs := self.shared.parent.name) != (ours := f"rl-{os.getuid()}"):
            raise Refusal(
                f"runs its rl worker as another user than the run's ({ours} and {theirs} in {base}); start "
                f"it as a user with the same number"
            )
        try:
            if not is_owned(self.shared):  # two workers of one host share it
                self._kept.enter_context(owned_directory(base, request["run_dir"], self.shared.name))
            temporary = self._kept.enter_context(owned_directory(temporary_base(), "temporary files"))
            self._own = None if self.sees_directory else OwnDirectory(directory, self.mark)
        except ConfigError as error:
            self._kept.close()
            raise Refusal(f"cannot be used: {error}") from None
        except OSError as error:
            self._kept.close()
            raise Refusal(
                f"does not see the run's directory, and cannot make its own ({error}); give a --run_dir that "
                f"is free on all hosts, or one that they share"
            ) from None
        if self._own is not None:
            self._kept.callback(self._own.remove)
        self._environment = {
            **environment_of(host),
            **kernel_cache(),
            "TMPDIR": str(temporary),
            OWN_HOST: address,
            LEASE: self._lease,
        }
        self._name = address.replace(":", "-").strip("[]")

    def check_next(self, request: Mapping[str, Any]) -> None:
        """Raises Refusal where a controller comes back that another has followed."""
        if request["again"] and request["mark"] != self.mark:
            raise Refusal("is another controller's of this run by now; end one of the two")

    async def start_worker(self) -> None:
        """Raises Refusal."""
        try:
            log = (self._logs / f"host-{self._name}.log").open("ab")
        except OSError as error:
            raise Refusal(
                f"cannot write to {self._logs} ({error.strerror}); let the user of its rl worker write there"
            ) from None
        with log:
            self._worker = await asyncio.create_subprocess_exec(
                sys.executable, "-P", *MONARCH, self._host,
                env=self._environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        assert self._worker.stdout is not None
        text = b""
        with suppress(TimeoutError):
            async with within(_START_SECONDS):
                text = await self._worker.stdout.readline()
        self.worker_address = text.decode().strip()
        if not self.worker_address:
            raise Refusal(f"could not start Monarch; see {log.name}")

    async def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        do = asked.get("do")
        if do == "kill":
            for pid in asked["pids"]:
                if pid in {child.pid for child in self._started(recursive=True)}:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        elif do == "end_log":
            kill_those_that_log_to(Path(asked["log"]))
        elif do == "release":
            release_version(self.shared, asked["paths"])
        elif do == "worker" and not self._is_alive:
            await self.start_worker()
        elif do == "close":
            self._kill()
            return {"logs": self._news()}
        return {"processes": self._processes(), "worker": self.worker_address, "logs": self._news()}

    def _news(self) -> list[list[str]]:
        return self._own.news() if self._own is not None else []

    @property
    def _is_alive(self) -> bool:
        return self._worker is not None and self._worker.returncode is None

    def _processes(self) -> list[list[Any]]:
        """[pid, mesh, status] of each that was started for a mesh."""
        rows, known = [], self._meshes
        self._meshes = {}
        for child in self._started(recursive=False):
            with suppress(psutil.Error, OSError):
                birth = child.pid, child.create_time()
                mesh = known.get(birth) or mesh_of(child)
                if mesh:
                    self._meshes[birth] = mesh
                    rows.append([child.pid, mesh, child.status()])
        return rows

    def _started(self, recursive: bool) -> Sequence[psutil.Process]:
        """By Monarch's process; recursive: also what those have started."""
        if self._worker is None:
            return ()
        with suppress(psutil.Error):
            return psutil.Process(self._worker.pid).children(recursive=recursive)
        return ()

    async def end(self) -> None:
        """Kill all that the run has here, and remove its directories. May be called again.

        In a thread: gigabytes of shared memory take seconds, in which other runs' leases are kept.
        """
        self._kill()
        await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(self._remove)))

    def _remove(self) -> None:
        with self._removing:
            self._kept.close()

    def _kill(self) -> None:
        if self._worker is not None and self._is_alive:  # else its number may be another's
            kill_tree(self._worker.pid)
        for process in psutil.Process().children(recursive=True):  # orphans, where Monarch's was killed
            with suppress(psutil.Error, OSError):
                if process.environ().get(LEASE) == self._lease:
                    process.kill()
        self._worker = None


def environment_of(host: str) -> dict[str, str]:
    """Of this process, without what a launcher of the worker itself set, and with the network's interface."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_LAUNCHERS and not name.startswith(_LAUNCHERS)
    }
    for name in _INTERFACES:
        if environment.get(name) == "lo":
            exactly = "=" if name.startswith("NCCL") else ""  # NCCL takes a name for the beginning of several
            environment[name] = exactly + interface_of(host)
    return environment


def interface_of(address: str) -> str:
    """The network interface that has it. Raises Refusal."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    raise Refusal(f"has no network interface with the address {address}; listen on one that it has")
