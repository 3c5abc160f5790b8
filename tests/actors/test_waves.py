"""Requests of one turn through pool, replica and the generator's own engine, of which some are cancelled."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl.actors.generator_pool import GeneratorPool
from rl.actors.generator_replica import GeneratorReplica
from rl.models.generator.commands import Abort, Admit, Tick
from rl.models.generator.engine import GeneratorEngine
from rl.types import Completion, SamplingParams, StopReason, VersionRange
from rl.waiting import beside
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.store import WeightStore
from tests.virtual_time import run_virtually

REQUESTS = 3


class Decoder:
    """Each request takes so many steps."""

    def __init__(self, num_steps=3):
        self.left, self.admitted, self.finished, self.num_steps = {}, [], [], num_steps

    def tick(self, commands):
        answers = {}
        for command in commands:
            if isinstance(command, Admit):
                self.left[command] = self.num_steps
                self.admitted.append(command.prompt)
            else:
                if isinstance(command, Abort):
                    self.left = {a: n for a, n in self.left.items() if a.id not in command.requests}
                answers[command.id] = None
        for admit in list(self.left):
            self.left[admit] -= 1
            if not self.left[admit]:
                del self.left[admit]
                self.finished.append(admit.prompt)
                answers[admit.id] = Completion([1], [-1.0], VersionRange(0, 0), StopReason.STOP)
        return Tick(answers, len(self.left))


class Member:
    """A call is a message: who cancels its own wait does not take it back."""

    def __init__(self, engine):
        self.engine = engine

    async def check(self):
        pass

    async def kill(self):
        pass

    async def load_weights(self, manifest):
        await self.engine.load_weights(manifest)

    async def sample(self, prompt, n, params, wave, key):
        return await asyncio.shield(asyncio.ensure_future(self.engine.sample(prompt, n, params, wave, key)))

    async def give_up_samples(self, keys):
        self.engine.give_up_samples(keys)


def answers(turns, cancelled, decoder=None):
    """Of requests of one turn, some of which are cancelled after so many turns of the event loop."""
    decoder = decoder or Decoder()

    async def main(thread):
        engine = GeneratorEngine(decoder.tick, thread)

        async def release(manifest):
            pass

        async def write():
            return Manifest(0, ())

        async def spawn():
            return Member(engine)

        store = WeightStore(release)

        def make(number, updates, changed):
            return GeneratorReplica(f"generator-{number}", spawn, 3, "in_flight", updates, changed)

        pool = GeneratorPool("generator", make, 1, MODEL, store)
        async with beside(pool.run()):
            await store.publish(MODEL, write)
            await pool.wait_served(0)
            tasks = [asyncio.create_task(pool.sample([i], 1, SamplingParams(3))) for i in range(REQUESTS)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for i in cancelled:
                tasks[i].cancel()
            try:
                async with asyncio.timeout(60):
                    return await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.sleep(1)  # what was given up is told to the decoder

    with ThreadPoolExecutor(1) as thread:
        return run_virtually(main(thread)), decoder.admitted


@pytest.mark.parametrize("cancelled", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_a_request_that_is_cancelled_at_any_turn_holds_up_no_other(cancelled):
    for turns in range(12):
        got, admitted = answers(turns, cancelled)
        for i, answer in enumerate(got):
            if i not in cancelled:
                assert isinstance(answer, list), (turns, i, answer)
        assert [i for (i,) in admitted] == sorted(i for (i,) in admitted)


@pytest.mark.parametrize("cancelled", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_the_generator_ends_what_nobody_waits_for_at_any_turn(cancelled):
    for turns in range(12):
        decoder = Decoder(num_steps=300)
        answers(turns, cancelled, decoder)
        assert not decoder.left
        assert sorted(decoder.finished) == [(i,) for i in range(REQUESTS) if i not in cancelled], turns
