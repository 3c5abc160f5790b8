"""PolicyTrainer: one rank of the policy's engine as an actor, and the handle that drives all ranks as one."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from monarch.actor import Actor, endpoint

from rl.actors.remote import call
from rl.interfaces import Loss, Transport
from rl.models.layout import Layout
from rl.types import POLICY, Batch, LoRA, OptimParams, PolicyVersion
from rl.weight_sync.manifest import Manifest, Shard

_MODEL = "model"
_KEPT_VERSIONS = 2


class PolicyTrainer(Actor):
    """Each endpoint is called on every rank at once; the engine's collectives keep the ranks in step."""

    def __init__(self, engine: str, model_dir: str, config: Any, lora: LoRA, seed: int, transport: Transport):
        """engine: a key of ENGINES; config: its EngineConfig. With lora.rank, the adapter POLICY learns in place of the model."""
        import torch.distributed as dist

        from rl.models.build import ENGINES  # torchtitan: 3 s that the controller need not spend

        self._engine = ENGINES[engine](model_dir, config)
        self._adapter = POLICY if lora.rank else None
        if self._adapter:
            self._engine.adapters.add(self._adapter, lora, seed)
        self._transport = transport
        self._rank = dist.get_rank()

    @endpoint
    async def ready(self) -> str:
        """The device this rank computes on."""
        return str(self._engine.device)

    @endpoint
    async def forward(self, batch: Batch) -> dict[int, np.ndarray]:
        return self._engine.forward(batch, self._adapter)

    @endpoint
    async def forward_backward(self, batch: Batch, loss: Loss) -> dict[str, float]:
        return self._engine.forward_backward(batch, loss, self._adapter)

    @endpoint
    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        return self._engine.optim_step(params, self._adapter)

    @endpoint
    async def reset_optimizer(self) -> None:
        self._engine.reset_optimizer(self._adapter)

    @endpoint
    async def push_weights(self, version: PolicyVersion) -> list[Shard]:
        """Publish this rank's shards of what learns, as it is now, and drop the oldest version that was kept."""
        name = self._adapter or _MODEL
        shards = await self._transport.publish(name, version, self._rank, self._engine.export(self._adapter))
        await self._transport.release(name, version - _KEPT_VERSIONS, self._rank)
        return shards

    @endpoint
    async def push_base(self) -> list[Shard]:
        """Publish this rank's shards of the frozen model under its adapter."""
        return await self._transport.publish(_MODEL, 0, self._rank, self._engine.export())

    @endpoint
    async def release_base(self) -> None:
        await self._transport.release(_MODEL, 0, self._rank)

    @endpoint
    async def save_checkpoint(self, path: str, state: dict[str, Any], keep_last: int) -> None:
        """Returns when everything is copied; the next call, or finish_checkpoint, waits until it is written."""
        self._engine.save(path, state, keep_last=keep_last, wait=False)

    @endpoint
    async def finish_checkpoint(self) -> None:
        self._engine.wait_for_save()

    @endpoint
    async def load_checkpoint(self, path: str) -> dict[str, Any]:
        return self._engine.load(path)

    @endpoint
    async def save_hf(self, out_dir: str) -> None:
        """The model with its adapter merged, and the adapter beside it in PEFT's format."""
        self._engine.save_hf(out_dir, self._adapter)
        if self._adapter:
            self._engine.save_adapter(self._adapter, f"{out_dir}-adapter")


class TrainerHandle:
    """All ranks of a PolicyTrainer mesh as one trainer. Every method has a deadline and raises RunError past it."""

    def __init__(self, actors: Any, layout: Layout, lora: LoRA, deadline_seconds: float):
        self._actors = actors
        self._layout = layout
        self._lora = lora
        self._deadline = deadline_seconds

    async def _all(self, name: str, *args: Any) -> list[Any]:
        """Call every rank; returns their answers, one for each data-parallel rank (ranks that share rows agree)."""
        answers = await call(getattr(self._actors, name).call(*args), f"trainer.{name}", self._deadline)
        return list(answers.values())[:: self._layout.procs_per_row]

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
        return Manifest(version, _joined(answers), (POLICY, self._lora) if self._lora.rank else None)

    async def push_base(self) -> Manifest:
        """The frozen model under its adapter: what generators load once. Follow it by `release_base`."""
        return Manifest(0, _joined(await call(self._actors.push_base.call(), "trainer.push_base", self._deadline)))

    async def release_base(self) -> None:
        await self._all("release_base")

    async def save_checkpoint(self, path: str, state: dict[str, Any], keep_last: int) -> None:
        """`state`: plain data that `load_checkpoint` returns. Written in the background: see `finish_checkpoint`."""
        await self._all("save_checkpoint", path, state, keep_last)

    async def finish_checkpoint(self) -> None:
        await self._all("finish_checkpoint")

    async def load_checkpoint(self, path: str) -> dict[str, Any]:
        return (await self._all("load_checkpoint", path))[0]

    async def save_hf(self, out_dir: str) -> None:
        await self._all("save_hf", out_dir)


def _joined(answers: Any) -> tuple[Shard, ...]:
    return tuple(shard for shards in answers.values() for shard in shards)


def _combine(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    parts = list(parts)
    return {
        name: (max if name.endswith(":max") else sum)(part[name] for part in parts if name in part)
        for name in {name: None for part in parts for name in part}
    }
