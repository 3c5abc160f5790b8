"""Actors: all that a run drives, as one record."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rl.actors.engine import EngineHandle
from rl.actors.generator_pool import GeneratorPool
from rl.actors.reference import Reference
from rl.actors.remote import EarlyDeaths, EngineDied
from rl.actors.reward import RewardPool
from rl.actors.trainer import TrainerHandle
from rl.actors.turns import Turns
from rl.errors import RunError
from rl.plan.roles import RoleName
from rl.plan.types import Phase
from rl.types import LoRA, PolicyVersion
from rl.waiting import Deadlines, within
from rl.weight_sync.manifest import MODEL
from rl.weight_sync.store import WeightStore

_log = logging.getLogger(__name__)


class Revival:
    """Trainer, critic and reference live and die together: what one has lost, the others must unlearn.

    Restarts are counted anew with each checkpoint: what ends a run is that it gets no further.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[None]],
        engines: Sequence[EngineHandle] = (),
        max_restarts: int = 0,
    ):
        """start: starts all engines, as they were at first."""
        self.num_restarts = 0
        self._num_in_place = 0  # of them, since the run has got as far as this step
        self._step = 0
        self._start = start
        self._engines = engines
        self._max_restarts = max_restarts

    async def start(self) -> None:
        """For the first time. What dies meanwhile is started again. Raises RunError where it dies in the same
        way again and again."""
        try:
            await self._start()
        except EngineDied as death:
            await self._restart(death, EarlyDeaths())

    async def restart(self, death: EngineDied, step: int = 0) -> None:
        """step: of the newest checkpoint. Raises RunError once no restart is left from there."""
        if step > self._step:
            self._step, self._num_in_place = step, 0
        await self._restart(death)

    async def _restart(self, death: EngineDied, early: EarlyDeaths | None = None) -> None:
        while True:
            if early is not None:
                early.count(death)
            if self._num_in_place == self._max_restarts:
                raise RunError(f"{death}; no restart is left of trainer.max_restarts={self._max_restarts}")
            self._num_in_place += 1
            self.num_restarts += 1
            _log.warning("%s; started again (%d of %d)", death, self._num_in_place, self._max_restarts)
            await asyncio.gather(*(engine.kill() for engine in self._engines))
            try:
                return await self._start()
            except EngineDied as another:
                death = another


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
    engines: Mapping[RoleName, EngineHandle] = field(default_factory=dict)  # beside the trainer
    reference: Reference | None = None  # where the loss or the KL penalty asks for one
    policy: tuple[str, LoRA] | None = None
    revival: Revival | None = None  # None: what dies stays dead
    turns: Turns | None = None  # None: everybody stays on their devices
    address: str = "127.0.0.1"  # of this process, as other processes of the run reach it

    @property
    def critic(self) -> EngineHandle | None:
        """There where the advantage estimator asks for one."""
        return self.engines.get("critic")

    @property
    def adapter(self) -> str | None:
        return self.policy[0] if self.policy else None

    async def enter(self, phase: Phase) -> None:
        """Whoever is needed in the phase is on its devices, and nobody else. Raises EngineDied."""
        if self.turns is not None:
            await self.turns.enter(phase)

    async def first_turn(self) -> None:
        """Engines leave, so that generators can start. What dies meanwhile is started again."""
        while True:
            try:
                return await self.enter("generate")
            except EngineDied as death:
                await self.restart_engines(death)

    async def restart_engines(self, death: EngineDied, step: int = 0) -> None:
        """Start trainer, critic and reference again, as they were at first; generators wait for new weights.

        step: of the newest checkpoint. Raises RunError once no restart is left from there.
        """
        if self.revival is None:
            raise death
        if self.turns is not None:
            await self.turns.leave_to("score")  # new engines are there as soon as they are spawned
        await self.revival.restart(death, step)
        await self.generators.forget()
        if self.policy is not None:
            await self.publish_base_again()

    async def publish_base(self) -> None:
        """Of an adapter: the model never changes, so this is once, and only where somebody samples with it.

        Engines that die are started again.
        """
        while self.generators.replicas and self.store.newest(MODEL) is None:
            try:
                await self.store.publish(MODEL, lambda: self.trainer.publish_weights(0))
            except EngineDied as death:
                if self.revival is None:
                    raise
                await self.revival.restart(death)

    async def publish_base_again(self) -> None:
        """After engines were started again: a host that had a part of it may be lost."""
        await self.store.forget(MODEL)
        await self.publish_base()

    async def publish(self, version: PolicyVersion) -> None:
        """Make the trainer's weights the newest version; returns when they are written.

        Generators fetch them by themselves.

        Raises RunError where a reader of older versions does not let go within `deadlines.sync`; the trainer
        then has as long to write.
        """
        name = self.adapter or MODEL
        try:
            async with within(self.deadlines.sync):
                await self.store.wait_for_room(name)
        except TimeoutError:
            raise RunError(
                f"version {version} could not be published within {self.deadlines.sync:.0f} s: of the "
                f"versions {self.store.versions} some are still being read; see the generators' logs, or "
                f"raise --deadlines.sync"
            ) from None
        await self.store.publish(name, lambda: self.trainer.publish_weights(version, self.policy))
