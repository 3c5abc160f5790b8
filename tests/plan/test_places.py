"""Who is on which device, with how many threads."""

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.models.layout import Layout
from rl.plan.cluster import GPU, Cluster, Host
from rl.plan.demand import Demand, JudgeDemand
from rl.plan.places import deal_out, threads
from rl.plan.sections import GeneratorConfig, RewardConfig, TrainerConfig
from rl.plan.types import Notes


def host(num_cores=12, num_gpus=0) -> Host:
    return Host(num_cores, 1000.0, (GPU("H100", 78.8, (9, 0)),) * num_gpus)


def demand(
    trainer=1, generators=1, ranks=1, critic=0, reference=0, judges=0, rewards=1, **settings
) -> Demand:
    return Demand(
        command="train",
        trainer=TrainerConfig(layout=Layout(shard=trainer), num_threads=settings.pop("trainer_threads", 0)),
        generator=GeneratorConfig(num_replicas=generators, tensor_parallel=ranks) if generators else None,
        engines={
            role: Layout(shard=procs)
            for role, procs in (("critic", critic), ("reference", reference))
            if procs
        },
        judge=JudgeDemand(judges, 1, 512, 1.0) if judges else None,
        reward=RewardConfig(num_procs=rewards) if rewards else None,
        **settings,
    )


def settle(asked: Demand, *hosts: Host):
    """Role -> (host, GPU) of each process, and role -> threads of each; or the problems."""
    notes, cluster = Notes(), Cluster(hosts)
    places = deal_out(asked, cluster, notes)
    if places is None:
        return [problem.text for problem in notes.problems], {}
    counts = threads(places, asked, cluster, notes)
    devices: dict[str, list] = {}
    of_role: dict[str, list] = {}
    for member in places.started:
        devices.setdefault(member.role, []).extend((p.host, p.gpu) for p in places.by_name[member.name])
        of_role.setdefault(member.role, []).extend(counts[member.name])
    return devices, of_role


ALL = {"trainer": 2, "generators": 2, "critic": 1, "reference": 1, "rewards": 3}


def test_devices_are_dealt_out_in_order_and_rewards_get_none():
    devices, _ = settle(demand(**ALL), host(num_gpus=6))
    assert devices == {
        "trainer": [(0, 0), (0, 1)], "generator": [(0, 2), (0, 3)], "critic": [(0, 4)], "reference": [(0, 5)],
        "reward": [(0, None)] * 3,
    }  # fmt: skip


def test_those_that_work_at_the_same_time_share_the_cores():
    _, apart = settle(demand(**ALL), host())
    assert {role: counts[0] for role, counts in apart.items()} == {
        "trainer": 4, "generator": 6, "critic": 4, "reference": 3, "reward": 1,
    }  # fmt: skip
    _, at_once = settle(demand(**ALL, overlap=True), host())
    assert {role: counts[0] for role, counts in at_once.items()} == {
        "trainer": 2, "generator": 2, "critic": 2, "reference": 2, "reward": 1,
    }  # fmt: skip


def test_what_is_asked_for_is_given_and_nobody_has_no_thread():
    assert settle(demand(trainer_threads=5), host(2))[1]["trainer"] == [5]
    assert settle(demand(trainer=8), host(4, 8))[1]["trainer"] == [1] * 8


def test_cores_of_another_host_are_not_shared():
    _, counts = settle(demand(trainer=2, generators=2, overlap=True), host(16, 2), host(16, 2))
    assert counts["trainer"] == [8, 8]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_generator_s_ranks_are_on_one_host(ranks):
    devices, _ = settle(demand(trainer=3, generators=1, ranks=ranks), host(16, 4), host(16, 4))
    assert [place[0] for place in devices["trainer"]] == [0, 0, 0]
    assert devices["generator"] == [(1, gpu) for gpu in range(ranks)]


small = st.integers(1, 4)
some = st.integers(0, 4)


@given(small, some, some, some, some, st.integers(1, 40), st.booleans(), st.integers(4, 8), st.booleans())
def test_no_two_share_a_gpu_unless_told_to_and_threads_fit_the_cores(
    trainer, generators, critic, reference, judges, num_cores, overlap, num_gpus, shared
):
    sharing = "side_by_side" if shared else "auto"
    asked = demand(trainer, generators, 1, critic, reference, judges, overlap=overlap, sharing=sharing)
    devices, counts = settle(asked, Host(num_cores + 40, 1000.0, (GPU("H100", 78.8, (9, 0)),) * num_gpus))
    load = Counter(place for role, of in devices.items() if role != "reward" for place in of)
    assert max(load.values()) - min(load[0, gpu] for gpu in range(num_gpus)) <= 1
    assert {place[1] for place in load} <= set(range(num_gpus))
    if sum(load.values()) <= num_gpus:
        assert max(load.values()) == 1
    for role, of in devices.items():
        if role != "reward":
            assert len(set(of)) == min(len(of), num_gpus), role
    together = [["trainer", "critic", "generator"] if overlap else ["trainer", "critic"], ["judge"]]
    for group in together:
        at_work = [count for role in group for count in counts.get(role, [])]
        assert sum(at_work) <= max(num_cores + 40, len(at_work)), group


@pytest.mark.parametrize("hosts", [(2, 2), (3, 3), (1, 1, 1), (2, 4)])
@pytest.mark.parametrize("sharing", ["auto", "side_by_side", "alone"])
@pytest.mark.parametrize(("trainer", "ranks", "critic"), [(1, 2, 1), (2, 2, 0), (1, 1, 1), (3, 1, 0)])
def test_over_hosts_nobody_shares_unawares_and_a_generator_is_on_one(hosts, sharing, trainer, ranks, critic):
    there = [host(16, count) for count in hosts]
    notes = Notes()
    asked = demand(trainer, 2, ranks, critic, sharing=sharing)
    places = deal_out(asked, Cluster(tuple(there)), notes)
    if places is None:
        assert notes.problems
        return
    load = Counter(
        place for member in places.started if member.role != "reward" for place in places.by_name[member.name]
    )
    assert places.shared == (max(load.values()) > 1) or sharing == "side_by_side"
    assert sharing != "alone" or max(load.values()) == 1
    for member in places.started:
        of_member = places.by_name[member.name]
        assert len({*of_member}) == len(of_member) or member.role == "reward"
        if member.role == "generator":
            assert len({place.host for place in of_member}) == 1


def test_many_replicas_are_placed_in_no_time():
    """A remedy places all of them again and again."""
    asked = demand(generators=3000, sharing="side_by_side", overlap=True)
    began = time.process_time()
    devices, counts = settle(asked, *(host(64, 8) for _ in range(64)))
    assert len(devices["generator"]) == len(counts["generator"]) == 3000
    assert time.process_time() - began < 2  # holds: meaning, a walk over all for each takes minutes
