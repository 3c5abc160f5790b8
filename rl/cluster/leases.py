"""Lease: a run's hold on another host, by the connection to its `rl worker`."""

import asyncio
import base64
import logging
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from rl.actors.remote import ProcessDied
from rl.cluster.host_agent import SILENCE_SECONDS
from rl.cluster.hosts import ClockOff
from rl.cluster.unshared import send_files
from rl.errors import ConfigError
from rl.host_protocol import (
    LONGEST_LINE,
    HostDiffers,
    HostRefuses,
    HostUnreachable,
    checked,
    line,
    parse_address,
    signed,
    unreachable,
)
from rl.host_tls import client_context
from rl.processes import ProcessInfo
from rl.waiting import within

_PING_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
_AGAIN_SECONDS = 2.0
_TELL_SECONDS = 5.0
_START_SECONDS = 90.0  # until Monarch's process is there
_log = logging.getLogger(__name__)


class Lease:
    """Holds while `run` runs. What is asked of a host that is lost raises HostUnreachable.

    An OtherHost (rl/processes.py): it knows the run's processes there as they were a second ago. Where the
    host is lost, or comes back, all those of before are gone: its worker has ended them.
    """

    def __init__(
        self,
        address: str,
        run: str,
        run_dir: Path,
        shared: Path,
        patience: float,
        models: Sequence[Path] = (),
        sharer: str = "",
        may_return: bool = True,
        check: Callable[[], None] = lambda: None,
        mark: str = "",
    ):
        """patience: seconds to wait for a host that does not answer. models: directories that its processes
        read. sharer: a role there that needs the run's directory, if one does. may_return: once lost, it may
        be leased again. check: called in a thread when it is; raises ConfigError where it is not as planned.
        mark: of this controller, in the run's directory; empty: the run's name.
        """
        self.address = address
        self.own_address = ""  # of this process, as that host reaches it
        self._request = {
            "do": "lease", "run": run, "mark": mark or run, "run_dir": str(run_dir), "shared": str(shared),
            "python": sys.executable, "sharer": sharer,
        }  # fmt: skip
        self._logs, self._models = run_dir / "logs", models
        self._patience, self._may_return, self._check = patience, may_return, check
        self._sees_directory = True
        self._was_held = False
        self._refused: tuple[float, HostUnreachable] | None = None  # when it last did not answer
        self._id = ""  # of the connection; empty while there is none
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._sending: socket.socket | None = None  # models
        self._is_sending = False
        self._turn = asyncio.Lock()
        self._connecting = asyncio.Lock()
        self._worker = ""
        self._processes: dict[int, tuple[str, str]] = {}  # pid -> (mesh, status)
        self._seen: set[int] = set()
        self.joined: Sequence[str] = ()
        """Hosts that would join this run, as that host was told."""

    @property
    def is_held(self) -> bool:
        return bool(self._id)

    async def connect(self) -> None:
        """Raises HostUnreachable."""
        lease = uuid.uuid4().hex
        with ExitStack() as opened:  # closes it where anything fails
            try:
                async with within(_CONNECT_SECONDS):
                    host, port = parse_address(self.address)
                    tls = client_context()
                    reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE, ssl=tls)
                    opened.callback(writer.close)
                    first = await reader.readline()
                asked = {**self._request, "lease": lease, "again": self._was_held}
                writer.write(signed(asked, first))
                async with within(_START_SECONDS):
                    answer = checked(self.address, await reader.readline())
            except (OSError, ValueError, TimeoutError, KeyError) as error:
                raise HostUnreachable(unreachable(self.address, error)) from error
            opened.pop_all()
        self._reader, self._writer, self._id, self._was_held = reader, writer, lease, True
        self._worker, self._processes, self._seen = answer["worker"], {}, set()
        self.own_address = writer.get_extra_info("sockname")[0]
        self._sees_directory = answer["sees_directory"]

    async def send_models(self) -> None:
        """Those that the host does not have. It may take minutes: `run` keeps the lease."""
        directory = self._logs.parent
        missing = [m for m in self._models if not (self._sees_directory and m.is_relative_to(directory))]
        self._is_sending = True
        try:
            sent = await asyncio.to_thread(self._send, missing)
        except BaseException as error:
            self._stop_sending()
            if isinstance(error, HostUnreachable):
                self._lose()
            raise
        if sent or not self._sees_directory:
            _log.warning("host %s: %.1f GB of models were sent there", self.address, sent / 1e9)
        if not self._sees_directory:
            _log.warning("host %s does not see %s; its logs come here", self.address, directory)

    def _send(self, models: Sequence[Path]) -> int:
        run = self._request["run"]
        return sum(send_files(self.address, run, model, self._hold) for model in models)

    def _hold(self, connection: socket.socket) -> None:
        """Of the thread that sends: the connection goes with the lease. Raises ConnectionError."""
        self._sending = connection
        if not (self._id and self._is_sending):
            raise ConnectionError("it was lost")

    def _stop_sending(self) -> None:
        """The thread that sends, where one does, meets a closed connection."""
        self._is_sending = False
        if self._sending is not None:
            with suppress(OSError):
                self._sending.shutdown(socket.SHUT_RDWR)

    async def run(self) -> None:
        """Keep it, until cancelled."""
        while True:
            await self.ping()
            await asyncio.sleep(_PING_SECONDS)

    async def run_until_lost(self) -> None:
        while self.is_held:
            await self.ping()
            await asyncio.sleep(_PING_SECONDS)

    async def ping(self) -> None:
        if self.is_held:
            with suppress(HostUnreachable):
                await self._ask({"do": "ping"})

    async def worker(self, patience: float | None = None) -> str:
        """Where Monarch starts processes on that host. Waits for a host that is lost; raises ProcessDied.

        patience: seconds to wait for it; None: as long as the lease is told. One that was held may refuse for
        a while after it has booted, as without its file systems.
        """
        patience, began = self._patience if patience is None else patience, time.monotonic()
        while True:
            if not patience and self._connecting.locked():
                raise ProcessDied(f"host {self.address} is being waited for")
            try:
                async with self._connecting:
                    return await self._start_worker()
            except HostUnreachable as error:
                is_over = time.monotonic() - began > patience or not self._may_return
                is_final = isinstance(error, HostDiffers if self._was_held else HostRefuses)
                if is_over or is_final:
                    raise ProcessDied(str(error)) from error
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _start_worker(self) -> str:
        """Who waits for the same host has the same answer: each attempt takes its time."""
        if self._refused is not None and time.monotonic() - self._refused[0] < _AGAIN_SECONDS:
            raise self._refused[1]
        try:
            if not self._id:
                if not self._may_return:
                    raise HostUnreachable(f"host {self.address} has left the run")
                await self.connect()
                try:
                    await self._check_return()
                    await self.send_models()
                except BaseException:  # else the next start would take it as one with the models
                    self._lose()
                    raise
            await self._ask({"do": "worker"})
        except HostUnreachable as error:
            self._refused = time.monotonic(), error
            raise
        return self._worker

    async def _check_return(self) -> None:
        """A host that was lost may come back with other GPUs, or another rl. Raises HostDiffers.

        One whose clock is not set yet, or that refuses for now, is asked again: it raises HostUnreachable.
        """
        try:
            await asyncio.to_thread(self._check)
        except ClockOff as error:
            raise HostUnreachable(str(error)) from error
        except ConfigError as error:
            if isinstance(error.__cause__, HostUnreachable):  # it is gone again
                raise error.__cause__ from None
            raise HostDiffers(str(error)) from error

    async def _ask(self, request: dict[str, Any]) -> None:
        """Whoever asks may be cancelled; the answer is read all the same."""
        await asyncio.shield(asyncio.ensure_future(self._asked(request)))

    async def _asked(self, request: dict[str, Any]) -> None:
        async with self._turn:
            if not self._id:
                raise HostUnreachable(unreachable(self.address, ConnectionError("it was lost")))
            try:
                async with within(SILENCE_SECONDS):
                    self._writer.write(line(request))
                    answer = checked(self.address, await self._reader.readline())
            except (OSError, ValueError, TimeoutError) as error:
                self._lose()
                raise HostUnreachable(unreachable(self.address, error)) from error
        for name, text in answer.get("logs", ()):
            with suppress(OSError), (self._logs / Path(name).name).open("ab") as file:
                file.write(base64.b64decode(text))
        if "processes" in answer:
            self._worker, self.joined = answer["worker"], answer["joined"]
            self._processes = {pid: (mesh, status) for pid, mesh, status in answer["processes"]}
            self._seen |= self._processes.keys()

    def _lose(self) -> None:
        self._id = ""
        self._writer.close()
        self._stop_sending()

    def born(self, mesh: str) -> list[ProcessInfo]:
        return [
            ProcessInfo(pid, self.address, "", self._id)
            for pid, (of, _) in self._processes.items()
            if of == mesh and self._id
        ]

    def status(self, process: ProcessInfo) -> str | None:
        if process.lease != self._id:
            return psutil.STATUS_ZOMBIE
        if process.pid in self._processes:
            return self._processes[process.pid][1]
        return psutil.STATUS_ZOMBIE if process.pid in self._seen else None

    async def kill(self, processes: Sequence[ProcessInfo]) -> None:
        """What is on a lost host is ended by its worker."""
        pids = [process.pid for process in processes if process.lease == self._id]
        if pids:
            await self._tell({"do": "kill", "pids": pids})

    async def end_log(self, log: Path) -> None:
        """End those that write to this log, a rank's number aside."""
        await self._tell({"do": "end_log", "log": str(log)})

    async def release(self, paths: Iterable[str]) -> None:
        """Until it is done there: then files of these names may be made again. A lost host has ended all."""
        with suppress(HostUnreachable):
            await self._ask({"do": "release", "paths": list(paths)})

    async def _tell(self, request: dict[str, Any]) -> None:
        """What is told in time, or later where the host answers again. A lost host has ended all."""
        with suppress(HostUnreachable, TimeoutError):
            async with within(_TELL_SECONDS):
                await self._ask(request)

    async def close(self) -> None:
        """Everything of the run on that host is gone."""
        await self._tell({"do": "close"})
        if self._id:
            self._lose()
