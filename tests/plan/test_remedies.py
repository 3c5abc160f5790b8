"""Remedies are tried from the mildest on, each once, and none asks for more than there is."""

# holds: exact

import re
from dataclasses import replace

import pytest

from rl.models.layout import Layout
from rl.plan.demand import Demand
from rl.plan.remedies import changes, last_remedy
from rl.plan.sections import GeneratorConfig, TrainerConfig
from rl.types import LoRA
from tests.plans import cluster

SELECTIVE = "set --trainer.activation_checkpointing selective"
FULL = "--trainer.activation_checkpointing full"
TRAINER = TrainerConfig(micro_batch_tokens=4096)
DEMAND = Demand("train", TRAINER, GeneratorConfig(), max_seq_len=4096, longest_answer=1024, sharing="alone")
ADAPTER = ["set --trainer.lora.rank 16", f"set --trainer.lora.rank 16 and {FULL}"]
FEWER = [
    f"set --trainer.micro_batch_tokens 2048 and {FULL}",
    f"set --max_seq_len 2048, --trainer.micro_batch_tokens 2048 and {FULL}",
]


def told(demand, gpus):
    return [words for words, _ in changes(demand, cluster(gpus))]


def trainer(**settings):
    return replace(DEMAND, trainer=replace(TRAINER, **settings))


def test_from_the_mildest_on():
    assert told(DEMAND, "1xH100-80") == [SELECTIVE, f"set {FULL}", *FEWER, *ADAPTER]


def test_experts_have_adapters_at_their_attention_alone():
    (adapter,) = [
        changed.trainer.lora
        for words, changed in changes(DEMAND, cluster("1xH100-80"), has_experts=True)
        if words == "set --trainer.lora.rank 16, --trainer.lora.targets q_proj k_proj v_proj o_proj"
    ]
    assert adapter == LoRA(rank=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))


def test_where_nothing_is_learned_nothing_is_computed_again():
    demand = replace(DEMAND, learns=False, command="eval")
    assert told(demand, "2xH100-80") == ["set --trainer.layout.shard 2", "set --generator.tensor_parallel 2"]


def test_a_checkpoint_of_the_whole_model_has_no_adapter():
    assert told(replace(DEMAND, from_checkpoint=True), "1xH100-80") == [SELECTIVE, f"set {FULL}", *FEWER]


def test_more_devices_are_those_that_there_are():
    two = ["set --trainer.layout.shard 2", f"set --trainer.layout.shard 2 and {FULL}"]
    four = ["set --trainer.layout.shard 4", f"set --trainer.layout.shard 4 and {FULL}"]
    ranks = [f"set --generator.tensor_parallel {n}" for n in (2, 4)]
    first = [SELECTIVE, f"set {FULL}", *FEWER]
    assert told(DEMAND, "2xH100-80") == [*first, *two, ranks[0], *ADAPTER]
    assert told(DEMAND, "3xH100-80") == [*first, *two, ranks[0], *ADAPTER]
    assert told(DEMAND, "4xH100-80") == [*first, *two, *four, *ranks, *ADAPTER]
    assert told(trainer(layout=Layout(shard=2)), "4xH100-80") == [*first, *four, *ranks, *ADAPTER]
    split = replace(DEMAND, generator=GeneratorConfig(tensor_parallel=2))
    assert told(split, "4xH100-80") == [*first, *two, *four, ranks[1], *ADAPTER]
    assert told(replace(DEMAND, generator=None), "2xH100-80") == [*first, *two, *ADAPTER]


@pytest.mark.parametrize(
    "checkpointing, first",
    [("none", [SELECTIVE, f"set {FULL}"]), ("selective", [f"set {FULL}"]), ("full", [])],
)
def test_what_is_set_already_is_no_remedy(checkpointing, first):
    demand = trainer(activation_checkpointing=checkpointing)
    assert told(demand, "1xH100-80") == [*first, *FEWER, *ADAPTER]
    with_adapter = replace(demand, trainer=replace(demand.trainer, lora=LoRA(rank=8)))
    assert told(with_adapter, "1xH100-80") == [*first, *FEWER]


def test_sequences_are_cut_only_where_micro_batches_are_shorter():
    wide = trainer(micro_batch_tokens=16384)
    steps = [f"set --trainer.micro_batch_tokens {n} and {FULL}" for n in (8192, 4096)]
    assert told(wide, "1xH100-80") == [SELECTIVE, f"set {FULL}", *steps, *FEWER, *ADAPTER]
    # Twice the longest answer is the least, or the longest sequence where that is shorter.
    long = replace(wide, longest_answer=3000)
    assert told(long, "1xH100-80") == [SELECTIVE, f"set {FULL}", *steps, *ADAPTER]
    for words, changed in changes(wide, cluster("1xH100-80")):
        assert changed.max_seq_len == (2048 if "max_seq_len" in words else 4096)
        if "micro_batch" in words:
            assert changed.trainer.activation_checkpointing == "full"


def test_a_cache_that_is_asked_for_is_halved_down_to_a_tenth_of_a_gib():
    demand = replace(DEMAND, generator=GeneratorConfig(kv_cache_gib=1.5))
    sizes = ["0.75", "0.37", "0.18", "0.093"]
    assert told(demand, "1xH100-80")[:5] == [
        *(f"set --generator.kv_cache_gib {size}" for size in sizes),
        SELECTIVE,
    ]
    caches = [d.generator.kv_cache_gib for w, d in changes(demand, cluster("1xH100-80")) if "kv_" in w]
    assert caches == [float(size) for size in sizes]


@pytest.mark.parametrize(
    "sharing, overlap, switches, device, is_told",
    [
        ("side_by_side", False, True, "gpu", True),
        ("side_by_side", True, True, "gpu", False),
        ("side_by_side", False, False, "gpu", False),  # as in a replay
        ("auto", False, True, "gpu", False),  # which takes turns by itself where it is full
        ("by_turns", False, True, "gpu", False),
        ("alone", False, True, "gpu", False),
        ("auto", False, True, "cpu", True),
    ],
)
def test_turns_are_a_remedy_where_everyone_stays(sharing, overlap, switches, device, is_told):
    demand = replace(DEMAND, sharing=sharing, overlap=overlap, switches=switches)
    machine = cluster("1xH100-80")
    told_first = next(w for w, _ in changes(demand, replace_gpus(machine) if device == "cpu" else machine))
    assert (told_first == "set --placement by_turns") is is_told


def replace_gpus(cluster):
    """The same hosts without GPUs."""
    return replace(cluster, hosts=tuple(replace(host, gpus=()) for host in cluster.hosts))


@pytest.mark.parametrize(
    "command, gpus, cache, words",
    [
        ("train", True, 0.0, "use a smaller model, more GPUs, or hosts with more memory"),
        ("train", False, 2.0, "use a smaller model, or more memory"),
        ("serve", True, 0.0, "use a smaller model, context_length, limits.max_rank or limits.max_models, or more GPUs"),
        ("serve", False, 2.0, "lower kv_cache_gib, or use a smaller model, context_length, limits.max_rank or limits.max_models, or more memory"),
    ],
)  # fmt: skip
def test_where_none_is_enough(command, gpus, cache, words):
    demand = replace(DEMAND, command=command, generator=GeneratorConfig(kv_cache_gib=cache))
    machine = cluster("1xH100-80")
    assert last_remedy(demand, machine if gpus else replace_gpus(machine)) == words


def test_a_server_has_its_own_remedy_alone():
    assert told(replace(DEMAND, command="serve"), "8xH100-80") == []


def test_each_remedy_changes_what_it_says_and_nothing_else():
    def settings(demand):
        trainer, generator = demand.trainer, demand.generator
        return {
            "placement": demand.sharing,
            "max_seq_len": f"{demand.max_seq_len}",
            "generator.kv_cache_gib": f"{generator.kv_cache_gib:g}",
            "generator.tensor_parallel": f"{generator.tensor_parallel}",
            "trainer.activation_checkpointing": trainer.activation_checkpointing,
            "trainer.micro_batch_tokens": f"{trainer.micro_batch_tokens}",
            "trainer.layout.shard": f"{trainer.layout.shard}",
            "trainer.lora.rank": f"{trainer.lora.rank}",
        }

    generator = GeneratorConfig(kv_cache_gib=1.0)
    demand = replace(DEMAND, generator=generator, sharing="side_by_side", switches=True)
    seen = set()
    for words, changed in changes(demand, cluster("4xH100-80")):
        flags = dict(re.findall(r"--(\S+) ([\w.]+)", words))
        assert settings(changed) == settings(demand) | flags, words
        assert "reference" not in changed.engines and not changed.reference_is_adapter
        seen |= flags.keys()
    assert seen == settings(demand).keys()
