"""Stand-in machines: which settings follow from them, what fits on them, and what is refused with which figures."""

# holds: exact, sums of whole bytes in float64

import asyncio
import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from configs import gpu
from configs.quickstart import quickstart
from configs.smollm2 import smollm2
from rl.config import (
    CriticConfig,
    GeneratorConfig,
    JudgeConfig,
    ReferenceConfig,
    RewardConfig,
    RunConfig,
    TrainerConfig,
    WeightSyncConfig,
)
from rl.config.settle import NOT_STARTED, demand_of, facts_of, settle, why_no_plan
from rl.controller import evaluate, replay
from rl.controller.plan import plan
from rl.errors import ConfigError, RunError
from rl.loss.advantages.gae import GAE
from rl.loss.kl import KL
from rl.models.generator.vllm_config import LORA_RANKS, Fill
from rl.models.known_shapes import known_config
from rl.models.layout import Layout
from rl.models.sources import ModelDir
from rl.plan.cluster import GPU, USABLE, Cluster, Host, parse_cluster
from rl.plan.demand import ModelFacts
from rl.plan.model_shape import ModelShape
from rl.plan.remedies import changes as changes_of
from rl.plan.resolve import resolve
from rl.plan.roles import ENGINE_ROLES
from rl.plan.shapes import why_not_sampled_by
from rl.plan.show import show
from rl.plan.types import Plan
from rl.tinker.serve import ServeConfig
from rl.tinker.serve import settle as settle_server
from rl.types import LoRA
from tests.plans import cluster
from tests.traced_memory import traced_memory

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936, "num_key_value_heads": 8, "tie_word_embeddings": True,
    "num_hidden_layers": 28, "num_attention_heads": 16,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5, "vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {
    "qwen3-0.6b": QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144},
    "qwen3-30b-a3b": QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "llama-3.1-8b": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-3.1-70b": LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}  # fmt: skip
# Those of their model cards and safetensors' headers.
NUM_PARAMETERS = {
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
}  # fmt: skip
RECIPES = {
    "qwen3_0_6b": ("qwen3-0.6b", "1xH100-80"),
    "qwen3_1_7b": ("qwen3-1.7b", "4xA100-80"),
    "llama_3_1_8b_lora": ("llama-3.1-8b", "4xH100-80"),
    "qwen3_30b_a3b_lora": ("qwen3-30b-a3b", "8xH100-80"),
}
GIB = 2**30
GPU_DOCS = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()


@pytest.fixture
def model(tmp_path):
    """A directory with a config.json alone."""

    def make(name):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIGS[name]))
        return ModelDir(str(tmp_path / name))

    return make


def plan_or_problems(config: RunConfig, hosts: Cluster | str) -> Plan | list[str]:
    hosts = cluster(hosts) if isinstance(hosts, str) else hosts
    demand = demand_of(config, "train")
    made = resolve(demand, facts_of(config, demand), hosts)
    return made if isinstance(made, Plan) else [problem.text for problem in made]


def problems(config: RunConfig, hosts: Cluster | str) -> list[str]:
    made = plan_or_problems(config, hosts)
    return [] if isinstance(made, Plan) else made


HUGE = Cluster((Host(64, 4000.0, (GPU("H100", 4000.0, (9, 0)),) * 16),))


def memory(config: RunConfig, hosts: Cluster, role: str = "trainer") -> dict[str, float]:
    (process, *_) = settle(config, cluster=hosts).of(role)[0].processes
    return dict(process.memory["train"].parts) | {"total": process.peak}


def where(made: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """Who is on which GPU."""
    return [
        (replica.name, process.gpus)
        for replica in made.replicas
        for process in replica.processes
        if process.gpus
    ]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(shard=4), Layout(shard=2, tensor_parallel=4), Layout(replicate=2)]
)
def test_states_of_the_trainer_are_what_arithmetic_says(model, name, layout):
    config = dataclasses.replace(smollm2(), model=model(name), trainer=TrainerConfig(layout=layout))
    config = dataclasses.replace(config, max_seq_len=64)
    found = memory(config, HUGE)
    by_hand = NUM_PARAMETERS[name] / (layout.shard * layout.tensor_parallel)
    assert found["weights"] == pytest.approx(4 * by_hand, rel=0.01)
    assert found["gradients"] == pytest.approx(4 * by_hand, rel=0.01)
    assert found["optimizer"] == pytest.approx(8 * by_hand, rel=0.01)
    generated = memory(config, HUGE, "generator")
    assert generated["weights"] == pytest.approx(2 * NUM_PARAMETERS[name], rel=0.01)


def test_the_parameters_counted_are_those_that_torchtitan_makes(tmp_path):
    import torch

    from rl.models.decoder_config import model_spec

    for name in ("qwen3-0.6b", "qwen3-30b-a3b", "llama-3.1-70b"):
        hf = CONFIGS[name] | ({"rope_scaling": None} if "llama" in name else {})
        with torch.device("meta"):
            built = model_spec(dict(hf), packed_attention=True).model.build()
        count = sum(p.numel() for p in built.parameters())
        assert ModelShape.of(hf).num_parameters == count == NUM_PARAMETERS[name]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_fit_where_they_say(model, recipe, capsys):
    name, machine = RECIPES[recipe]
    config = dataclasses.replace(getattr(gpu, recipe)(), model=model(name))
    assert problems(config, machine) == []
    assert plan([recipe, "--model.path", config.model.path, "--cluster", machine]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("it fits\n") and "weight sync:" in printed
    made = settle(config, cluster=cluster(machine))
    caches = {"generator": made.of("generator")[0].spec.config.kv_cache_gib}
    totals = {role: made.of(role)[0].processes[0].peak / GIB for role in ("trainer", "generator")}
    if isinstance(caches["generator"], Fill):  # what vLLM takes beside is the page's own column
        totals["generator"] -= caches["generator"].expected_gib
    (row,) = [line for line in GPU_DOCS.splitlines() if line.startswith(f"| `{recipe}` ")]
    of_page = [float(cell.split()[0].rstrip(",")) for cell in row.strip("| ").split("|")[2:]]
    assert of_page == pytest.approx([totals["trainer"], totals["generator"]], abs=0.05 + 1e-9)
    assert (
        plan([recipe, "--model.path", config.model.path, "--cluster", "1xA10-24"]) == 1
        or recipe == "qwen3_0_6b"
    )


def qwen(make, **changes) -> RunConfig:
    """SmolLM2's recipe with Qwen3-0.6B, and nothing set that follows from the device."""
    unset = {"model": make("qwen3-0.6b"), "dtype": "auto", "generator": GeneratorConfig()}
    return dataclasses.replace(smollm2(), **(unset | changes))


# (machine, changes to SmolLM2's recipe with Qwen3-0.6B, what the refusal says)
REFUSED = [
    ("1xL4-24", {"trainer": TrainerConfig()}, "GPU 0 has 21.7 GiB for processes that need about"),
    ("1xL4-24", {"trainer": TrainerConfig()}, "set --trainer.activation_checkpointing selective"),
    ("1xH100-80", {"placement": "alone"}, "2 processes (trainer 1 + generator 1) need a GPU each but the machine has 1"),
    ("1xH100-80", {"max_seq_len": 4096, "trainer": TrainerConfig(micro_batch_tokens=2048)}, "trainer.micro_batch_tokens=2048 holds no sequence of 4096 tokens; raise it, or lower max_seq_len"),
    ("1xH100-80", {"trainer": TrainerConfig(), "max_seq_len": 8192, "generator": GeneratorConfig(kv_cache_gib=0.1)}, "is less than one sequence of 8192 tokens takes, 0.88 GiB"),
    ("1xH100-80", {"trainer": TrainerConfig(layout=Layout(shard=2))}, "trainer has 2 processes and the machine 1 GPU:"),
    ("1xH100-80", {"generator": GeneratorConfig(kv_cache_gib=70)}, "generator 7"),
    ("1xH100-80", {"generator": GeneratorConfig(block_size=8)}, "generator.block_size=8 is not a multiple of 16, as on a GPU"),
    ("1xA100-80", {"dtype": "float32", "trainer": TrainerConfig(lora=LoRA(rank=8))}, "because vLLM's kernels take 16 bits; set it to bfloat16"),
    ("4xA100-80", {"trainer": TrainerConfig(float8=True, compile=True)}, "float8=True needs GPUs of compute capability 8.9"),
    ("4xH100-80", {"trainer": TrainerConfig(float8=True)}, "without trainer.compile is slower than bfloat16"),
    ("1xT4-16", {}, "dtype=bfloat16 needs GPUs of compute capability 8.0 or more (this is a T4, 7.5); set --dtype float32"),
    ("cpu", {"placement": "side_by_side"}, "placement=side_by_side has no effect without GPUs"),
    ("cpu", {"generator": GeneratorConfig(cuda_graphs="on")}, "cuda_graphs=on needs a GPU"),
]  # fmt: skip


@pytest.mark.parametrize("machine, changes, words", REFUSED)
def test_what_would_fail_on_a_machine_is_refused_with_its_figures(model, machine, changes, words):
    assert sum(words in line for line in problems(qwen(model, **changes), machine)) == 1


def test_a_vocabulary_that_shards_of_its_parts_cannot_have_is_refused(tmp_path):
    """Llama 3's and a token more. torch 2.13 gives one rank a row fewer than it reads there."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"] | {"vocab_size": 128257}))

    def lines(**layout):
        trainer = TrainerConfig(layout=Layout(**layout))
        config = dataclasses.replace(qwen(lambda _: ModelDir(str(tmp_path))), trainer=trainer)
        return [line for line in problems(config, "8xH100-80") if "vocab_size" in line]

    assert lines(shard=8) == lines(tensor_parallel=8) == lines(replicate=2, tensor_parallel=2) == []
    for layout in ({"shard": 4}, {"context_parallel": 2}):
        (line,) = lines(tensor_parallel=2, **layout)
        assert line.startswith(
            "trainer.layout.tensor_parallel=2 does not divide the model's vocab_size=128257"
        )


# Llama-3.1-8B in full takes 120 GiB of states: (machine, what is said, the same as settings).
REMEDIES = [
    ("8xH100-80", "set --trainer.layout.shard 2", {"layout": Layout(shard=2)}),
    ("2xA100-80", "set --trainer.layout.shard 2", {"layout": Layout(shard=2)}),  # by turns
    ("1xA100-80", "set --trainer.lora.rank 16", {"lora": LoRA(rank=16)}),
]


def test_a_gpu_without_float8_is_told_so_and_nothing_to_install(model):
    config = qwen(model, trainer=TrainerConfig(float8=True, compile=True))
    demand = demand_of(config, "train")
    facts = dataclasses.replace(facts_of(config, demand), packages=frozenset())
    (problem,) = resolve(demand, facts, cluster("4xA100-80"))
    assert "capability 8.9" in problem.text
    (problem,) = resolve(demand, facts, cluster("4xH100-80"))
    assert "pip install torchao" in problem.text


@pytest.mark.parametrize("machine, words, settings", REMEDIES)
def test_the_remedy_is_one_that_fits(model, machine, words, settings):
    trainer = TrainerConfig(micro_batch_tokens=2048, activation_checkpointing="full")
    llama = qwen(model, model=model("llama-3.1-8b"), trainer=trainer, max_seq_len=2048)
    (line,) = problems(llama, machine)
    assert line.endswith(words)
    changed = dataclasses.replace(trainer, **settings)
    assert problems(dataclasses.replace(llama, trainer=changed), machine) == []


def test_the_remedy_is_two_changes_where_no_single_one_is_enough(model):
    """The trainer of the whole model does not fit, and beside an adapter's the cache does not."""
    trainer = TrainerConfig(micro_batch_tokens=2048, activation_checkpointing="full")
    large = GeneratorConfig(kv_cache_gib=70.0)
    llama = qwen(model, model=model("llama-3.1-8b"), trainer=trainer, generator=large, max_seq_len=2048)
    (line,) = problems(llama, "1xA100-80")
    assert line.endswith("; set --trainer.lora.rank 16, and set --generator.kv_cache_gib 35")
    small = dataclasses.replace(large, kv_cache_gib=35.0)
    adapter = dataclasses.replace(trainer, lora=LoRA(rank=16))
    assert problems(dataclasses.replace(llama, trainer=adapter, generator=small), "1xA100-80") == []
    for one in ({"trainer": adapter}, {"generator": small}):
        assert problems(dataclasses.replace(llama, **one), "1xA100-80")


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def test_the_adapter_of_a_model_with_experts_leaves_its_feed_forward_out(model):
    trainer = TrainerConfig(micro_batch_tokens=2048, activation_checkpointing="full")
    experts = qwen(model, model=model("qwen3-30b-a3b"), trainer=trainer, max_seq_len=2048)
    lines = problems(experts, "1xH200-141")
    adapter = f"set --trainer.lora.rank 16, --trainer.lora.targets {' '.join(ATTENTION)}"
    assert lines and all(line.endswith(adapter) for line in lines)

    def with_adapter(lora):
        changed = dataclasses.replace(trainer, lora=lora)
        return problems(dataclasses.replace(experts, trainer=changed), "1xH200-141")

    assert with_adapter(LoRA(rank=16, targets=ATTENTION)) == []
    (line,) = with_adapter(LoRA(rank=16))  # also where no weights are here that would show it
    assert "names down_proj, gate_proj, up_proj, which the model does not have" in line


def test_no_adapter_is_a_remedy_where_a_checkpoint_of_the_whole_model_is_loaded(model):
    config = qwen(model, model=model("llama-3.1-8b"), resume="runs/x/checkpoints/step-1")
    words = [words for words, _ in changes_of(demand_of(config, "train"), cluster("1xA100-80"))]
    assert words and not any("lora" in text for text in words)


def test_reward_workers_take_a_quarter_of_a_gib(model):
    def refusal(num_procs):
        config = dataclasses.replace(quickstart(), reward=RewardConfig(num_procs=num_procs))
        return problems(config, Cluster((Host(num_cores=32, free_gib=11.9),)))

    assert refusal(12) == []
    (line,) = refusal(60)
    assert (
        line
        == "62 processes take 16.8 GiB before they load a model, and this machine has 11.9 free; use fewer"
    )


def test_what_does_not_fit_on_a_host_without_gpus_is_refused(model):
    config = dataclasses.replace(smollm2(), model=model("llama-3.1-8b"))
    (line,) = problems(config, Cluster((Host(num_cores=16, free_gib=64),)))
    assert "the run needs about" in line and "but 64.0 are free" in line and "; " in line


def test_experts_that_bfloat16_cannot_split_are_told_before_anything_starts(model):
    """768 over 8 ranks is 96; over 64, 12."""

    def of_experts(tensor_parallel, dtype):
        trainer = TrainerConfig(layout=Layout(tensor_parallel=tensor_parallel))
        config = qwen(model, model=model("qwen3-30b-a3b"), trainer=trainer, dtype=dtype)
        return [line for line in problems(config, "128xH100-80") if "moe_intermediate_size" in line]

    assert not of_experts(8, "bfloat16") and not of_experts(64, "float32")
    (line,) = of_experts(64, "bfloat16")
    assert "moe_intermediate_size=768, which over tensor_parallel=64 is no multiple of 8, as bfloat16" in line


def test_an_adapter_beside_experts_needs_a_gpu(model):
    trainer = TrainerConfig(lora=LoRA(rank=8, targets=ATTENTION))
    config = qwen(model, model=model("qwen3-30b-a3b"), trainer=trainer)
    (line, *_) = problems(config, Cluster((Host(num_cores=64, free_gib=1000),)))
    assert "trainer.lora.rank=8 of a model with experts needs a GPU" in line


def settled(made: Plan) -> dict[str, str]:
    return {line.setting: line.value for line in made.settled}


def test_one_gpu_is_shared_and_the_cache_is_what_is_left(model):
    made = settle(qwen(model), cluster=cluster("1xH100-80"))
    assert settled(made)["placement"] == "side_by_side" and settled(made)["dtype"] == "bfloat16"
    (trainer,), (generator,) = made.of("trainer"), made.of("generator")
    assert generator.spec.config.cuda_graphs
    explicit = settle(qwen(model, generator=GeneratorConfig(kv_cache_gib=3.0)), cluster=cluster("1xH100-80"))
    assert explicit.of("generator")[0].spec.config.kv_cache_gib == 3.0
    alone = settle(qwen(model), cluster=cluster("2xH100-80"))
    assert settled(alone)["placement"] == "alone"
    assert isinstance(alone.of("generator")[0].spec.config.kv_cache_gib, Fill)  # vLLM looks for itself
    assert where(made) == [("trainer", (0,)), ("generator-0", (0,))]
    # holds: meaning, most of the memory is planned and no more than there is
    assert 0.8 * 72.5 < (trainer.processes[0].peak + generator.processes[0].peak) / GIB < 72.5


# (cluster, setting, what it is where nothing is asked for)
DEFAULTS = [
    ("cpu", "dtype", "float32"), ("2xH100-80", "dtype", "bfloat16"),
    ("cpu", "generator.cuda_graphs", "off"), ("2xH100-80", "generator.cuda_graphs", "on"),
    ("cpu", "generator.num_threads", "2"), ("2xH100-80", "generator.num_threads", "1"),
    ("2xH100-80", "placement", "alone"), ("1xH100-80", "placement", "side_by_side"),
    ("cpu", "generator.kv_cache_gib", "0.25"),
]  # fmt: skip


@pytest.mark.parametrize(("hosts", "setting", "value"), DEFAULTS)
def test_each_default_by_device_holds_and_has_a_reason(model, hosts, setting, value):
    config = qwen(
        model, generator=GeneratorConfig(), trainer=TrainerConfig(micro_batch_tokens=256), max_seq_len=256
    )
    made = settle(config, cluster=cluster(hosts))
    (line,) = [line for line in made.settled if line.setting == setting]
    assert (
        line.value == value and line.asked in ("auto", "0") and line.why not in ("", "asked for", "default")
    )


def cpus(*bfloat16):
    return Cluster(
        tuple(
            Host(16, 128.0, address=f"10.0.0.{i}:7000" if i else "", bfloat16=b)
            for i, b in enumerate(bfloat16)
        )
    )


FASTEST = [
    (cpus(True), "bfloat16"), (cpus(False), "float32"), (cpus(None), "bfloat16"), (cpus(True, False), "float32"),
    (Cluster((Host(16, 128.0, (GPU("V100", 79.0, (7, 0)),)),)), "float32"), (cluster("1xH100-80"), "bfloat16"),
    (Cluster(tuple(replace(host, bfloat16=False) for host in cluster("1xH100-80").hosts)), "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("hosts", "dtype"), FASTEST)
def test_the_fastest_numbers_are_those_that_every_device_has_instructions_for(model, hosts, dtype):
    trainer = TrainerConfig(micro_batch_tokens=256)
    made = settle(qwen(model, dtype="fastest", trainer=trainer, max_seq_len=256), cluster=hosts)
    (line,) = [line for line in made.settled if line.setting == "dtype"]
    assert (line.value, line.asked) == (dtype, "fastest") and line.why != "asked for"
    assert made.of("trainer")[0].spec.config.dtype == made.of("generator")[0].spec.config.dtype == dtype


def test_bfloat16_is_refused_where_a_cpu_would_emulate_it_and_the_model_is_no_tiny_one(model):
    config = qwen(model, dtype="bfloat16")
    (line,) = problems(config, cpus(False))
    assert line.startswith("dtype=bfloat16 takes many times as long") and "this host" in line
    assert "set it to float32, or use hosts that have them" in line
    assert "on host 10.0.0.1:7000, whose" in problems(config, cpus(True, False))[0]
    assert not any(
        "many times" in line for hosts in (cpus(True), cpus(None)) for line in problems(config, hosts)
    )
    assert problems(replace(quickstart(), dtype="bfloat16"), cpus(False)) == []  # 64 wide


def test_a_host_on_which_no_model_runs_needs_no_instructions_for_bfloat16(model):
    apart = {"trainer": TrainerConfig(hosts=(0,)), "generator": GeneratorConfig(hosts=(0,))}
    config = qwen(model, dtype="bfloat16", reward=RewardConfig(hosts=(1,)), **apart)
    assert not any("many times" in line for line in problems(config, cpus(True, False)))
    assert any("many times" in line for line in problems(config, cpus(False, True)))


def test_old_gpus_that_adapters_cannot_use_are_told_no_setting(model):
    lora = TrainerConfig(lora=LoRA(rank=8))
    for dtype in ("fastest", "float32"):
        lines = problems(qwen(model, trainer=lora, dtype=dtype), "2xT4-16")
        (line,) = [line for line in lines if "adapters on a GPU" in line]
        assert line.endswith("use newer GPUs (this is a T4, 7.5)")


def test_dropout_is_drawn_from_the_runs_seed(model):
    trainer = dataclasses.replace(qwen(model).trainer, engine="hf", dropout=True)
    made = settle(qwen(model, trainer=trainer, seed=7), cluster=cluster("2xH100-80"))
    assert made.of("trainer")[0].spec.config.dropout_seed == 7


def test_a_default_gives_way_to_a_setting(model):
    asked = GeneratorConfig(num_threads=3, cuda_graphs="off", kv_cache_gib=2.0)
    config = qwen(model, dtype="float32", generator=asked, placement="by_turns")
    made = settle(config, cluster=cluster("2xH100-80"))
    spec = made.of("generator")[0].spec.config
    assert (
        spec.sleeps
        and not settle(qwen(model), cluster=cluster("2xH100-80")).of("generator")[0].spec.config.sleeps
    )
    assert spec.dtype == "float32" and not spec.cuda_graphs and spec.kv_cache_gib == 2.0
    assert made.of("generator")[0].processes[0].threads == 3
    reasons = {line.setting: line.why for line in made.settled}
    for setting in (
        "dtype",
        "generator.cuda_graphs",
        "generator.num_threads",
        "generator.kv_cache_gib",
        "placement",
    ):
        assert reasons[setting] == "asked for", setting


@pytest.mark.parametrize(
    "text", ["", "H100", "0xH100-80", "8xXYZ-80", "8 x H100-80-", "-1xH100-80", "0 x 8xH100-80"]
)
def test_a_cluster_that_is_not_understood_is_refused(text):
    with pytest.raises(ConfigError, match="is not understood; write 8xH100-80"):
        cluster(text)


def test_roles_deal_out_gpus_in_turn(model):
    config = qwen(
        model, trainer=TrainerConfig(layout=Layout(shard=2)), generator=GeneratorConfig(num_replicas=2)
    )
    made = settle(config, cluster=cluster("2xH100-80"))
    assert where(made) == [("trainer", (0,)), ("trainer", (1,)), ("generator-0", (0,)), ("generator-1", (1,))]


def test_an_engine_that_shares_a_gpu_may_take_what_is_planned_for_nobody_else(model):
    made = settle(qwen(model), cluster=cluster("1xH100-80"))
    (trainer,), (generator,) = made.of("trainer"), made.of("generator")
    budget, room = trainer.spec.config.device_memory_gib, made.cluster.gpus[0].gib
    assert budget == pytest.approx(room * 0.92 - generator.processes[0].peak / GIB)
    assert trainer.processes[0].peak / GIB < budget < room
    alone = settle(qwen(model), cluster=cluster("2xH100-80"))
    assert alone.of("trainer")[0].spec.config.device_memory_gib is None


@pytest.mark.parametrize("command", NOT_STARTED)
@pytest.mark.parametrize("num_gpus", range(1, 7))
def test_budgets_are_of_what_is_started_where_it_is_started(model, num_gpus, command):
    """The GPUs that are dealt out are those that the budgets were made for, and they exist."""
    hosts = Cluster((Host(16, 64.0, (GPU("H200", 139.0, (9, 0)),) * num_gpus),))
    judge = JudgeConfig(model=model("qwen3-1.7b"), kv_cache_gib=1.0)
    config = qwen(model, placement="auto", judge=judge, kl=KL(coef=0.1), advantages=GAE())
    made = settle(config, command, hosts)
    everybody = {"trainer", "generator", "critic", "reference", "judge", "reward"}
    assert set(made.roles) == everybody - {*NOT_STARTED[command]}
    on_gpus = where(made)
    assert max(gpus[0] for _, gpus in on_gpus) < num_gpus
    shared = len(on_gpus) > num_gpus
    assert (len({gpus for _, gpus in on_gpus}) < len(on_gpus)) == shared
    for role in made.roles.keys() & {*ENGINE_ROLES}:
        (replica,) = made.of(role)
        gpus = replica.processes[0].gpus
        others = sum(
            other.processes[0].peak
            for other in made.replicas
            if other.role not in (role, "reward") and other.processes[0].gpus == gpus
        )
        room = hosts.gpus[0].gib * USABLE - others / GIB
        assert replica.spec.config.device_memory_gib == (pytest.approx(room) if shared else None), role


@pytest.mark.parametrize("command", ["eval", "replay"])
def test_eval_and_replay_start_their_plan(model, tmp_path, monkeypatch, capsys, command):
    host = Host(16, 128.0, cluster("1xH200-141").gpus)
    module, started = {"eval": (evaluate, evaluate._answers), "replay": (replay, replay._learn_again)}[
        command
    ]
    out = tmp_path / "out"
    out.mkdir()
    launched = []

    def launch(made, models, run_dir, env=None):
        launched.append((made, models, run_dir))
        raise RunError("enough")

    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(
        module, "temporary_directory", lambda: tmp_path
    )  # else a janitor stays in this process
    monkeypatch.setattr("rl.cluster.hosts.look_at_host", lambda: host)
    config = qwen(model, placement="auto", kl=KL(coef=0.1), advantages=GAE())
    arguments = (config, 0, out / "plan.json") if command == "eval" else (config, tmp_path, 3, out)
    with pytest.raises(RunError, match="enough"):
        asyncio.run(started(*arguments))
    ((made, models, run_dir),) = launched
    assert run_dir == out  # its logs stay
    assert made == settle(config, command, Cluster((host,))) and made.command == command
    assert models["model"] == tmp_path / "qwen3-0.6b"
    assert bool(made.of("critic")) == (command == "replay") and not made.of("reference")
    assert json.loads((out / "plan.json").read_text())["command"] == command
    values = [f"{row.setting}={row.value}" for row in made.settled if row.value != row.asked]
    assert "dtype=bfloat16" in values and "placement=side_by_side" in values
    assert f"settled: {', '.join(values)} (why: {out / 'plan.json'})" in capsys.readouterr().out.splitlines()
    assert made.of("trainer")[0].spec.config.device_memory_gib is not None


@pytest.mark.parametrize("command", ["eval", "replay", "serve"])
@pytest.mark.parametrize("hosts", ["cpu", "1xH100-80", "2xH100-80", "8xH100-80", "2 x 8xH100-80"])
def test_the_same_demand_settles_the_same_whatever_the_command(model, hosts, command):
    """Whatever is settled comes from the demand: a command's name alone changes nothing. `rl plan` prints the Plan
    of `rl train`."""
    config = qwen(model, judge=JudgeConfig(model=model("qwen3-1.7b")), kl=KL(coef=0.1), advantages=GAE())
    here = Cluster((Host(16, 256.0),)) if hosts == "cpu" else cluster(hosts)
    demand = demand_of(config, "train")
    facts = facts_of(config, demand)
    training = resolve(demand, facts, here)
    other = resolve(dataclasses.replace(demand, command=command), facts, here)
    assert isinstance(training, Plan) and dataclasses.replace(other, command="train") == training


def test_an_evaluation_settles_what_training_does_but_for_learning(model):
    config, hosts = qwen(model), cluster("1xH100-80")
    of_learning = {"warmup.lr", "max_logprob_diff"}
    assert {line.setting for line in settle(config, "eval", hosts).settled} == {
        line.setting for line in settle(config, "train", hosts).settled
    } - of_learning


def test_an_evaluation_needs_no_room_for_what_only_learning_takes(model):
    """8 billion parameters in fp32, and no gradient, moments or activations: it fits where training does not."""
    config, hosts = qwen(model, model=model("llama-3.1-8b")), cluster("1xH100-80")
    assert why_no_plan(config, "train", hosts)
    assert why_no_plan(config, "eval", hosts) == []
    (remedy,) = why_no_plan(dataclasses.replace(config, resume="x/checkpoints/step-1"), "eval", hosts)
    assert not any(word in remedy for word in ("lora", "activation_checkpointing", "micro_batch"))


def test_plans_need_neither_torch_nor_monarch():
    check = "import sys, rl.plan.resolve, rl.plan.show; print([m for m in ('torch', 'monarch', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("hosts", "most"), [("cpu", 8 * 2), ("8xH100-80", 8 * 32 + 8 * 16)])
@pytest.mark.parametrize(
    "setting",
    ["generator.num_replicas", "generator.tensor_parallel", "reward.num_procs", "judge.num_replicas"],
)
def test_any_number_of_processes_is_refused_before_a_list_of_them_is_made(model, hosts, most, setting):
    """2^31 - 1, which a list of would take all memory. Eight of a core are the most, or 32 of a GPU and one of a core."""
    section, _, name = setting.partition(".")
    config = qwen(model, judge=JudgeConfig(model=model("qwen3-1.7b")))
    config = dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **{name: 2**31 - 1})}
    )

    def is_refused():
        assert any(
            "processes are more than this machine can hold" in line and f": at most {most})" in line
            for line in problems(config, hosts)
        )

    _, peak = traced_memory(is_refused)
    assert peak < 10e6  # holds: meaning, a list of so many would take gigabytes


def test_experts_without_a_width_of_their_own_have_the_layers(tmp_path):
    """Mixtral 8x7B: 46.7 billion parameters, by its card."""
    mixtral = LLAMA | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    assert ModelShape.of(mixtral).num_parameters == pytest.approx(
        46.7e9, rel=0.002
    )  # holds: meaning, three digits of the card


@pytest.mark.parametrize(
    "odd",
    [{"hidden_size": "4096"}, {"moe_intermediate_size": [1], "num_experts": 4}, {"num_attention_heads": 0}],
)
def test_sizes_that_are_no_numbers_are_not_known(odd):
    assert ModelFacts.of(CONFIGS["llama-3.1-8b"] | odd, 128).shape is None


def unknown(make, **changes) -> RunConfig:
    config = qwen(make, **changes)
    (Path(config.model.path) / "config.json").write_text(
        json.dumps({"model_type": "mamba", "vocab_size": 64})
    )
    return config


def test_of_a_model_of_unknown_sizes_what_is_asked_is_counted_and_no_gpu_is_shared(model):
    config = unknown(model)
    assert (
        settle(config, cluster=Cluster((Host(16, 128.0),))).of("generator")[0].spec.config.kv_cache_gib
        == 0.25
    )
    large = unknown(model, generator=GeneratorConfig(kv_cache_gib=1000))
    assert any("1000 GiB but 128.0 are free" in line for line in problems(large, Cluster((Host(16, 128.0),))))
    for asked in (config, large):
        assert any("gives no sizes of a decoder" in line for line in problems(asked, "1xH100-80"))
    lines = show("unknown", settle(config, cluster=cluster("2xH100-80")))
    assert any("nothing is claimed of its memory" in line for line in lines)


def test_a_remedy_divides_the_heads(model):
    """Of 2 key heads, four ranks would have half of one."""
    made = model("llama-3.1-70b")
    path = Path(made.path) / "config.json"
    path.write_text(json.dumps(CONFIGS["llama-3.1-70b"] | {"num_key_value_heads": 2}))
    for hosts in ("4xH100-80", "8xA100-80", "16xL4-24", "64xL4-24"):
        for line in problems(qwen(model, model=made, trainer=TrainerConfig(layout=Layout(shard=2))), hosts):
            assert "tensor_parallel 4" not in line and "tensor_parallel 8" not in line, line


FULL = TrainerConfig(activation_checkpointing="full", micro_batch_tokens=32768)
"""With Qwen3-0.6B 17.9 GiB, beside 4.1 of a generator."""


@pytest.mark.parametrize("tokens", [512, 2048, 32768])
def test_no_remedy_makes_sequences_longer(model, tokens):
    config = qwen(model, trainer=TrainerConfig(micro_batch_tokens=tokens), max_seq_len=2048)
    lengths = {made.max_seq_len for _, made in changes_of(demand_of(config, "train"), cluster("1xL4-24"))}
    assert max(lengths) == 2048


def test_an_adapter_is_of_a_rank_and_of_layers_that_there_are(model):
    def lines(lora):
        return problems(qwen(model, trainer=TrainerConfig(lora=lora)), "1xH100-80")

    assert lines(LoRA(rank=LORA_RANKS[-1])) == []
    assert any("the most that vLLM serves" in line for line in lines(LoRA(rank=LORA_RANKS[-1] + 1)))
    demand = demand_of(
        qwen(model, trainer=TrainerConfig(lora=LoRA(rank=8, targets=("q_proj", "k_prj")))), "train"
    )
    facts = facts_of(qwen(model), demand)
    trainer = replace(facts.models["trainer"], layers=frozenset({"q_proj", "k_proj"}))
    (problem,) = resolve(
        demand, replace(facts, models={**facts.models, "trainer": trainer}), cluster("1xH100-80")
    )
    assert "targets names k_prj, which the model does not have; its layers: k_proj, q_proj" in problem.text


def test_generators_may_be_split_over_every_gpu_and_no_further(model):
    tried = {words for words, _ in changes_of(demand_of(qwen(model), "train"), cluster("4xL4-24"))}
    split = {words for words in tried if "tensor_parallel" in words}
    assert split == {"set --generator.tensor_parallel 2", "set --generator.tensor_parallel 4"}


def test_a_teacher_has_a_position_for_each_token(model):
    """Else the run would end at the first long sequence."""
    short = model("qwen3-1.7b")
    path = Path(short.path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 512}))
    config = qwen(model, kl=KL(coef=0.1), reference=ReferenceConfig(model=short), max_seq_len=1024)
    (line,) = problems(config, "2xH100-80")
    assert (
        "reference's model has 512 positions, and sequences may have 1024 tokens; set --max_seq_len 512"
        in line
    )
    assert problems(replace(config, max_seq_len=512), "2xH100-80") == []


def test_this_host_without_gpus_keeps_its_shared_memory():
    here = Host(num_cores=2, free_gib=24.0, shared_gib=0.001, gpus=cluster("1xH100-80").hosts[0].gpus)
    assert parse_cluster("cpu", here) == Cluster((replace(here, gpus=()),))


def test_gpus_that_a_generator_leaves_in_between_are_for_later_roles(model):
    """Its ranks are of one host: after two of the trainer's, two are left there for the critic."""
    config = qwen(
        model,
        advantages=GAE(),
        critic=CriticConfig(layout=Layout(shard=2)),
        trainer=TrainerConfig(layout=Layout(shard=2)),
        generator=GeneratorConfig(num_replicas=1, tensor_parallel=4),
        placement="alone",
    )
    made = plan_or_problems(config, "2 x 4xH100-80")
    assert isinstance(made, Plan), made
    devices = [(p.host, gpu) for replica in made.replicas for p in replica.processes for gpu in p.gpus]
    assert sorted(devices) == [(host, gpu) for host in range(2) for gpu in range(4)]
    assert {p.host for p in made.of("generator")[0].processes} == {1}


def test_of_a_model_of_unknown_sizes_sharing_is_not_asked_for_where_each_has_a_gpu(model, tmp_path):
    unknown = qwen(model)
    path = Path(unknown.model.path) / "config.json"
    path.write_text(
        json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": 100})
    )
    for hosts, remedy in (
        ("2xH100-80", "each has one of its own: set --placement alone"),
        ("1xH100-80", "use a GPU for each"),
    ):
        lines = problems(replace(unknown, placement="side_by_side"), hosts)
        assert any(remedy in line for line in lines), lines


@pytest.mark.parametrize(("cache", "begin"), [(0.0, "; "), (1.0, "; lower kv_cache_gib, or ")])
def test_a_server_that_fits_nowhere_is_told_what_is_its_own(model, cache, begin):
    """It has neither a sequence length nor a trainer to set."""
    huge = model("llama-3.1-70b").path
    with pytest.raises(ConfigError) as refused:
        settle_server(ServeConfig(huge, kv_cache_gib=cache), ModelDir(huge).config(), cluster("1xL4-24"))
    own = "use a smaller model, context_length, limits.max_rank or limits.max_models"
    assert begin + own in str(refused.value) and "--trainer" not in str(refused.value)


@pytest.mark.parametrize(
    ("transport", "through"), [("shared_memory", "/dev/shm"), ("torchstore", "torchstore")]
)
def test_the_plan_says_what_weights_go_through(model, transport, through):
    config = qwen(model, weight_sync=WeightSyncConfig(transport=transport))
    (line,) = [
        line for line in show("a run", settle(config, cluster=cluster("2xH100-80"))) if "weight sync" in line
    ]
    assert f"through {through}, which holds three at most" in line


def test_roles_whose_gpu_is_full_take_turns_by_themselves(model):
    auto = qwen(model, trainer=FULL)
    made = plan_or_problems(auto, "1xL4-24")
    (placement,) = [line for line in made.settled if line.setting == "placement"]
    assert (placement.asked, placement.value) == ("auto", "by_turns") and made.takes_turns
    (refusal,) = plan_or_problems(dataclasses.replace(auto, placement="side_by_side"), "1xL4-24")
    assert f"if all stayed, {refusal}" == f"{placement.why}; set --placement by_turns"
    asked = plan_or_problems(dataclasses.replace(auto, placement="by_turns"), "1xL4-24")
    assert dataclasses.replace(made, settled=()) == dataclasses.replace(asked, settled=())
    assert "if all stayed" in "".join(show("by turns", made))


def test_roles_stay_where_all_fit_or_where_they_work_at_the_same_time(model):
    auto = qwen(model, trainer=FULL)
    for hosts in ("1xH100-80", "2xL4-24"):
        assert not plan_or_problems(auto, hosts).takes_turns
    for changes in ({"max_offpolicy_steps": 1}, {"stream_groups": 2}, {"placement": "side_by_side"}):
        (line,) = plan_or_problems(dataclasses.replace(auto, **changes), "1xL4-24")
        assert "GPU 0 has 21.7 GiB" in line
    on_cpu = Cluster((Host(16, 10.0),))  # its disk would hold what leaves: that is asked for
    (line,) = plan_or_problems(auto, on_cpu)
    assert "the run needs about" in line


def test_a_host_has_room_for_what_leaves_its_gpus(model):
    """Weights and moments of Qwen3-0.6B: 6.7 GiB; as much again for a checkpoint that is still being written; 2.2 for two
    published versions; and 2 for a trainer, a generator and a reward process."""
    (gpu,) = cluster("1xL4-24").gpus
    asked = qwen(model, trainer=FULL, placement="by_turns")
    assert plan_or_problems(asked, Cluster((Host(16, 17.7, (gpu,)),))).takes_turns
    (line,) = plan_or_problems(asked, Cluster((Host(16, 17.2, (gpu,)),)))
    words = "the host has 17.2 GiB free for what leaves its GPUs, processes, weights and checkpoints on their way, about "
    words += "17.6 (trainer 13.3, published weights 2.2, processes 2.0)"
    assert line.startswith(words), line
    auto = dataclasses.replace(asked, placement="auto")
    (line,) = plan_or_problems(auto, Cluster((Host(16, 17.2, (gpu,)),)))
    assert line.startswith("GPU 0 has 21.7 GiB for processes that need about")


def test_a_host_has_room_for_a_checkpoint_on_its_way_to_the_disk(model):
    """In an evaluation there is none."""
    (gpu,) = cluster("1xH100-80").gpus
    asked = qwen(model, trainer=FULL)
    small = Cluster((Host(16, 6.0, (gpu,)),))
    (line,) = plan_or_problems(asked, small)
    words = "the host has 6.0 GiB free for processes, weights and checkpoints on their way, about 10.9"
    assert line.startswith(words), line
    demand = demand_of(asked, "eval")
    assert isinstance(resolve(demand, facts_of(asked, demand), small), Plan)
    assert isinstance(plan_or_problems(asked, Cluster((Host(16, 11.0, (gpu,)),))), Plan)


def test_the_critics_checkpoint_is_on_the_disk_before_the_trainers_is_copied(model):
    """They are never in memory together."""
    (gpu,) = cluster("1xH200-141").gpus
    asked = qwen(model, trainer=FULL, advantages=GAE())
    assert isinstance(plan_or_problems(asked, Cluster((Host(16, 12.0, (gpu,)),))), Plan)
    (line,) = plan_or_problems(asked, Cluster((Host(16, 11.2, (gpu,)),)))
    assert "about 11.7 (trainer 6.7, critic 6.7, published" in line
    on_cpu, problems_of = [Cluster((Host(16, gib),)) for gib in (500.0, 20.0)], plan_or_problems
    made = problems_of(dataclasses.replace(asked, data="rollouts", max_offpolicy_steps=1), on_cpu[0])
    copies = [
        made.of(role)[0].processes[0].memory["train"].parts["checkpoint"] for role in ("trainer", "critic")
    ]
    assert min(copies) > 0
    together = (
        sum(r.processes[0].memory["train"].total for r in made.replicas if r.processes[0].memory) / 2**30
    )
    (line,) = problems_of(dataclasses.replace(asked, data="rollouts", max_offpolicy_steps=1), on_cpu[1])
    (needed,) = re.findall(r"needs about ([0-9.]+) GiB", line)
    assert float(needed) == pytest.approx(together - min(copies) / 2**30, abs=0.06)


def test_a_run_can_be_evaluated_where_it_was_trained(model):
    """Critic and reference are not started, and nothing is computed: roles need not take turns."""
    config = qwen(model, trainer=FULL, critic=CriticConfig(), advantages=GAE(), kl=KL(coef=0.1))
    assert any("critic" in line for line in problems(config, "1xL4-24"))
    assert why_no_plan(config, "train", cluster("1xL4-24"))
    assert why_no_plan(config, "eval", cluster("1xL4-24")) == []
    assert not settle(config, "eval", cluster("1xL4-24")).takes_turns
    large = qwen(model, model=model("qwen3-1.7b"), dtype="float32")  # 6.4 GiB twice, and what loading takes
    assert settle(large, "eval", cluster("1xT4-16")).takes_turns
    alone = qwen(model, max_offpolicy_steps=1)
    (generator,) = settle(alone, "eval", Cluster((Host(8, 64.0),))).of("generator")
    assert generator.processes[0].threads == 8  # the trainer does not work meanwhile


def test_generators_have_query_heads_alike_and_key_heads_alike_or_one_each(model):
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4}
    assert [split for split in range(1, 33) if not why_not_sampled_by(split, heads)] == [1, 2, 4, 8, 16, 32]
    assert [split for split in range(1, 25) if not why_not_sampled_by(split, {"num_attention_heads": 24, "num_key_value_heads": 6})] == [1, 2, 3, 6, 12, 24]  # fmt: skip
    assert "num_attention_heads=20" in why_not_sampled_by(8, {"num_attention_heads": 20})
    shape = ModelShape.of(CONFIGS["qwen3-30b-a3b"])
    assert shape.kv_bytes("bfloat16", 8) == shape.kv_bytes("bfloat16", 4) == shape.kv_bytes("bfloat16") / 4
    asked = qwen(model, model=model("qwen3-30b-a3b"), generator=GeneratorConfig(tensor_parallel=8))
    assert not any("heads" in line for line in problems(asked, "16xH100-80"))


def test_adapters_on_a_gpu_are_sampled_in_16_bits_alone(model):
    lora = TrainerConfig(lora=LoRA(rank=8))
    (line,) = problems(qwen(model, trainer=lora, dtype="float32"), "2xH100-80")
    assert (
        line.startswith("dtype=float32 does not go with adapters on a GPU") and "set it to bfloat16" in line
    )
    assert problems(qwen(model, trainer=lora), "2xH100-80") == []
    lines = problems(qwen(model, trainer=lora, dtype="bfloat16"), "2xT4-16")
    assert not any("set --dtype float32" in line for line in lines) and "compute capability 8.0" in lines[0]
    assert problems(qwen(model, trainer=lora, dtype="float32"), Cluster((Host(16, 128.0),))) == []


def test_an_adapter_as_a_remedy_takes_the_reference_into_the_trainer(model):
    def remedies(**changes):
        config = qwen(model, kl=KL(coef=0.1), **changes)
        made = [
            made
            for words, made in changes_of(demand_of(config, "train"), cluster("1xL4-24"))
            if "lora" in words
        ]
        return [(each.engines.get("reference"), each.reference_is_adapter) for each in made]

    assert remedies() == [(None, True)] * 2
    assert remedies(reference=ReferenceConfig(model=model("qwen3-1.7b"))) == [(Layout(), False)] * 2
    for own in (ReferenceConfig(layout=Layout(shard=2)), ReferenceConfig(hosts=(0,))):
        assert remedies(reference=own) == []


def test_a_command_reads_no_model_that_it_does_not_start():
    hosts, nowhere = Cluster((Host(16, 128.0),)), ModelDir("nowhere")
    taught = replace(quickstart(), kl=KL(coef=0.1), reference=ReferenceConfig(model=nowhere))
    judged = replace(quickstart(), judge=JudgeConfig(model=nowhere))
    for config, command in ((taught, "eval"), (taught, "replay"), (judged, "replay")):
        assert not {"reference", "judge"} & settle(config, command, hosts).roles.keys()
        with pytest.raises(ConfigError, match="nowhere has no config.json"):
            settle(config, cluster=hosts)


def test_of_a_model_of_unknown_sizes_the_cache_is_what_is_asked_for_or_what_is_free(model):
    """On a CPU it may be all of the host's memory; on a GPU the host's is no matter."""
    on_cpu = Cluster((Host(16, 128.0),))
    on_gpus = Cluster((Host(16, 64.0, cluster("2xH200-141").gpus),))
    for hosts, gib in ((on_cpu, 128.0), (on_gpus, 100.0)):
        asked = unknown(model, generator=GeneratorConfig(kv_cache_gib=gib))
        made = settle(asked, cluster=hosts)
        assert made.of("generator")[0].spec.config.kv_cache_gib == gib
        rows = [(row.value, row.why) for row in made.settled if row.setting == "generator.kv_cache_gib"]
        assert rows == [(f"{gib:g}", "asked for")]
        assert not settle(asked, "replay", hosts).of("generator")
    made = settle(unknown(model), cluster=on_gpus)
    assert isinstance(made.of("generator")[0].spec.config.kv_cache_gib, Fill)
    assert settled(made)["generator.kv_cache_gib"] == "what is free"
    assert not any("weight sync" in line for line in show("unknown", made))


def test_a_generator_of_unknown_heads_may_be_split(model):
    split = unknown(model, generator=GeneratorConfig(tensor_parallel=2))
    (generator,) = settle(split, cluster=cluster("3xH100-80")).of("generator")
    assert [process.gpus for process in generator.processes] == [(1,), (2,)]


def test_each_kind_of_gpu_has_the_compute_capability_that_nvidia_gives():
    """https://developer.nvidia.com/cuda-gpus. Without a number it is one."""
    published = {
        "7.5": ["T4"], "8.0": ["A100"], "8.6": ["A10", "A6000"], "8.9": ["L4", "L40S", "RTX4090"],
        "9.0": ["H100", "H200"], "10.0": ["B200"], "12.0": ["RTX5090"],
    }  # fmt: skip
    for capability, kinds in published.items():
        for kind in kinds:
            (gpu,) = cluster(f"{kind}-24").gpus
            assert ".".join(map(str, gpu.capability)) == capability, kind


@pytest.mark.parametrize(("width", "count"), [(255, 0), (256, 1)])
def test_from_256_on_a_model_is_wide(width, count):
    """As docs/gpu.md has it."""
    made = replace(quickstart().model, hidden_size=width)
    lines = problems(replace(quickstart(), dtype="bfloat16", model=made), cpus(False))
    assert [line.startswith("dtype=bfloat16 takes many times as long") for line in lines] == [True] * count


def test_of_two_kinds_of_gpus_the_older_decides(model):
    def mixed(*kinds):
        return Cluster((Host(32, 256.0, tuple(gpu for kind in kinds for gpu in cluster(kind).gpus)),))

    def config(dtype, **trainer):
        return qwen(
            model, dtype=dtype, trainer=TrainerConfig(micro_batch_tokens=256, **trainer), max_seq_len=256
        )

    assert settled(settle(config("fastest"), cluster=mixed("1xH100-80", "1xT4-80")))["dtype"] == "float32"
    (line,) = problems(config("bfloat16"), mixed("1xH100-80", "1xT4-80"))
    assert "compute capability 8.0 or more (this is a T4, 7.5)" in line
    (line,) = problems(config("auto", float8=True, compile=True), mixed("1xH100-80", "1xA100-80"))
    assert "compute capability 8.9 or more (this is a A100, 8.0)" in line


def test_generators_on_gpus_of_two_sizes_have_the_cache_that_fits_the_smaller(model):
    hosts = Cluster((cluster("2xH100-80").hosts[0], cluster("1xH200-141").hosts[0]))
    made = settle(qwen(model, generator=GeneratorConfig(num_replicas=2)), cluster=hosts)
    generators = [replica.processes[0] for replica in made.of("generator")]
    assert [(process.host, process.gpus) for process in generators] == [(0, (1,)), (1, (0,))]
    room = cluster("1xH100-80").gpus[0].gib * USABLE
    assert [process.peak / GIB for process in generators] == [pytest.approx(room)] * 2


def test_a_generator_that_takes_what_is_free_has_to_find_one_sequence(model):
    """Llama 3.1 8B in bfloat16 on an L4 of its own: 15 GiB of weights, and 0.12 GiB for each 1,000 tokens."""
    hosts = tuple(
        dataclasses.replace(cluster(text).hosts[0], address=f"10.0.0.{number}:7000")
        for number, text in enumerate(("1xH200-141", "1xL4-24"))
    )
    config = qwen(model, generator=GeneratorConfig(hosts=(1,)))
    Path(config.model.path, "config.json").write_text(json.dumps(known_config("meta-llama/Llama-3.1-8B")))

    def placed(tokens):
        trainer = dataclasses.replace(config.trainer, hosts=(0,), micro_batch_tokens=tokens)
        longer = dataclasses.replace(config, trainer=trainer, max_seq_len=tokens)
        return settle(longer, "eval", Cluster(hosts))

    assert isinstance(placed(8192).of("generator")[0].spec.config.kv_cache_gib, Fill)
    with pytest.raises(ConfigError, match="GPU 0 of host 1"):
        placed(131072)
