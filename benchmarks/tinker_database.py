"""A Tinker server whose database is full of what was: how long it takes to start, to sweep and to answer, beside an empty one.

`python -m benchmarks.tinker_database [--sessions 10000] [--models 1000] [--requests 1000000] [--database sqlite postgres] [--write]`. PostgreSQL is a server of its own, with the settings that it comes with.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import numpy as np
from sqlalchemy import create_engine, event, insert

from benchmarks.pages import machine, write_page
from benchmarks.tinker_server import Client
from rl.tinker.database import Database, checkpoints, models, requests, samplers, sessions
from tests.tinker.fakes import KEYS
from tests.tinker.postgres import postgres

SERVER = """
import asyncio, sys, time
from pathlib import Path
from rl.tinker.limits import Limits
from rl.tinker.retention import Retention
from tests.tinker.fakes import serving

async def sweep_when_told(self):
    await asyncio.to_thread(sys.stdin.readline)
    began = time.monotonic()
    await self.sweep()
    print(time.monotonic() - began, flush=True)
    await asyncio.Event().wait()

Retention.run = sweep_when_told
began = time.monotonic()
with serving(Path(sys.argv[1]), limits=Limits(max_models=32), database_url=sys.argv[2]) as (url, _):
    print(url, time.monotonic() - began, flush=True)
    time.sleep(100000)
"""
NOTES = """The database holds {sessions:,} sessions, of which nine in ten are over, {models:,} models with a checkpoint and a snapshot each, and
{requests:,} requests with results of 300 bytes, one in twenty with its body. Half of the requests are older than
`limits.keep_seconds`: the sweep deletes them while clients go on. Clients: {clients}, each in turn a forward_backward and its result, a sample and its
result; the backend computes nothing. Client and server share two cores. Seconds to start: of the service on the database, without
imports. PostgreSQL 16 with its own settings (each commit is synced), over a Unix socket; SQLite syncs snapshots and checkpoints alone."""
RESULT = b"r" * 300
BODY = b"b" * 1000
_PIECE = 5000


def fill(url: str, num_sessions: int, num_models: int, num_requests: int) -> None:
    """With what a server of many clients has after a day."""
    Database(url).close()
    now, lora = time.time(), {"rank": 8, "alpha": 32.0, "targets": ["q_proj"]}
    day = 24 * 3600.0
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _hurry)
    with engine.begin() as connection:

        def add(table, rows) -> None:
            piece = []
            for row in rows:
                piece.append(row)
                if len(piece) == _PIECE:
                    connection.execute(insert(table), piece)
                    piece = []
            if piece:
                connection.execute(insert(table), piece)

        def seen(i: int) -> float:
            return now if i % 10 == 0 else now - 2 * day

        add(sessions, (
            {"id": f"{i:032x}", "tenant": f"tenant-{i % 50}", "created": now - i, "seen": seen(i)}
            for i in range(num_sessions)
        ))  # fmt: skip
        add(samplers, (
            {"id": f"{i:032x}:sample:0", "session": f"{i:032x}", "tenant": f"tenant-{i % 50}", "created": now, "num_bytes": 0}
            for i in range(num_sessions)
        ))  # fmt: skip
        ids = [f"{i * (num_sessions // num_models):032x}:train:0" for i in range(num_models)]
        add(models, (
            {
                "id": id, "session": id.partition(":")[0], "tenant": f"tenant-{i % 50}", "lora": lora, "seed": i,
                "source_optimizer": False, "snapshot": f"models/{i}", "snapshot_number": num_requests, "created": now - i,
                "seen": now - (i % 20) * day, "snapshot_bytes": 10**6,
            }
            for i, id in enumerate(ids)
        ))  # fmt: skip
        add(checkpoints, (
            {
                "path": f"tinker://{id}/weights/x", "model": id, "tenant": f"tenant-{i % 50}", "kind": "weights", "name": "x",
                "request": "r", "directory": f"checkpoints/{i}", "lora": lora, "created": now, "num_bytes": 10**6,
                "public": False,
            }
            for i, id in enumerate(ids)
        ))  # fmt: skip
        add(requests, (
            {
                "id": f"{ids[i % num_models]}:{i}", "tenant": f"tenant-{i % num_models % 50}", "kind": "forward_backward",
                "target": ids[i % num_models], "body": BODY if i % 20 == 0 else None, "state": "failed" if i % 100 == 1 else "done",
                "result": RESULT, "media_type": "application/json", "created": now - day, "deaths": 0,
                "finished": now - 2 * day * (1 - i / num_requests), "num_bytes": len(RESULT) + (len(BODY) if i % 20 == 0 else 0),
            }
            for i in range(num_requests)
        ))  # fmt: skip
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE")
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()


def _hurry(connection, _record) -> None:
    for pragma in ("synchronous=OFF", "cache_size=-300000"):
        connection.execute(f"PRAGMA {pragma}")


async def drive(url: str, seconds: float, num_clients: int) -> list[float]:
    """How long each request took: two HTTP requests each."""
    async with aiohttp.ClientSession(url, headers={"X-API-Key": KEYS[0]}) as http:
        clients = [Client(http, i) for i in range(num_clients)]
        for client in clients:
            await client.begin()
        until, spent = time.monotonic() + seconds, []

        async def work(client: Client) -> None:
            seq_id = 1
            while time.monotonic() < until:
                for verb in (client.train, client.sample):
                    began = time.monotonic()
                    await verb(seq_id)
                    spent.append(time.monotonic() - began)
                seq_id += 1

        await asyncio.gather(*map(work, clients))
        return spent


@contextmanager
def serving(url: str):
    """(The server's address, seconds that it took to start, a call that has it sweep and returns how long that takes)."""
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-c", SERVER, root, url]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def begin_sweep() -> None:
            process.stdin.write("sweep\n")
            process.stdin.flush()

        try:
            address, started = process.stdout.readline().split()
            yield address, float(started), begin_sweep, process.stdout.readline
        finally:
            process.kill()
            process.wait()


def measure(urls: dict[str, str], options: argparse.Namespace) -> dict[str, list[float]]:
    """By content: seconds to start and to sweep; milliseconds a request, median and 99 of 100, before and in a sweep.

    The servers take turns, so that what else the machine does is the same to both.
    """
    with ExitStack() as stack:
        servers = {content: stack.enter_context(serving(url)) for content, url in urls.items()}
        spent: dict[str, list[list[float]]] = {content: [[], []] for content in urls}
        for phase in (0, 1):
            for _ in range(options.rounds):
                for content, (address, *_) in servers.items():
                    spent[content][phase] += asyncio.run(drive(address, options.seconds, options.clients))
            if phase == 0:
                for _, _, begin_sweep, _ in servers.values():
                    begin_sweep()
        swept = {content: float(swept()) for content, (_, _, _, swept) in servers.items()}
        return {
            content: [started, swept[content], *(
                1e3 * float(np.percentile(spent[content][phase], share)) for phase in (0, 1) for share in (50, 99)
            )]
            for content, (_, started, _, _) in servers.items()
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--models", type=int, default=1_000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4, help="of a server's turn")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--database", nargs="+", default=["sqlite", "postgres"], choices=["sqlite", "postgres"]
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    machine()
    rows = [
        ["database", "s to start", "s to sweep", "ms: median", "99 of 100", "in a sweep: median", "99 of 100"]
    ]
    for kind in options.database:
        with ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(postgres(settings=())) if kind == "postgres" else None
            urls = {
                content: server.url(content)
                if server
                else f"sqlite:///{root}/{content}.db?check_same_thread=false"
                for content in ("empty", "full")
            }
            fill(urls["full"], options.sessions, options.models, options.requests)
            for content, numbers in measure(urls, options).items():
                rows.append([f"{kind}, {content}", *(f"{number:.2f}" for number in numbers)])
                print(" | ".join(rows[-1]), flush=True)
    notes = NOTES.format(**vars(options))
    if options.write:
        command = f"python -m benchmarks.tinker_database --clients {options.clients} --seconds {options.seconds:g} --write"
        write_page(
            "tinker_database", "The Tinker server on a full database", command, rows, notes, packages=("SQLAlchemy",)
        )  # fmt: skip


if __name__ == "__main__":
    main()
