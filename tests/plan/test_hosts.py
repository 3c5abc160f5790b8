"""On which hosts roles are, and what is refused."""

from dataclasses import replace

import pytest

from configs.quickstart import quickstart
from rl.config import CriticConfig, GeneratorConfig, RewardConfig, TrainerConfig
from rl.config.settle import plan_or_problems
from rl.loss.advantages.gae import GAE
from rl.models.layout import Layout
from rl.plan.cluster import GPU, Cluster, Host
from rl.plan.show import show
from rl.plan.types import Plan
from tests.plans import cluster

CPUS = Cluster(tuple(Host(8, 64.0, address=f"10.0.0.{i}:7000") for i in range(3)))
GPUS = cluster("3 x 4xH100-80")


def config(shard=1, replicas=1, workers=1, tensor_parallel=1, **hosts):
    of = {role: hosts.get(role, ()) for role in ("trainer", "generator", "reward")}
    return replace(
        quickstart(),
        model=replace(quickstart().model, num_heads=4, num_kv_heads=4),
        trainer=TrainerConfig(layout=Layout(shard=shard), hosts=of["trainer"]),
        generator=GeneratorConfig(
            num_replicas=replicas, tensor_parallel=tensor_parallel, hosts=of["generator"]
        ),
        reward=RewardConfig(num_procs=workers, hosts=of["reward"]),
    )


def places(settings, hosts):
    """Role -> (host, GPU) of each process."""
    plan = plan_or_problems(settings, "train", hosts)
    assert isinstance(plan, Plan), plan
    return {
        role: [(p.host, *p.gpus) for replica in plan.of(role) for p in replica.processes]
        for role in ("trainer", "generator", "reward")
    }


def on(*hosts):
    return [(host,) for host in hosts]


def problem(settings, hosts):
    (text,) = plan_or_problems(settings, "train", hosts)
    return text


def test_on_cpus_engines_are_on_the_first_host_and_the_others_elsewhere():
    assert places(config(shard=2, replicas=3, workers=2), CPUS) == {
        "trainer": on(0, 0), "generator": on(1, 2, 1), "reward": on(1, 2)
    }  # fmt: skip
    one = Cluster(CPUS.hosts[:1])
    assert places(config(replicas=2), one) == {"trainer": on(0), "generator": on(0, 0), "reward": on(0)}


def test_roles_are_on_the_hosts_that_are_named_in_their_order():
    settings = config(shard=4, replicas=2, workers=3, trainer=(2, 0), generator=(0,), reward=(1, 2))
    assert places(settings, CPUS) == {
        "trainer": on(2, 2, 0, 0), "generator": on(0, 0), "reward": on(1, 2, 1)
    }  # fmt: skip
    with_gpus = places(settings, GPUS)
    assert with_gpus["reward"] == on(1, 2, 1)


def test_gpus_of_named_hosts_are_dealt_out_once():
    settings = config(shard=4, replicas=4, trainer=(1,), generator=(0, 2))
    found = places(settings, GPUS)
    assert found["trainer"] == [(1, gpu) for gpu in range(4)]
    assert found["generator"] == [(0, 0), (2, 0), (0, 1), (2, 1)]
    # Those who may be anywhere leave out what is taken.
    found = places(config(shard=4, replicas=8, trainer=(1,)), GPUS)
    assert len({*found["trainer"], *found["generator"]}) == 12
    # Roles on the same hosts share, where GPUs are too few.
    found = places(config(shard=4, replicas=2, trainer=(1,), generator=(1,)), GPUS)
    assert found["generator"] == [(1, 0), (1, 1)]


def test_on_gpus_named_hosts_have_as_many_ranks_and_replicas_each():
    settings = config(shard=4, replicas=3, trainer=(2, 0), generator=(0, 2))
    found = places(settings, GPUS)
    assert found["trainer"] == [(2, 0), (2, 1), (0, 0), (0, 1)]
    assert found["generator"] == [(0, 2), (2, 2), (0, 3)]
    # A host that is full is passed over.
    assert places(config(shard=4, replicas=5, trainer=(2, 0), generator=(0, 1)), GPUS)["generator"] == [
        (0, 2), (1, 0), (0, 3), (1, 1), (1, 2)
    ]  # fmt: skip
    # So is a host on which the ranks of one would not meet.
    settings = config(shard=4, replicas=2, tensor_parallel=4, trainer=(0, 1), generator=(2, 0))
    settings = replace(settings, generator=replace(settings.generator, num_replicas=1))
    assert problem(settings, GPUS).startswith("generator.hosts names host 0, and none of the generator's 4 ")


def test_replicas_share_a_gpu_only_where_all_of_their_hosts_have_been_dealt_out():
    uneven = Cluster((cluster("1xH100-80").hosts[0], GPUS.hosts[1]))
    found = places(config(replicas=5, trainer=(1,), generator=(0, 1)), uneven)
    assert found["trainer"] == [(1, 0)]
    assert sorted(found["generator"]) == [(0, 0), (0, 0), (1, 1), (1, 2), (1, 3)]


def test_ranks_that_do_not_meet_are_named_where_the_gpus_would_be_enough():
    settings = config(shard=2, replicas=3, tensor_parallel=2, trainer=(0, 1), generator=(0, 1))
    two = Cluster(GPUS.hosts[:2])
    text = problem(replace(settings, placement="alone"), two)
    assert "the 2 hosts have 8, not all of them where a role's ranks meet, or on its hosts; use fewer" in text


def test_the_ranks_of_an_engine_on_a_host_follow_each_other():
    """Where the critic begins amid the GPUs, and again on the first host. Monarch numbers ranks host by host."""
    settings = config(shard=16, replicas=1, tensor_parallel=4)
    settings = replace(settings, advantages=GAE(), critic=CriticConfig(layout=Layout(shard=16)))
    plan = plan_or_problems(settings, "train", cluster("2 x 8xH100-80"))
    assert isinstance(plan, Plan), plan
    (critic,) = plan.of("critic")
    hosts = [process.host for process in critic.processes]
    assert hosts == sorted(hosts) and len({(p.host, *p.gpus) for p in critic.processes}) == 16


def test_an_engine_whose_hosts_are_named_can_lose_one():
    settings = config(shard=4, trainer=(0, 1))
    settings = replace(settings, trainer=replace(settings.trainer, min_hosts=1))
    plan = plan_or_problems(settings, "train", cluster("2 x 8xH100-80"))
    assert isinstance(plan, Plan), plan
    told = {s.setting: s.value for s in plan.settled}
    assert told["trainer without host 1"] == "2 processes on hosts 0"
    assert told["trainer without host 0"].startswith(
        "2 processes on hosts 1, but no generator process is left"
    )


def test_a_generators_ranks_are_on_one_host():
    found = places(config(shard=1, replicas=2, tensor_parallel=2), cluster("3 x 2xH100-80"))
    assert found["trainer"] == [(0, 0)] and found["generator"] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_threads_are_of_the_hosts_own_cores():
    plan = plan_or_problems(config(shard=2, trainer=(0, 1), generator=(1,)), "train", CPUS)
    assert [process.threads for process in plan.of("trainer")[0].processes] == [8, 8]
    uneven = Cluster((replace(CPUS.hosts[0], num_cores=2), CPUS.hosts[1]))
    plan = plan_or_problems(config(shard=2, trainer=(0, 1), generator=(1,)), "train", uneven)
    assert [process.threads for process in plan.of("trainer")[0].processes] == [2, 8]


def joined_by(settings, count):
    return replace(settings, joining_hosts=count)


def test_generators_alone_are_on_hosts_that_may_join():
    two = Cluster(CPUS.hosts[:2])
    found = places(joined_by(config(shard=2, replicas=3, workers=3), 2), two)
    assert found == {"trainer": on(0, 0), "generator": on(1, 2, 3), "reward": on(1, 1, 1)}
    one = Cluster(CPUS.hosts[:1])
    assert places(joined_by(config(replicas=2), 1), one)["generator"] == on(0, 1)
    assert places(joined_by(config(replicas=4, generator=(0, 1, 2)), 2), one)["generator"] == on(0, 1, 2, 0)
    with_gpus = places(joined_by(config(shard=4, replicas=6), 1), Cluster(GPUS.hosts[:2]))
    assert with_gpus["generator"] == [*[(1, gpu) for gpu in range(4)], (2, 0), (2, 1)]
    plan = plan_or_problems(joined_by(config(replicas=2), 1), "train", two)
    assert [line for line in show("quickstart", plan) if line.startswith("host 2 (may join): ")]


REFUSED = {
    "hosts that join without use": (
        joined_by(config(replicas=2), 2), CPUS,
        "joining_hosts=2: no generator is on host 3; raise generator.num_replicas, or name it with --generator.hosts",
    ),
    "generators on hosts that join alone": (
        joined_by(config(generator=(3,)), 1), CPUS,
        "joining_hosts=1: every generator is on a host that may join; --generator.hosts has to name another",
    ),
    "a trainer on a host that joins": (
        joined_by(config(replicas=4, trainer=(3,)), 1), CPUS,
        "trainer.hosts names host 3, which may join later; name another: only generators may be there",
    ),
    "hosts that join, and turns": (
        replace(joined_by(config(replicas=4), 1), placement="by_turns"), CPUS,
        "joining_hosts=1 has no effect with placement=by_turns; leave out one of them",
    ),
    "a host that is not there": (config(trainer=(3,)), CPUS, "trainer.hosts names host 3; the 3 hosts are 0 to 2"),
    "on one host": (config(trainer=(1,)), Cluster(CPUS.hosts[:1]), "trainer.hosts names host 1; the only host is 0"),
    "twice": (config(reward=(1, 1)), CPUS, "reward.hosts names a host twice; the 3 hosts are 0 to 2"),
    "uneven": (
        config(shard=3, trainer=(0, 1)), CPUS,
        "trainer has 3 processes, 1 on host 0, 2 on host 1: each of its hosts has to have as many; use another "
        "layout, or name its hosts with --trainer.hosts",
    ),
    "uneven GPUs": (
        config(shard=6), GPUS,
        "trainer has 6 processes, 4 on host 0, 2 on host 1: each of its hosts has to have as many; use another "
        "layout, or name its hosts with --trainer.hosts",
    ),
    "hosts that nobody is on": (
        config(shard=2, trainer=(0, 1, 2)), CPUS,
        "trainer.hosts names host 2, and none of the trainer's 2 processes is there; leave it out, or raise "
        "trainer.layout",
    ),
    "hosts that no replica is on": (
        config(replicas=1, generator=(1, 2)), GPUS,
        "generator.hosts names host 2, and none of the generator's 1 process is there; leave it out, or raise "
        "generator.num_replicas",
    ),
    "too few GPUs on one": (
        config(shard=6, trainer=(0, 1)), Cluster((GPUS.hosts[0], cluster("2xH100-80").hosts[0])),
        "trainer has 3 of its 6 processes on host 1, which has 2 GPUs: those of one role cannot share; use fewer, "
        "or name other hosts with --trainer.hosts",
    ),
    "too few GPUs there": (
        config(shard=8, trainer=(1,)), GPUS,
        "trainer has 8 processes and host 1 4 GPUs: those of one role cannot share; use fewer",
    ),
    "too few GPUs on two": (
        config(shard=16, trainer=(0, 1)), GPUS,
        "trainer has 16 processes and 2 hosts 8 GPUs: those of one role cannot share; use fewer",
    ),
    "a generator over hosts": (
        config(tensor_parallel=4), cluster("3 x 2xH100-80"),
        "generator has 4 processes and a host 2 GPUs: those of one role cannot share; use fewer",
    ),
    "memory of one": (
        config(), Cluster((CPUS.hosts[0], replace(CPUS.hosts[1], free_gib=1.01))),
        "the run needs about 1.1 GiB on host 1 (10.0.0.1:7000) (generator 1.1) but 1.0 are free, 0.1 GiB short; use a "
        "smaller model, or more memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_line_with_its_remedy(case):
    settings, hosts, text = REFUSED[case]
    assert problem(settings, hosts) == text


def test_a_plan_over_hosts_is_shown_by_host():
    plan = plan_or_problems(config(replicas=2), "train", CPUS)
    lines = show("quickstart", plan)
    assert lines[0].startswith("quickstart on 3 hosts, each 8 cores with 64 GiB free, float32")
    of_hosts = [line for line in lines if line.startswith("host ")]
    assert [line.partition(":")[0] for line in of_hosts] == [f"host {i} (10.0.0.{i}" for i in range(3)]
    assert any(line.split()[:3] == ["generator", "2", "1:CPU,2:CPU"] for line in lines)
    assert any(line.split()[:3] == ["generator.hosts", "1", "2"] for line in lines)


def test_hosts_of_several_kinds_are_named_with_their_number():
    mixed = Cluster((Host(4, 8.0), Host(8, 16.0), Host(8, 16.0)))
    assert str(mixed) == "3 hosts: 1 with 4 cores with 8 GiB free, 2 with 8 cores with 16 GiB free"


def test_a_host_that_may_join_is_taken_to_be_as_the_last_with_its_own_names():
    def gpus(*names):
        return tuple(GPU("H100", 78.8, (9, 0), name) for name in names)

    of_both = {"gb_per_s": 2.0, "shared_gib": 64.0, "bfloat16": True}
    last = Host(16, 128.0, gpus("GPU-a", "GPU-b"), address="10.0.0.1:7000", machine="m", **of_both)
    joins = Host(16, 128.0, gpus("0", "1"), may_join=True, **of_both)
    hosts = Cluster((CPUS.hosts[0], last)).with_joining(2)
    assert hosts.hosts == (CPUS.hosts[0], last, joins, joins)
    assert str(hosts) == (
        "4 hosts: 1 with 8 cores with 64 GiB free, 1 with 2 x H100 of 78.8 GiB, "
        "2 with 2 x H100 of 78.8 GiB that may join"
    )


def test_a_generators_ranks_are_on_a_host_that_has_so_many_gpus():
    uneven = Cluster((cluster("2xH100-80").hosts[0], GPUS.hosts[1]))
    placed = places(config(tensor_parallel=4), uneven)
    assert placed["trainer"] == [(0, 0)] and placed["generator"] == [(1, gpu) for gpu in range(4)]


def test_a_plan_over_hosts_says_on_which_each_replica_is():
    two, one = (plan_or_problems(config(replicas=2), "train", Cluster(CPUS.hosts[:n])) for n in (2, 1))
    assert two.hosts == {"trainer": {0}, "generator-0": {1}, "generator-1": {1}, "reward-0": {1}}
    assert one.hosts == {}
