"""Whether a generator makes progress: the time in which the controller was blocked is not held against it.

And in which thread its engine is made and runs.
"""

# holds: exact, seconds of a clock that is made up

import asyncio
import sys
import threading
from types import SimpleNamespace

import pytest
from monarch.actor import ActorError

from rl.actors.generator import Generator, GeneratorProcesses
from rl.actors.remote import ProcessDied
from rl.errors import GeneratorFailed
from rl.models.generator.commands import Admit, Progress, Tick
from rl.models.generator.vllm_config import VLLMConfig
from rl.observability.timeline import Timeline
from rl.types import Completion, SamplingParams, StopReason, VersionRange
from rl.waiting import Deadlines
from rl.weight_sync.manifest import Manifest
from tests.test_waiting import run

LIMIT = 20.0


class Ranks:
    """One rank, whose progress is `progress`."""

    progress_now = Progress(0, 0)

    def slice(self, procs):
        return self

    @property
    def progress(self):
        return self

    async def call(self):
        await asyncio.sleep(0.01)
        return {0: self.progress_now}


def generator(ranks):
    return GeneratorProcesses("generator-0", None, ranks, Deadlines(progress=LIMIT), Timeline())


@pytest.mark.parametrize("length", [1.0, LIMIT - 1, 3 * LIMIT, 100 * LIMIT])
def test_a_request_that_came_after_a_block_has_not_waited_since_before_it(length):
    async def main():
        ranks, loop = Ranks(), asyncio.get_running_loop()
        member = generator(ranks)
        await member.check()
        loop.call_later(0.5, loop.block, length)
        await asyncio.sleep(1.0)
        ranks.progress_now = Progress(0, 1)  # it has been asked, and has not decoded yet
        await member.check()
        ranks.progress_now = Progress(1, 1)
        await member.check()

    run(main())


def test_one_that_decodes_nothing_is_dead_after_its_deadline():
    async def main():
        ranks, loop = Ranks(), asyncio.get_running_loop()
        member = generator(ranks)
        ranks.progress_now = Progress(0, 1)
        loop.call_later(3.5, loop.block, 1000.0)
        with pytest.raises(ProcessDied, match="has 1 requests and decoded nothing for"):
            while True:
                await asyncio.sleep(1.0)
                await member.check()
        return loop.time()

    assert 1000.0 + LIMIT <= run(main()) <= 1000.0 + LIMIT + 3


def test_all_of_vllm_runs_in_the_thread_that_made_it(monkeypatch):
    """CUDA's current stream belongs to a thread, and OpenMP's threads do: requests and weights come from others."""
    idents = []

    class VLLM:
        def __init__(self, config, transport):
            idents.append(threading.get_ident())

        def tick(self, commands):
            idents.append(threading.get_ident())
            done = Completion([1], [-1.0], VersionRange(0, 0), StopReason.STOP)
            return Tick({c.id: done if isinstance(c, Admit) else None for c in commands}, 0)

    monkeypatch.setitem(sys.modules, "rl.models.generator.vllm_engine", SimpleNamespace(VLLM=VLLM))
    generator = Generator(VLLMConfig(""), None)

    async def main():
        await generator._engine.sample([1], 1, SamplingParams(1), None, None)
        await generator._engine.load_weights(Manifest(1, ()))
        await asyncio.gather(
            *(generator._engine.sample([1], 1, SamplingParams(1), None, None) for _ in range(3))
        )

    try:
        asyncio.run(main())
    finally:
        generator._thread.shutdown()
    assert len(idents) >= 4 and len(set(idents)) == 1
    assert threading.get_ident() not in idents


def test_it_decodes_while_a_version_comes_from_another_host(monkeypatch):
    """vLLM has one thread: a transfer of a minute in it would be a minute in which no request goes on."""
    order, sampled = [], threading.Event()

    class VLLM:
        def __init__(self, config, transport):
            pass

        def tick(self, commands):
            order.extend(type(command).__name__ for command in commands)
            done = Completion([1], [-1.0], VersionRange(0, 0), StopReason.STOP)
            return Tick({c.id: done if isinstance(c, Admit) else None for c in commands}, 0)

    class Far:
        def prefetch(self, manifest):
            order.append("prefetch")
            assert sampled.wait(10)

    monkeypatch.setitem(sys.modules, "rl.models.generator.vllm_engine", SimpleNamespace(VLLM=VLLM))
    generator = Generator(VLLMConfig(""), Far())

    async def main():
        load_weights, sample = (getattr(Generator, n)._method.__wrapped__ for n in ("load_weights", "sample"))
        load = asyncio.create_task(load_weights(generator, Manifest(1, ())))
        await asyncio.sleep(0.01)
        assert len(await sample(generator, [1], 1, SamplingParams(1), None, None)) == 1
        sampled.set()
        await load

    try:
        asyncio.run(main())
    finally:
        generator._thread.shutdown()
    assert order == ["prefetch", "Admit", "Load"]


BROKEN_CALLS = {
    "sample": lambda member: member.sample([1], 1, SamplingParams(1)),
    "load_weights": lambda member: member.load_weights(Manifest(1, ())),
    "suspend": lambda member: member.suspend(),
}


@pytest.mark.parametrize("name", BROKEN_CALLS)
def test_a_generator_whose_engine_is_broken_is_as_good_as_dead(name):
    """So it is started again, and another has its work."""

    async def fails(*args):
        raise ActorError(GeneratorFailed("vLLM ended by an error: out of memory"))

    class Broken:
        def slice(self, procs):
            return SimpleNamespace(**{each: SimpleNamespace(call=fails) for each in BROKEN_CALLS})

    async def main():
        await BROKEN_CALLS[name](generator(Broken()))

    with pytest.raises(ProcessDied, match="^generator-0: vLLM ended by an error: out of memory$"):
        run(main())
