"""Where engines go on when a host is lost for good, and what is refused before the run starts."""

from dataclasses import replace

import pytest

from configs.gpu import qwen3_1_7b
from configs.quickstart import quickstart
from rl.config import (
    CriticConfig,
    GeneratorConfig,
    ReferenceConfig,
    RewardConfig,
    TrainerConfig,
    WeightSyncConfig,
)
from rl.config.settle import fallback_of, plan_or_problems
from rl.loss.advantages.gae import GAE
from rl.loss.kl import KL
from rl.models.layout import Layout
from rl.plan.cluster import USABLE, Cluster, Host
from rl.plan.show import show
from rl.plan.types import Plan
from tests.plans import cluster

CPUS = Cluster(tuple(Host(8, 64.0, address=f"10.0.0.{i}:7000") for i in range(4)))


def config(layout=None, hosts=(0, 1), generators=(3,), **trainer):
    return replace(
        quickstart(),
        trainer=TrainerConfig(layout=layout or Layout(shard=2), hosts=hosts, **trainer),
        generator=GeneratorConfig(hosts=generators),
        reward=RewardConfig(hosts=(3,)),
    )


def planned(settings, hosts=CPUS):
    plan = plan_or_problems(settings, "train", hosts)
    assert isinstance(plan, Plan), plan
    return plan


def after(settings, *lost, hosts=CPUS):
    """(layout, host of each rank) of the trainer without these hosts; or why not."""
    engines = fallback_of(settings, planned(settings, hosts))(lost)
    if isinstance(engines, str):
        return engines
    (trainer,) = engines
    return trainer.spec.config.layout, [process.host for process in trainer.processes]


def test_fewer_hosts_have_fewer_shards_or_copies_and_as_many_ranks_each():
    assert after(config(min_hosts=1), 1) == (Layout(), [0])
    assert after(config(min_hosts=1), 0) == (Layout(), [1])
    assert after(config(Layout(shard=4), min_hosts=1), 0) == (Layout(shard=2), [1, 1])
    assert after(config(Layout(replicate=2, shard=2), min_hosts=1), 0) == (Layout(shard=2), [1, 1])
    three = config(Layout(shard=6), (0, 1, 2), min_hosts=1)
    assert after(three, 1) == (Layout(shard=4), [0, 0, 2, 2])
    assert after(three, 1, 0) == (Layout(shard=2), [2, 2])
    assert after(three, 3) == (Layout(shard=6), [0, 0, 1, 1, 2, 2])  # the generator's


def test_a_spare_host_takes_the_place_of_a_lost_one():
    spare = config(spare_hosts=(2,))
    assert after(spare, 1) == (Layout(shard=2), [0, 2])
    assert after(spare, 0) == (Layout(shard=2), [1, 2])
    assert after(spare, 0, 1) == "trainer has 1 of 2 hosts, and needs 2"
    assert after(replace(spare, trainer=replace(spare.trainer, min_hosts=1)), 0, 1) == (Layout(), [2])
    assert after(spare, 1, 2) == "trainer has 1 of 2 hosts, and needs 2"


def test_it_is_in_the_plan():
    lines = show("quickstart", planned(config(min_hosts=1)))
    words = [line.split() for line in lines]
    assert next(line[:9] for line in words if line[:4] == ["trainer", "without", "host", "1"]) == [
        "trainer",
        "without",
        "host",
        "1",
        "1",
        "processes",
        "on",
        "hosts",
        "0",
    ]
    assert not any("without" in line for line in show("quickstart", planned(config())))


def test_a_generator_on_gpus_keeps_its_own():
    gpus, layout = cluster("4 x 2xH100-80"), Layout(shard=4)
    (text,) = plan_or_problems(config(layout, generators=(2,), spare_hosts=(2,)), "train", gpus)
    assert (
        text
        == "trainer.spare_hosts: without host 0 host 2's GPUs have another role; a spare host's have none"
    )
    assert after(config(layout, spare_hosts=(2,)), 1, hosts=gpus) == (layout, [0, 0, 2, 2])


REFUSED = {
    "all of them": (config(min_hosts=2), "trainer.min_hosts=2 has no effect on engines of 2; give fewer, or 0"),
    "one host": (
        config(Layout(), (0,), min_hosts=1), "trainer.min_hosts=1 has no effect on engines of 1; give fewer, or 0"
    ),
    "a layout that does not divide": (
        replace(
            config(Layout(shard=1, tensor_parallel=2), min_hosts=1),
            model=replace(quickstart().model, num_kv_heads=2),
        ),
        "trainer.min_hosts: without host 0 trainer's layout cannot be made smaller for 1 of 2 hosts",
    ),
    "too few": (
        config(Layout(shard=4), (0, 1), min_hosts=0, spare_hosts=(7,)),
        "trainer.spare_hosts names host 7, which is not there; name one of --hosts",
    ),
    "its own host": (
        config(spare_hosts=(1,)), "trainer.spare_hosts names host 1, which engines have already; name another"
    ),
    "one that may join": (
        replace(config(spare_hosts=(4,), generators=(3, 4)), joining_hosts=1),
        "joining_hosts=1: no generator is on host 4; raise generator.num_replicas, or name it with --generator.hosts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_line_with_its_remedy(case):
    settings, text = REFUSED[case]
    assert plan_or_problems(settings, "train", CPUS) == [text]


def test_a_host_without_the_memory_is_refused_before_the_run():
    settings = config(Layout(shard=2), (0, 1), min_hosts=0, spare_hosts=(2,))
    tight = Cluster((*CPUS.hosts[:2], replace(CPUS.hosts[2], free_gib=0.5), CPUS.hosts[3]))
    (text,) = plan_or_problems(settings, "train", tight)
    assert text.startswith("trainer.spare_hosts: without host 0 the run needs about") and "on host 2" in text


def test_spare_hosts_that_take_the_place_of_all_have_to_have_the_memory():
    small = replace(CPUS.hosts[0], free_gib=0.5, address="10.0.0.4:7000")
    (text,) = plan_or_problems(config(spare_hosts=(2, 4)), "train", Cluster((*CPUS.hosts, small)))
    assert (
        text.startswith("trainer.spare_hosts: without host 0 1 the run needs about") and "on host 4" in text
    )


BIG = {"hidden_size": 4096, "num_layers": 22, "intermediate_size": 12288, "num_heads": 32, "num_kv_heads": 8}
MEDIUM = {"hidden_size": 1024, "num_layers": 8, "intermediate_size": 4096, "num_heads": 16, "num_kv_heads": 8}


def test_generators_keep_the_cache_that_they_were_started_with():
    """A trainer beside them would fit if theirs were smaller."""
    gpus = cluster("2 x 1xH200-141")
    base = replace(
        quickstart(),
        model=replace(quickstart().model, **BIG),
        trainer=TrainerConfig(layout=Layout(shard=2), hosts=(0, 1)),
        generator=GeneratorConfig(num_replicas=2),
        placement="side_by_side",
    )
    planned(base, gpus)
    alone = replace(base, trainer=replace(base.trainer, layout=Layout(), hosts=(0,)))
    planned(alone, gpus)
    (text,) = plan_or_problems(replace(base, trainer=replace(base.trainer, min_hosts=1)), "train", gpus)
    assert text.startswith("trainer.min_hosts: without host 0 GPU 0 of host 1 has ") and "short" in text


def test_processes_take_turns_after_a_loss_where_they_did_before():
    """Generators that stay were not started to leave their GPUs."""
    gpus = cluster("2 x 1xH200-141")
    auto = replace(
        quickstart(),
        model=replace(quickstart().model, **BIG),
        trainer=TrainerConfig(layout=Layout(shard=2), hosts=(0, 1), min_hosts=1),
        generator=GeneratorConfig(num_replicas=2),
    )
    (text,) = plan_or_problems(auto, "train", gpus)
    words = "trainer.min_hosts: without host 0 what is left fits by turns alone; set --placement by_turns"
    assert text == words
    asked = replace(auto, placement="by_turns")
    assert after(asked, 1, hosts=gpus) == (Layout(), [0])
    small = replace(auto, model=quickstart().model)  # which would not take turns by itself
    assert not planned(small, gpus).takes_turns
    by_turns = planned(replace(small, placement="by_turns"), gpus)
    (trainer,) = fallback_of(small, by_turns)((1,))
    assert trainer.spec.config.device_memory_gib > 0.9 * 139 * USABLE  # holds: meaning, nobody else is there


@pytest.mark.parametrize(("free_gib", "count"), [(9.0, 0), (8.5, 2)])
def test_every_loss_down_to_the_fewest_hosts_is_looked_at(free_gib, count):
    """Where two of three hosts may be lost, the third has to have the memory. count: of the lost, that do not fit."""
    hosts = Cluster(tuple(replace(host, free_gib=free_gib) for host in CPUS.hosts[:3]) + CPUS.hosts[3:])
    base = config(Layout(shard=3), (0, 1, 2), min_hosts=1)
    plan = plan_or_problems(replace(base, model=replace(base.model, **MEDIUM)), "train", hosts)
    assert isinstance(plan, Plan) if not count else "without host 0 1 the run needs" in plan[0], plan


def test_a_replay_has_neither_guests_nor_fallbacks():
    settings = replace(config(min_hosts=1, generators=(3, 4)), joining_hosts=1)
    settings = replace(settings, generator=replace(settings.generator, num_replicas=2))
    assert isinstance(plan_or_problems(settings, "train", CPUS), Plan)
    assert isinstance(plan_or_problems(settings, "replay", CPUS), Plan)


def test_engines_that_grow_have_room_beside_the_generators_that_stay_on_their_gpu(monkeypatch, tmp_path):
    """Which are not dealt out anew: the GPU of the lost host that they might have is lost, too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    trainer = TrainerConfig(
        layout=Layout(shard=2), micro_batch_tokens=8192, activation_checkpointing="full", min_hosts=1
    )
    settings = replace(
        qwen3_1_7b(),
        trainer=trainer,
        max_seq_len=4096,
        generator=GeneratorConfig(num_replicas=1, kv_cache_gib=40.0),
    )
    gpus = cluster("2 x 1xH100-80")
    (text,) = plan_or_problems(settings, "train", gpus)
    assert text.startswith(
        "trainer.min_hosts: without host 1 GPU 0:0 would need 81.8 of 72.5 GiB; give engines hosts"
    )
    less = replace(settings, generator=replace(settings.generator, kv_cache_gib=20.0))
    assert after(less, 1, hosts=gpus) == (Layout(), [0])


def test_processes_that_stay_and_engines_have_one_dtype_whatever_the_hosts_that_are_left_can():
    def run(*bfloat16, **trainer):
        hosts = Cluster(
            tuple(Host(8, 64.0, address=f"10.0.0.{i}:7000", bfloat16=can) for i, can in enumerate(bfloat16))
        )
        settings = replace(
            config(generators=(0,), **trainer), reward=RewardConfig(hosts=(0,)), dtype="fastest"
        )
        before = planned(settings, hosts).value_of("dtype")
        engines = fallback_of(settings, planned(settings, hosts))((1,))
        assert not isinstance(engines, str), engines
        return before, engines[0].spec.config.dtype

    assert run(True, False, min_hosts=1) == ("float32", "float32")
    assert run(True, True, False, spare_hosts=(2,)) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("role", ["generator", "reward", "torchstore"])
def test_the_plan_says_what_the_run_cannot_do_without_and_loses_with_a_host(role):
    settings, lost = config(generators=(3,), min_hosts=1), "1"
    if role == "torchstore":
        settings, lost = replace(settings, weight_sync=WeightSyncConfig(transport="torchstore")), "0"
        words = ", but torchstore's process is gone; set weight_sync.transport=shared_memory"
    else:
        section = {"generator": GeneratorConfig, "reward": RewardConfig}[role](hosts=(1,))
        settings = replace(settings, **{role: section})
        words = f", but no {role} process is left; set {role}.hosts to more hosts"
    told = {s.setting: s.value for s in planned(settings).settled}
    other = "1" if lost == "0" else "0"
    assert told[f"trainer without host {lost}"] == f"1 processes on hosts {other}{words}"
    assert told[f"trainer without host {other}"] == f"1 processes on hosts {lost}"


def test_an_evaluation_and_a_replay_start_on_one_host_whatever_min_hosts_is():
    settings = config(Layout(), (0,), min_hosts=1)
    assert not isinstance(plan_or_problems(settings, "train", CPUS), Plan)
    for command in ("eval", "replay"):
        assert isinstance(plan_or_problems(settings, command, CPUS), Plan)


def test_critic_and_reference_have_layouts_of_their_own_without_a_host():
    settings = replace(
        config(Layout(shard=4), min_hosts=1),
        advantages=GAE(),
        critic=CriticConfig(layout=Layout(shard=2), hosts=(0, 1)),
        kl=KL(coef=0.1),
        reference=ReferenceConfig(layout=Layout(replicate=2), hosts=(0, 1)),
    )
    engines = fallback_of(settings, planned(settings))((1,))
    assert not isinstance(engines, str), engines
    assert [(e.role, e.spec.config.layout, [p.host for p in e.processes]) for e in engines] == [
        ("trainer", Layout(shard=2), [0, 0]),
        ("critic", Layout(), [0]),
        ("reference", Layout(), [0]),
    ]


def test_as_many_spare_hosts_are_taken_as_were_lost():
    two = config(spare_hosts=(2, 3))
    assert planned(two).spare_hosts == (2, 3) and planned(config()).spare_hosts == ()
    assert after(two, 3) == (Layout(shard=2), [0, 1])  # the generator's
    assert after(two, 1) == (Layout(shard=2), [0, 2])
    assert after(two, 0, 1) == (Layout(shard=2), [2, 3])
    # Without min_hosts one spare host is for one loss.
    assert after(config(Layout(shard=3), (0, 1, 2), spare_hosts=(3,)), 1) == (Layout(shard=3), [0, 2, 3])


def test_a_spare_host_is_there_when_the_run_starts():
    text = "trainer.spare_hosts names host 4, which is not there; name one of --hosts"
    assert plan_or_problems(config(spare_hosts=(4,)), "train", CPUS) == [text]
    joining = replace(config(spare_hosts=(4,), generators=(3, 4)), joining_hosts=1)
    joining = replace(joining, generator=replace(joining.generator, num_replicas=2))
    assert plan_or_problems(joining, "train", CPUS) == [text]


def test_engines_that_lost_a_host_take_no_gpu_of_those_who_stay():
    """The generators might have others, had they been dealt out without it."""

    def devices(replicas):
        return {(p.host, gpu) for r in replicas for p in r.processes for gpu in p.gpus}

    settings = replace(
        quickstart(),
        trainer=TrainerConfig(layout=Layout(shard=2), hosts=(0, 1)),
        generator=GeneratorConfig(num_replicas=2, tensor_parallel=2, kv_cache_gib=1.0),
        advantages=GAE(),
        critic=CriticConfig(layout=Layout(shard=2), hosts=(0, 1)),
    )
    plan = planned(settings, cluster("2 x 4xH100-80"))
    goes_on = replace(settings, trainer=replace(settings.trainer, min_hosts=1))
    for lost in (0, 1):
        engines = fallback_of(goes_on, plan)((lost,))
        assert isinstance(engines, str) or not devices(engines) & devices(plan.of("generator"))
