"""PolicyTrainer: one rank of an engine that publishes its weights, as an actor, and its handle."""

from os.path import abspath

from monarch.actor import endpoint

from rl.actors.engine import EngineHandle
from rl.actors.engine_actor import EngineActor
from rl.interfaces import Transport
from rl.models.engine_config import EngineConfig
from rl.types import LoRA, PolicyVersion
from rl.weight_sync.manifest import MODEL, Manifest, Shard


class PolicyTrainer(EngineActor):
    def __init__(self, kind: str, model_dir: str, config: EngineConfig, transport: Transport):
        import torch.distributed as dist

        super().__init__(kind, model_dir, config)
        self._transport = transport
        self._rank = dist.get_rank()

    @endpoint
    async def publish_weights(self, version: PolicyVersion, adapter: str | None) -> list[Shard]:
        """Publish this rank's shards, as they are now. The WeightStore in the controller frees them."""
        return await self._transport.publish(
            adapter or MODEL, version, self._rank, self._engine.export(adapter)
        )

    @endpoint
    async def save_hf(self, out_dir: str, adapter: str | None) -> None:
        """The model with its adapter merged, and the adapter beside it in PEFT's format."""
        self._engine.save_hf(out_dir, adapter)
        if adapter:
            self._engine.save_adapter(adapter, f"{out_dir}-adapter")


class TrainerHandle(EngineHandle):
    """All ranks of a PolicyTrainer mesh as one trainer."""

    async def publish_weights(
        self, version: PolicyVersion, adapter: tuple[str, LoRA] | None = None
    ) -> Manifest:
        """Of the model, or of an adapter. The manifest exists only once every rank has written its shards."""
        answers = await self._every("publish_weights", version, adapter[0] if adapter else None, kind="sync")
        shards = tuple(shard for shards in answers for shard in shards)
        return Manifest(version, shards, adapter)

    async def save_hf(self, out_dir: str, adapter: str | None = None) -> None:
        await self._every("save_hf", abspath(out_dir), adapter, kind="checkpoint")
