"""GeneratorEngine: takes requests and weights at any time, and has them run between decoding steps.

That is continuous batching. It knows nothing of Monarch and nothing of vLLM's API.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from itertools import count

from rl.errors import GeneratorFailed, RunError
from rl.models.generator.commands import Abort, Admit, Command, Load, Progress, Suspend, Tick
from rl.models.generator.wave import Wave
from rl.types import Completion, SamplingParams
from rl.weight_sync.manifest import Manifest

_log = logging.getLogger(__name__)


class GeneratorEngine:
    """`tick` runs commands and decodes one step. All coroutines belong to one event loop."""

    def __init__(self, tick: Callable[[Sequence[Command]], Tick], thread: Executor):
        """thread: of one worker, the one that made what `tick` drives."""
        self._tick = tick
        self._thread = thread
        self._numbers = count()
        self._commands: list[Command] = []
        self._waves: dict[int, dict[int, list[Admit]]] = {}  # those that are not complete yet
        self._keyed: dict[int, tuple[int, ...]] = {}  # samples by the key of their request
        self._answers: dict[int, asyncio.Future] = {}
        self._sampling: set[int] = set()
        self._stepper: asyncio.Task[None] | None = None
        self._num_ticks = 0

    async def sample(
        self,
        prompt: Sequence[int],
        n: int,
        params: SamplingParams,
        wave: Wave | None = None,
        key: int | None = None,
    ) -> list[Completion]:
        """n completions of one prompt, in order.

        Completion i is drawn with seed `params.seed + i`, whatever else runs. `key` names the request for
        `give_up_samples`. Raises RunError for a request that cannot be served; others go on.
        """
        tokens = tuple(prompt)
        each = [replace(params, seed=params.seed + i) for i in range(n)]
        each[1:] = [replace(p, prompt_likeliest=None) for p in each[1:]]  # the prompt is the same
        admits = [Admit(next(self._numbers), tokens, p) for p in each]
        answers = [self._expect(admit.id) for admit in admits]
        self._sampling |= {admit.id for admit in admits}
        if key is not None:
            self._keyed[key] = tuple(admit.id for admit in admits)
        self._submit(self._complete_wave(admits, wave) if wave else admits)
        try:
            return await asyncio.gather(*answers)
        except BaseException:  # nobody waits for the others
            under_way = [admit.id for admit in admits if self._answers.pop(admit.id, None) is not None]
            if under_way:
                self._abort(under_way)
            raise
        finally:
            self._sampling -= {admit.id for admit in admits}
            if key is not None:
                del self._keyed[key]

    def give_up_samples(self, keys: Sequence[int] | None = None) -> None:
        """End samples that are under way or wait for their wave: of these requests, or all.

        Who asked for one gets a RunError. A request that has ended already is left alone.
        """
        if keys is None:
            given_up = list(self._sampling)
            self._waves.clear()
        else:
            given_up = [number for key in keys for number in self._keyed.get(key, ())]
        self._abort(given_up)
        for number in given_up:
            self._resolve(number, RunError("the sample was given up"))

    def _abort(self, numbers: Collection[int]) -> None:
        """Of samples, which may wait for their wave: it is complete with their empty place."""
        for members in self._waves.values():
            for position, admits in members.items():
                members[position] = [admit for admit in admits if admit.id not in numbers]
        self._submit([Abort(next(self._numbers), tuple(numbers))])

    async def load_weights(self, manifest: Manifest) -> None:
        """Switch to another version of the model, or of an adapter, between two steps."""
        await self._carry_out(Load(next(self._numbers), manifest))

    async def suspend(self) -> None:
        """Give back the memory of weights and cache. The next model that is loaded takes it again."""
        await self._carry_out(Suspend(next(self._numbers)))

    async def _carry_out(self, command: Load | Suspend) -> None:
        answer = self._expect(command.id)
        self._submit([command])
        await answer

    @property
    def progress(self) -> Progress:
        return Progress(self._num_ticks, len(self._answers))

    def _complete_wave(self, admits: list[Admit], wave: Wave) -> list[Admit]:
        """All of the wave, once its last request has come; nothing before."""
        members = self._waves.setdefault(wave.id, {})
        members[wave.position] = admits
        if len(members) < wave.size:
            return []
        del self._waves[wave.id]
        return [admit for position in sorted(members) for admit in members[position]]

    def _expect(self, number: int) -> asyncio.Future:
        future = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        return future

    def _submit(self, commands: Sequence[Command]) -> None:
        self._commands += commands
        if self._commands and (self._stepper is None or self._stepper.done()):
            self._stepper = asyncio.create_task(self._step_until_idle())

    async def _step_until_idle(self) -> None:
        num_running = 0
        try:
            while self._commands or num_running:
                commands, self._commands = self._commands, []
                # Transports may call actors, for which they need the context of this one.
                step = partial(copy_context().run, self._tick, commands)
                tick = await asyncio.get_running_loop().run_in_executor(self._thread, step)
                num_running = tick.num_running
                self._num_ticks += 1
                for number, answer in tick.answers.items():
                    self._resolve(number, answer)
        except Exception as error:  # the engine is broken: whoever waits must hear of it
            for number in list(self._answers):
                self._resolve(number, GeneratorFailed(f"the generator's engine failed: {error!r}"))
            _log.exception("the generator's engine failed")

    def _resolve(self, number: int, answer: Completion | Exception | None) -> None:
        future = self._answers.pop(number, None)
        if future is None or future.done():  # whoever asked has gone
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
