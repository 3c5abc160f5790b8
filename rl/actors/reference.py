"""The reference policy: where the KL penalty pulls to, a teacher, or DPO's start. Two ways to have one."""

import asyncio
import hashlib
import shutil
from collections.abc import Collection, Sequence
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np

from rl.actors.engine import EngineHandle
from rl.actors.trainer import TrainerHandle
from rl.errors import RunError
from rl.models.checkpoint_dir import REFERENCES
from rl.paths import sync
from rl.types import POLICY, REFERENCE, Sample


class Reference(Protocol):
    async def compute_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Logprobs of each sample, [T], 0 where a token is not a target."""
        ...

    async def refresh(self, step: int, noted: Collection[str]) -> None:
        """Become what the policy is now, after `step`. noted: weights that checkpoints need, which stay."""
        ...

    async def restore(self, weights: str) -> None:
        """Become again what it was when a checkpoint noted `weights`."""
        ...

    def note(self) -> str:
        """Plain data by which the checkpoint that is written next notes the present weights."""
        ...


class ReferenceMesh:
    """A frozen engine in processes of its own.

    It is refreshed through a Hugging Face directory, which a resumed run finds again. No directory that a
    checkpoint notes is written to or removed. Another run's directory is copied into this run's, because the
    other run may remove it.
    """

    def __init__(self, engine: EngineHandle, trainer: TrainerHandle, run_dir: Path):
        self._engine = engine
        self._trainer = trainer
        self._directory = (run_dir / REFERENCES).resolve()
        self._weights = ""  # the model's own, as the mesh was started
        self._last_noted = ""  # by a checkpoint that may still be being written

    async def compute_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return await self._engine.forward_samples(samples)

    async def refresh(self, step: int, noted: Collection[str]) -> None:
        # By name: the run may have been moved since they were noted.
        needed = {Path(weights).name for weights in (*noted, self._last_noted)}
        path = self._path(step, needed)
        await self._trainer.save_hf(path)
        await self.restore(path)
        for old in self._directory.glob("step-*"):
            if old.name not in needed | {Path(path).name}:
                shutil.rmtree(old)

    def _path(self, step: int, needed: Collection[str]) -> str:
        """Another one where a checkpoint notes the weights of an earlier refresh after the same step."""
        name, numbers = f"step-{step}", count(2)
        while name in needed:
            name = f"step-{step}-{next(numbers)}"
        return str(self._directory / name)

    async def restore(self, weights: str) -> None:
        if weights and Path(weights).parent != self._directory:
            weights = await asyncio.to_thread(self._copy, weights)
        if weights:
            await self._engine.load_weights(weights)
        self._weights = weights

    def _copy(self, weights: str) -> str:
        """Another run's weights, as a directory of this run. Made once. Blocks until it is on the disk."""
        digest = hashlib.blake2b(weights.encode(), digest_size=4).hexdigest()
        path = self._directory / f"{Path(weights).name}-from-{digest}"
        if path.exists():
            return str(path)
        if not Path(weights).is_dir():
            raise RunError(
                f"the reference's weights {weights}, which the checkpoint notes, are missing; bring them "
                f"back, or go on from another checkpoint"
            )
        partial = path.with_name(f"{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed here
        shutil.copytree(weights, partial)
        for file in (*partial.rglob("*"), partial):
            sync(file)
        partial.rename(path)
        sync(self._directory)
        return str(path)

    def note(self) -> str:
        self._last_noted = self._weights
        return self._weights


class ReferenceAdapter:
    """Where the policy is an adapter: a second one in the trainer itself.

    The base weights exist once, and checkpoints hold both.
    """

    def __init__(self, trainer: TrainerHandle):
        self._trainer = trainer

    async def compute_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return await self._trainer.forward_samples(samples, REFERENCE)

    async def refresh(self, step: int, noted: Collection[str]) -> None:
        await self._trainer.copy_adapter(POLICY, REFERENCE)

    async def restore(self, weights: str) -> None:
        pass  # they came with the trainer's checkpoint

    def note(self) -> str:
        return ""
