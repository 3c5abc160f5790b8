"""EngineHandle: all ranks of an engine as one: the trainer's, the critic's, the reference's."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from os.path import abspath
from typing import Any

import numpy as np

from rl.actors.remote import Caller, Deadline, EngineDied, ProcessDied
from rl.batching import pack
from rl.errors import RunError
from rl.interfaces import Loss
from rl.micro_batch import Batch
from rl.models.engine_config import EngineConfig
from rl.observability.timeline import Timeline
from rl.processes import is_gone, is_stopped, kill_processes
from rl.types import LoRA, OptimParams, Sample
from rl.waiting import Deadlines, beside, in_thread, loop_seconds

_MANY = 256
"""Samples; to pack fewer takes a few milliseconds."""

_PATIENCE_SECONDS = 10.0  # for the collectives of the others to fail, and for Monarch to say why


class EngineHandle:
    """All ranks of a mesh as one engine. Every method has a deadline and raises RunError past it.

    Paths may be relative to this process's working directory; ranks on other hosts have another.

    Where a rank dies, or is stopped for longer than `deadlines.progress`, methods raise EngineDied. So does
    one that has met its deadline before and now does not: its ranks hang. After `kill` the engine may be
    started again: it is then as it was at first.
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[], Awaitable[tuple[Any, Any]]],
        config: EngineConfig,
        deadlines: Deadlines,
        timeline: Timeline,
    ):
        """spawn: makes new processes; returns their mesh and the actors in it."""
        self.name = name
        self.place(spawn, config)
        self.mesh: Any = None  # while its processes live
        self._actors: Any = None
        self._deadlines = deadlines
        self._timeline = timeline
        self._caller = Caller(name, f"logs/{name}*.log of the run")
        self._packing: dict[str, Any] = {}
        self._met_deadline: set[str] = set()  # methods; others may have been given too little time
        self.is_there: bool | None = True  # on its devices; None: it was on its way, and nobody waited
        self._turn = asyncio.Lock()  # every rank gets the calls in the same order, whoever makes them

    def place(self, spawn: Callable[[], Awaitable[tuple[Any, Any]]], config: EngineConfig) -> None:
        """How it is started from now on. It has no processes."""
        self.config, self._spawn = config, spawn

    async def _every(self, method: str, *args: Any, kind: str = "train") -> list[Any]:
        """Call every rank with the same arguments; returns their answers, in the order of ranks."""
        return await self._ranks(method, lambda rank: args, kind)

    async def _data_parallel(self, method: str, batch: Batch, *args: Any) -> list[Any]:
        """Send each rank its own part of the batch; returns an answer for each data-parallel rank."""
        per_row = self.config.layout.procs_per_row
        answers = await self._ranks(method, lambda rank: (batch.for_rank(rank // per_row), *args), "train")
        return answers[::per_row]

    async def _ranks(self, method: str, args_of: Callable[[int], tuple], kind: str) -> list[Any]:
        deadline = Deadline(kind, getattr(self._deadlines, kind))
        past = EngineDied if method in self._met_deadline else RunError
        async with self._turn:
            with self._timeline.span(self.name, method):
                answers = [
                    getattr(self._actors.slice(procs=rank), method).call(*args_of(rank))
                    for rank in range(self.config.layout.num_procs)
                ]
                try:
                    async with beside(self._watch(method)):
                        returned = await self._caller.call_ranks(answers, method, deadline, past)
                except ProcessDied as death:
                    raise EngineDied(str(death)) from death
                except RunError as error:
                    self._raise_if_one_is_gone(method, error)
                    raise
        self._met_deadline.add(method)
        return returned

    def _raise_if_one_is_gone(self, method: str, error: RunError) -> None:
        """The other ranks' collectives fail at once; Monarch may notice a death seconds later."""
        for rank, process in enumerate(self._caller.processes):
            if is_gone(process):
                process_name, where = f"{self.name} rank {rank}", process.place
                raise EngineDied(self._caller.death(process_name, method, where)) from error

    async def _watch(self, method: str) -> None:
        """Raises EngineDied where a rank is stopped, or is gone and the others wait for it.

        Nobody else would notice before the deadline.
        """
        limit, running, complete = self._deadlines.progress, loop_seconds(), loop_seconds()
        while True:
            await asyncio.sleep(1.0)
            gone = [process for process in self._caller.processes if is_gone(process)]
            if not gone:
                complete = loop_seconds()
            elif loop_seconds() - complete > _PATIENCE_SECONDS:
                where = gone[0].place
                raise EngineDied(self._caller.death(self.name, method, where))
            stopped = [process for process in self._caller.processes if is_stopped(process)]
            if not stopped:
                running = loop_seconds()
            if loop_seconds() - running > limit:
                raise EngineDied(
                    f"{self.name} is stopped in {method} ({stopped[0].place}, for "
                    f"over {limit:.0f} s); continue it with kill -CONT, or raise --deadlines.progress"
                )

    async def start(self) -> None:
        """Spawn the processes and wait until each has answered."""
        self.is_there = True
        try:
            self.mesh, self._actors = await self._spawn()
        except ProcessDied as death:
            raise EngineDied(str(death)) from death
        await self.ready()

    @property
    def is_stuck(self) -> bool:
        """A rank has not answered, and the next call would wait for it until its deadline."""
        return self._caller.is_stuck

    async def kill(self) -> None:
        """End the processes, whatever they are doing. No method is under way."""
        mesh, self.mesh = self.mesh, None
        if mesh is not None:
            await kill_processes(mesh, self._caller.processes)
        self._caller.processes, self._caller.is_stuck = (), False

    async def pack(self, samples: Sequence[Sample], samples_per_unit: int = 1) -> Batch:
        """For this engine's ranks; see batching.pack.

        Many are packed in a thread, which a cancelled caller does not wait for: it changes nothing, and its
        batch is dropped.
        """
        plan = partial(
            pack,
            samples,
            max_tokens=self.config.micro_batch_tokens,
            samples_per_unit=samples_per_unit,
            **self._packing,
        )
        return plan() if len(samples) < _MANY else await in_thread(plan)

    async def ready(self) -> None:
        self._caller.processes = tuple(await self._every("ready", kind="start"))
        self._packing = (await self._every("packing", kind="start"))[0]

    async def suspend(self, directory: str) -> None:
        """Leave the device, until `resume`; see Engine.suspend."""
        self.is_there = None
        await self._every("suspend", directory, kind="load")
        self.is_there = False

    async def resume(self) -> None:
        self.is_there = None
        await self._every("resume", kind="load")
        self.is_there = True

    async def add_adapter(self, name: str, lora: LoRA, seed: int) -> None:
        await self._every("add_adapter", name, lora, seed, kind="load")

    async def copy_adapter(self, source: str, target: str) -> None:
        """`target` becomes what `source` is now."""
        await self._every("copy_adapter", source, target, kind="load")

    async def remove_adapter(self, name: str) -> None:
        await self._every("remove_adapter", name, kind="load")

    async def save_adapter(self, name: str, out_dir: str, base_model: str, optimizer: bool) -> None:
        """In PEFT's format; with the optimizer's moments beside it, `load_adapter_state` goes on from it."""
        await self._every("save_adapter", name, abspath(out_dir), base_model, optimizer, kind="checkpoint")

    async def load_adapter_state(self, name: str, path: str, optimizer: bool = True) -> None:
        """What `save_adapter` wrote becomes the adapter `name`, whether or not there is one."""
        await self._every("load_adapter_state", name, abspath(path), optimizer, kind="load")

    async def forward(self, batch: Batch, adapter: str | None = None) -> dict[int, np.ndarray]:
        """Sample index -> logprobs of its target tokens, fp32 nats; a critic's values."""
        parts = await self._data_parallel("forward", batch, adapter)
        return {index: values for part in parts for index, values in part.items()}

    async def forward_samples(
        self, samples: Sequence[Sample], adapter: str | None = None
    ) -> list[np.ndarray]:
        """What `forward` gives, as [T] for each sample, 0 where a token is not a target."""
        return _scattered(samples, await self.forward(await self.pack(samples), adapter))

    async def forward_backward(
        self, batch: Batch, loss: Loss, adapter: str | None = None
    ) -> dict[str, float]:
        """Metrics over all ranks, still named `name:sum` or `name:max`."""
        return combine(await self._data_parallel("forward_backward", batch, loss, adapter))

    async def forward_backward_samples(
        self, samples: Sequence[Sample], loss: Loss, adapter: str | None = None
    ) -> tuple[dict[str, float], list[np.ndarray]]:
        """`forward_backward`, and what `forward_samples` would have said before it."""
        batch = await self.pack(samples)
        answers = await self._data_parallel("forward_backward_logprobs", batch, loss, adapter)
        by_sample = {index: values for _, part in answers for index, values in part.items()}
        return combine(metrics for metrics, _ in answers), _scattered(samples, by_sample)

    async def optim_step(self, params: OptimParams, adapter: str | None = None) -> dict[str, float]:
        return (await self._every("optim_step", params, adapter))[0]

    async def reset_optimizer(self, adapter: str | None = None) -> None:
        await self._every("reset_optimizer", adapter)

    async def load_weights(self, model_dir: str) -> None:
        """Take over the weights of a directory that a trainer's `save_hf` wrote."""
        await self._every("load_weights", abspath(model_dir), kind="load")

    async def save_checkpoint(
        self, path: str, state: dict[str, Any], keep_last: int, wait: bool = False
    ) -> None:
        """`state`: plain data that `load_checkpoint` returns. Without `wait`, written in the background."""
        await self._every("save_checkpoint", abspath(path), state, keep_last, wait, kind="checkpoint")

    async def finish_checkpoint(self) -> None:
        await self._every("finish_checkpoint", kind="checkpoint")

    async def load_checkpoint(self, path: str) -> dict[str, Any]:
        return (await self._every("load_checkpoint", abspath(path), kind="checkpoint"))[0]


def combine(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Metrics named `name:sum` or `name:max`, of several ranks or batches, as one."""
    combined: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in combined:
                combined[name] = value
            else:
                combined[name] = (
                    max(combined[name], value) if name.endswith(":max") else combined[name] + value
                )
    return combined


def _scattered(samples: Sequence[Sample], by_sample: Mapping[int, np.ndarray]) -> list[np.ndarray]:
    """[T] for each sample, of the values of its target tokens; 0 elsewhere."""
    nothing = np.zeros(0, np.float32)
    return [sample.scatter(by_sample.get(i, nothing)) for i, sample in enumerate(samples)]
