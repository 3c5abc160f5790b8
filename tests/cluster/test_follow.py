"""Launch follows the Plan: what is started, where, with what; by a launcher whose processes are made up."""

import asyncio
import dataclasses
import json
import sys
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, fields, replace

import pytest

from configs.calculator import calculator
from configs.quickstart import quickstart
from rl.actors.engine_actor import EngineActor
from rl.actors.generator import Generator
from rl.actors.reward import RewardWorker
from rl.actors.trainer import PolicyTrainer
from rl.cluster import launch as launching
from rl.cluster import spawner
from rl.cluster.launch import launch
from rl.cluster.launchers import models_on, sharers
from rl.config import GeneratorConfig, RewardConfig, RunConfig, TrainerConfig
from rl.config.settle import model_dirs, settle
from rl.envs.sort_letters import SortLetters
from rl.errors import RunError
from rl.loss.kl import KL
from rl.models.layout import Layout
from rl.models.sources import TinyQwen3
from rl.plan import roles
from rl.plan.cluster import Cluster, Host
from rl.plan.types import Plan
from tests.cluster.fake_launcher import FakeLauncher
from tests.plan.test_five_runs import RUNS, small

ACTORS = {"trainer": PolicyTrainer, "critic": EngineActor, "reference": EngineActor, "reward": RewardWorker}


@pytest.fixture
def models(tmp_path):
    path = TinyQwen3(alphabet="abcdefghijklmnopqrstuvwxyz>[](),=").materialize(tmp_path)
    return dict.fromkeys(("model", "reference", "judge"), path)


@pytest.fixture(autouse=True)
def this_process_stays_as_it_is(monkeypatch, tmp_path):
    """Ranks meet nowhere; no janitor is started, and nothing is changed that outlives the test."""

    async def nothing(*_):
        return None

    async def for_ever():
        await asyncio.Event().wait()

    monkeypatch.setattr(spawner, "join_group", nothing)
    monkeypatch.setattr(launching, "reap_orphans", for_ever)
    for name in ("adopt_orphans", "allow_many_files", "freeze_heap"):
        monkeypatch.setattr(launching, name, lambda: None)
    monkeypatch.setattr(launching, "temporary_files", nullcontext)
    monkeypatch.setattr(launching, "owned_directory", lambda *_: nullcontext(tmp_path / "shared"))


def without_torchstore(plan: Plan) -> Plan:
    """torchstore's own actors are not to be had without processes."""
    return dataclasses.replace(plan, transport="shared_memory")


def started(plan: Plan, models, tmp_path, launcher: FakeLauncher) -> FakeLauncher:
    async def run():
        env = SortLetters() if plan.of("reward") else None
        async with launch(plan, models, tmp_path / "run", env, launcher=launcher) as actors:
            assert actors.trainer.mesh is not None and (actors.critic is not None) == bool(plan.of("critic"))

    asyncio.run(run())
    return launcher


@pytest.mark.parametrize("name", RUNS)
def test_each_replica_is_started_as_the_plan_says(name, models, tmp_path):
    plan = without_torchstore(RUNS[name]())
    launcher = started(plan, models, tmp_path, FakeLauncher(plan))
    by_name = {spawned.name: spawned for spawned in launcher.spawned}
    assert sorted(spawned.name for spawned in launcher.spawned) == sorted(r.name for r in plan.replicas)
    for replica in plan.replicas:
        spawned = by_name[replica.name]
        assert spawned.hosts == tuple(process.host for process in replica.processes)
        for process, environment in zip(replica.processes, spawned.environments, strict=True):
            assert environment["OMP_NUM_THREADS"] == str(process.threads)
            gpus = plan.cluster.hosts[process.host].gpus
            assert environment.get("CUDA_VISIBLE_DEVICES") == (
                ",".join(map(str, process.gpus)) if gpus else None
            )
        ((actor, arguments),) = spawned.actors
        assert actor is ACTORS.get(replica.role, Generator)
        if replica.role in ("trainer", "critic", "reference"):
            assert arguments[:3] == (replica.spec.kind, str(models[replica.spec.model]), replica.spec.config)
        elif replica.role in ("generator", "judge"):
            config = dataclasses.replace(arguments[0], model_dir="", shared_directory="")
            assert config == replica.spec.config and arguments[0].model_dir == str(models[replica.spec.model])
        else:
            assert arguments[1] == replica.spec.limit_seconds
        assert spawned.stopped
    assert launcher.closed


@dataclass(frozen=True)
class ScorerConfig:
    model: TinyQwen3 | None = None
    layout: Layout = Layout(shard=2)
    hosts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scored(RunConfig):
    scorer: ScorerConfig = ScorerConfig()

    @property
    def engines(self):
        return {**super().engines, "scorer": self.scorer.layout}


def test_a_role_of_an_engine_is_a_row_and_a_section(tmp_path, monkeypatch):
    """All else follows from the two: memory, devices, processes, its model, and who drives it."""
    row = roles._engine("scorer", works=("score",), beside=("scorer",), learns=False, model="scorer")
    monkeypatch.setitem(roles.ROLES, "scorer", row)
    before = roles.ENGINE_ROLES
    for module in [module for name, module in sys.modules.items() if name.startswith("rl.")]:
        if getattr(module, "ENGINE_ROLES", None) is before:
            monkeypatch.setattr(module, "ENGINE_ROLES", (*before, "scorer"))
    recipe = replace(quickstart(), kl=KL(coef=0.1))
    larger = replace(recipe.model, hidden_size=128)
    config = Scored(
        **{field.name: getattr(recipe, field.name) for field in fields(recipe)}, scorer=ScorerConfig(larger)
    )
    plan = settle(config, "train", Cluster((Host(8, 64.0),)))
    (scorer,) = plan.of("scorer")
    assert scorer.spec.config.layout == Layout(shard=2) and scorer.spec.config.adapters
    takes, of_trainer = (
        plan.of(role)[0].processes[0].memory["score"].total for role in ("scorer", "trainer")
    )
    assert takes > 0 and takes != of_trainer

    models = model_dirs(config, plan, tmp_path)
    width = {
        name: json.loads((path / "config.json").read_text())["hidden_size"] for name, path in models.items()
    }
    assert width == {"model": 64, "reference": 64, "scorer": 128}
    launcher = FakeLauncher(plan)

    async def run():
        async with launch(plan, models, tmp_path / "run", SortLetters(), launcher=launcher) as actors:
            assert {*actors.engines} == {"reference", "scorer"}
            assert actors.engines["scorer"].mesh is not None

    asyncio.run(run())
    (spawned,) = [each for each in launcher.spawned if each.name == scorer.name]
    ((actor, arguments),) = spawned.actors
    assert actor is EngineActor and arguments[1] == str(models["scorer"]) and len(spawned.environments) == 2


@pytest.mark.parametrize("run", ["", "a run on hosts"])
def test_compiled_kernels_stay_where_each_host_has_them(run, models, tmp_path, monkeypatch):
    """On other hosts an `rl worker` says where: the controller's directory may not be there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/the/controller")
    plan = without_torchstore(settle(quickstart(), "train", Cluster((Host(8, 64.0),))))
    launcher = FakeLauncher(plan)
    launcher.run = run
    started(plan, models, tmp_path, launcher)
    told = {
        env.get("TORCHINDUCTOR_CACHE_DIR") for spawned in launcher.spawned for env in spawned.environments
    }
    assert told == {None if run else "/of/the/controller"}


def test_each_rank_has_the_threads_of_its_own_host(models, tmp_path):
    hosts = tuple(Host(cores, 64.0, address=f"10.0.0.{cores}:7000") for cores in (8, 2))
    trainer = TrainerConfig(layout=Layout(shard=2), hosts=(0, 1))
    plan = settle(dataclasses.replace(quickstart(), trainer=trainer), "train", Cluster(hosts))
    launcher = started(without_torchstore(plan), models, tmp_path, FakeLauncher(plan))
    (spawned,) = (spawned for spawned in launcher.spawned if spawned.name == "trainer")
    threads = [process.threads for process in plan.of("trainer")[0].processes]
    assert [int(environment["OMP_NUM_THREADS"]) for environment in spawned.environments] == threads
    assert len({*threads}) == 2


@pytest.mark.parametrize("name", RUNS)
def test_each_replica_may_die_as_it_starts(name, models, tmp_path):
    """Each is started again, in the same place; engines together."""
    plan = without_torchstore(RUNS[name]())
    launcher = started(plan, models, tmp_path, FakeLauncher(plan, deaths=1))
    for replica in plan.replicas:
        starts = [spawned for spawned in launcher.spawned if spawned.name == replica.name]
        assert len(starts) >= 2 and len({start.hosts for start in starts}) == 1, replica.name
        environments = [
            [{n: v for n, v in env.items() if n != "RL_MESH"} for env in start.environments]
            for start in starts
        ]
        assert environments == [environments[0]] * len(starts)
        assert (replica.name, starts[0].hosts, 1) in launcher.ended  # what did not answer is not left there


def test_a_replica_that_dies_at_each_start_ends_the_run(models, tmp_path):
    with pytest.raises(RunError, match="generator-0 died in start .*it did not even start"):
        plan = small()
        started(plan, models, tmp_path, FakeLauncher(plan, deaths=10))


def test_models_and_the_directory_are_needed_where_roles_are():
    base = dataclasses.replace(
        quickstart(),
        trainer=TrainerConfig(layout=Layout(shard=2), hosts=(0, 1), spare_hosts=(2,)),
        generator=GeneratorConfig(hosts=(3,)),
        reward=RewardConfig(hosts=(4,)),
    )
    plan = settle(base, cluster=Cluster((Host(8, 64.0),) * 5))
    assert [models_on(host, plan) for host in range(5)] == [["model"]] * 4 + [[]]
    assert sharers(plan) == {0: "trainer", 1: "trainer", 2: "trainer"}
    served = dataclasses.replace(plan, command="serve", spare_hosts=())
    assert sharers(served) == {0: "trainer", 1: "trainer", 3: "generator"}


class Losing(FakeLauncher):
    """Some of its hosts do not answer."""

    def __init__(self, plan, gone):
        super().__init__(plan)
        self.gone, self.asked = gone, []

    async def lost(self, hosts, others=()):
        self.asked.append(({*hosts}, [*others]))
        return frozenset(self.gone)


@pytest.mark.parametrize(
    ("gone", "can_go_on", "where", "words"),
    [
        ((), True, (0, 1), ""),
        ((1,), True, (0, 0), "does not answer; they go on without it"),
        ((1,), False, (0, 1), "does not answer; they wait for it: two processes need two hosts"),
    ],
)
def test_engines_start_without_a_host_that_is_lost_where_they_can(
    gone, can_go_on, where, words, models, tmp_path, caplog
):
    hosts = tuple(Host(8, 64.0, address=f"10.0.0.{number}:7000") for number in (1, 2))
    trainer = TrainerConfig(layout=Layout(shard=2), hosts=(0, 1))
    config = dataclasses.replace(quickstart(), trainer=trainer)
    plan = without_torchstore(settle(config, "train", Cluster(hosts)))
    launcher = Losing(plan, gone)

    def engines_without(lost):
        assert {*lost} == {1}
        if not can_go_on:
            return "two processes need two hosts"
        (planned,) = plan.of("trainer")
        processes = tuple(dataclasses.replace(process, host=0) for process in planned.processes)
        return (dataclasses.replace(planned, processes=processes),)

    async def run():
        more = {"launcher": launcher, "engines_without": engines_without}
        async with launch(plan, models, tmp_path / "run", SortLetters(), **more):
            pass

    asyncio.run(run())
    (spawned,) = (spawned for spawned in launcher.spawned if spawned.name == "trainer")
    assert spawned.hosts == where and launcher.asked == [({0, 1}, [0, 1])]
    assert words in caplog.text


def test_as_many_episodes_are_under_way_as_the_environment_allows(models, tmp_path):
    env = dataclasses.replace(calculator().env, max_episodes=2)
    plan = without_torchstore(settle(calculator(), "train", Cluster((Host(8, 64.0),))))
    problem = env.train_problem(1)

    async def run():
        async with launch(plan, models, tmp_path / "run", env, launcher=FakeLauncher(plan)) as actors:
            third = actors.rewards.open(problem, 3)
            async with AsyncExitStack() as first_two:
                for seed in (1, 2):
                    await first_two.enter_async_context(actors.rewards.open(problem, seed))
                opening = asyncio.create_task(third.__aenter__())
                await asyncio.sleep(0.05)
                assert not opening.done()
            await opening
            await third.__aexit__(None, None, None)

    asyncio.run(asyncio.wait_for(run(), 20))
