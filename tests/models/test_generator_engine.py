"""The generator's scheduling over an engine that is made up: waves, weights between steps, failures."""

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rl.errors import GeneratorFailed, RunError
from rl.models.generator.commands import Abort, Admit, Load, Tick
from rl.models.generator.engine import GeneratorEngine
from rl.models.generator.wave import Wave
from rl.types import Completion, SamplingParams, StopReason, VersionRange
from rl.weight_sync.manifest import Manifest

PARAMS = SamplingParams(3, seed=100)


class Fake:
    """Answers each request after `max_new_tokens` steps; writes down which commands came together."""

    def __init__(self, breaks_at=None):
        self.ticks, self.left, self.breaks_at = [], {}, breaks_at

    def tick(self, commands):
        self.ticks.append(list(commands))
        if len(self.ticks) == self.breaks_at:
            raise ValueError("out of memory")
        answers = {}
        for command in commands:
            match command:
                case Admit(params=params) if params.max_new_tokens < 1:
                    answers[command.id] = RunError("vLLM refused a request: max_tokens must be at least 1")
                case Admit():
                    self.left[command] = command.params.max_new_tokens
                case Load():
                    answers[command.id] = None
                case Abort(requests=numbers):
                    self.left = {c: n for c, n in self.left.items() if c.id not in numbers}
                    answers[command.id] = None
        for command in list(self.left):
            self.left[command] -= 1
            if not self.left[command]:
                del self.left[command]
                tokens = [command.params.seed]
                answers[command.id] = Completion(tokens, [-1.0], VersionRange(0, 0), StopReason.STOP)
        return Tick(answers, len(self.left))


def run(main, **options):
    fake = Fake(**options)
    with ThreadPoolExecutor(1) as thread:
        asyncio.run(asyncio.wait_for(main(GeneratorEngine(fake.tick, thread)), 10))
    return fake


def test_a_wave_is_admitted_at_once_in_the_order_of_its_positions_however_it_arrives():
    async def main(engine):
        order = [2, 0, 1]
        calls = [engine.sample([p], 2, PARAMS, Wave(0, p, 3)) for p in order]
        answers = await asyncio.gather(*calls)
        assert [[c.tokens.tolist() for c in completions] for completions in answers] == [[[100], [101]]] * 3

    fake = run(main)
    assert [c.prompt for c in fake.ticks[0]] == [(0,), (0,), (1,), (1,), (2,), (2,)]
    assert not any(fake.ticks[1:])


def test_requests_and_weights_join_between_the_steps_of_others():
    async def main(engine):
        first = asyncio.create_task(engine.sample([1], 1, SamplingParams(50)))
        while not engine.progress.num_ticks:
            await asyncio.sleep(0)
        second = asyncio.create_task(engine.sample([2], 1, SamplingParams(2)))
        await engine.load_weights(Manifest(7, ()))
        assert not first.done()
        await second
        assert not first.done() and engine.progress.num_requests == 1
        await first

    fake = run(main)
    kinds = [[type(c).__name__ for c in commands] for commands in fake.ticks]
    later = [kind for commands in kinds[1:] for kind in commands]
    assert kinds[0] == ["Admit"] and sorted(later) == ["Admit", "Load"] and len(fake.ticks) >= 50


def test_a_request_that_is_refused_costs_no_other():
    async def main(engine):
        good, bad = engine.sample([1], 2, PARAMS), engine.sample([2], 1, SamplingParams(0))
        good, bad = await asyncio.gather(good, bad, return_exceptions=True)
        assert len(good) == 2 and isinstance(bad, RunError)

    run(main)


def test_what_nobody_waits_for_any_more_is_aborted():
    async def main(engine):
        gone = asyncio.create_task(engine.sample([1], 1, SamplingParams(10**9)))
        while not engine.progress.num_ticks:
            await asyncio.sleep(0)
        gone.cancel()
        await engine.sample([2], 1, PARAMS)
        while engine.progress.num_requests:
            await asyncio.sleep(0)

    fake = run(main)
    assert any(isinstance(c, Abort) for commands in fake.ticks for c in commands) and not fake.left


def test_all_who_wait_hear_of_a_broken_engine():
    async def main(engine):
        calls = [engine.sample([i], 1, SamplingParams(9)) for i in range(3)]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(answer, GeneratorFailed) and "out of memory" in str(answer)
        with pytest.raises(asyncio.TimeoutError):  # and it is not asked again by itself
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)

    fake = run(main, breaks_at=2)
    assert len(fake.ticks) == 2  # nothing is asked of an engine that is broken


def test_samples_that_are_given_up_end_and_what_comes_next_is_served():
    async def main(engine):
        running = [asyncio.create_task(engine.sample([i], 1, SamplingParams(10**9))) for i in range(2)]
        incomplete = asyncio.create_task(engine.sample([5], 1, PARAMS, Wave(0, 1, 2)))  # its first never came
        while not engine.progress.num_ticks:
            await asyncio.sleep(0)
        engine.give_up_samples()
        for answer in await asyncio.gather(*running, incomplete, return_exceptions=True):
            assert isinstance(answer, RunError) and "given up" in str(answer)
        assert len(await engine.sample([2], 2, PARAMS, Wave(1, 0, 1))) == 2
        while engine.progress.num_requests:
            await asyncio.sleep(0)

    fake = run(main)
    assert not fake.left


def test_requests_of_one_group_alone_share_cached_prefixes():
    alone, grouped = (Admit(0, (1, 2), replace(PARAMS, cache_group=group)) for group in ("", "me"))
    assert alone.vllm_prompt() == {"prompt_token_ids": [1, 2]}
    assert grouped.vllm_prompt() == {"prompt_token_ids": [1, 2], "cache_salt": "me"}


def test_where_one_of_n_samples_fails_the_others_end():
    """Nobody waits for them any more."""

    class Third(Fake):
        def tick(self, commands):
            tick = super().tick(commands)
            failing = [c for c in commands if isinstance(c, Admit) and c.params.seed == 102]
            self.left = {c: n for c, n in self.left.items() if c not in failing}
            return Tick({**tick.answers, **{c.id: RunError("no JSON") for c in failing}}, len(self.left))

    fake = Third()

    async def main(engine):
        with pytest.raises(RunError, match="no JSON"):
            await engine.sample([1], 4, SamplingParams(1000, seed=100), key=7)
        while engine.progress.num_requests or fake.left:
            await asyncio.sleep(0)
        await engine.sample([2], 1, PARAMS)

    with ThreadPoolExecutor(1) as thread:
        asyncio.run(asyncio.wait_for(main(GeneratorEngine(fake.tick, thread)), 10))
    admitted = [c.id for c in fake.ticks[0]]
    (abort,) = [c for tick in fake.ticks for c in tick if isinstance(c, Abort)]
    assert sorted(abort.requests) == [n for i, n in enumerate(admitted) if i != 2]
    assert len(fake.ticks) < 100


def test_a_request_that_is_cancelled_before_its_wave_is_complete_is_never_admitted():
    async def main(engine):
        gone = asyncio.create_task(engine.sample([0], 2, PARAMS, Wave(0, 0, 2)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        (answer,) = await engine.sample([1], 1, PARAMS, Wave(0, 1, 2))
        assert answer.tokens.tolist() == [100]

    fake = run(main)
    assert [c.prompt for tick in fake.ticks for c in tick if isinstance(c, Admit)] == [(1,)]


def test_what_has_ended_is_neither_kept_nor_given_up():
    """A generator lives through millions of prompts."""
    aborted = []

    class Token:
        pass

    def tick(commands):
        aborted.extend(number for c in commands if isinstance(c, Abort) for number in c.requests)
        one = Completion([1], [-1.0], VersionRange(0, 0), StopReason.STOP)
        return Tick({c.id: one if isinstance(c, Admit) else None for c in commands}, 0)

    async def main(engine):
        tokens = [Token(), Token()]
        calls = [engine.sample([token], 1, PARAMS, Wave(0, i, 2), key=i) for i, token in enumerate(tokens)]
        await asyncio.gather(*calls)
        engine.give_up_samples([0, 1])
        await engine.sample([], 1, PARAMS)  # comes after what that told the engine
        return [weakref.ref(token) for token in tokens]

    with ThreadPoolExecutor(1) as thread:
        engine = GeneratorEngine(tick, thread)
        references = asyncio.run(asyncio.wait_for(main(engine), 10))
    gc.collect()
    assert not aborted and [reference() for reference in references] == [None, None]
