"""PolicyTrainer: one rank of the policy's engine as an actor, and the handle that drives all ranks as one."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from monarch.actor import Actor, endpoint

from rl.actors.remote import call
from rl.interfaces import Loss, Transport
from rl.models.layout import Layout
from rl.types import Batch, OptimParams, PolicyVersion
from rl.weight_sync.manifest import Manifest, Shard

_KEPT_VERSIONS = 2


class PolicyTrainer(Actor):
    """Each endpoint is called on every rank at once; the engine's collectives keep the ranks in step."""

    def __init__(self, engine_args: dict[str, Any], transport: Transport):
        import torch.distributed as dist

        from rl.models.engine import TitanEngine  # torchtitan: 3 s that the controller need not spend

        self._engine = TitanEngine(**engine_args)
        self._transport = transport
        self._rank = dist.get_rank()

    @endpoint
    async def ready(self) -> str:
        """The device this rank computes on."""
        return str(self._engine.device)

    @endpoint
    async def forward(self, batch: Batch) -> dict[int, np.ndarray]:
        return self._engine.forward(batch)

    @endpoint
    async def forward_backward(self, batch: Batch, loss: Loss) -> dict[str, float]:
        return self._engine.forward_backward(batch, loss)

    @endpoint
    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        return self._engine.optim_step(params)

    @endpoint
    async def reset_optimizer(self) -> None:
        self._engine.reset_optimizer()

    @endpoint
    async def push_weights(self, version: PolicyVersion) -> list[Shard]:
        """Publish this rank's shards of the weights as they are now, and drop the oldest version that was kept."""
        shards = await self._transport.publish(version, self._rank, self._engine.export())
        await self._transport.release(version - _KEPT_VERSIONS, self._rank)
        return shards

    @endpoint
    async def save_checkpoint(self, path: str) -> None:
        self._engine.save_checkpoint(path)

    @endpoint
    async def load_checkpoint(self, path: str) -> None:
        self._engine.load_checkpoint(path)

    @endpoint
    async def save_hf(self, out_dir: str) -> None:
        self._engine.save_hf(out_dir)


class TrainerHandle:
    """All ranks of a PolicyTrainer mesh as one trainer. Every method has a deadline and raises RunError past it."""

    def __init__(self, actors: Any, layout: Layout, deadline_seconds: float):
        self._actors = actors
        self._layout = layout
        self._deadline = deadline_seconds

    async def _all(self, name: str, *args: Any) -> list[Any]:
        """Call every rank; returns their answers, one for each data-parallel rank (tensor-parallel peers agree)."""
        answers = await call(getattr(self._actors, name).call(*args), f"trainer.{name}", self._deadline)
        return list(answers.values())[:: self._layout.tensor_parallel]

    async def ready(self) -> list[str]:
        return await self._all("ready")

    async def forward(self, batch: Batch) -> dict[int, np.ndarray]:
        """Sample index -> logprobs of its scored tokens, fp32 nats."""
        return {k: v for part in await self._all("forward", batch) for k, v in part.items()}

    async def forward_backward(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """Metrics over all ranks, still named `name:sum` or `name:max`."""
        return _combine(await self._all("forward_backward", batch, loss))

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        return (await self._all("optim_step", params))[0]

    async def reset_optimizer(self) -> None:
        await self._all("reset_optimizer")

    async def push_weights(self, version: PolicyVersion) -> Manifest:
        """The manifest exists only once every rank has written its shards: a version is never torn."""
        answers = await call(self._actors.push_weights.call(version), "trainer.push_weights", self._deadline)
        return Manifest(version, tuple(shard for shards in answers.values() for shard in shards))

    async def save_checkpoint(self, path: str) -> None:
        await self._all("save_checkpoint", path)

    async def load_checkpoint(self, path: str) -> None:
        await self._all("load_checkpoint", path)

    async def save_hf(self, out_dir: str) -> None:
        await self._all("save_hf", out_dir)


def _combine(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    parts = list(parts)
    return {
        name: (max if name.endswith(":max") else sum)(part[name] for part in parts if name in part)
        for name in {name: None for part in parts for name in part}
    }
