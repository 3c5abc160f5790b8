"""ActorsBackend: the service's calls, on the same actors that the controller drives."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rl.actors.actors import Actors
from rl.actors.remote import EngineDied, ProcessDied
from rl.errors import ConfigError, RunError
from rl.tinker.backend import Backend, Datum, GeneratorsDied, Learned, ModelsLost, UserError
from rl.tinker.losses import make_loss, measure, to_logprobs, to_samples
from rl.types import Completion, LoRA, OptimParams, SamplingParams

T = TypeVar("T")
_SHOWN = ("loss:sum", "clip_fraction:sum", "apart_squared:sum")
"""Metrics of the engine that say something of any data."""


class ActorsBackend(Backend):
    def __init__(self, actors: Actors, base_model: str, context_length: int, vocab_size: int):
        """base_model: what adapter_config.json says that adapters belong to."""
        self.context_length = context_length
        self.vocab_size = vocab_size
        self._actors = actors
        self._base_model = base_model

    async def create(self, model: str, lora: LoRA, seed: int) -> None:
        await self._train(lambda: self._actors.trainer.add_adapter(model, lora, seed))

    async def remove(self, model: str) -> None:
        async def call() -> None:
            try:
                await self._actors.trainer.remove_adapter(model)
            except EngineDied:
                raise
            except RunError as error:  # it is still at work on what it was given up on
                raise EngineDied(str(error)) from error

        await self._train(call)

    async def forward_backward(
        self, model: str, data: Sequence[Datum], loss: str, config: Mapping[str, float], forward_only: bool
    ) -> Learned:
        samples, trainer = await asyncio.to_thread(to_samples, data, loss), self._actors.trainer
        objective = make_loss(loss, config)
        if forward_only:
            computed = await self._train(lambda: trainer.forward_samples(samples, model))
            metrics = await asyncio.to_thread(measure, samples, computed, objective)
        else:
            metrics, computed = await self._train(
                lambda: trainer.forward_backward_samples(samples, objective, model)
            )
        shown = {name: value for name, value in metrics.items() if name in _SHOWN}
        return Learned(to_logprobs(data, computed), shown)

    async def optim_step(self, model: str, params: OptimParams) -> dict[str, float]:
        return await self._train(lambda: self._actors.trainer.optim_step(params, model))

    async def save(self, model: str, directory: Path, optimizer: bool) -> None:
        call = self._actors.trainer.save_adapter
        await self._train(lambda: call(model, str(directory), self._base_model, optimizer))

    async def load(self, model: str, directory: Path, optimizer: bool) -> None:
        await self._train(lambda: self._actors.trainer.load_adapter_state(model, str(directory), optimizer))

    async def sample(
        self,
        adapter: Path | None,
        prompt: Sequence[int],
        n: int,
        params: SamplingParams,
        max_deaths: int = 3,
    ) -> list[Completion]:
        with_adapter = replace(params, adapter=str(adapter.absolute()) if adapter else None)
        try:
            return await self._actors.generators.sample(prompt, n, with_adapter, max_deaths)
        except ProcessDied as death:
            raise GeneratorsDied(str(death)) from death

    async def _train(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await call()
        except ConfigError as error:
            raise UserError(str(error)) from error
        except EngineDied as death:
            assert self._actors.revival is not None
            await self._actors.revival.restart(death)
            await self._actors.publish_base_again()
            raise ModelsLost(f"{death}; the training engine was started again") from death
