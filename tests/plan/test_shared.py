"""Whether each host's shared memory has room for the versions of the weights that it will have."""

import os
from dataclasses import replace

import pytest

from configs.quickstart import quickstart
from rl.cluster import machine
from rl.config import GeneratorConfig, TrainerConfig, WeightSyncConfig
from rl.config.settle import plan_or_problems
from rl.models.layout import Layout
from rl.models.sources import ModelDir
from rl.plan.cluster import Cluster, Host
from rl.plan.model_shape import ModelShape
from rl.plan.types import Plan
from rl.tinker.serve import ServeConfig, settle
from rl.types import LoRA
from tests.tiny import write_config

GIB = 2**30
VERSION = 4 * ModelShape.of(quickstart().model.config()).num_parameters / GIB  # in fp32
ADAPTER = 4 * ModelShape.of(quickstart().model.config()).adapter_elements(LoRA(rank=8)) / GIB


def hosts(*shared_gib):
    several = len(shared_gib) > 1
    return Cluster(
        tuple(
            Host(8, 64.0, address=f"10.0.0.{i}:7000" if several else "", shared_gib=shared)
            for i, shared in enumerate(shared_gib)
        )
    )


def config(shard=1, trainer=(), generator=(), rank=0, transport="shared_memory", **settings):
    return replace(
        quickstart(),
        trainer=TrainerConfig(layout=Layout(shard=shard), hosts=trainer, lora=LoRA(rank=rank)),
        generator=GeneratorConfig(num_replicas=max(1, len(generator)), hosts=generator),
        weight_sync=WeightSyncConfig(transport=transport),
        **settings,
    )


APART = {"shard": 2, "trainer": (0, 1), "generator": (1,)}
CASES = {
    "one that is read and one that is written": (config(), {0: 2 * VERSION}),
    "groups are learned from meanwhile, one by one": (config(stream_groups=1), {0: 3 * VERSION}),
    "generators work meanwhile": (config(max_offpolicy_steps=1), {0: 3 * VERSION}),
    "an adapter, and the model once": (config(rank=8), {0: VERSION + 2 * ADAPTER}),
    "a trainer's rank, and a generator": (config(**APART), {0: VERSION, 1: 2 * VERSION}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_published_has_to_fit_to_the_byte(case):
    settings, needed = CASES[case]
    enough = [needed[host] + 1 / GIB for host in sorted(needed)]
    assert isinstance(plan_or_problems(settings, "train", hosts(*enough)), Plan)
    for host in needed:
        there = [gib - 2 / GIB * (number == host) for number, gib in enumerate(enough)]
        (problem,) = plan_or_problems(settings, "train", hosts(*there))
        who = "this host" if len(needed) == 1 else f"host {host} (10.0.0.{host}:7000)"
        assert problem == (
            f"{who} has {there[host]:.2f} GiB of shared memory, and published weights take {needed[host]:.2f}; "
            "enlarge /dev/shm (docker run --shm-size=...), or use --weight_sync.transport torchstore"
        )


def test_where_none_is_needed_or_known_none_is_asked_for(tmp_path):
    for settings in (config(transport="torchstore"), config(**APART, transport="torchstore")):
        assert isinstance(plan_or_problems(settings, "train", hosts(0.0, 0.0)), Plan)
    assert isinstance(plan_or_problems(config(), "replay", hosts(0.0)), Plan)  # it starts no generator
    assert isinstance(plan_or_problems(config(), "train", hosts(None)), Plan)
    unknown = tmp_path / "config.json"
    unknown.write_text('{"model_type": "xglm", "vocab_size": 100}')
    problems = plan_or_problems(replace(config(), model=ModelDir(str(tmp_path))), "train", hosts(0.0))
    assert not any("shared memory" in problem for problem in ([] if isinstance(problems, Plan) else problems))


def test_a_server_is_told_what_it_can_change(tmp_path):
    write_config(tmp_path)
    serving = ServeConfig(model=str(tmp_path))
    hf = quickstart().model.config()
    with pytest.raises(Exception, match=r"enlarge /dev/shm \(docker run --shm-size=...\)$"):
        settle(serving, hf, hosts(0.0))


def test_a_host_has_what_its_file_system_holds(monkeypatch, tmp_path):
    """Used or not: what a killed run left there goes when the next one starts."""
    there = os.statvfs("/dev/shm")
    assert machine.shared_memory() == there.f_blocks * there.f_frsize > 0
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "none")
    assert machine.shared_memory() == 0
