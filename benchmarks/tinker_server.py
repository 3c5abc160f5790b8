"""The Tinker server's own cost: requests/s and milliseconds a request on one core, with a backend that computes nothing;
and how it holds many clients with several models each.

`python -m benchmarks.tinker_server [--seconds 10] [--clients 32] [--database sqlite postgres] [--write]`
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

import aiohttp
import numpy as np
import psutil
from tinker.proto import tinker_public_pb2 as pb

from benchmarks.pages import machine, write_page
from tests.tinker.fakes import KEYS, NAME
from tests.tinker.postgres import postgres

SERVER = """
import sys, time
from pathlib import Path
from rl.tinker.limits import Limits
from tests.tinker.fakes import serving
with serving(Path(sys.argv[1]), limits=Limits(max_models=1000), database_url=sys.argv[2] or None) as (url, _):
    print(url, flush=True)
    time.sleep(100000)
"""
NOTES = """One process serves, on one core, with a backend that computes nothing; clients are another process on another core. "train":
forward_backward of one datum of 32 tokens, and its result fetched; "sample": one sample asked for, and fetched; each two HTTP requests. Fairness: the
fewest requests that a model got done, over the most. Memory: of the server, at the end less after the first tenth.
PostgreSQL 16, on both cores, with its own settings (each commit is synced, and the server waits for it), over a Unix socket; SQLite syncs snapshots and checkpoints alone."""


def body(model: str, seq_id: int) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.ones(32, np.int32).tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.ones(32, np.int64).tobytes(), pb.DTYPE_INT64
    targets.shape.append(32)
    return message.SerializeToString()


class Client:
    def __init__(self, http: aiohttp.ClientSession, number: int):
        self.http, self.number, self.done = http, number, 0

    async def post(self, path: str, **content) -> tuple[str, bytes]:
        """Media type and body."""
        async with self.http.post(f"/api/v1/{path}", **content) as answer:
            answer.raise_for_status()
            return answer.content_type, await answer.read()

    async def ask(self, path: str, **content) -> dict:
        return json.loads((await self.post(path, **content))[1])

    async def begin(self) -> None:
        nobody = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
        session = (await self.ask("create_session", json=nobody))["session_id"]
        lora = {"rank": 8, "seed": 1}
        model = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": lora}
        self.model = (await self.ask("create_model", json=model))["model_id"]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
        self.sampler = (await self.ask("create_sampling_session", json=sampler))["sampling_session_id"]

    async def train(self, seq_id: int) -> None:
        headers = {"Content-Type": "application/x-protobuf"}
        sent = await self.ask("forward_backward", data=body(self.model, seq_id), headers=headers)
        await self.fetch(sent["request_id"])

    async def sample(self, seq_id: int) -> None:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        asked = {"sampling_session_id": self.sampler, "seq_id": seq_id, "prompt": prompt, "num_samples": 1}
        sent = await self.ask("asample", json=asked | {"sampling_params": {"max_tokens": 3, "seed": 0}})
        await self.fetch(sent["request_id"])

    async def fetch(self, id: str) -> None:
        media_type, answer = await self.post("retrieve_future", json={"request_id": id})
        assert media_type == "application/x-protobuf", answer
        self.done += 1


async def drive(
    url: str, seconds: float, num_clients: int, verb: str, server: psutil.Process
) -> dict[str, float]:
    async with aiohttp.ClientSession(url, headers={"X-API-Key": KEYS[0]}) as http:
        clients = [Client(http, i) for i in range(num_clients)]
        for client in clients:
            await client.begin()
        began, cpu = time.monotonic(), sum(server.cpu_times()[:2])
        memory: list[int] = []

        async def work(client: Client) -> None:
            seq_id = 1
            while time.monotonic() - began < seconds:
                await getattr(client, verb)(seq_id)
                seq_id += 1

        async def watch() -> None:
            while time.monotonic() - began < seconds:
                await asyncio.sleep(seconds / 20)
                memory.append(server.memory_info().rss)

        await asyncio.gather(watch(), *map(work, clients))
        spent, done = time.monotonic() - began, sum(client.done for client in clients)
        each = [client.done for client in clients]
        return {
            "requests/s": 2 * done / spent,
            "server CPU ms a request": (sum(server.cpu_times()[:2]) - cpu) / (2 * done) * 1e3,
            "fairness": min(each) / max(each),
            "memory MiB": (statistics.median(memory[-4:]) - memory[1]) / 2**20,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--database", nargs="+", default=["sqlite", "postgres"], choices=["sqlite", "postgres"]
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    machine()
    cores = os.sched_getaffinity(0)
    rows = [
        ["database", "request", "clients", "requests/s", "server CPU ms a request", "fairness", "memory, MiB"]
    ]
    for kind in options.database:
        for verb in ("train", "sample"):
            with ExitStack() as stack:
                root = stack.enter_context(tempfile.TemporaryDirectory())
                postgres_server = stack.enter_context(postgres(settings=())) if kind == "postgres" else None
                database_url = postgres_server.url("server") if postgres_server else ""
                command = ["taskset", "-c", "0", sys.executable, "-c", SERVER, root, database_url]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                try:
                    url = process.stdout.readline().strip()
                    os.sched_setaffinity(0, {1})  # what drives it; PostgreSQL has both cores
                    measured = asyncio.run(
                        drive(url, options.seconds, options.clients, verb, psutil.Process(process.pid))
                    )
                finally:
                    process.kill()
                    process.wait()
                    os.sched_setaffinity(0, cores)
            cells = [
                f"{measured[name]:.2f}" for name in ("server CPU ms a request", "fairness", "memory MiB")
            ]
            rows.append([kind, verb, str(options.clients), f"{measured['requests/s']:.0f}", *cells])
            print(" | ".join(rows[-1]), flush=True)
    if options.write:
        command = (
            f"python -m benchmarks.tinker_server --seconds {options.seconds:.0f} --clients {options.clients} "
        )
        command += f"--database {' '.join(options.database)} --write"
        write_page(
            "tinker_server",
            "The Tinker server's own cost",
            command,
            rows,
            NOTES,
            packages=("tinker", "SQLAlchemy"),
        )


if __name__ == "__main__":
    main()
