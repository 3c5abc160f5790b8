"""What dies in the same way before it ever worked is given up at once; what has worked is started again as often
as is allowed."""

import asyncio

import pytest

from rl.actors import replica as module
from rl.actors.actors import Revival
from rl.actors.generator_pool import GeneratorPool
from rl.actors.generator_replica import GeneratorReplica
from rl.actors.remote import EngineDied, ProcessDied
from rl.actors.replica import Replica, State
from rl.errors import RunError
from rl.waiting import Signal, beside
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.store import WeightStore

MANY = 100


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch):
    monkeypatch.setattr(module, "_HEARTBEAT_SECONDS", 0.001)


def same(number):
    return f"the process of r0 died in load (pid {1000 + number} on a host): 0.{number} GiB; see logs"


def other(number):
    return f"the process of r0 died in load: {'abcdefgh'[number % 8]}"


class Member:
    async def check(self):
        await asyncio.sleep(0)

    async def kill(self):
        pass


class Loading(Replica):
    """Its member number i serves for a moment if `serves` has it, and dies with the words of `words`."""

    def __init__(self, words, serves=(), max_restarts=MANY):
        self.num_spawned, self.words, self.serves = 0, words, serves

        async def spawn():
            self.num_spawned += 1
            return Member()

        super().__init__("r0", spawn, max_restarts, Signal())

    async def serve(self, member):
        number = self.num_spawned - 1
        self._enter(State.LOADING)
        if number in self.serves:
            self._enter(State.SERVING)
            await asyncio.sleep(0)
        raise ProcessDied(self.words(number))


def run(main):
    return asyncio.run(asyncio.wait_for(main, 20))


def test_a_replica_that_dies_alike_before_it_serves_is_given_up_with_its_own_words():
    replica = Loading(same)
    with pytest.raises(
        RunError, match=r"died in load \(pid 1002 on a host\).*3 times.*before it ever worked"
    ):
        run(replica.run())
    assert replica.num_spawned == 3


@pytest.mark.parametrize("words", [same, other])
def test_one_that_has_served_is_started_again_as_often_as_is_allowed(words):
    replica = Loading(words, serves={1})
    run(replica.run())
    assert replica.num_spawned == MANY + 1 and replica.state is State.DEAD


def test_deaths_that_differ_are_started_again_as_often_as_is_allowed():
    replica = Loading(other, max_restarts=7)
    run(replica.run())
    assert replica.num_spawned == 8 and replica.state is State.DEAD


def test_a_generator_that_never_takes_the_first_weights_ends_the_run():
    spawned = []

    class Processes(Member):
        async def load_weights(self, manifest):
            raise ProcessDied(same(len(spawned)))

    async def spawn():
        spawned.append(Processes())
        return spawned[-1]

    async def main():
        async def release(manifest):
            pass

        async def write():
            return Manifest(0, (), None)

        store = WeightStore(release)
        pool = GeneratorPool(
            "generator",
            lambda number, *rest: GeneratorReplica("generator-0", spawn, 1000, "in_flight", *rest),
            1,
            MODEL,
            store,
        )
        await store.publish(MODEL, write)
        async with beside(pool.run()):
            await pool.wait_served(0)

    with pytest.raises(RunError, match="died in load"):
        run(main())
    assert len(spawned) == 3


class Engine:
    async def kill(self):
        pass


@pytest.mark.parametrize(("words", "num_starts"), [(same, 3), (other, 8)])
def test_engines_that_die_alike_before_they_ever_worked_are_given_up(words, num_starts):
    starts = []

    async def start():
        starts.append(len(starts))
        raise EngineDied(words(starts[-1]))

    with pytest.raises(RunError, match="3 times" if words is same else "no restart is left"):
        run(Revival(start, [Engine()], 7).start())
    assert len(starts) == num_starts


def test_engines_that_have_worked_are_started_again_as_often_as_is_allowed():
    starts = []

    async def start():
        starts.append(len(starts))
        if len(starts) > 1:
            raise EngineDied(same(starts[-1]))

    async def main():
        revival = Revival(start, [Engine()], 7)
        await revival.start()
        await revival.restart(EngineDied("one rank died"))

    with pytest.raises(RunError, match="no restart is left"):
        run(main())
    assert len(starts) == 8
