"""Whether a generator makes progress: the time in which the controller was blocked is not held against it."""

# holds: exact, seconds of a clock that is made up

import asyncio

import pytest

from rl.actors.generator import GeneratorProcesses
from rl.actors.remote import ProcessDied
from rl.models.generator.commands import Progress
from rl.observability.timeline import Timeline
from rl.waiting import Deadlines
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
