"""Who computes where, with how many threads."""

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.actors.replica import Pool
from rl.cluster import launch, spawn
from rl.cluster.actor_specs import ActorSpecs, EngineSpec
from rl.cluster.placement import ENGINE_ROLES, Place, place
from rl.models.engine_config import EngineConfig
from rl.models.generator.vllm_config import VLLMConfig
from rl.models.layout import Layout
from rl.observability.timeline import Timeline

ROLES = {"trainer": 2, "generator": 2, "critic": 1, "reference": 1, "reward": 3}


def test_devices_are_dealt_out_in_order_and_rewards_get_none():
    places = place(ROLES, num_cores=12)
    assert {role: p.devices for role, p in places.items()} == {
        "trainer": (0, 1), "generator": (2, 3), "critic": (4,), "reference": (5,), "reward": (),
    }  # fmt: skip


def test_those_that_work_at_the_same_time_share_the_cores():
    threads = {role: p.num_threads for role, p in place(ROLES, num_cores=12).items()}
    assert threads == {"trainer": 4, "generator": 6, "critic": 4, "reference": 3, "reward": 1}
    at_once = {role: p.num_threads for role, p in place(ROLES, overlap=True, num_cores=12).items()}
    assert at_once == {"trainer": 2, "generator": 2, "critic": 2, "reference": 2, "reward": 1}


def test_what_is_asked_for_is_given_and_nobody_has_no_thread():
    assert place({"trainer": 1}, 2, {"trainer": 5})["trainer"] == Place(1, (0,), 5)
    assert place({"trainer": 8}, 2, {"trainer": 0})["trainer"].num_threads == 1


roles = st.dictionaries(st.sampled_from(["trainer", "generator", "critic", "reference", "judge", "reward"]), st.integers(1, 5))  # fmt: skip


@given(roles, st.integers(1, 40), st.booleans(), st.integers(0, 8), st.booleans())
def test_no_two_share_a_gpu_unless_told_to_and_threads_fit_the_cores(
    roles, num_cores, overlap, num_devices, shared
):
    places = place(roles, num_cores, None, overlap, num_devices, shared)
    dealt = [device for where in places.values() for device in where.devices]
    assert len(dealt) == sum(count for role, count in roles.items() if role != "reward")
    if shared and num_devices:
        assert set(dealt) <= set(range(num_devices))
        load = Counter(dealt)
        assert max(load.values(), default=0) - min((load[d] for d in range(num_devices)), default=0) <= 1
        for role, where in places.items():
            assert len(set(where.devices)) == min(len(where.devices), num_devices), role
    else:
        assert dealt == list(range(len(dealt)))
    learning = [role for role in ENGINE_ROLES[:2] if role in roles]
    together = [["judge"], ["generator"], learning]
    if overlap:
        together = [["judge"], [*learning, "generator"]]
    for group in together:
        members = [places[role] for role in group if role in places]
        at_work = sum(where.num_procs * where.num_threads for where in members)
        assert at_work <= max(num_cores, sum(where.num_procs for where in members)), group


class Spawned:
    """What the launcher asks of Monarch, in place of processes."""

    def __init__(self, monkeypatch, num_gpus):
        self.meshes = {}
        names = [f"GPU-{i}" for i in range(num_gpus)]
        monkeypatch.setattr(spawn, "visible_devices", lambda: names)
        monkeypatch.setattr(launch, "visible_devices", lambda: names)
        monkeypatch.setattr(launch, "num_cores", lambda: 24)
        monkeypatch.setattr("monarch.actor.this_host", lambda: self)
        monkeypatch.setattr("monarch.actor.default_bootstrap_cmd", lambda: SimpleNamespace(with_env=dict))
        monkeypatch.setattr(launch, "join_group", self.nothing)
        monkeypatch.setattr(launch._Launcher, "_started", self.started)
        monkeypatch.setattr(launch, "_ready", self.nothing)

    async def nothing(self, *_):
        return None

    async def started(self, name, answer):
        return await answer

    def spawn_procs(self, per_host, name, bootstrap, bootstrap_command):
        points = [SimpleNamespace(rank=rank) for rank in range(per_host["procs"])]
        self.meshes[name] = [bootstrap_command(point) for point in points]
        actors = SimpleNamespace(slice=lambda procs: None)
        return SimpleNamespace(spawn=lambda *_: actors)

    @property
    def gpus(self):
        return {name: [env["CUDA_VISIBLE_DEVICES"] for env in envs] for name, envs in self.meshes.items()}

    @property
    def threads(self):
        return {name: {env["OMP_NUM_THREADS"] for env in envs} for name, envs in self.meshes.items()}


async def start_all(specs, tmp_path):
    """As a run does, but for what takes processes."""
    launcher = launch._Launcher(specs, tmp_path, tmp_path, Timeline())
    actors = await launcher.start()
    for engine in launcher.engines:
        await engine._spawn()
    pools: list[Pool] = [actors.generators, *([launcher.judge.pool] if launcher.judge else [])]
    for pool in pools:
        for replica in pool.replicas:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(launch.Births, "watching", lambda births, coroutine: coroutine)
                await replica._spawn()


@pytest.mark.parametrize("shared", [False, True])
def test_processes_are_where_the_placement_says(tmp_path, monkeypatch, shared):
    """Two generators on two GPUs each, a judge, a critic and a reference, each process with its own GPU or in turn."""
    spawned = Spawned(monkeypatch, num_gpus=4 if shared else 10)
    counts = {"trainer": 2, "generator": 4, "critic": 1, "reference": 1, "judge": 2, "reward": 1}
    engine = EngineSpec("titan", tmp_path, EngineConfig())
    generator = VLLMConfig(str(tmp_path), tensor_parallel=2)
    specs = ActorSpecs(
        roles=counts, trainer=replace(engine, config=EngineConfig(layout=Layout(shard=2))), generator=generator,
        num_generators=2, critic=engine, reference=engine, share_devices=shared, num_judges=2,
        judge=replace(generator, tensor_parallel=1, weights="directory"),
    )  # fmt: skip
    monkeypatch.setattr(launch, "HFTokenizer", lambda directory: None)
    asyncio.run(start_all(specs, tmp_path))
    in_turn = [f"GPU-{i % 4 if shared else i}" for i in range(10)]
    assert spawned.gpus == {
        "trainer": in_turn[:2], "generator-0": in_turn[2:4], "generator-1": in_turn[4:6], "critic": in_turn[6:7],
        "reference": in_turn[7:8], "judge-0": in_turn[8:9], "judge-1": in_turn[9:],
    }  # fmt: skip
    # Of 24 cores: 2 + 1 learn together, beside a reference 2 + 1 + 1; 4 ranks sample, 2 judge.
    assert spawned.threads == {
        "trainer": {"8"}, "critic": {"8"}, "reference": {"6"}, "generator-0": {"6"}, "generator-1": {"6"},
        "judge-0": {"12"}, "judge-1": {"12"},
    }  # fmt: skip
