"""The reference policy: where the KL penalty pulls to, a teacher, or DPO's start. Two ways to have one."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from rl.actors.engine import EngineHandle
from rl.actors.trainer import TrainerHandle
from rl.types import POLICY, REFERENCE, Sample


class Reference(Protocol):
    async def compute_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Logprobs of each sample, [T], 0 where a token is not a target."""
        ...

    async def refresh(self, step: int) -> None:
        """Become what the policy is now, after `step`."""
        ...

    async def restore(self, weights: str) -> None:
        """Become again what it was when a checkpoint noted `weights`."""
        ...

    def keep(self, checkpoint: Path) -> str:
        """Plain data by which a checkpoint notes the present weights; they are kept while it exists."""
        ...


class ReferenceMesh:
    """A frozen engine in processes of its own.

    It is refreshed through a Hugging Face directory, which a resumed run finds again.
    """

    def __init__(self, engine: EngineHandle, trainer: TrainerHandle, directory: Path):
        self._engine = engine
        self._trainer = trainer
        self._directory = directory.resolve()
        self._weights = ""  # the model's own, as the mesh was started
        self._notes: dict[Path, str] = {}  # checkpoint -> the weights it notes

    async def compute_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return await self._engine.forward_samples(samples)

    async def refresh(self, step: int) -> None:
        path = str(self._directory / f"step-{step}")
        await self._trainer.save_hf(path)
        await self.restore(path)
        last = next(reversed(self._notes), None)  # may still be being written
        noted = {
            weights
            for checkpoint, weights in self._notes.items()
            if checkpoint == last or checkpoint.exists()
        }
        for old in self._directory.iterdir():
            if str(old) not in noted | {path}:
                shutil.rmtree(old)

    async def restore(self, weights: str) -> None:
        if weights:
            await self._engine.load_weights(weights)
        self._weights = weights

    def keep(self, checkpoint: Path) -> str:
        self._notes[checkpoint] = self._weights
        return self._weights


class ReferenceAdapter:
    """Where the policy is an adapter: a second one in the trainer itself.

    The base weights exist once, and checkpoints hold both.
    """

    def __init__(self, trainer: TrainerHandle):
        self._trainer = trainer

    async def compute_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return await self._trainer.forward_samples(samples, REFERENCE)

    async def refresh(self, step: int) -> None:
        await self._trainer.copy_adapter(POLICY, REFERENCE)

    async def restore(self, weights: str) -> None:
        pass  # they came with the trainer's checkpoint

    def keep(self, checkpoint: Path) -> str:
        return ""
