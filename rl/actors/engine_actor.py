"""EngineActor: one rank of an engine as an actor. EngineHandle (engine.py) drives all ranks as one.

A critic and a reference are this and no more; the PolicyTrainer adds what concerns weight sync. Which adapter
is meant comes with each call; None is the model itself.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from monarch.actor import Actor, endpoint

from rl.interfaces import Loss
from rl.micro_batch import Batch
from rl.models.engine_config import EngineConfig
from rl.processes import ProcessInfo, freeze_heap, importing, process_info
from rl.types import LoRA, OptimParams


class EngineActor(Actor):
    """Each endpoint is called on every rank at once; the engine's collectives keep the ranks in step."""

    def __init__(self, kind: str, model_dir: str, config: EngineConfig):
        """kind: a key of ENGINES. With a seed the directory is given the weights, unless it has them."""
        # torchtitan: 3 s that the controller need not spend
        with importing():
            from rl.models.build import ENGINES
            from rl.models.random_weights import draw_once

            engine = ENGINES[kind]
        if config.seed is not None:
            draw_once(kind, Path(model_dir), config.seed)
            config = replace(config, seed=None)
        self._engine = engine(model_dir, config)

    @endpoint
    async def ready(self) -> ProcessInfo:
        freeze_heap()
        return process_info(str(self._engine.device))

    @endpoint
    async def packing(self) -> dict[str, Any]:
        return self._engine.packing

    @endpoint
    async def suspend(self, directory: str) -> None:
        self._engine.suspend(directory)

    @endpoint
    async def resume(self) -> None:
        self._engine.resume()

    @endpoint
    async def add_adapter(self, name: str, lora: LoRA, seed: int) -> None:
        self._engine.adapters.add(name, lora, seed)

    @endpoint
    async def copy_adapter(self, source: str, target: str) -> None:
        self._engine.adapters.copy(source, target)

    @endpoint
    async def remove_adapter(self, name: str) -> None:
        self._engine.adapters.remove(name)

    @endpoint
    async def save_adapter(self, name: str, out_dir: str, base_model: str, optimizer: bool) -> None:
        adapters = self._engine.adapters
        (adapters.save_state if optimizer else adapters.save)(name, out_dir, base_model)

    @endpoint
    async def load_adapter_state(self, name: str, path: str, optimizer: bool) -> None:
        self._engine.adapters.load_state(name, path, optimizer)

    @endpoint
    async def forward(self, batch: Batch, adapter: str | None) -> dict[int, np.ndarray]:
        return self._engine.forward(batch, adapter)

    @endpoint
    async def forward_backward(self, batch: Batch, loss: Loss, adapter: str | None) -> dict[str, float]:
        return self._engine.forward_backward(batch, loss, adapter)

    @endpoint
    async def forward_backward_logprobs(
        self, batch: Batch, loss: Loss, adapter: str | None
    ) -> tuple[dict[str, float], dict[int, np.ndarray]]:
        logprobs: dict[int, np.ndarray] = {}
        return self._engine.forward_backward(batch, loss, adapter, logprobs), logprobs

    @endpoint
    async def optim_step(self, params: OptimParams, adapter: str | None) -> dict[str, float]:
        return self._engine.optim_step(params, adapter)

    @endpoint
    async def reset_optimizer(self, adapter: str | None) -> None:
        self._engine.reset_optimizer(adapter)

    @endpoint
    async def load_weights(self, model_dir: str) -> None:
        self._engine.load_weights(model_dir)

    @endpoint
    async def save_checkpoint(self, path: str, state: dict[str, Any], keep_last: int, wait: bool) -> None:
        """Without `wait`, returns when everything is copied.

        The next call, or finish_checkpoint, then waits for the files.
        """
        self._engine.save(path, state, keep_last=keep_last, wait=wait)

    @endpoint
    async def finish_checkpoint(self) -> None:
        self._engine.wait_for_save()

    @endpoint
    async def load_checkpoint(self, path: str) -> dict[str, Any]:
        return self._engine.load(path)
