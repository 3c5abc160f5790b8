"""EngineHandle, with ranks that are made up."""

import asyncio
import threading
from types import SimpleNamespace

import psutil
import pytest

from rl.actors.engine import EngineHandle
from rl.actors.remote import EngineDied
from rl.actors.trainer import TrainerHandle
from rl.batching import supervised_sample
from rl.errors import RunError
from rl.models.engine_config import EngineConfig
from rl.models.layout import Layout
from rl.observability.timeline import Timeline
from rl.processes import OTHER_HOSTS, ProcessInfo
from rl.types import OptimParams
from rl.waiting import Deadlines
from tests.virtual_time import run_virtually


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


class Scoring:
    """Four ranks, two to a row: each scores a target by its token, and counts the targets of its row."""

    def __init__(self, rank=0):
        self.rank = rank

    def slice(self, procs):
        return Scoring(procs)

    def __getattr__(self, method):
        async def call(*args):
            if method == "ready":
                return {None: ProcessInfo(1, "another host", "cpu")}
            if method == "packing":
                return {None: {"num_ranks": 2}}
            rows = [row for rank in args[0].ranks for row in rank]
            logprobs = {
                int(i): 10.0 * row.targets[row.sample_ids == i] for row in rows for i in row.sample_ids
            }
            counts = {
                "tokens:sum": float(sum(len(row.targets) for row in rows)),
                "rank:max": float(self.rank),
            }
            return {None: logprobs if method == "forward" else (counts, logprobs)}

        return SimpleNamespace(call=call)


def test_what_ranks_say_of_their_rows_is_of_the_whole_batch():
    """One rank of each row is heard; a sample without a target has zeros."""

    async def spawn():
        return None, Scoring()

    async def main():
        config = EngineConfig(layout=Layout(shard=2, tensor_parallel=2))
        trainer = EngineHandle("trainer", spawn, config, Deadlines(), Timeline())
        await trainer.start()
        parts = (([1], [2, 3]), ([4, 5], [6]), ([7, 8], []))
        samples = [supervised_sample(prompt, target) for prompt, target in parts]
        metrics, logprobs = await trainer.forward_backward_samples(samples, None)
        return metrics, logprobs, await trainer.forward_samples(samples)

    metrics, logprobs, again = asyncio.run(main())
    assert metrics == {"tokens:sum": 3.0, "rank:max": 2.0}
    expected = [[0.0, 20.0, 30.0], [0.0, 0.0, 60.0], [0.0, 0.0]]
    assert [each.tolist() for each in logprobs] == [each.tolist() for each in again] == expected


class Known:
    """What is known of another host's processes: pid -> psutil's word."""

    def __init__(self, monkeypatch):
        self.words, self.killed = {}, []
        monkeypatch.setitem(OTHER_HOSTS, "another host", self)

    def status(self, process):
        return self.words.get(process.pid, psutil.STATUS_RUNNING)

    async def kill(self, processes):
        self.killed += [process.pid for process in processes]


class TwoRanks:
    """Numbers 11 and 12 of another host, and their mesh. answers: of each its seconds, or its error."""

    def __init__(self, *answers):
        self.answers, self.num_stops = [*answers], 0

    def slice(self, procs):
        return SimpleNamespace(**{n: self._endpoint(n, procs) for n in ("ready", "packing", "optim_step")})

    def _endpoint(self, name, rank):
        async def call(*args):
            if name == "ready":
                return {None: ProcessInfo(11 + rank, "another host", "cpu")}
            if name == "optim_step":
                answer = self.answers[rank]
                if isinstance(answer, Exception):
                    raise answer
                await asyncio.sleep(answer)
            return {None: {}}

        return SimpleNamespace(call=call)

    async def stop(self, why):
        self.num_stops += 1


async def engine_of(ranks):
    async def spawn():
        return ranks, ranks

    config, deadlines = EngineConfig(layout=Layout(shard=2)), Deadlines(train=100.0, progress=20.0)
    trainer = EngineHandle("trainer", spawn, config, deadlines, Timeline())
    await trainer.start()
    return trainer


def test_an_engine_whose_rank_is_gone_has_died_though_all_that_is_told_is_the_other_ones_error(monkeypatch):
    """Its collective fails at once. What is ended then is not stuck any more, and may be started again."""

    async def main():
        known, ranks = Known(monkeypatch), TwoRanks(OSError("a collective failed"), 1e6)
        trainer = await engine_of(ranks)
        known.words[12] = psutil.STATUS_ZOMBIE
        words = r"^the process of trainer rank 1 died in optim_step \(pid 12 on another host\)"
        with pytest.raises(EngineDied, match=words):
            await trainer.optim_step(OptimParams(0.0))
        assert trainer.is_stuck
        await trainer.kill()
        assert not trainer.is_stuck and trainer.mesh is None
        assert (known.killed, ranks.num_stops) == ([11, 12], 1)

    run_virtually(main())


@pytest.mark.parametrize(
    ("word", "words", "least", "most"),
    [
        (psutil.STATUS_ZOMBIE, r"process of trainer died in optim_step \(pid 12 on another host\)", 10, 14),
        (psutil.STATUS_STOPPED, r"stopped in optim_step \(pid 12 on another host, for over 20 s\)", 19, 24),
    ],
)
def test_a_rank_that_is_gone_or_stands_still_is_told_long_before_the_deadline(
    word, words, least, most, monkeypatch
):
    """One that goes on after some seconds costs nothing."""

    async def main():
        loop, known, ranks = asyncio.get_running_loop(), Known(monkeypatch), TwoRanks(12.0, 12.0)
        trainer = await engine_of(ranks)
        known.words[12] = word
        loop.call_later(8.0, known.words.clear)
        await trainer.optim_step(OptimParams(0.0))
        known.words[12], ranks.answers = word, [1e6, 1e6]
        began = loop.time()
        with pytest.raises(EngineDied, match=words):
            await trainer.optim_step(OptimParams(0.0))
        return loop.time() - began

    assert least <= run_virtually(main()) <= most  # holds: exact, a clock that is made up
