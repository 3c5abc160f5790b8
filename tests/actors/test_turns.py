"""Turns over made-up processes that die at any moment: nobody is on a device beside one who may not be there."""

import asyncio
import random
from pathlib import Path

import pytest

from rl.actors import replica as module
from rl.actors.actors import Actors
from rl.actors.generator_pool import GeneratorPool
from rl.actors.generator_replica import GeneratorReplica
from rl.actors.remote import EngineDied, ProcessDied
from rl.actors.replica import State
from rl.actors.turns import Turns
from rl.plan.types import PHASES, Stay
from rl.types import Completion, SamplingParams, StopReason, VersionRange
from rl.waiting import Deadlines, beside
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.store import WeightStore
from tests.virtual_time import run_virtually

ENGINES = {"generate": (), "grade": (), "score": ("trainer", "critic", "reference"), "train": ("trainer", "critic"), "sync": ("trainer",)}  # fmt: skip
DEADLIEST = 0.1
GENERATORS = ("generator-0", "generator-1")
BY_TURNS = [Stay(phase, ENGINES[phase] or GENERATORS) for phase in PHASES]


class World:
    """A device on which nobody may be beside one who may not, and processes that die by chance."""

    def __init__(self, rng, deadly=0.0, stays=BY_TURNS):
        self.rng, self.deadly = rng, deadly
        self.there = {}  # name -> what it holds: "coming", "whole"
        self.num_deaths = self.num_suspended = 0
        self.store = WeightStore(self.release)
        self.engines = [Engine(self, name) for name in ENGINES["score"]]
        self.turns = Turns(stays, self.engines, Path("/dev/null"), self.store.changed)

        def make(number, updates, changed):
            name = GENERATORS[number]

            async def spawn():
                await self.arrive(name)
                await self.moment(ProcessDied, name)
                return Generator(self, name)

            return GeneratorReplica(name, spawn, 10**6, "in_flight", updates, changed, self.turns)

        self.pool = GeneratorPool("generator", make, len(GENERATORS), MODEL, self.store)

    async def release(self, manifest):
        pass

    async def publish(self, version):
        async def write():
            return Manifest(version, ())

        await self.store.publish(MODEL, write)

    async def moment(self, death, name):
        """Time passes; with some luck it lives."""
        await asyncio.sleep(self.rng.choice((0, 0.1, 3.0)))
        if self.rng.random() < self.deadly:
            self.num_deaths += 1
            self.there.pop(name, None)
            raise death(f"{name} died")

    async def arrive(self, name):
        """Everybody who is there may be there beside it."""
        assert self.turns.may_stay(name), (name, self.turns.phase)
        self.there[name] = "coming"
        for other in self.there:
            assert self.turns.may_stay(other), (other, "beside", name, self.turns.phase)


class Engine:
    def __init__(self, world, name):
        self.world, self.name, self.is_there = world, name, True
        world.there[name] = "whole"

    async def suspend(self, directory):
        self.is_there = None
        await self.world.moment(EngineDied, self.name)
        self.world.there.pop(self.name, None)
        self.is_there = False
        self.world.num_suspended += 1

    async def resume(self):
        self.is_there = None
        await self.world.arrive(self.name)
        await self.world.moment(EngineDied, self.name)
        self.is_there = True


class Generator:
    def __init__(self, world, name):
        self.world, self.name, self.version = world, name, None

    async def check(self):
        await self.world.moment(ProcessDied, self.name)

    async def kill(self):
        self.world.there.pop(self.name, None)

    async def give_up_samples(self, keys=None):
        pass

    async def load_weights(self, manifest):
        await self.world.arrive(self.name)
        await self.world.moment(ProcessDied, self.name)
        self.version = manifest.version

    async def suspend(self):
        self.version = None
        await self.world.moment(ProcessDied, self.name)
        self.world.there.pop(self.name, None)
        self.world.num_suspended += 1

    async def sample(self, prompt, n, params, wave, key):
        assert self.version is not None  # it has not left
        if self.name not in self.world.there:
            raise ProcessDied(f"{self.name} died before")
        began = self.version
        await self.world.moment(ProcessDied, self.name)
        assert self.version == began
        done = Completion([1], [-1.0], VersionRange(began, began), StopReason.STOP)
        return [done] * n


async def restart(world):
    """As Actors.restart_engines does it."""

    async def start():
        for engine in world.engines:
            engine.is_there = True
            await world.arrive(engine.name)

    revival = type("Revival", (), {"restart": staticmethod(lambda death, step: start())})
    actors = Actors(None, world.pool, None, world.store, Deadlines(), revival=revival, turns=world.turns)
    await actors.restart_engines(EngineDied("one died"))


@pytest.mark.parametrize("seed", range(60))
def test_steps_end_and_nobody_is_beside_one_who_may_not_be_there(seed):
    rng = random.Random(seed)
    world, deadly = World(rng), rng.choice((0.0, 0.02, DEADLIEST))

    async def main():
        sampled = 0
        async with beside(world.pool.run()):
            version = 0
            while version < 6:
                try:
                    await world.turns.enter("sync")
                    assert {*world.there} <= {"trainer"}
                    await world.publish(version)
                    await world.turns.enter("generate")
                    await world.pool.wait_served(version)
                    world.deadly = deadly  # who dies again and again before it ever served ends the run
                    at_least = world.pool.at_least(version)
                    for completion in await asyncio.gather(
                        *(at_least.sample([i], 1, SamplingParams(4)) for i in range(5))
                    ):
                        assert completion[0].versions.oldest >= version
                        sampled += 1
                    await world.turns.enter(rng.choice(("score", "train")))
                    await world.turns.enter("train")
                    assert {*world.there} == {"trainer", "critic"}
                    version += 1
                except EngineDied:
                    await restart(world)
        assert sampled >= 30 and world.num_suspended > 20

    run_virtually(main())
    assert bool(world.num_deaths) or deadly != DEADLIEST


def test_a_generator_that_died_away_from_its_device_is_spawned_when_it_is_its_turn():
    world = World(random.Random(0))

    async def main():
        async with beside(world.pool.run()):
            await world.turns.enter("generate")
            await world.pool.started()
            await world.turns.enter("train")
            assert {replica.state for replica in world.pool.replicas} == {State.SUSPENDED}
            world.deadly = 1.0
            await asyncio.sleep(10)  # the watch of each notices
            world.deadly = 0.0
            assert world.num_deaths == 2 and {*world.there} == {"trainer", "critic"}
            await world.turns.enter("generate")
            await world.publish(0)
            await world.pool.wait_served(0)

    run_virtually(main())


def test_a_generator_finishes_what_it_has_before_it_leaves_and_takes_no_more():
    world = World(random.Random(0))

    async def main():
        async with beside(world.pool.run()):
            await world.turns.enter("generate")
            await world.publish(0)
            await world.pool.wait_served(0)
            world.rng = random.Random(1)
            asked = [asyncio.create_task(world.pool.sample([i], 1, SamplingParams(4))) for i in range(9)]
            while not any(replica.load for replica in world.pool.replicas):
                await asyncio.sleep(0)
            leaving = asyncio.create_task(world.turns.enter("train"))
            await asyncio.sleep(0)
            later = asyncio.create_task(world.pool.sample([9], 1, SamplingParams(4)))
            await leaving
            assert all(task.done() and not task.exception() for task in asked) and not later.done()
            await world.turns.enter("generate")
            await later

    run_virtually(main())


@pytest.mark.parametrize("phase", ["generate", "train"])
def test_engines_that_died_come_back_only_once_generators_have_left(phase):
    world = World(random.Random(0))

    async def main():
        async with beside(world.pool.run()):
            await world.turns.enter("generate")
            await world.pool.started()
            await world.turns.enter(phase)
            for engine in world.engines:
                world.there.pop(engine.name, None)
            await restart(world)
            assert {*world.there} == {*ENGINES["score"]}

    run_virtually(main())


def test_where_everybody_stays_no_phase_waits_for_anybody():
    world = World(random.Random(0), stays=[Stay(phase, (*ENGINES["score"], *GENERATORS)) for phase in PHASES])

    async def main():
        async with beside(world.pool.run()):
            for phase in PHASES * 2:
                await asyncio.wait_for(world.turns.enter(phase), 0.001)
            await world.pool.started()
            assert not world.num_suspended and {*world.there} == {*ENGINES["score"], *GENERATORS}

    run_virtually(main())


def test_an_engine_that_was_interrupted_on_its_way_is_brought_where_it_belongs():
    world = World(random.Random(0))
    world.turns._engines = world.engines = [world.engines[0]]
    (engine,), world.there = world.engines, {"trainer": "whole"}

    async def main():
        async with beside(world.pool.run()):
            leaving = asyncio.create_task(world.turns.enter("generate"))
            await asyncio.sleep(0)
            while engine.is_there is not None:
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait({leaving})
            await world.turns.enter("train")
            assert engine.is_there and world.there["trainer"] == "coming"

    run_virtually(main())


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch):
    monkeypatch.setattr(module, "_HEARTBEAT_SECONDS", 0.5)
