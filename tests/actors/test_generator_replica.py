"""Generators that follow the weight store, over processes that are made up."""

import asyncio
import contextlib

import pytest

from rl.actors import generator_pool, generator_replica
from rl.actors import replica as module
from rl.actors.generator_pool import GeneratorPool
from rl.actors.generator_replica import GeneratorReplica, Updates
from rl.actors.remote import ProcessDied
from rl.actors.replica import State
from rl.errors import RunError, WeightsUnreachable
from rl.types import Completion, LoRA, SamplingParams, StopReason, VersionRange
from rl.waiting import beside
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.store import WeightStore

PARAMS = SamplingParams(4)


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch):
    monkeypatch.setattr(module, "_HEARTBEAT_SECONDS", 0.001)


class Processes:
    """Samples until `release` is set; loads when `may_load` is."""

    def __init__(self, name):
        self.name, self.version, self.loaded, self.waves, self.dead = name, None, [], [], False
        self.given_up, self.unreachable = 0, set()
        self.release, self.may_load = asyncio.Event(), asyncio.Event()
        self.release.set()
        self.may_load.set()

    async def check(self):
        if self.dead:
            raise ProcessDied(f"{self.name} died")

    async def kill(self):
        pass

    async def give_up_samples(self, keys=None):
        self.given_up += 1

    async def load_weights(self, manifest):
        await self.may_load.wait()
        if (manifest.name, manifest.version) in self.unreachable:
            raise WeightsUnreachable(f"weights of version {manifest.version} could not be fetched")
        self.loaded.append((manifest.name, manifest.version))
        self.version = manifest.version

    async def sample(self, prompt, n, params, wave, key):
        first = self.version
        self.waves.append((wave.id, wave.position, wave.size, tuple(prompt)))
        await self.release.wait()
        done = Completion([1], [-1.0], VersionRange(first, self.version), StopReason.STOP)
        return [done] * n


class World:
    def __init__(self, num_replicas=1, update_mode="in_flight", policy=None, may_load=True):
        self.freed, self.processes = [], {}
        self.policy = policy
        self.store = WeightStore(self.release)
        name = policy[0] if policy else MODEL

        def make(number, updates, changed):
            async def spawn():
                process = Processes(f"generator-{number}")
                if not may_load:
                    process.may_load.clear()
                self.processes.setdefault(number, []).append(process)
                return process

            return GeneratorReplica(f"generator-{number}", spawn, 3, update_mode, updates, changed)

        self.pool = GeneratorPool("generator", make, num_replicas, name, self.store)

    async def release(self, manifest):
        self.freed.append((manifest.name, manifest.version))

    async def publish(self, version, policy=None):
        async def write():
            return Manifest(version, (), policy)

        await self.store.publish(policy[0] if policy else MODEL, write)

    def process(self, number=0):
        return self.processes[number][-1]

    async def until(self, holds):
        await asyncio.wait_for(self.pool.changed.wait_for(holds), 1)


@contextlib.asynccontextmanager
async def running(world):
    async with beside(world.pool.run()):
        await asyncio.wait_for(world.pool.started(), 1)
        yield world


@contextlib.asynccontextmanager
async def loading_its_base(policy):
    """A generator that loads the base of an adapter, of which version 0 is there, too, until `may_load`."""
    async with running(World(policy=policy, may_load=False)) as world:
        await world.publish(0)
        await world.publish(0, policy)
        await asyncio.sleep(0.01)
        yield world


def run(main):
    asyncio.run(asyncio.wait_for(main(), 10))


def test_it_serves_only_once_it_has_weights_and_then_follows_the_newest():
    async def main():
        async with running(World()) as world:
            await world.until(lambda: world.pool.replicas[0].state == State.LOADING)
            assert world.pool.served is None
            early = asyncio.create_task(world.pool.sample([1], 1, PARAMS))
            await asyncio.sleep(0.01)
            assert not early.done()
            await world.publish(0)
            assert (await early)[0].versions == VersionRange(0, 0)
            await world.publish(1)
            await world.pool.wait_served(1)
            assert world.process().loaded == [(MODEL, 0), (MODEL, 1)] and (MODEL, 0) in world.freed

    run(main)


async def request_under_way(world):
    """A request that version 0 samples, and does not end, as version 1 is published."""
    await world.publish(0)
    await world.pool.wait_served(0)
    world.process().release.clear()
    request = asyncio.create_task(world.pool.sample([1], 1, PARAMS))
    await asyncio.sleep(0.01)
    await world.publish(1)
    return request


def test_in_flight_a_running_request_goes_on_with_the_new_weights():
    async def main():
        async with running(World(update_mode="in_flight")) as world:
            request = await request_under_way(world)
            await world.pool.wait_served(1)
            world.process().release.set()
            assert (await request)[0].versions == VersionRange(0, 1)

    run(main)


async def draining(world):
    """The request that version 1 waits for, with version 0 served."""
    request = await request_under_way(world)
    await world.until(lambda: world.pool.replicas[0].state == State.DRAINING)
    return request


def test_draining_a_running_request_finishes_first_and_no_other_begins():
    async def main():
        async with running(World(update_mode="drain")) as world:
            under_way = await draining(world)
            later = asyncio.create_task(world.pool.sample([2], 1, PARAMS))
            await asyncio.sleep(0.01)
            assert len(world.process().waves) == 1 and world.process().version == 0
            world.process().release.set()
            assert (await under_way)[0].versions == VersionRange(0, 0)
            assert (await later)[0].versions == VersionRange(1, 1)

    run(main)


def test_requests_of_one_turn_are_one_wave_in_their_order():
    async def main():
        async with running(World()) as world:
            await world.publish(0)
            await world.pool.wait_served(0)
            await asyncio.gather(*(world.pool.sample([i], 2, PARAMS) for i in range(5)))
            await world.pool.sample([9], 1, PARAMS)
            first = [(0, i, 5, (i,)) for i in range(5)]
            assert world.process().waves == [*first, (1, 0, 1, (9,))]

    run(main)


def test_work_for_a_version_goes_only_where_it_is_served():
    async def main():
        async with running(World(2)) as world:
            await world.publish(0)
            await world.until(lambda: world.pool.num_serving == 2)
            world.process(1).may_load.clear()  # a slow one
            await world.publish(1)
            await world.pool.wait_served(1)
            prompts = [[i] for i in range(6)]
            await asyncio.gather(*(world.pool.at_least(1).sample(p, 1, PARAMS) for p in prompts))
            assert len(world.process(0).waves) == 6 and not world.process(1).waves
            assert world.store.versions[MODEL] == [1]  # version 0 is in its memory, and nobody reads it
            world.process(1).may_load.set()
            await world.until(lambda: all(r.version == 1 for r in world.pool.replicas))
            await asyncio.gather(*(world.pool.at_least(1).sample([9, i], 1, PARAMS) for i in range(6)))
            assert len(world.process(1).waves) == 3

    run(main)


def test_those_that_load_at_the_same_time_begin_together_and_share_what_waits():
    async def main():
        async with running(World(3)) as world:
            await world.publish(0)
            await world.until(lambda: world.pool.num_serving == 3)
            for number in range(3):
                world.process(number).may_load.clear()
            await world.publish(1)
            waiting = [asyncio.create_task(world.pool.at_least(1).sample([i], 1, PARAMS)) for i in range(9)]
            for number in (2, 0, 1):
                assert world.pool.served == 0
                await asyncio.sleep(0.01)
                world.process(number).may_load.set()
            await asyncio.gather(*waiting)
            assert [len(world.process(number).waves) for number in range(3)] == [3, 3, 3]

    run(main)


def test_one_that_takes_far_longer_to_load_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(generator_replica, "_SLACK_SECONDS", 0.05)

    async def main():
        async with running(World(2)) as world:
            await world.publish(0)
            await world.until(lambda: world.pool.num_serving == 2)
            world.process(1).may_load.clear()
            await world.publish(1)
            await world.pool.wait_served(1)
            assert [r.version for r in world.pool.replicas] == [1, 0]
            world.process(1).may_load.set()
            await world.until(lambda: all(r.version == 1 for r in world.pool.replicas))

    run(main)


def test_pinned_nobody_goes_beyond_the_version_that_is_measured():
    async def main():
        async with running(World(2)) as world:
            await world.publish(0)
            await world.until(lambda: world.pool.num_serving == 2)
            async with world.pool.pinned() as (version, sampler):
                await world.publish(1)
                await world.publish(2)
                await asyncio.sleep(0.01)
                assert version == 0 and [r.version for r in world.pool.replicas] == [0, 0]
                assert (await sampler.sample([1], 1, PARAMS))[0].versions == VersionRange(0, 0)
                assert world.pool.take_counts() == (0, 0)  # none of a step's
                await world.pool.at_least(0).sample([1, 2], 2, PARAMS)
                assert world.pool.take_counts()[0] == 4
                assert world.store.versions[MODEL] == [0, 2]
            await world.until(lambda: all(r.version == 2 for r in world.pool.replicas))
            assert world.process(0).loaded == [(MODEL, 0), (MODEL, 2)]
            assert world.store.versions[MODEL] == [2]

    run(main)


def test_one_that_died_while_it_read_lets_go_and_gets_the_base_and_the_newest_adapter():
    async def main():
        policy = ("policy", LoRA(rank=4))
        async with running(World(policy=policy)) as world:
            await world.publish(0)
            await world.publish(0, policy)
            await world.pool.wait_served(0)
            first = world.process()
            assert first.loaded == [(MODEL, 0), ("policy", 0)]
            first.may_load.clear()
            await world.publish(1, policy)
            await asyncio.sleep(0.01)
            await world.publish(2, policy)
            assert world.store.versions["policy"] == [1, 2]
            first.dead = True
            await world.until(lambda: len(world.processes[0]) == 2 and world.pool.served == 2)
            assert world.process().loaded == [(MODEL, 0), ("policy", 2)]
            assert world.store.versions == {MODEL: [0], "policy": [2]}

    run(main)


def test_a_version_that_is_freed_while_the_base_is_loaded_is_not_asked_for():
    async def main():
        policy = ("policy", LoRA(rank=4))
        async with loading_its_base(policy) as world:
            await world.publish(1, policy)
            await world.publish(2, policy)
            assert world.store.versions["policy"] == [2]
            world.process().may_load.set()
            await world.until(lambda: world.pool.served == 2)
            assert world.process().loaded == [(MODEL, 0), ("policy", 2)]

    run(main)


@pytest.mark.parametrize(("num_prompts", "num_replicas"), [(128, 8), (32, 4), (44, 2)])
def test_prompts_that_begin_alike_are_dealt_to_all(num_prompts, num_replicas):
    """As those with a system prompt: each generator has that in its cache after the first."""

    async def main():
        async with running(World(num_replicas)) as world:
            await world.publish(0)
            await world.until(lambda: world.pool.num_serving == num_replicas)
            for number in range(num_replicas):
                world.process(number).release.clear()
            prompts = [[7] * 40 + [number] for number in range(num_prompts)]
            asked = [asyncio.create_task(world.pool.sample(prompt, 8, PARAMS)) for prompt in prompts]
            await asyncio.sleep(0.05)
            loads = [replica.load for replica in world.pool.replicas]
            for number in range(num_replicas):
                world.process(number).release.set()
            await asyncio.gather(*asked)
            assert sum(loads) == 8 * num_prompts and max(loads) - min(loads) <= 16

    run(main)


def test_a_prompt_that_goes_on_is_answered_where_its_prefix_was_computed():
    async def main():
        async with running(World(3)) as world:
            await world.publish(0)
            await world.until(lambda: world.pool.num_serving == 3)
            histories = [[number] * 40 for number in range(12)]
            await asyncio.gather(*(world.pool.sample(h, 1, PARAMS) for h in histories))
            for turn in range(3):
                longer = [h + [turn] * (turn + 1) for h in histories]
                await asyncio.gather(*(world.pool.sample(h, 1, PARAMS) for h in longer))
            for number in range(3):
                homes = {prompt[0] for *_, prompt in world.process(number).waves}
                assert len(homes) == 4 and len(world.process(number).waves) == 16

    run(main)


@pytest.mark.parametrize("policy", [None, ("policy", LoRA(rank=4))])
@pytest.mark.parametrize("while_loading", [False, True])
def test_what_was_published_may_be_forgotten_and_an_older_version_come(policy, while_loading):
    """A trainer that died goes on from its checkpoint: what generators have is no version any more."""

    async def main():
        world = World(num_replicas=2, policy=policy)
        async with beside(world.pool.run()):
            if policy:
                await world.publish(0)
            await world.publish(7, policy)
            await world.until(lambda: world.pool.num_serving == 2)
            if while_loading:
                for number in range(2):
                    world.process(number).may_load.clear()
                await world.publish(8, policy)
                await asyncio.sleep(0.01)
            forgetting = asyncio.create_task(world.pool.forget())
            await asyncio.sleep(0.01)
            assert world.pool.served is None and forgetting.done() != while_loading
            for number in range(2):
                world.process(number).may_load.set()
            await asyncio.wait_for(forgetting, 1)
            assert world.pool.served is None and world.pool.num_serving == 0
            early = asyncio.create_task(world.pool.sample([1], 1, PARAMS))
            await asyncio.sleep(0.01)
            assert not any(world.process(number).waves for number in range(2))
            await world.publish(4, policy)
            await world.until(lambda: world.pool.num_serving == 2)
            assert [replica.version for replica in world.pool.replicas] == [4, 4]
            for number in range(2):
                assert world.process(number).given_up == 1
                assert world.process(number).loaded[-1][1] == 4
            assert (await early)[0].versions == VersionRange(4, 4)
            assert (await world.pool.at_least(4).sample([1], 1, PARAMS))[0].versions == VersionRange(4, 4)

    asyncio.run(main())


def test_a_version_that_is_loaded_a_second_time_is_waited_for_again():
    """As by generators that started again: the first to have it does not serve alone."""

    async def main():
        updates, done = Updates(None, MODEL), []

        async def load(name, seconds):
            async with updates.together(5):
                await asyncio.sleep(seconds)
                done.append(f"{name} has it")
            done.append(f"{name} serves")

        for _ in range(2):
            done.clear()
            await asyncio.gather(load("fast", 0.0), load("slow", 0.04))
            assert done[:2] == ["fast has it", "slow has it"] and len(done) == 4

    asyncio.run(main())


@pytest.mark.parametrize("policy", [None, ("policy", LoRA(rank=2))])
def test_weights_that_cannot_be_reached_are_waited_for_and_nothing_dies(policy, monkeypatch):
    """The host that had them may come back, or its engines go elsewhere and publish again."""
    monkeypatch.setattr(generator_replica, "_TRY_SECONDS", 0.001)

    async def main():
        world = World(policy=policy)
        await world.publish(0)
        async with running(world):
            process = world.process()
            await world.publish(1, policy)
            await world.pool.wait_served(1)
            process.unreachable |= {(policy[0] if policy else MODEL, 2), (MODEL, 0)}
            await world.publish(2, policy)
            await asyncio.sleep(0.05)
            assert world.pool.served == 1  # the one before goes on
            assert (await world.pool.sample([1], 1, PARAMS))[0].versions.newest == 1
            await world.pool.forget()
            await asyncio.sleep(0.05)
            if policy:
                await world.store.forget(MODEL)
                process.unreachable.clear()
                await world.publish(0)
            await world.publish(1, policy)
            await asyncio.wait_for(world.pool.wait_served(1), 1)
            assert world.process() is process and world.pool.replicas[0].num_restarts == 0

    asyncio.run(main())


def test_the_wait_for_weights_that_cannot_be_reached_ends(monkeypatch):
    monkeypatch.setattr(generator_replica, "_TRY_SECONDS", 0.001)
    monkeypatch.setattr(generator_replica, "_UNREACHABLE_SECONDS", 0.05)

    async def main():
        world = World()
        await world.publish(0)
        async with running(world):
            first = world.process()
            await world.pool.wait_served(0)
            first.unreachable.add((MODEL, 1))
            await world.publish(1)
            await asyncio.wait_for(world.pool.wait_served(1), 2)
            assert world.process() is not first

    asyncio.run(main())


def test_what_is_forgotten_while_it_drains_is_not_loaded():
    """A trainer that dies as a generator finishes its requests: then there is no version to take."""

    async def main():
        async with running(World(update_mode="drain")) as world:
            under_way = await draining(world)
            await world.pool.forget()
            world.process().release.set()
            await under_way
            await asyncio.sleep(0.01)
            assert world.process().loaded == [(MODEL, 0)] and world.process().given_up == 1
            await world.publish(0)
            await world.pool.wait_served(0)
            assert world.process().loaded == [(MODEL, 0), (MODEL, 0)]

    run(main)


@pytest.mark.parametrize("error", [RunError("no such adapter"), asyncio.CancelledError()])
def test_a_sample_that_fails_or_is_cancelled_by_its_process_leaves_nobody_waiting(error):
    async def main():
        async with running(World()) as world:
            await world.publish(0)
            await world.pool.wait_served(0)

            async def fails(*_):
                raise error

            world.process().sample = fails
            asked = asyncio.create_task(world.pool.sample([1], 1, PARAMS))
            await asyncio.wait({asked}, timeout=1)
            assert asked.done()
            if isinstance(error, RunError):
                assert asked.exception() is error
            else:
                assert asked.cancelled()
            (replica,) = world.pool.replicas
            assert (replica.state, replica.load, replica.num_restarts) == (State.SERVING, 0, 0)

    run(main)


def test_what_is_forgotten_while_the_base_is_loaded_is_not_asked_for():
    """A trainer that dies as a generator begins: the generator takes the next version, and lives."""

    async def main():
        policy = ("policy", LoRA(rank=4))
        async with loading_its_base(policy) as world:
            await asyncio.wait_for(world.pool.forget(), 1)
            world.process().may_load.set()
            await asyncio.sleep(0.01)
            await world.publish(1, policy)
            await asyncio.wait_for(world.pool.wait_served(1), 1)
            assert world.process().loaded[-1] == ("policy", 1) and world.pool.replicas[0].num_restarts == 0

    run(main)


def test_nothing_is_kept_of_requests_that_were_answered():
    """A run makes millions."""

    async def main():
        async with running(World()) as world:
            await world.publish(0)
            await world.pool.wait_served(0)
            await asyncio.gather(*(world.pool.sample([i], 1, PARAMS) for i in range(5)))
            await asyncio.sleep(0.01)
            assert not world.pool.replicas[0]._sent

    run(main)


def test_of_more_prompts_than_are_remembered_the_one_that_was_asked_longest_ago_is_forgotten(monkeypatch):
    """A run of weeks has millions of prompts: they would fill the controller's memory."""
    monkeypatch.setattr(generator_pool, "_NUM_HOMES", 2)

    async def main():
        async with running(World(2)) as world:
            await world.publish(0)
            await world.until(lambda: world.pool.num_serving == 2)

            async def asked(number):
                """Which of the two is asked for the prompt: the first, where neither has its prefix."""
                before = len(world.process(1).waves)
                await world.pool.sample([number] * 40, 1, PARAMS)
                return len(world.process(1).waves) - before

            world.process(0).release.clear()
            busy = asyncio.create_task(world.pool.sample([9] * 40, 1, PARAMS))
            await asyncio.sleep(0.01)
            assert await asked(1) == 1  # the first has something to do
            world.process(0).release.set()
            await busy
            assert [await asked(number) for number in (1, 2, 1, 3, 1)] == [1, 0, 1, 0, 1]
            assert [await asked(number) for number in (4, 5, 1)] == [0, 0, 0]

    run(main)
