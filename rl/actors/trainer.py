"""PolicyTrainer: one rank of the policy's engine as an actor, which publishes its weights, and its handle."""

from typing import Any

from monarch.actor import endpoint

from rl.actors.engine import EngineActor, EngineHandle
from rl.interfaces import Transport
from rl.models.engine_config import EngineConfig
from rl.types import POLICY, REFERENCE, LoRA, PolicyVersion
from rl.weight_sync.manifest import Manifest, Shard

_MODEL = "model"
_KEPT_VERSIONS = 2


class PolicyTrainer(EngineActor):
    def __init__(self, kind: str, model_dir: str, config: EngineConfig, lora: LoRA, with_reference: bool, seed: int, transport: Transport):
        """With lora.rank, the adapter POLICY learns in place of the model; `with_reference` keeps another, REFERENCE, beside it."""
        import torch.distributed as dist

        super().__init__(kind, model_dir, config)
        if lora.rank:
            self._adapter = POLICY
            self._engine.adapters.add(POLICY, lora, seed)
        if with_reference:
            self._engine.adapters.add(REFERENCE, lora, seed)
        self._transport = transport
        self._rank = dist.get_rank()

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
    async def keep_reference(self) -> None:
        self._engine.adapters.copy(POLICY, REFERENCE)

    @endpoint
    async def save_hf(self, out_dir: str) -> None:
        """The model with its adapter merged, and the adapter beside it in PEFT's format."""
        self._engine.save_hf(out_dir, self._adapter)
        if self._adapter:
            self._engine.save_adapter(self._adapter, f"{out_dir}-adapter")


class TrainerHandle(EngineHandle):
    """All ranks of a PolicyTrainer mesh as one trainer."""

    def __init__(self, actors: Any, config: EngineConfig, lora: LoRA, deadline_seconds: float):
        super().__init__("trainer", actors, config, deadline_seconds)
        self._lora = lora

    async def push_weights(self, version: PolicyVersion) -> Manifest:
        """The manifest exists only once every rank has written its shards: a version is never torn."""
        shards = _joined(await self._every("push_weights", version))
        return Manifest(version, shards, (POLICY, self._lora) if self._lora.rank else None)

    async def push_base(self) -> Manifest:
        """The frozen model under its adapter: what generators load once. Follow it by `release_base`."""
        return Manifest(0, _joined(await self._every("push_base")))

    async def release_base(self) -> None:
        await self._all("release_base")

    async def keep_reference(self) -> None:
        """The adapter REFERENCE becomes what the policy is now."""
        await self._all("keep_reference")

    async def save_hf(self, out_dir: str) -> None:
        await self._all("save_hf", out_dir)


def _joined(answers: list[list[Shard]]) -> tuple[Shard, ...]:
    return tuple(shard for shards in answers for shard in shards)
