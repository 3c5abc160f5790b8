"""Which GPUs a process is shown."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from configs.quickstart import quickstart
from rl.cluster.spawner import gpus_shown
from rl.config import GeneratorConfig, TrainerConfig
from rl.config.settle import settle
from rl.models.layout import Layout
from rl.plan.cluster import GPU, Cluster, Host


@pytest.fixture(scope="module")
def replicas():
    """A trainer of two processes, and two generators of two, on one host with six GPUs."""
    gpus = tuple(GPU("H100-80", 79.1, (9, 0), f"GPU-{number}") for number in range(6))
    config = replace(
        quickstart(),
        trainer=TrainerConfig(layout=Layout(shard=2)),
        generator=GeneratorConfig(tensor_parallel=2, num_replicas=2),
        placement="alone",
    )
    plan = settle(config, cluster=Cluster((Host(32, 200.0, gpus, shared_gib=100.0, bfloat16=True),)))
    return {replica.name: replica for replica in plan.replicas}


def test_a_rank_of_a_generator_is_shown_those_of_all_its_ranks_and_one_that_trains_its_own(replicas):
    shown = {
        name: [gpus_shown(replica, process) for process in replica.processes]
        for name, replica in replicas.items()
    }
    assert shown["trainer"] == [(0,), (1,)]
    assert shown["generator-0"] == [(2, 3)] * 2 and shown["generator-1"] == [(4, 5)] * 2


def test_vllm_finds_a_way_from_each_of_a_generator_s_gpus_to_each(replicas, monkeypatch):
    """By vLLM's own look at them, which counts what is in CUDA_VISIBLE_DEVICES."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("CUDA's kernels"))
    from vllm.distributed.device_communicators import custom_all_reduce
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    asked = []
    monkeypatch.setattr(custom_all_reduce, "current_platform", NonNvmlCudaPlatform)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: asked.append(pair) or True)
    for rank, process in enumerate(replicas["generator-1"].processes):
        shown = gpus_shown(replicas["generator-1"], process)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, shown)))
        assert custom_all_reduce._can_p2p(rank, 2)
    assert asked == [(0, 1), (1, 0)]
