"""EngineHandle, with ranks that are made up."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from rl.actors.engine import EngineHandle
from rl.actors.remote import EngineDied
from rl.actors.trainer import TrainerHandle
from rl.batching import supervised_sample
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


def test_paths_are_of_this_process_wherever_ranks_are(monkeypatch, tmp_path):
    """Those of an rl worker on another host have its working directory."""
    sent = []

    class Noting(Rank):
        def __getattr__(self, method):
            async def call(*args):
                sent.append([str(arg) for arg in args if "here" in str(arg)])
                return await super(Noting, self).__getattr__(method).call(*args)

            return SimpleNamespace(call=call)

    async def main():
        trainer = engine(Noting())
        await trainer.start()
        await trainer.save_checkpoint("here/step-1", {}, 0)
        await trainer.load_checkpoint("here/step-1")
        await trainer.load_weights("here/hf")
        await trainer.save_adapter("a", "here/adapter", "base", False)
        await trainer.load_adapter_state("a", "here/adapter")
        await TrainerHandle.save_hf(trainer, "here/hf")

    monkeypatch.chdir(tmp_path)
    asyncio.run(main())
    names = ("step-1", "step-1", "hf", "adapter", "adapter", "hf")
    assert [paths for paths in sent if paths] == [[f"{tmp_path}/here/{name}"] for name in names]


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


def test_a_batch_is_planned_beside_the_event_loop_and_dropped_where_its_caller_is_cancelled(monkeypatch):
    asked, may_end = threading.Event(), threading.Event()

    def slow_pack(samples, **settings):
        asked.set()
        assert may_end.wait(10)
        return samples

    monkeypatch.setattr("rl.actors.engine.pack", slow_pack)
    monkeypatch.setattr("rl.actors.engine._MANY", 1)

    async def main():
        trainer = engine(Rank())
        await trainer.start()
        trainer.config = EngineConfig(micro_batch_tokens=8)
        calls = []
        monkeypatch.setattr(trainer, "_ranks", lambda *call: calls.append(call))
        scoring = asyncio.create_task(trainer.forward_samples([supervised_sample([1], [2])]))
        while not asked.is_set():  # the loop turns while the batch is packed
            await asyncio.sleep(0.001)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        may_end.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        assert calls == []

    asyncio.run(main())
