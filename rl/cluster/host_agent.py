"""`rl worker --listen HOST:PORT`: this host, lent to runs.

A connection that asks for a lease is the lease. As long as it asks something every few seconds, the run's
processes live; when it closes, or nothing comes for a while, they are ended, and what the run has in this
host's memory and temporary files is removed.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from rl.actors.births import mesh_of
from rl.cluster.machine import free_memory, num_cores, versions
from rl.cluster.spawn import kill_those_that_log_to
from rl.errors import ConfigError
from rl.host_protocol import (
    LONGEST_LINE,
    MARK,
    OWN_HOST,
    address_of,
    greeting,
    line,
    parse_address,
    request_of,
)
from rl.owned_directory import SHARED_MEMORY, owned_directory, remove_unowned, temporary_base
from rl.processes import LEASE, adopt_orphans, allow_many_files, kill_tree, on_interrupt, reap_orphans

SILENCE_SECONDS = 45.0
"""Without a word from a controller, its run is ended here."""
MONARCH = ("-m", "rl.cluster.monarch_worker")
"""The process that Monarch starts a run's from: prints its address, then waits."""
_START_SECONDS = 60.0
_GREETING_SECONDS = 10.0
_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_OF_LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Refusal(Exception):
    """Why a request is not granted: what comes after "host a:port"."""


class HostAgent:
    """Serves from `serve` on. `address`: host:port as others reach it."""

    def __init__(self, host: str, port: int):
        self._host, self._port = host, port
        self.address = ""
        self._runs: dict[str, _HostedRun] = {}  # by the run's id
        self._gpus: list[dict[str, Any]] = []
        self._answering: set[asyncio.Future[None]] = set()

    async def serve(self) -> None:
        """Until cancelled; then no process of a run is left."""
        self._gpus = await _look_at_gpus()
        server = await asyncio.start_server(self._accept, self._host, self._port, limit=LONGEST_LINE)
        port = server.sockets[0].getsockname()[1]
        self.address = f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"
        print(f"rl worker: listening on {self.address}", flush=True)
        try:
            async with server:
                await reap_orphans()
        finally:
            for task in self._answering:
                task.cancel()
            if self._answering:
                await asyncio.wait(self._answering)
            for run in list(self._runs.values()):
                run.end()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._answer(reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce, first = greeting()
        try:
            writer.write(first)
            text = await asyncio.wait_for(reader.readline(), _GREETING_SECONDS)
            try:
                request = request_of(text, nonce)
            except PermissionError:
                raise Refusal("refused the key; set RL_WORKER_KEY to the same on all hosts") from None
            if request.get("do") == "look":
                writer.write(line(self._look()))
            elif request.get("do") == "file":
                await self._send_file(request, writer)
            elif request.get("do") == "lease":
                await self._lease(request, reader, writer)
            else:
                raise Refusal(f"knows no request {request.get('do')!r}; use the same rl on all hosts")
            await writer.drain()
        except Refusal as refusal:
            writer.write(line({"error": str(refusal)}))
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            pass  # no controller, or one that is gone
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _look(self) -> dict[str, Any]:
        shared = os.statvfs(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
        return {
            "num_cores": num_cores(),
            "free_gib": free_memory() / 2**30,
            "shared_gib": shared.f_bavail * shared.f_frsize / 2**30 if shared else 0.0,
            "gpus": self._gpus,
            "versions": versions(),
            "time": time.time(),
            "num_runs": len(self._runs),
        }

    async def _send_file(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Bytes of a file in a run's shared memory: first a line with their number."""
        run = self._runs.get(request["run"])
        path = Path(request["path"])
        if run is None or path.parent != run.shared:
            raise Refusal(f"has no file {path} of this run")
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise Refusal(f"has released {path}") from None
        with file:
            size = os.fstat(file.fileno()).st_size
            begin = request.get("begin", 0)
            count = min(request.get("count", size), size - begin)
            writer.write(line({"size": size}))
            await writer.drain()
            if count > 0:
                await asyncio.get_running_loop().sendfile(writer.transport, file, begin, count)

    async def _lease(
        self, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if before := self._runs.get(request["run"]):
            before.end()
        run = self._runs[request["run"]] = _HostedRun(request, self._host, self.address)
        try:
            await run.start_worker()
            writer.write(line({"worker": run.worker_address}))
            while text := await asyncio.wait_for(reader.readline(), SILENCE_SECONDS):
                asked = json.loads(text)
                writer.write(line(await run.answer(asked)))
                await writer.drain()
                if asked.get("do") == "close":
                    break
        finally:
            run.end()
            if self._runs.get(request["run"]) is run:
                del self._runs[request["run"]]


class _HostedRun:
    """A run's part on this host: a process of Monarch's with all that it starts, and two directories."""

    def __init__(self, request: dict[str, Any], host: str, address: str):
        self.shared, self._logs = Path(request["shared"]), Path(request["run_dir"]) / "logs"
        self.worker_address = ""
        self._host, self._lease = host, str(request["lease"])
        self._kept = ExitStack()
        self._worker: asyncio.subprocess.Process | None = None
        self._meshes: dict[tuple[int, float], str] = {}  # (pid, time of birth) -> mesh
        mark = Path(request["run_dir"]) / MARK
        if not mark.is_file() or mark.read_text() != request["run"]:
            raise Refusal(
                f"does not see {mark.parent}; put the run's directory on a file system that all hosts share: "
                f"--run_dir"
            )
        if not os.path.exists(request["python"]):
            raise Refusal(f"has no {request['python']}; install in the same directory on all hosts")
        base = self.shared.parent.parent
        try:
            remove_unowned(base)  # of a worker that was killed
            if not self.shared.exists():  # two workers of one host share it
                self._kept.enter_context(owned_directory(base, request["run_dir"], self.shared.name))
            temporary = self._kept.enter_context(owned_directory(temporary_base(), "temporary files"))
        except ConfigError as error:
            self._kept.close()
            raise Refusal(f"cannot be used: {error}") from None
        self._environment = _environment(host) | {
            "TMPDIR": str(temporary),
            OWN_HOST: address,
            LEASE: self._lease,
        }
        self._name = address.replace(":", "-").strip("[]")

    async def start_worker(self) -> None:
        """Raises Refusal."""
        log = (self._logs / f"host-{self._name}.log").open("ab")
        with log:
            self._worker = await asyncio.create_subprocess_exec(
                sys.executable, *MONARCH, self._host,
                env=self._environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        assert self._worker.stdout is not None
        text = b""
        with suppress(TimeoutError):
            text = await asyncio.wait_for(self._worker.stdout.readline(), _START_SECONDS)
        self.worker_address = text.decode().strip()
        if not self.worker_address:
            raise Refusal(f"could not start Monarch; see {log.name}")

    async def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        do = asked.get("do")
        if do == "kill":
            for pid in asked["pids"]:
                if pid in {child.pid for child in self._descendants()}:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        elif do == "end_log":
            kill_those_that_log_to(Path(asked["log"]))
        elif do == "release":
            from rl.weight_sync.shared_memory import release_files

            release_files(asked["paths"])
        elif do == "worker" and (self._worker is None or self._worker.returncode is not None):
            await self.start_worker()
        elif do == "close":
            self.end()
            return {}
        return {"processes": self._processes(), "worker": self.worker_address, "alive": self._alive()}

    def _alive(self) -> bool:
        return self._worker is not None and self._worker.returncode is None

    def _processes(self) -> list[list[Any]]:
        """[pid, mesh, status] of each that was started for a mesh."""
        rows, known = [], self._meshes
        self._meshes = {}
        for child in self._children():
            with suppress(psutil.Error, OSError):
                birth = child.pid, child.create_time()
                mesh = known.get(birth) or mesh_of(child)
                if mesh:
                    self._meshes[birth] = mesh
                    rows.append([child.pid, mesh, child.status()])
        return rows

    def _children(self) -> Sequence[psutil.Process]:
        if self._worker is None:
            return ()
        with suppress(psutil.Error):
            return psutil.Process(self._worker.pid).children()
        return ()

    def _descendants(self) -> Sequence[psutil.Process]:
        if self._worker is None:
            return ()
        with suppress(psutil.Error):
            return psutil.Process(self._worker.pid).children(recursive=True)
        return ()

    def end(self) -> None:
        """Kill all that the run has here, and remove its directories. May be called again."""
        if self._worker is not None:
            kill_tree(self._worker.pid)
        for process in psutil.Process().children(recursive=True):  # orphans, where Monarch's was killed
            with suppress(psutil.Error, OSError):
                if process.environ().get(LEASE) == self._lease:
                    process.kill()
        self._worker = None
        self._kept.close()


def _environment(host: str) -> dict[str, str]:
    """Of this process, without what a launcher of the worker itself set, and with the network's interface."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_LAUNCHERS and not name.startswith(_LAUNCHERS)
    }
    for name in _INTERFACES:
        if environment.get(name) == "lo":
            environment[name] = interface_of(host)
    return environment


def interface_of(address: str) -> str:
    """The network interface that has it. Raises Refusal."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    raise Refusal(f"has no network interface with the address {address}; listen on one that it has")


async def _look_at_gpus() -> list[dict[str, Any]]:
    """In a process of its own: a context of CUDA would stay in this one."""
    script = (
        "import dataclasses, json; from rl.cluster.machine import look_at_host; "
        "print(json.dumps([dataclasses.asdict(gpu) for gpu in look_at_host().gpus]))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise ConfigError("this host's GPUs cannot be looked at; see what is above")
    gpus: list[dict[str, Any]] = json.loads(output)
    return gpus


def worker(arguments: Sequence[str]) -> int:
    """The command. Raises ConfigError."""
    if len(arguments) == 1 and arguments[0].startswith("--listen="):
        arguments = ("--listen", arguments[0].partition("=")[2])
    if len(arguments) != 2 or arguments[0] != "--listen":
        raise ConfigError("write rl worker --listen ADDRESS:PORT, as rl worker --listen 10.0.0.2:7000")
    host, port = parse_address(arguments[1])
    address = address_of(host)
    if address in ("0.0.0.0", "::"):
        raise ConfigError(
            f"--listen {arguments[1]}: who reaches it can run programs here; give the address of one network"
        )
    adopt_orphans()
    allow_many_files()
    try:
        asyncio.run(_serve(HostAgent(address, port)))
    except OSError as error:
        raise ConfigError(
            f"--listen {arguments[1]}: {error.strerror or error}; give a free port of an address of this host"
        ) from error
    return 0


def _cancel(task: "asyncio.Future[None]") -> None:
    task.cancel()


async def _serve(agent: HostAgent) -> None:
    serving = asyncio.ensure_future(agent.serve())
    on_interrupt(lambda number: _cancel(serving))
    with suppress(asyncio.CancelledError):
        await serving
