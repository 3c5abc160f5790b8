"""Actors: all that a run drives, as one record."""

import asyncio
from dataclasses import dataclass

from rl.actors.engine import EngineHandle
from rl.actors.generator_pool import GeneratorPool
from rl.actors.reference import Reference
from rl.actors.reward import RewardPool
from rl.actors.trainer import TrainerHandle
from rl.errors import RunError
from rl.types import LoRA, PolicyVersion
from rl.waiting import Deadlines
from rl.weight_sync.manifest import MODEL
from rl.weight_sync.store import WeightStore


@dataclass(frozen=True)
class Actors:
    """The running actors of a run.

    `policy`: the adapter that learns and is sampled with; None is the model itself.
    """

    trainer: TrainerHandle
    generators: GeneratorPool
    rewards: RewardPool
    store: WeightStore
    deadlines: Deadlines
    reference: Reference | None = None  # where the loss or the KL penalty asks for one
    critic: EngineHandle | None = None  # where the advantage estimator asks for one
    policy: tuple[str, LoRA] | None = None

    @property
    def adapter(self) -> str | None:
        return self.policy[0] if self.policy else None

    async def publish(self, version: PolicyVersion) -> None:
        """Make the trainer's weights the newest version; returns when they are written.

        Generators fetch them by themselves.

        Raises RunError where a reader of older versions does not let go within `deadlines.sync`.
        """
        try:
            async with asyncio.timeout(self.deadlines.sync):
                await self.store.publish(
                    self.adapter or MODEL, lambda: self.trainer.publish_weights(version, self.policy)
                )
        except TimeoutError:
            raise RunError(
                f"version {version} could not be published within {self.deadlines.sync:.0f} s: of the "
                f"versions {self.store.versions} some are still being read; see the generators' logs, or "
                f"raise --deadlines.sync"
            ) from None
