"""Replicas and pools over processes that are made up: who gets work, and what happens when one dies."""

import asyncio
import contextlib

import pytest

from rl.actors import replica as module
from rl.actors.remote import ProcessDied, ProcessSilent
from rl.actors.replica import Pool, Replica, State
from rl.errors import RunError
from rl.waiting import Signal, beside


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch):
    monkeypatch.setattr(module, "_HEARTBEAT_SECONDS", 0.001)


class Process:
    """Answers with its own number; `die` fails its heartbeat, or also the work under way."""

    def __init__(self, number):
        self.number = number
        self.killed = self.dead = False
        self.release = asyncio.Event()

    async def check(self):
        if self.dead:
            raise ProcessDied(f"process {self.number} died")

    async def kill(self):
        self.killed = True

    async def work(self, wait=False):
        if wait:
            await self.release.wait()
        return self.number


class World:
    """A pool of replicas whose processes are numbered as they are spawned."""

    def __init__(self, num_replicas=2, max_restarts=3, fails_at_start=(), death=ProcessDied, visitor=None):
        """visitor: the last one's host."""
        self.processes, self.changed, self.fails_at_start = [], Signal(), fails_at_start
        self.may_start = asyncio.Event()
        self.may_start.set()

        async def spawn():
            process = Process(len(self.processes))
            self.processes.append(process)
            await asyncio.sleep(0)
            await self.may_start.wait()
            if process.number in self.fails_at_start:
                raise death(f"process {process.number} died in start")
            return process

        hosts = [*[None] * (num_replicas - 1), visitor]
        replicas = [Replica(f"r{i}", spawn, max_restarts, self.changed, host) for i, host in enumerate(hosts)]
        self.pool = Pool("worker", replicas, self.changed)

    def ask(self, wait=False):
        return asyncio.create_task(self.pool.ask(lambda r: r.ask(lambda process: process.work(wait))))

    async def serving(self, count):
        await asyncio.wait_for(self.changed.wait_for(lambda: self.pool.num_serving == count), 1)


@contextlib.asynccontextmanager
async def running(world):
    async with beside(world.pool.run()):
        await asyncio.wait_for(world.pool.started(), 1)
        await world.serving(len(world.pool.replicas))
        yield world


def test_work_goes_to_the_one_with_the_least_of_it():
    async def main():
        async with running(World(3)) as world:
            waiting = [world.ask(wait=True) for _ in range(7)]
            await asyncio.sleep(0.01)
            assert sorted(r.load for r in world.pool.replicas) == [2, 2, 3]
            for process in world.processes:
                process.release.set()
            assert sorted(await asyncio.gather(*waiting)) == [0, 0, 0, 1, 1, 2, 2]
            assert all(r.load == 0 for r in world.pool.replicas)
        assert all(process.killed for process in world.processes)

    asyncio.run(main())


def test_what_a_dead_one_held_is_done_by_another_and_it_is_spawned_again():
    async def main():
        async with running(World(2)) as world:
            held = [world.ask(wait=True) for _ in range(4)]
            await asyncio.sleep(0.01)
            world.processes[0].dead = True  # hangs: its work never answers
            world.processes[1].release.set()
            assert await asyncio.wait_for(asyncio.gather(*held), 1) == [1, 1, 1, 1]
            await world.serving(2)
            assert world.processes[0].killed and len(world.processes) == 3
            assert world.pool.replicas[0].num_restarts == 1 and world.pool.num_alive == 2

    asyncio.run(main())


def test_both_die_and_work_waits_for_the_first_that_is_back():
    async def main():
        async with running(World(2)) as world:
            held = [world.ask(wait=True) for _ in range(2)]
            await asyncio.sleep(0.01)
            world.may_start.clear()  # else the first may be back before the second is missed
            for process in world.processes[:2]:
                process.dead = True
            await world.serving(0)
            world.may_start.set()
            await world.serving(2)
            for process in world.processes:
                process.release.set()
            assert set(await asyncio.wait_for(asyncio.gather(*held), 1)) <= {2, 3}

    asyncio.run(main())


def test_one_that_dies_over_and_over_is_given_up_and_at_last_the_run_hears_of_it():
    async def main():
        async with running(World(1, max_restarts=2)) as world:
            held = world.ask(wait=True)
            for number in range(3):
                await asyncio.wait_for(world.changed.wait_for(lambda n=number: len(world.processes) > n), 1)
                world.processes[number].dead = True
            with pytest.raises(ProcessDied, match="every worker has died for good; process 2 "):
                await asyncio.wait_for(held, 1)
            assert world.pool.replicas[0].state == State.DEAD and world.pool.num_alive == 0
            assert len(world.processes) == 3

    asyncio.run(main())


@pytest.mark.parametrize(("lives", "is_given_up"), [
    ([3600] * 5, False), ([0, 0], True), ([3600, 0], True), ([0, 3600, 0], True), ([0, 3600, 3600, 3600], False),
    ([3599, 3599], True), ([3600, "never serves"], True),
])  # fmt: skip
def test_restarts_are_counted_anew_with_processes_that_served_for_an_hour(lives, is_given_up):
    """lives: for how many seconds each serves before it dies."""

    async def main():
        loop, skipped = asyncio.get_running_loop(), 0
        now = loop.time
        loop.time = lambda: now() + skipped
        world = World(
            1, max_restarts=1, fails_at_start=[i for i, life in enumerate(lives) if life == "never serves"]
        )
        (replica,) = world.pool.replicas
        async with beside(world.pool.run()):
            for number, seconds in enumerate(lives):
                if number in world.fails_at_start:
                    continue
                await until(lambda n=number: len(world.processes) == n + 1 and replica.state is State.SERVING)
                skipped += seconds
                world.processes[number].dead = True
            await until(lambda: replica.state is State.DEAD or len(world.processes) > len(lives))
            assert (replica.state is State.DEAD) == is_given_up and replica.num_restarts == len(
                lives
            ) - is_given_up

    asyncio.run(main())


@pytest.mark.parametrize("max_deaths", [1, 2])
def test_work_that_so_many_died_of_is_not_tried_again(max_deaths):
    async def main():
        async with running(World(3)) as world:
            asked = []

            async def deadly(process):
                asked.append(process.number)
                raise ProcessDied(f"process {process.number} died in work")

            with pytest.raises(ProcessDied, match="died in work"):
                await asyncio.wait_for(
                    world.pool.ask(lambda replica: replica.ask(deadly), max_deaths=max_deaths), 1
                )
            assert len(asked) == max_deaths

    asyncio.run(main())


def test_an_idle_one_that_dies_is_noticed_within_two_seconds(monkeypatch):
    """Without work nobody but its heartbeat looks at it."""
    monkeypatch.undo()  # the heartbeats of a run

    async def main():
        async with running(World(1)) as world:
            world.processes[0].dead = True
            await asyncio.wait_for(world.changed.wait_for(lambda: len(world.processes) == 2), 2.5)

    asyncio.run(main())


def test_one_that_cannot_even_start_ends_the_run():
    async def main():
        with pytest.raises(RunError, match="process 1 died in start; it did not even start"):
            async with running(World(1, fails_at_start={0, 1})):
                await asyncio.sleep(1)

    asyncio.run(asyncio.wait_for(main(), 2))


def test_one_that_is_killed_as_it_starts_for_the_first_time_is_started_again():
    async def main():
        async with running(World(1, fails_at_start={0})) as world:
            assert world.pool.num_serving == 1 and len(world.processes) == 2

    asyncio.run(main())


def test_one_that_does_not_answer_as_it_starts_is_not_waited_for_twice():
    async def main():
        world = World(1, fails_at_start={0}, death=ProcessSilent)
        with pytest.raises(RunError, match="process 0 died in start; it did not even start"):
            async with running(world):
                await asyncio.sleep(1)
        assert len(world.processes) == 1

    asyncio.run(asyncio.wait_for(main(), 2))


def test_one_that_says_why_it_cannot_start_ends_the_run_at_once():
    async def main():
        world = World(1, fails_at_start={0}, death=RunError)
        with pytest.raises(RunError, match="process 0 died in start$"):
            async with running(world):
                await asyncio.sleep(1)
        assert len(world.processes) == 1

    asyncio.run(asyncio.wait_for(main(), 2))


@pytest.mark.parametrize(
    "death", [ProcessDied, RunError]
)  # one that says why it cannot, as memory that is not free
def test_one_that_dies_as_it_starts_again_is_started_once_more(death):
    async def main():
        async with running(World(1, fails_at_start={1}, death=death)) as world:
            world.processes[0].dead = True
            await world.serving(0)
            await world.serving(1)
            assert world.pool.replicas[0].num_restarts == 2 and len(world.processes) == 3

    asyncio.run(main())


def test_an_error_of_the_work_itself_is_the_callers_and_kills_nobody():
    async def main():
        async with running(World(1)) as world:

            async def refuse(process):
                raise RunError("no such adapter")

            with pytest.raises(RunError, match="no such adapter"):
                await world.pool.ask(lambda r: r.ask(refuse))
            assert await world.ask() == 0 and len(world.processes) == 1

    asyncio.run(main())


def test_a_pool_has_started_once_each_of_it_has():
    async def main():
        world, gate = World(3), asyncio.Event()
        last = world.pool.replicas[2]
        spawn = last._spawn

        async def slowly():
            await gate.wait()
            return await spawn()

        last._spawn = slowly
        async with beside(world.pool.run()):
            started = asyncio.create_task(world.pool.started())
            await asyncio.sleep(0.02)
            assert [r.state for r in world.pool.replicas] == [State.SERVING, State.SERVING, State.STARTING]
            assert not started.done()
            gate.set()
            await asyncio.wait_for(started, 1)

    asyncio.run(main())


@pytest.mark.parametrize("part", ["check", "serve"])
def test_an_error_of_our_own_beside_the_work_ends_the_run_with_its_words(monkeypatch, part):
    """It is no death: another start would end like it."""

    async def fails(*_):
        raise ValueError("a bug of ours")

    async def main():
        world = World(1)
        monkeypatch.setattr(*((Process, "check", fails) if part == "check" else (Replica, "serve", fails)))
        with pytest.raises(BaseExceptionGroup) as raised:
            await asyncio.wait_for(world.pool.run(), 1)
        assert [str(error) for error in raised.value.exceptions] == ["a bug of ours"]
        assert [process.killed for process in world.processes] == [True]

    asyncio.run(main())


class Guest:
    """A host that is there from `come` to `go`."""

    def __init__(self):
        self.visit, self._num_visits, self._changed = 0, 0, Signal()

    def come(self):
        self._num_visits += 1
        self.visit = self._num_visits
        self._changed.notify()

    def go(self):
        self.visit = 0

    async def arrival(self, last):
        await self._changed.wait_for(lambda: self.visit not in (0, last))


def test_one_on_a_host_that_joins_serves_while_it_is_there_and_is_never_given_up():
    async def main():
        guest = Guest()
        world = World(2, max_restarts=1, visitor=guest)
        async with beside(world.pool.run()):
            await asyncio.wait_for(world.pool.started(), 1)  # it does not wait for the guest
            await world.serving(1)
            _, visiting = world.pool.replicas
            assert visiting.state is State.ABSENT and world.pool.num_alive == 1
            for _ in range(3):  # more often than it may be restarted
                guest.come()
                await world.serving(2)
                guest.go()
                world.processes[-1].dead = True
                await world.serving(1)
                await asyncio.sleep(0.01)
                assert visiting.state is State.ABSENT and world.pool.num_alive == 1
                assert await world.ask() == 0

    asyncio.run(main())


@pytest.mark.parametrize("death", [ProcessDied, ProcessSilent, RunError])
def test_nothing_that_happens_on_a_host_that_joins_ends_the_run(death):
    """Processes that die as they start, again and again: the next host has a chance of its own."""

    async def main():
        guest = Guest()
        world = World(2, max_restarts=2, fails_at_start=range(1, 7), visitor=guest, death=death)
        async with beside(world.pool.run()):
            await world.serving(1)
            visiting = world.pool.replicas[1]
            for num_started in (4, 7):
                guest.come()
                await until(lambda count=num_started: len(world.processes) == count)
                await until(lambda: visiting.state is State.ABSENT)
                assert await world.ask() == 0
            guest.come()
            await world.serving(2)

    asyncio.run(main())


@pytest.mark.parametrize("part", ["serve", "check"])
def test_an_error_of_our_own_on_a_host_that_joins_ends_its_visit_alone(part, monkeypatch):
    async def fails(*_):
        raise RunError("no room in shared memory")

    async def main():
        guest = Guest()
        world = World(2, max_restarts=1, visitor=guest)
        visiting = world.pool.replicas[1]
        if part == "serve":
            monkeypatch.setattr(visiting, "serve", fails)
        async with beside(world.pool.run()):
            await world.serving(1)
            if part == "check":
                monkeypatch.setattr(
                    Process, "check", lambda self: fails() if self.number else asyncio.sleep(0)
                )
            guest.come()
            await until(lambda: len(world.processes) == 3)
            await until(lambda: visiting.state is State.ABSENT)
            assert await world.ask() == 0

    asyncio.run(main())


def test_a_death_is_one_death_of_the_work_that_noticed_it():
    async def main():
        async with running(World(1)) as world:

            async def work(process):
                if process.number == 0:
                    raise ProcessDied("process 0 died")
                return process.number

            asked = world.pool.ask(lambda replica: replica.ask(work), max_deaths=2)
            assert await asyncio.wait_for(asked, 1) == 1

    asyncio.run(main())


def test_what_one_holds_whose_visit_an_error_ends_is_done_by_another(monkeypatch):
    async def main():
        guest, fails_now = Guest(), asyncio.Event()
        world = World(2, visitor=guest)
        visiting = world.pool.replicas[1]

        async def serve(member):
            visiting._enter(State.SERVING)
            await fails_now.wait()
            raise RunError("no room in shared memory")

        monkeypatch.setattr(visiting, "serve", serve)
        async with beside(world.pool.run()):
            guest.come()
            await world.serving(2)
            held = [world.ask(wait=True) for _ in range(2)]
            await until(lambda: all(r.load == 1 for r in world.pool.replicas))
            guest.go()
            fails_now.set()
            world.processes[0].release.set()
            assert await asyncio.wait_for(asyncio.gather(*held), 1) == [0, 0]

    asyncio.run(main())


def test_hosts_that_come_one_right_after_the_other_cost_no_restarts():
    async def main():
        guest = Guest()
        world = World(2, max_restarts=1, visitor=guest)
        async with beside(world.pool.run()):
            for _ in range(6):
                guest.come()
                await world.serving(2)
                guest.come()  # before its replica knows that the other has left
                world.processes[-1].dead = True
                await world.serving(1)
            await world.serving(2)

    asyncio.run(main())


def test_a_first_start_on_a_host_that_has_come_is_no_outage(monkeypatch):
    """Else what fails meanwhile would be laid to the generators."""
    states, enter = [], Replica._enter

    def noting(replica, state):
        enter(replica, state)
        if replica.name == "r1" and state is State.STARTING:
            states.append(replica.starts_again)

    monkeypatch.setattr(Replica, "_enter", noting)

    async def main():
        guest = Guest()
        world = World(2, max_restarts=3, visitor=guest)
        async with beside(world.pool.run()):
            guest.come()
            await world.serving(2)
            assert states == [False]
            world.processes[-1].dead = True
            await world.serving(1)
            await world.serving(2)
            assert states[1:] == [False, True]  # it ends, and starts again
            guest.come()
            world.processes[-1].dead = True
            await world.serving(1)
            await world.serving(2)
            assert states[-1] is False

    asyncio.run(main())


def test_a_pool_whose_visitor_is_given_up_has_started():
    async def main():
        guest = Guest()
        guest.come()
        world = World(2, max_restarts=0, fails_at_start=range(1, 9), visitor=guest)
        async with beside(world.pool.run()):
            await asyncio.wait_for(world.pool.started(), 1)

    asyncio.run(main())


async def until(holds):
    async with asyncio.timeout(2):
        while not holds():
            await asyncio.sleep(0.001)


def test_the_run_ends_where_only_hosts_that_have_not_joined_are_left():
    async def main():
        world = World(2, max_restarts=0, visitor=Guest())
        async with beside(world.pool.run()):
            await world.serving(1)
            world.processes[0].dead = True
            with pytest.raises(ProcessDied, match="every worker has died for good"):
                await asyncio.wait_for(world.pool.until_dead(), 1)

    asyncio.run(main())


def test_who_stops_waiting_ends_the_work_and_the_replica_is_idle():
    async def main():
        async with running(World(1)) as world:
            began, ended = asyncio.Event(), asyncio.Event()

            async def work(process):
                began.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()

            (replica,) = world.pool.replicas
            asked = asyncio.create_task(world.pool.ask(lambda r: r.ask(work)))
            await asyncio.wait_for(began.wait(), 1)
            idle = asyncio.create_task(world.changed.wait_for(lambda: replica.load == 0))
            await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait_for(asyncio.gather(ended.wait(), idle), 1)
            assert asked.cancelled() and len(world.processes) == 1

    asyncio.run(main())


def test_what_went_on_beside_the_work_ends_with_its_processes(monkeypatch):
    ended = []

    async def serve(replica, member):
        replica._enter(State.SERVING)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(member.number)

    monkeypatch.setattr(Replica, "serve", serve)

    async def main():
        async with running(World(1)) as world:
            world.processes[0].dead = True
            await world.serving(0)
            await world.serving(1)
            assert ended == [0] and len(world.processes) == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("least", "load", "chosen"), [(0, 8, "r1"), (0, 9, "r0"), (1, 10, "r1"), (1, 11, "r0")]
)
def test_one_that_is_preferred_may_have_eight_more_than_twice_the_least(least, load, chosen):
    async def main():
        async with running(World(2)) as world:
            idler, preferred = world.pool.replicas
            idler.load, preferred.load = least, load

            async def name(replica):
                return replica.name

            assert await world.pool.ask(name, prefer=preferred) == chosen
            assert await world.pool.ask(name, lambda replica: replica is idler, preferred) == "r0"
            preferred.load = 0
            assert await world.pool.ask(name, prefer=idler) == "r0"

    asyncio.run(main())
