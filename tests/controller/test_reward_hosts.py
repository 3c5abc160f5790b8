"""An environment that works where a run is started and not on a host that rewards: said before the first step."""

import asyncio
import contextlib
import functools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from configs.calculator import calculator
from configs.quickstart import quickstart
from rl.actors.remote import ProcessDied
from rl.actors.replica import Replica
from rl.actors.reward import RewardPool, RewardWorker
from rl.config import RewardConfig, WarmupConfig
from rl.config.learning import learning_of
from rl.config.rehearsal import rehearse
from rl.config.settle import settle
from rl.controller import reward_hosts
from rl.controller.reward_hosts import try_reward_hosts
from rl.envs.chat.env import ChatEnv
from rl.envs.verifier import score_of
from rl.errors import RunError, one_line
from rl.plan.cluster import Cluster, Host
from rl.types import Score
from rl.waiting import Signal, beside
from tests.controller.tables import Asking, Computing, Graded


class Worker:
    """A reward worker's process; `env` is what it is as its host has it. Episodes are in processes of their own."""

    def __init__(self, env, dies=False):
        self.env, self.dies, self.num_asked = env, dies, 0
        self.worker = RewardWorker(env, 20.0) if isinstance(env, ChatEnv) else None

    async def check(self):
        await asyncio.Event().wait()

    async def kill(self):
        if self.worker is not None:
            self.worker._host.close()

    def note(self):
        self.num_asked += 1
        if self.dies:
            raise ProcessDied("killed")

    async def score(self, rollouts):
        self.note()
        return [self._score(rollout) for rollout in rollouts]

    def _score(self, rollout):
        try:
            return score_of(self.env.reward(rollout.problem, rollout.response, rollout.stop))
        except OSError as error:
            return Score(0.0, error=one_line(error), cause="raised")

    async def ask_episode(self, call):
        self.note()
        return await RewardWorker.ask_episode._method.__wrapped__(self.worker, call)

    async def close_episode(self, number):
        await RewardWorker.close_episode._method.__wrapped__(self.worker, number)


KINDS = {"a reward": (Graded, quickstart), "tools": (Computing, calculator), "an agent": (Asking, calculator)}


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """(config, what its rehearsal tried) of a kind of environment."""
    table = tmp_path_factory.mktemp("tables") / "table"
    table.write_text("7")

    @functools.cache
    def of(kind):
        env, base = KINDS[kind]
        reward = RewardConfig(num_procs=2, hosts=(0, 1))
        config = replace(base(), env=env(table=str(table)), reward=reward, warmup=WarmupConfig(), steps=2)
        rehearsal = rehearse(config, config.model.tokenizer())
        assert rehearsal.problems == [] and rehearsal.takes
        return config, rehearsal.takes

    return of


def try_out(config, takes, tables, dying=(), here=False):
    """tables: what each host has for the environment's; as many hosts. dying: which of all processes die as they
    are asked. here: on this host, without an address. Returns (host, process) of those that were started, in order."""
    hosts = tuple(
        Host(num_cores=64, free_gib=1000.0, shared_gib=64.0, address=f"10.0.0.{n}:7000")
        for n in range(1, len(tables) + 1)
    )
    if here:
        hosts = (replace(hosts[0], address=""),)
    config = replace(config, reward=replace(config.reward, hosts=tuple(range(len(hosts)))))
    envs, tokenizer = [replace(config.env, table=table) for table in tables], config.model.tokenizer()
    plan, started, changed = settle(config, cluster=Cluster(hosts)), [], Signal()

    def replica(planned):
        async def spawn():
            number = planned.processes[0].host
            started.append((number, Worker(envs[number], len(started) in dying)))
            return started[-1][1]

        return Replica(planned.name, spawn, 1, changed)

    pool = RewardPool("reward worker", [replica(planned) for planned in plan.of("reward")], changed, 8)

    async def main():
        async with beside(pool.run()):
            await pool.started()
            actors = SimpleNamespace(rewards=pool, address="127.0.0.1")
            async with asyncio.timeout(60):
                await try_reward_hosts(takes, learning_of(config), plan, actors, tokenizer)

    asyncio.run(main())
    return started


@pytest.mark.parametrize("kind", ["a reward", "an agent"])
def test_a_host_that_lacks_a_file_is_named(kind, tried, monkeypatch):
    config, takes = tried(kind)
    table = config.env.table
    monkeypatch.setattr(reward_hosts, "_PAUSES", (0.01,))
    with pytest.raises(RunError) as error:
        try_out(config, takes, [table, f"{table}.none"])
    assert re.match(
        r"reward-\d on host 1 \(10.0.0.2:7000\) fails where .*: FileNotFoundError.*", str(error.value)
    )
    assert f"what env {type(config.env).__name__} needs, or leave it out of --reward.hosts" in str(
        error.value
    )


def test_one_worker_of_each_host_is_asked_and_on_one_host_none_again(tried):
    config, takes = tried("a reward")
    config = replace(config, reward=replace(config.reward, num_procs=4))
    asked = [host for host, worker in try_out(config, takes, [config.env.table] * 2) if worker.num_asked]
    assert sorted(asked) == [0, 1]
    assert not any(worker.num_asked for _, worker in try_out(config, takes, [config.env.table], here=True))


def test_what_failed_here_too_is_not_asked_elsewhere(tried):
    config, takes = tried("a reward")
    failed = [replace(take, score=replace(take.score, error="as here")) for take in takes]
    started = try_out(config, failed, [config.env.table, "none"])
    assert len(started) == 2 and not any(worker.num_asked for _, worker in started)


def test_a_run_on_one_named_host_that_is_not_this_one_is_tried_there(tried, monkeypatch):
    monkeypatch.setattr(reward_hosts, "_PAUSES", ())
    config, takes = tried("a reward")
    with pytest.raises(RunError, match="FileNotFoundError"):
        try_out(config, takes, ["none"])


@pytest.mark.parametrize(("num_failures", "is_refused"), [(1, False), (2, False), (3, True)])
def test_a_service_that_is_away_for_a_moment_is_asked_again(num_failures, is_refused, tried, monkeypatch):
    config, takes = tried("a reward")
    left, score = [num_failures], Worker._score

    def fails(worker, rollout):
        if worker.env.table.endswith("weak") and left[0]:
            left[0] -= 1
            return Score(0.0, error="503", cause="server")
        return score(replace_env(worker), rollout)

    def replace_env(worker):
        return SimpleNamespace(env=replace(worker.env, table=config.env.table))

    monkeypatch.setattr(Worker, "_score", fails)
    monkeypatch.setattr(reward_hosts, "_PAUSES", (0.01, 0.02))
    with pytest.raises(RunError, match="503") if is_refused else contextlib.nullcontext():
        try_out(config, takes, [config.env.table, "weak"])


@pytest.mark.parametrize("kind", ["a reward", "tools"])
def test_the_work_of_a_worker_that_is_killed_meanwhile_is_left_to_others(kind, tried):
    config, takes = tried(kind)
    started = try_out(config, takes, [config.env.table] * 2, dying=(0,))
    assert [host for host, worker in started if worker.num_asked] == [0, 1]
