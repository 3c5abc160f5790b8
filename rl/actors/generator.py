"""Generator: a vLLM engine as an actor, and the pool that spreads prompts over its replicas."""

from collections.abc import Sequence
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from rl.actors.remote import Replicas
from rl.interfaces import Transport
from rl.types import Completion, SamplingParams
from rl.weight_sync.manifest import Manifest


class Generator(Actor):
    """Endpoints are concurrent: requests join while others run, and weights arrive in between."""

    def __init__(self, engine_args: dict[str, Any], transport: Transport):
        from rl.models.generator import GeneratorEngine  # vLLM changes the process that imports it: not the controller's

        self._engine = GeneratorEngine(**engine_args)
        self._transport = transport

    @concurrent_endpoint
    async def ready(self) -> bool:
        return True

    @concurrent_endpoint
    async def sample(self, prompt: Sequence[int], n: int, params: SamplingParams) -> list[Completion]:
        return await self._engine.sample(prompt, n, params)

    @concurrent_endpoint
    async def load_weights(self, manifest: Manifest) -> int:
        await self._engine.load_weights(manifest, await self._transport.fetch(manifest))
        return self._engine.version


class GeneratorPool:
    """The replicas as one Sampler."""

    def __init__(self, actors: Any, num_replicas: int, deadline_seconds: float):
        members = [actors.slice(procs=i) for i in range(num_replicas)]
        self._replicas = Replicas("generator", members, deadline_seconds)

    async def ready(self) -> None:
        await self._replicas.ready()

    async def sample(self, prompt: Sequence[int], n: int, params: SamplingParams) -> list[Completion]:
        return await self._replicas.call(lambda g: g.sample.call_one(prompt, n, params), load=n)

    async def load_weights(self, manifest: Manifest) -> list[int]:
        """Every live replica switches; returns the versions they are at."""
        return await self._replicas.call_all(lambda g: g.load_weights.call_one(manifest))

    @property
    def num_alive(self) -> int:
        return self._replicas.num_alive
