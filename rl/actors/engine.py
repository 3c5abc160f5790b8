"""EngineActor: one rank of an engine as an actor, and the handle that drives all ranks as one.

A critic and a reference are this and no more; the PolicyTrainer adds what concerns weight sync.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from monarch.actor import Actor, endpoint

from rl.actors.remote import call
from rl.batching import pack
from rl.interfaces import Loss
from rl.models.engine_config import EngineConfig
from rl.types import Batch, OptimParams, Sample


class EngineActor(Actor):
    """Each endpoint is called on every rank at once; the engine's collectives keep the ranks in step."""

    def __init__(self, kind: str, model_dir: str, config: EngineConfig):
        """kind: a key of ENGINES."""
        from rl.models.build import ENGINES  # torchtitan: 3 s that the controller need not spend

        self._engine = ENGINES[kind](model_dir, config)
        self._adapter: str | None = None  # what learns, where it is not the model itself

    @endpoint
    async def ready(self) -> str:
        """The device this rank computes on."""
        return str(self._engine.device)

    @endpoint
    async def forward(self, batch: Batch, adapter: str | None = None) -> dict[int, np.ndarray]:
        return self._engine.forward(batch, adapter or self._adapter)

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
    async def load_weights(self, model_dir: str) -> None:
        self._engine.load_weights(model_dir)

    @endpoint
    async def save_checkpoint(self, path: str, state: dict[str, Any], keep_last: int, wait: bool) -> None:
        """Without `wait` returns when everything is copied; the next call, or finish_checkpoint, waits until it is written."""
        self._engine.save(path, state, keep_last=keep_last, wait=wait)

    @endpoint
    async def finish_checkpoint(self) -> None:
        self._engine.wait_for_save()

    @endpoint
    async def load_checkpoint(self, path: str) -> dict[str, Any]:
        return self._engine.load(path)


class EngineHandle:
    """All ranks of a mesh as one engine. Every method has a deadline and raises RunError past it."""

    def __init__(self, name: str, actors: Any, config: EngineConfig, deadline_seconds: float):
        self.name = name
        self._actors = actors
        self._config = config
        self._deadline = deadline_seconds
        self._turn = asyncio.Lock()  # every rank gets the calls in the same order, whoever makes them

    async def _every(self, method: str, *args: Any) -> list[Any]:
        """Call every rank; returns their answers, in the order of ranks."""
        async with self._turn:
            answers = await call(getattr(self._actors, method).call(*args), f"{self.name}.{method}", self._deadline)
        return list(answers.values())

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """As `_every`, with one answer for each data-parallel rank (ranks that share rows agree)."""
        return (await self._every(method, *args))[:: self._config.layout.procs_per_row]

    def pack(self, samples: Sequence[Sample], together: int = 1) -> Batch:
        """For this engine's ranks; see batching.pack."""
        return pack(
            samples,
            num_ranks=self._config.layout.data_parallel,
            max_tokens=self._config.max_seq_len,
            multiple_of=self._config.row_multiple,
            samples_per_unit=together,
        )

    async def ready(self) -> list[str]:
        return await self._all("ready")

    async def forward(self, batch: Batch, adapter: str | None = None) -> dict[int, np.ndarray]:
        """Sample index -> logprobs of its target tokens, fp32 nats; a critic's values."""
        return {k: v for part in await self._all("forward", batch, adapter) for k, v in part.items()}

    async def scores(self, samples: Sequence[Sample], adapter: str | None = None) -> list[np.ndarray]:
        """What `forward` gives, as [T] for each sample, 0 where a token is not scored."""
        found = await self.forward(self.pack(samples), adapter)
        return [sample.scatter(found.get(i, np.zeros(0, np.float32))) for i, sample in enumerate(samples)]

    async def forward_backward(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """Metrics over all ranks, still named `name:sum` or `name:max`."""
        return combine(await self._all("forward_backward", batch, loss))

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        return (await self._all("optim_step", params))[0]

    async def reset_optimizer(self) -> None:
        await self._all("reset_optimizer")

    async def load_weights(self, model_dir: str) -> None:
        """Take over the weights of a directory that a trainer's `save_hf` wrote."""
        await self._all("load_weights", model_dir)

    async def save_checkpoint(self, path: str, state: dict[str, Any], keep_last: int, wait: bool = False) -> None:
        """`state`: plain data that `load_checkpoint` returns. Without `wait` written in the background: see `finish_checkpoint`."""
        await self._all("save_checkpoint", path, state, keep_last, wait)

    async def finish_checkpoint(self) -> None:
        await self._all("finish_checkpoint")

    async def load_checkpoint(self, path: str) -> dict[str, Any]:
        return (await self._all("load_checkpoint", path))[0]


def combine(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Metrics named `name:sum` or `name:max`, of several ranks or batches, as one."""
    parts = list(parts)
    return {
        name: (max if name.endswith(":max") else sum)(part[name] for part in parts if name in part)
        for name in {name: None for part in parts for name in part}
    }
