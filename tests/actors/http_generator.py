"""A generator behind HTTP: the second implementation of member.GeneratorMember. `python -m tests.actors.http_generator DIRECTORY` serves one.

Its weights come by the real shared memory; what it samples says which version it had: token i of a sample is the version, its logprob
the mean of the weights.
"""

import asyncio
import http.client
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl.actors.remote import ProcessDied
from rl.errors import RunError, WeightsUnreachable
from rl.models.generator.wave import Wave
from rl.types import Completion, SamplingParams, StopReason, VersionRange
from rl.weight_sync.manifest import Manifest, assemble
from rl.weight_sync.shared_memory import SharedMemory
from tests.json_server import JSONHandler, serving

TOKEN_SECONDS = 0.02


class HTTPGenerator:
    """Its server's end of the connection. One request of each call; a call that fails is its death."""

    def __init__(self, name: str, process: subprocess.Popen, port: int):
        self.name, self._process, self._port = name, process, port
        self.num_samples = 0  # under way, when it was last looked at
        self._threads = ThreadPoolExecutor(32)  # a request that samples keeps one

    async def check(self) -> None:
        self.num_samples = (await self._ask("check", {}))["num_samples"]

    async def kill(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def load_weights(self, manifest: Manifest) -> None:
        answer = await self._ask("load_weights", {"manifest": pickle.dumps(manifest).hex()})
        if "unreachable" in answer:
            raise WeightsUnreachable(answer["unreachable"])

    async def sample(
        self, prompt: Sequence[int], n: int, params: SamplingParams, wave: Wave, key: int
    ) -> list[Completion]:
        asked = {"n": n, "tokens": params.max_new_tokens, "key": key}
        answer = await self._ask("sample", asked)
        return [
            Completion(tokens, logprobs, VersionRange(*versions), StopReason.LENGTH)
            for tokens, logprobs, versions in answer["samples"]
        ]

    async def give_up_samples(self, keys: Sequence[int] | None = None) -> None:
        await self._ask("give_up_samples", {"keys": None if keys is None else list(keys)})

    async def suspend(self) -> None:
        await self._ask("suspend", {})

    async def _ask(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._post, verb, body)
        except (OSError, http.client.HTTPException) as error:
            raise ProcessDied(f"{self.name} does not answer: {error!r}") from error

    def _post(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        try:
            connection.request("POST", f"/{verb}", json.dumps(body))
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


async def start(name: str, directory: str) -> HTTPGenerator:
    """Raises ProcessDied where it does not start."""
    command = [sys.executable, "-m", "tests.actors.http_generator", directory]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = await asyncio.to_thread(process.stdout.readline)
    if not line:
        raise ProcessDied(f"{name} did not start")
    return HTTPGenerator(name, process, int(line))


class _Engine:
    """What the server has. Requests sample side by side, each at its own pace."""

    def __init__(self, directory: str):
        self._transport = SharedMemory(directory)
        self._version, self._mean = -1, 0.0
        self._given_up: set[int] = set()
        self._num_samples = 0

    def check(self) -> dict[str, Any]:
        return {"num_samples": self._num_samples}

    def load_weights(self, manifest: str) -> dict[str, Any]:
        version = pickle.loads(bytes.fromhex(manifest))
        try:
            tensors = dict(assemble(self._transport.fetch(version)))
        except RunError as error:
            return {"unreachable": str(error)}
        self._mean = float(tensors["w"].mean())
        self._version = version.version
        return {}

    def sample(self, n: int, tokens: int, key: int) -> dict[str, Any]:
        first, sampled = self._version, list[int]()
        logprobs = list[float]()
        self._num_samples += 1
        while len(sampled) < tokens and key not in self._given_up:
            time.sleep(TOKEN_SECONDS)
            sampled.append(self._version)
            logprobs.append(self._mean)
        self._num_samples -= 1
        return {"samples": [(sampled, logprobs, (first, self._version))] * n}

    def give_up_samples(self, keys: list[int] | None) -> dict[str, Any]:
        self._given_up |= {*(keys or ())}
        return {}

    def suspend(self) -> dict[str, Any]:
        self._version = -1
        return {}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = _Engine(sys.argv[1])

    class Handler(JSONHandler):
        def answer(self, asked):
            return getattr(engine, self.path.strip("/"))(**asked)

    parent = os.getppid()
    with serving(Handler) as server:
        print(server.server_port, flush=True)
        while os.getppid() == parent:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
