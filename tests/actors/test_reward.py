"""A reward worker's own part of episodes, without its process."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest

from configs.calculator import calculator
from rl.actors import reward
from rl.actors.remote import ProcessDied
from rl.actors.replica import Replica
from rl.actors.reward import EpisodeCall, RewardPool, RewardProcess, RewardWorker
from rl.errors import EpisodeLost
from rl.observability.timeline import Timeline
from rl.types import Score
from rl.waiting import Deadlines, Signal
from tests.virtual_time import run_virtually


class Host:
    """Episodes open once `may_open` is set."""

    def __init__(self, env, limit_seconds):
        self.may_open, self.open_ones = asyncio.Event(), 0

    @asynccontextmanager
    async def open(self, problem, seed):
        await self.may_open.wait()
        self.open_ones += 1
        try:
            yield self
        finally:
            self.open_ones -= 1

    async def begin(self):
        return "begun"


class Lost(Host):
    """What its processes are forked from is gone."""

    @asynccontextmanager
    async def open(self, problem, seed):
        raise EpisodeLost
        yield


@pytest.mark.parametrize("verb", ["begin", "act", "score_group"])
def test_an_episode_whose_process_cannot_start_is_lost_whatever_was_asked_first(monkeypatch, verb):
    monkeypatch.setattr(reward, "EpisodeHost", Lost)
    env = calculator().env
    ask = RewardWorker.ask_episode._method.__wrapped__
    call = EpisodeCall(7, verb, (), (env.train_problem(1), 1))
    assert isinstance(asyncio.run(ask(RewardWorker(env, 5.0), call)), EpisodeLost)


@pytest.mark.parametrize("closes_early", [True, False])
def test_an_episode_that_is_given_up_while_its_process_starts_is_closed(monkeypatch, closes_early):
    monkeypatch.setattr(reward, "EpisodeHost", Host)
    env = calculator().env

    async def main():
        worker = RewardWorker(env, 5.0)
        ask, close = (
            getattr(RewardWorker, name)._method.__wrapped__ for name in ("ask_episode", "close_episode")
        )
        call = EpisodeCall(7, "begin", (), (env.train_problem(1), 1))
        asked = asyncio.create_task(ask(worker, call))
        await asyncio.sleep(0)
        if closes_early:
            await close(worker, 7)
        worker._host.may_open.set()
        answer = await asked
        if not closes_early:
            assert answer == "begun" and worker._host.open_ones == 1
            await close(worker, 7)
        else:
            assert isinstance(answer, EpisodeLost)
        assert worker._host.open_ones == 0 and not worker._episodes

    asyncio.run(main())


class Dying:
    """A worker's process that dies at the first episode that it is asked for."""

    def __init__(self):
        self.num_asked = 0

    async def check(self):
        await asyncio.Event().wait()

    async def ask_episode(self, call):
        self.num_asked += 1
        raise ProcessDied("killed")

    async def close_episode(self, number):
        raise ProcessDied("killed")

    async def kill(self):
        pass


def test_no_episode_is_opened_on_a_worker_that_is_known_to_be_lost():
    """Between its death and the turn of the loop in which its state follows."""

    async def main():
        processes, changed = [], Signal()

        async def spawn():
            processes.append(Dying())
            return processes[-1]

        pool = RewardPool("reward worker", [Replica("reward-0", spawn, 5, changed)], changed, 8)
        running = asyncio.create_task(pool.run())
        await changed.wait_for(lambda: pool.num_serving == 1)
        problem = calculator().env.train_problem(1)
        async with pool.open(problem, 1) as first:
            with pytest.raises(EpisodeLost):
                await first.begin()
            async with pool.open(problem, 2) as second:
                with pytest.raises(EpisodeLost):
                    await second.begin()
        assert [process.num_asked for process in processes[:2]] == [1, 1]
        running.cancel()

    asyncio.run(main())


def test_a_worker_that_answers_nothing_is_dead_after_deadlines_progress():
    class Silent:
        class ready:
            @staticmethod
            async def call():
                await asyncio.Event().wait()

    deadlines = Deadlines(progress=0.05)
    worker = RewardProcess("reward-0", None, Silent, 5.0, deadlines, Timeline())
    with pytest.raises(ProcessDied, match="did not finish ready within 0 s .* or raise --deadlines.progress"):
        asyncio.run(worker.check())


def test_a_worker_has_its_limit_for_each_rollout_and_once_more(monkeypatch):
    """What was given up before ends first. Past that it is as good as dead, and another takes its work."""
    monkeypatch.setattr(reward, "START_SECONDS", 5.0)
    seconds = 29.0

    async def score(rollouts):
        await asyncio.sleep(seconds)
        return {None: [Score(1.0)] * len(rollouts)}

    async def main():
        nonlocal seconds
        actor = SimpleNamespace(score=SimpleNamespace(call=score))
        worker = RewardProcess("reward-0", None, actor, 5.0, Deadlines(), Timeline())
        assert [score.reward for score in await worker.score([None, None])] == [1.0, 1.0]
        seconds = 1e6
        words = r"did not finish score within 30 s .*, or raise --reward.limit_seconds$"
        with pytest.raises(ProcessDied, match=words):
            await worker.score([None, None])

    run_virtually(main())


class Playing(Dying):
    """Its episodes begin, and do not end by themselves."""

    async def ask_episode(self, call):
        self.num_asked += 1
        return "begun"

    async def close_episode(self, number):
        pass


def test_each_episode_is_opened_on_the_worker_with_the_fewest_of_them():
    async def main():
        processes, changed = [], Signal()

        async def spawn():
            processes.append(Playing())
            return processes[-1]

        workers = [Replica(f"reward-{number}", spawn, 5, changed) for number in range(3)]
        pool = RewardPool("reward worker", workers, changed, 8)
        running = asyncio.create_task(pool.run())
        await changed.wait_for(lambda: pool.num_serving == 3)
        problem = calculator().env.train_problem(1)
        async with AsyncExitStack() as stack:
            for seed in range(6):
                episode = await stack.enter_async_context(pool.open(problem, seed))
                assert await episode.begin() == "begun"
        running.cancel()
        return [process.num_asked for process in processes]

    assert asyncio.run(main()) == [2, 2, 2]
