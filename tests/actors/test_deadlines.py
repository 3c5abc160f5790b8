"""A call that hangs ends at the deadline of its own kind, and the error names the setting to raise."""

# holds: exact, seconds of a clock that is made up

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from configs.quickstart import quickstart
from rl.actors.actors import Actors
from rl.actors.generator import GeneratorProcesses
from rl.actors.remote import ProcessDied
from rl.actors.trainer import TrainerHandle
from rl.cluster.launch import _Start
from rl.cluster.launchers import ThisHost
from rl.config.settle import settle
from rl.errors import RunError
from rl.models.engine_config import EngineConfig
from rl.models.generator.commands import Progress
from rl.observability.timeline import Timeline
from rl.processes import ProcessInfo
from rl.types import LoRA, OptimParams
from rl.waiting import Deadlines
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.store import MAX_VERSIONS, WeightStore
from tests.plans import AMPLE
from tests.test_waiting import run

# Each far from the others, so that none is taken for another.
DEADLINES = Deadlines(start=100.0, load=200.0, progress=50.0, train=300.0, sync=400.0, checkpoint=500.0)
SLACK = 2.0


class Ranks:
    """Processes that answer at once, but for the methods in `hang`, which never do."""

    def __init__(self, *hang):
        self.hang = set(hang)
        self.answers = {"ready": ProcessInfo(1, "another host", "cpu"), "progress": Progress(0, 0)}

    def slice(self, procs):
        return self

    def __getattr__(self, method):
        async def call(*args):
            if method in self.hang:
                await asyncio.get_running_loop().create_future()
            return {0: self.answers.get(method, {})}

        return SimpleNamespace(call=call)


async def trainer(ranks):
    async def spawn():
        return None, ranks

    handle = TrainerHandle("trainer", spawn, EngineConfig(), DEADLINES, Timeline())
    await handle.start()
    return handle


def generator(ranks):
    return GeneratorProcesses("generator-0", None, ranks, DEADLINES, Timeline())


async def seconds_until(error, message, call):
    """Until the call fails so."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(error, match=message):
        await call
    return loop.time() - begun


TRAINER = {
    "optim_step": (lambda t: t.optim_step(OptimParams(0.0)), "train"),
    "reset_optimizer": (lambda t: t.reset_optimizer(), "train"),
    "publish_weights": (lambda t: t.publish_weights(1), "sync"),
    "load_weights": (lambda t: t.load_weights("dir"), "load"),
    "add_adapter": (lambda t: t.add_adapter("a", LoRA(), 0), "load"),
    "copy_adapter": (lambda t: t.copy_adapter("a", "b"), "load"),
    "remove_adapter": (lambda t: t.remove_adapter("a"), "load"),
    "load_adapter_state": (lambda t: t.load_adapter_state("a", "dir"), "load"),
    "load_checkpoint": (lambda t: t.load_checkpoint("dir"), "checkpoint"),
    "save_adapter": (lambda t: t.save_adapter("a", "dir", "model", True), "checkpoint"),
    "save_checkpoint": (lambda t: t.save_checkpoint("dir", {}, 0), "checkpoint"),
    "finish_checkpoint": (lambda t: t.finish_checkpoint(), "checkpoint"),
    "save_hf": (lambda t: t.save_hf("dir"), "checkpoint"),
}


@pytest.mark.parametrize("method", TRAINER)
def test_a_trainer_that_hangs_is_named_with_the_deadline_of_what_it_does(method):
    call, kind = TRAINER[method]

    async def main():
        handle = await trainer(Ranks(method))
        limit = getattr(DEADLINES, kind)
        message = rf"trainer did not finish {method} within {limit:.0f} s .* --deadlines.{kind}$"
        seconds = await seconds_until(RunError, message, call(handle))
        assert limit <= seconds <= limit + SLACK
        handle._actors.hang.clear()
        await handle.optim_step(OptimParams(0.0))  # what hung does not hold up what comes after it

    run(main())


def test_a_trainer_that_does_not_start_is_named_at_the_deadline_of_starts():
    async def main():
        message = r"trainer did not finish ready within 100 s \(it has not .* --deadlines.start$"
        return await seconds_until(RunError, message, trainer(Ranks("ready")))

    assert DEADLINES.start <= run(main()) <= DEADLINES.start + SLACK


def test_a_generator_that_does_not_start_is_dead_at_the_deadline_of_starts():
    async def main():
        message = r"generator-0 did not finish start within 100 s .* --deadlines.start$"
        return await seconds_until(ProcessDied, message, generator(Ranks("ready")).ready())

    assert DEADLINES.start <= run(main()) <= DEADLINES.start + SLACK


def test_a_generator_whose_weights_do_not_arrive_is_dead_at_their_deadline_and_not_before():
    """Its requests stand still meanwhile, for longer than `progress` allows, and nobody ends it for that."""

    async def main():
        ranks = Ranks("load_weights")
        member = generator(ranks)
        ranks.answers["progress"] = Progress(0, 3)
        await member.check()
        message = r"generator-0 did not finish load_weights within 200 s .* --deadlines.load$"
        loading = asyncio.create_task(
            seconds_until(ProcessDied, message, member.load_weights(Manifest(1, ())))
        )
        while not loading.done():
            await asyncio.sleep(1.0)
            await member.check()
        await asyncio.sleep(DEADLINES.progress / 2)
        await member.check()  # since the weights: half of what it may take
        return await loading

    assert DEADLINES.load <= run(main()) <= DEADLINES.load + SLACK


@pytest.mark.parametrize("method", ["check", "give_up_samples"])
def test_a_generator_that_answers_no_question_is_dead_at_the_deadline_of_progress(method):
    async def main():
        member = generator(Ranks("progress", "give_up_samples"))
        return await seconds_until(ProcessDied, "--deadlines.progress$", getattr(member, method)())

    assert DEADLINES.progress <= run(main()) <= DEADLINES.progress + SLACK


class Publishing:
    """A trainer that publishes at once, and a store that frees at once."""

    def __init__(self):
        async def release(manifest):
            pass

        self.store = WeightStore(release)
        self.actors = Actors(self, None, None, self.store, DEADLINES)

    async def publish_weights(self, version, adapter=None):
        return Manifest(version, (), adapter)


def test_a_reader_that_keeps_all_versions_ends_the_run_at_the_deadline_of_publishing():
    """And one that lets go just before it does not."""

    async def main():
        world, loop = Publishing(), asyncio.get_running_loop()
        readings = []
        for version in range(MAX_VERSIONS):
            await world.actors.publish(version)
            readings.append(world.store.reading(world.store.newest(MODEL)))
            await readings[-1].__aenter__()

        async def let_go():
            await asyncio.sleep(DEADLINES.sync - 1)
            await readings.pop(0).__aexit__(None, None, None)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(let_go())
            begun = loop.time()
            await world.actors.publish(MAX_VERSIONS)
            assert loop.time() - begun == pytest.approx(DEADLINES.sync - 1)
        readings.append(world.store.reading(world.store.newest(MODEL)))
        await readings[-1].__aenter__()
        message = r"version 4 could not be published within 400 s: .*'model': \[1, 2, 3\].* --deadlines.sync$"
        return await seconds_until(RunError, message, world.actors.publish(MAX_VERSIONS + 1))

    assert DEADLINES.sync <= run(main()) <= DEADLINES.sync + SLACK


def test_a_version_that_cannot_be_freed_ends_the_run_at_the_deadline_of_publishing(tmp_path, monkeypatch):
    """The launcher's store asks the transport to free a version; that one hangs."""

    class Transport:
        def __init__(self, directory, run, with_delta):
            pass

        async def release(self, manifest):
            await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("rl.cluster.launch.SharedMemory", Transport)
    config = replace(quickstart(), deadlines=DEADLINES)
    plan, models = settle(config, cluster=AMPLE), {"model": tmp_path}

    async def main():
        actors = await _Start(
            plan, models, tmp_path, tmp_path, config.env, Timeline(), ThisHost(plan.cluster)
        ).actors()

        async def write(version):
            return Manifest(version, ())

        await actors.store.publish(MODEL, lambda: write(0))
        message = r"shared_memory did not finish release within 400 s .* --deadlines.sync$"
        return await seconds_until(RunError, message, actors.store.publish(MODEL, lambda: write(1)))

    assert DEADLINES.sync <= run(main()) <= DEADLINES.sync + SLACK
