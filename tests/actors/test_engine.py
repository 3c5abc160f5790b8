"""EngineHandle, with ranks that are made up."""

import asyncio
from types import SimpleNamespace

import pytest

from rl.actors.engine import EngineHandle
from rl.actors.remote import EngineDied
from rl.errors import RunError
from rl.models.engine_config import EngineConfig
from rl.observability.timeline import Timeline
from rl.processes import ProcessInfo
from rl.types import OptimParams
from rl.waiting import Deadlines


class Rank:
    """Answers after so many seconds."""

    seconds = 0.0

    def slice(self, procs):
        return self

    def __getattr__(self, method):
        async def call(*args):
            await asyncio.sleep(self.seconds)
            return {None: ProcessInfo(1, "another host", "cpu") if method == "ready" else {}}

        return SimpleNamespace(call=call)


def engine(rank):
    async def spawn():
        return None, rank

    return EngineHandle("trainer", spawn, EngineConfig(), Deadlines(train=0.2), Timeline())


def test_an_engine_that_hangs_has_died():
    async def main():
        rank = Rank()
        trainer = engine(rank)
        await trainer.start()
        await trainer.optim_step(OptimParams(0.0))
        rank.seconds = 60.0
        with pytest.raises(EngineDied, match="did not finish optim_step within 0 s .* --deadlines.train"):
            await trainer.optim_step(OptimParams(0.0))

    asyncio.run(main())


def test_one_that_never_was_in_time_has_too_little():
    async def main():
        rank = Rank()
        trainer = engine(rank)
        await trainer.start()
        rank.seconds = 60.0
        with pytest.raises(RunError, match=r"raise --deadlines.train") as failure:
            await trainer.optim_step(OptimParams(0.0))
        assert not isinstance(failure.value, EngineDied)

    asyncio.run(main())
