"""When what changed goes from host to host in the place of whole weights."""

import json
from dataclasses import replace

import pytest

from configs.quickstart import quickstart
from rl.config import GeneratorConfig, TrainerConfig, WeightSyncConfig
from rl.config.settle import plan_or_problems
from rl.models.known_shapes import known_config
from rl.models.layout import Layout
from rl.models.sources import ModelDir
from rl.plan.cluster import Cluster, Host
from rl.plan.types import Plan
from rl.types import LoRA
from rl.waiting import Deadlines

ADDRESSES = [f"10.0.0.{i}:7000" for i in range(3)]


def linked(*rates, cores=4):
    """Hosts, each with what comes from the first in GB/s."""
    return Cluster(
        tuple(Host(cores, 64.0, address=ADDRESSES[i], gb_per_s=rate) for i, rate in enumerate(rates))
    )


def config(
    delta="auto", dtype="bfloat16", transport="shared_memory", on=(1,), shard=1, trainer_on=(0,), rank=0
):
    return replace(
        quickstart(),
        dtype=dtype,
        trainer=TrainerConfig(layout=Layout(shard=shard), hosts=trainer_on, lora=LoRA(rank=rank)),
        generator=GeneratorConfig(num_replicas=len(on), hosts=on),
        weight_sync=WeightSyncConfig(transport=transport, delta=delta),
    )


def settled(plan):
    assert isinstance(plan, Plan), plan
    return plan.delta, [(s.asked, s.value, s.why) for s in plan.settled if s.setting == "weight_sync.delta"]


SLOW, FAST, CORES = 0.1, 2.4, "differences are made at 2.4"
CASES = {
    "slow": (config(), linked(None, SLOW), True, "the slowest link carries 0.1 GB/s, and " + CORES),
    "as fast": (config(), linked(None, FAST), False, "the slowest link carries 2.4 GB/s, and " + CORES),
    "one of two": (config(on=(1, 2)), linked(None, 9.0, SLOW), True, "the slowest link carries 0.1 GB/s"),
    "a slow link to a host without weights": (config(), linked(None, 9.0, SLOW), False, "the slowest link carries 9 GB/s"),
    "few cores": (config(), linked(None, 1.0, cores=1), False, "differences are made at 0.6"),
    "many cores": (config(), linked(None, 1.5, cores=64), True, CORES),
    "not measured": (config(), linked(None, None), False, "the links were not measured"),
    "asked for": (config("on"), linked(None, 99.0), True, "asked for"),
    "not asked for": (config("off"), linked(None, SLOW), False, "asked for"),
    "shards of another host": (config(on=(0,), shard=2, trainer_on=(0, 1)), linked(None, SLOW), True, "slowest"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_difference_goes_over_a_slow_link(case):
    settings, hosts, expected, why = CASES[case]
    delta, ((asked, value, reason),) = settled(plan_or_problems(settings, "train", hosts))
    assert delta == expected and value == ("on" if expected else "off") and why in reason
    assert asked == settings.weight_sync.delta


NONE = {
    "one host": (config(on=(0,)), "no generator reads weights of another host"),
    "float32": (config(dtype="float32"), "with dtype=float32 nearly every value changes in a step"),
    "an adapter": (config(rank=4), "an adapter is sent whole"),
    "torchstore": (config(transport="torchstore"), "weight_sync.transport=torchstore sends whole weights"),
}


@pytest.mark.parametrize("case", NONE)
def test_where_none_can_go_it_is_off_and_cannot_be_asked_for(case):
    settings, why = NONE[case]
    hosts = linked(None, SLOW)
    assert settled(plan_or_problems(settings, "train", hosts)) == (False, [("auto", "off", why)])
    asked = replace(settings, weight_sync=replace(settings.weight_sync, delta="on"))
    assert plan_or_problems(asked, "train", hosts) == [
        f"weight_sync.delta=on has no effect: {why}; leave it out"
    ]


def test_what_else_takes_a_runs_setting_is_not_refused():
    """An evaluation on fewer hosts, a replay, which has no generator, and engines that lost a host."""
    why = "no generator reads weights of another host"
    for command, rows in {"eval": [("on", "off", why)], "replay": []}.items():
        assert settled(plan_or_problems(config("on", on=(0,)), command, linked(None, SLOW))) == (False, rows)
    both = config("on", on=(1,), shard=2, trainer_on=(0, 1))
    both = replace(both, trainer=replace(both.trainer, min_hosts=1))
    assert settled(plan_or_problems(both, "train", linked(None, SLOW)))[0]


def big(tmp_path, on=(1, 2), seconds=600.0, **changes):
    """8 billion parameters in bfloat16: 16 GB."""
    (tmp_path / "config.json").write_text(json.dumps(known_config("Qwen/Qwen3-8B")))
    made = replace(config(on=on, **changes), model=ModelDir(str(tmp_path)), deadlines=Deadlines(load=seconds))
    return replace(made, generator=replace(made.generator, kv_cache_gib=4.0), max_seq_len=2048)


def wide(*rates):
    """Hosts with much memory."""
    return Cluster(tuple(replace(host, num_cores=64, free_gib=900.0) for host in linked(*rates).hosts))


@pytest.mark.parametrize("command", ["train", "eval"])
def test_weights_that_do_not_come_in_time_are_found_before_a_run_starts(command, tmp_path):
    """16.4 GB to two hosts at 0.05 GB/s: 655 s. It was killed at the deadline, again and again."""
    (line,) = plan_or_problems(big(tmp_path), command, wide(None, 0.05, 9.0))
    assert line == (
        "weights of 15.3 GiB take about 655 s to 2 hosts at once, over links of 0.05 GB/s, and deadlines.load is 600 s; "
        "set --deadlines.load 1320, or put fewer generators on other hosts"
    )
    (line,) = plan_or_problems(big(tmp_path, on=(1,)), command, wide(None, 0.02, 9.0))
    assert "about 819 s to host 1, over links of 0.02 GB/s" in line
    for settings, hosts in (
        (big(tmp_path, seconds=1320.0), wide(None, 0.05, 9.0)),
        (big(tmp_path, on=(1,)), wide(None, 0.05, 9.0)),  # one copy enters a host
        (big(tmp_path, shard=2, trainer_on=(0, 2), on=(1,)), wide(None, 0.02, 9.0)),  # half from each
        (big(tmp_path, on=(0,)), wide(None, 0.01, 9.0)),
        (big(tmp_path, transport="torchstore"), wide(None, 0.05, 9.0)),
        (big(tmp_path), wide(None, None, None)),
    ):
        assert isinstance(plan_or_problems(settings, command, hosts), Plan)
