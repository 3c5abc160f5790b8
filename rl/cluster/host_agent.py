"""`rl worker --listen HOST:PORT`: this host, lent to runs.

A connection that asks for a lease is the lease. As long as it asks something every few seconds, the run's
processes live; when it closes, or nothing comes for a while, they are ended, and what the run has in this
host's memory and temporary files is removed.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from rl.cluster.hosted_run import HostedRun
from rl.cluster.link_speed import measure, send_noise
from rl.cluster.machine import code_at_start, has_driver, host_facts
from rl.cluster.unshared import receive_file
from rl.command_flags import take_value
from rl.errors import ConfigError
from rl.host_protocol import (
    LONGEST_LINE,
    HostUnreachable,
    Refusal,
    address_of,
    ask,
    greeting,
    line,
    parse_address,
    request_of,
    written,
)
from rl.host_tls import is_on, server_context
from rl.owned_directory import remove_unowned
from rl.processes import adopt_orphans, allow_many_files, on_interrupt, reap_orphans
from rl.waiting import beside, within
from rl.weight_sync.files import version_of
from rl.weight_sync.remote_files import send_file

SILENCE_SECONDS = 45.0
"""Without a word from a controller, its run is ended here."""
_GREETING_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_HANDSHAKE_SECONDS = 5.0  # less than who connects waits: it is told
_JOIN_SECONDS = 3.0
_OPEN_SECONDS = 60.0  # a port that is tried
_LOOK_SECONDS = 120.0  # at GPUs, whose driver may have to start


class HostAgent:
    """Serves from `serve` on. `address`: host:port as others reach it."""

    def __init__(self, host: str, port: int, join: str = ""):
        """join: the address of a worker whose runs this host would join."""
        self._host, self._port = host, port
        self.address = ""
        self._runs: dict[str, HostedRun] = {}  # by the run's id
        self._starting = WeakValueDictionary[str, asyncio.Lock]()  # by the run's id, while a lease holds it
        self._gpus: list[dict[str, Any]] = []
        self._had_driver = False  # when GPUs were last looked at
        self._looking = asyncio.Lock()
        self._answering: set[asyncio.Future[None]] = set()
        self._join = join
        self._told: dict[str, float] = {}  # a host that would join -> when it last said so

    async def serve(self) -> None:
        """Until cancelled; then no process of a run is left."""
        code_at_start()
        await self._look_at_gpus(is_first=True)
        server, self.address = await self._listen(self._port)
        print(f"rl worker: listening {'by TLS ' * is_on()}on {self.address}", flush=True)
        try:
            async with beside(*([self._ask_to_join()] if self._join else [])):
                await reap_orphans()
        finally:
            server.close()  # not by `async with`: from Python 3.12 on that waits for runs' connections to end
            for task in self._answering:
                task.cancel()
            if self._answering:
                await asyncio.wait(self._answering)
            for run in list(self._runs.values()):
                await run.end()

    async def _look_at_gpus(self, is_first: bool = False) -> None:
        """Once more where a driver has come, as on a host that boots, or showed none. Raises ConfigError."""
        async with self._looking:
            if is_first or (has_driver() and not (self._had_driver and self._gpus)):
                self._had_driver, self._gpus = has_driver(), await _look_at_gpus()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._answer(reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce, first = greeting()
        try:
            writer.write(first)
            async with within(_GREETING_SECONDS):
                text = await reader.readline()
            try:
                request = request_of(text, nonce)
            except PermissionError:
                raise Refusal("refused the key; set RL_WORKER_KEY to the same on all hosts") from None
            do = request.get("do")
            if do == "look":
                await self._look_at_gpus()
                writer.write(line({**host_facts(), "gpus": self._gpus, "address": self.address}))
            elif do == "file":
                await self._send_file(request, writer)
            elif do == "put":
                if request["run"] not in self._runs:
                    raise Refusal("knows no such run")
                await receive_file(request, reader, writer, lambda: request["run"] in self._runs)
            elif do == "lease":
                await self._lease(request, reader, writer)
            elif do == "join":
                self._told[str(request["address"])] = time.monotonic()
                writer.write(line({}))
            elif do == "open":
                await self._open_port(reader, writer)
            elif do == "noise":
                await send_noise(int(request["count"]), writer)
            elif do == "measure":
                asked = request["address"], int(request["count"]), int(request.get("streams", 1))
                measured = await asyncio.to_thread(measure, *asked)
                writer.write(line(measured))
            else:
                raise Refusal(f"knows no request {do!r}; use the same rl on all hosts")
            await writer.drain()
        except (Refusal, ConfigError) as refusal:
            writer.write(line({"error": str(refusal)}))
        except (ConnectionError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            pass  # no controller, or one that is gone
        except (KeyError, TypeError, AttributeError) as error:
            problem = f"is asked as another rl does ({error!r}); install the same on all hosts"
            writer.write(line({"error": problem}))
        except OSError as error:  # of this host's files or processes
            writer.write(line({"error": f"failed: {error}"}))
        finally:
            writer.close()
            with suppress(OSError, TimeoutError):  # what a link that is cut never takes is dropped
                async with within(_CLOSE_SECONDS):
                    await writer.wait_closed()
            writer.transport.abort()

    async def _open_port(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Another, as processes of a run do, while who asked is connected."""
        server, address = await self._listen(0)
        try:
            writer.write(line({"address": address}))
            async with within(_OPEN_SECONDS):
                await reader.read()
        finally:
            server.close()

    async def _listen(self, port: int) -> tuple[asyncio.Server, str]:
        tls = server_context()
        seconds = _HANDSHAKE_SECONDS if tls else None
        server = await asyncio.start_server(
            self._accept, self._host, port, limit=LONGEST_LINE, ssl=tls, ssl_handshake_timeout=seconds
        )
        return server, written(self._host, server.sockets[0].getsockname()[1])

    async def _ask_to_join(self) -> None:
        """Again and again: the run that it joins may be started later, or again."""
        was_heard = True
        while True:
            try:
                request = {"do": "join", "address": self.address}
                _, connection = await asyncio.to_thread(ask, self._join, request, _GREETING_SECONDS)
                connection.close()
                was_heard = True
            except HostUnreachable as error:
                if was_heard:
                    print(f"rl worker: {error}; it is asked again", flush=True)
                was_heard = False
            await asyncio.sleep(_JOIN_SECONDS)

    def _joining(self) -> list[str]:
        """Hosts that would join, and have said so lately."""
        now = time.monotonic()
        return [address for address, seconds in self._told.items() if now - seconds < 3 * _JOIN_SECONDS]

    async def _send_file(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Of a run's shared memory."""
        run = self._runs.get(request["run"])
        for path in filter(None, (request["path"], request.get("base"))):
            if run is None or Path(path).parent != run.shared or version_of(Path(path)) < 0:
                raise Refusal(f"has no file {path} of this run")
        try:
            await send_file(request, writer)
        except FileNotFoundError:
            raise Refusal(f"has released {request['path']}") from None

    async def _lease(
        self, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # In threads: a file system may hang, and other runs go on.
        await asyncio.to_thread(remove_unowned, Path(request["shared"]).parent.parent)
        name, run = request["run"], None
        one_at_a_time = self._starting.setdefault(name, asyncio.Lock())
        try:
            async with one_at_a_time:  # directories go before they are made again
                if before := self._runs.get(name):
                    before.check_next(request)
                    await before.end()
                run = self._runs[name] = await asyncio.to_thread(HostedRun, request, self._host, self.address)
                await run.start_worker()
            writer.write(line({"worker": run.worker_address, "sees_directory": run.sees_directory}))
            while True:  # not by wait_for, which may forget that this task is to end
                async with within(SILENCE_SECONDS):
                    if not (text := await reader.readline()):
                        break
                asked = json.loads(text)
                if self._runs.get(name) is not run:  # another controller goes on with the run
                    break
                writer.write(line({**await run.answer(asked), "joined": self._joining()}))
                async with within(SILENCE_SECONDS):
                    await writer.drain()
                if asked.get("do") == "close":
                    break
        finally:
            if run is not None:
                await run.end()
                if self._runs.get(name) is run:
                    del self._runs[name]


async def _look_at_gpus() -> list[dict[str, Any]]:
    """In a process of its own: a context of CUDA would stay in this one."""
    script = (
        "import dataclasses, json; from rl.cluster.machine import look_at_host; "
        "print(json.dumps([dataclasses.asdict(gpu) for gpu in look_at_host().gpus]))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", script, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        async with within(_LOOK_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise ConfigError(
            f"this host's GPUs did not answer within {_LOOK_SECONDS:.0f} s; see whether nvidia-smi does"
        ) from None
    if process.returncode:
        raise ConfigError("this host's GPUs cannot be looked at; see what is above")
    gpus: list[dict[str, Any]] = json.loads(output)
    return gpus


def worker(arguments: Sequence[str]) -> int:
    """The command. Raises ConfigError."""
    listen, join = _flags(arguments)
    host, port = parse_address(listen)
    address = address_of(host)
    if address in ("0.0.0.0", "::"):
        raise ConfigError(
            f"--listen {listen}: who reaches it can run programs here; give the address of one network"
        )
    if join:
        address_of(parse_address(join)[0])
    adopt_orphans()
    allow_many_files()
    try:
        asyncio.run(_serve(HostAgent(address, port, join)))
    except OSError as error:
        raise ConfigError(
            f"--listen {listen}: {error.strerror or error}; give a free port of an address of this host"
        ) from error
    return 0


def _flags(arguments: Sequence[str]) -> tuple[str, str]:
    """The values of --listen and --join. Raises ConfigError."""
    words = list(arguments)
    listen = take_value(words, "--listen", "10.0.0.2:7000")
    join = take_value(words, "--join", "10.0.0.1:7000")
    if words or not listen:
        raise ConfigError(
            "write rl worker --listen ADDRESS:PORT, as rl worker --listen 10.0.0.2:7000; with --join "
            "ADDRESS:PORT, of a run's first host, this one joins the run"
        )
    return listen, join


async def _serve(agent: HostAgent) -> None:
    serving = asyncio.ensure_future(agent.serve())

    def end(number: int) -> None:
        serving.cancel()

    on_interrupt(end)
    with suppress(asyncio.CancelledError):
        await serving
