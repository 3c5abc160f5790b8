"""Stand-in machines: which settings follow from them, what fits on them, and what is refused with which figures."""

# holds: exact, sums of whole bytes in float64

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from configs import gpu
from configs.smollm2 import smollm2
from rl.cluster.machine import GPU, Machine, parse_machine
from rl.cluster.placement import ENGINE_ROLES, place
from rl.controller import evaluate, replay
from rl.controller.config import GeneratorConfig, JudgeConfig, RunConfig, TrainerConfig
from rl.controller.device_defaults import DEVICE_DEFAULTS, by_device, specs_on
from rl.controller.device_rules import check_devices
from rl.controller.memory_plan import USABLE, processes, role_memories
from rl.controller.plan import plan
from rl.errors import ConfigError, RunError
from rl.loss.advantages.gae import GAE
from rl.loss.kl import KL
from rl.models.layout import Layout
from rl.models.sources import ModelDir
from rl.types import LoRA

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


def problems(config: RunConfig, machine: Machine | str) -> list[str]:
    machine = parse_machine(machine) if isinstance(machine, str) else machine
    return check_devices(by_device(config, machine), machine)


def memory(config: RunConfig, machine: str, role: str = "trainer") -> dict[str, float]:
    machine = parse_machine(machine)
    found = next(p for p in processes(by_device(config, machine), machine) if p.role == role)
    return dict(found.memory.parts) | {"total": found.memory.total}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(shard=4), Layout(shard=2, tensor_parallel=4), Layout(replicate=2)]
)
def test_states_of_the_trainer_are_what_arithmetic_says(model, name, layout):
    config = dataclasses.replace(smollm2(), model=model(name), trainer=TrainerConfig(layout=layout))
    found = memory(config, "16xH100-80")
    by_hand = NUM_PARAMETERS[name] / (layout.shard * layout.tensor_parallel)
    assert found["weights"] == pytest.approx(4 * by_hand, rel=0.01)
    assert found["gradients"] == pytest.approx(4 * by_hand, rel=0.01)
    assert found["optimizer"] == pytest.approx(8 * by_hand, rel=0.01)
    generated = memory(config, "16xH100-80", "generator")
    assert generated["weights"] == pytest.approx(2 * NUM_PARAMETERS[name], rel=0.01)


def test_the_parameters_counted_are_those_that_torchtitan_makes(tmp_path):
    import torch

    from rl.models.decoder_config import model_spec
    from rl.models.memory import ModelShape

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
    assert plan([recipe, "--model.path", config.model.path, "--devices", machine]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("it fits\n") and "weight sync:" in printed
    totals = {
        line.split()[0]: float(line.split()[-1])
        for line in printed.splitlines()
        if line.endswith(tuple("0123456789"))
    }
    (row,) = [line for line in GPU_DOCS.splitlines() if line.startswith(f"| `{recipe}` ")]
    of_page = [float(cell.split()[0].rstrip(",")) for cell in row.strip("| ").split("|")[2:]]
    assert of_page == pytest.approx([totals["trainer"], totals["generator"]], abs=0.05 + 1e-9)
    assert (
        plan([recipe, "--model.path", config.model.path, "--devices", "1xA10-24"]) == 1
        or recipe == "qwen3_0_6b"
    )


def qwen(make, **changes) -> RunConfig:
    """SmolLM2's recipe with Qwen3-0.6B, and nothing set that follows from the device."""
    unset = {"model": make("qwen3-0.6b"), "dtype": "auto", "generator": GeneratorConfig()}
    return dataclasses.replace(smollm2(), **(unset | changes))


# (machine, changes to SmolLM2's recipe with Qwen3-0.6B, what the refusal says)
REFUSED = [
    ("1xL4-24", {"trainer": TrainerConfig(max_tokens=8192)}, "GPU 0 has 21.7 GiB for processes that need about"),
    ("1xL4-24", {"trainer": TrainerConfig(max_tokens=8192)}, "set --trainer.activation_checkpointing full"),
    ("1xH100-80", {"placement": "separate"}, "2 processes (trainer 1 + generator 1) need a GPU each but the machine has 1"),
    ("1xH100-80", {"trainer": TrainerConfig(), "generator": GeneratorConfig(kv_cache_gib=0.1)}, "is less than one sequence of 8192 tokens takes, 0.88 GiB"),
    ("1xH100-80", {"trainer": TrainerConfig(layout=Layout(shard=2))}, "trainer has 2 processes and the machine 1 GPU:"),
    ("1xH100-80", {"generator": GeneratorConfig(kv_cache_gib=70)}, "generator 7"),
    ("4xA100-80", {"trainer": TrainerConfig(float8=True, compile=True)}, "float8=True needs GPUs of compute capability 8.9"),
    ("4xH100-80", {"trainer": TrainerConfig(float8=True)}, "without trainer.compile is slower than bfloat16"),
    ("1xT4-16", {}, "dtype=bfloat16 needs GPUs of compute capability 8.0 or more (this is a T4, 7.5); set --dtype float32"),
    ("cpu", {"placement": "shared"}, "placement=shared has no effect without GPUs"),
    ("cpu", {"generator": GeneratorConfig(cuda_graphs="on")}, "cuda_graphs=on needs a GPU"),
]  # fmt: skip


@pytest.mark.parametrize("machine, changes, words", REFUSED)
def test_what_would_fail_on_a_machine_is_refused_with_its_figures(model, machine, changes, words):
    (line,) = problems(qwen(model, **changes), machine)
    assert words in line


# Llama-3.1-8B in full takes 120 GiB of states: (machine, what is said, the same as settings).
REMEDIES = [
    ("8xH100-80", "set --trainer.layout.shard 2", {"layout": Layout(shard=2)}),
    ("2xA100-80", "set --trainer.lora.rank 16", {"lora": LoRA(rank=16)}),
]


@pytest.mark.parametrize("machine, words, settings", REMEDIES)
def test_the_remedy_is_one_that_fits(model, machine, words, settings):
    trainer = TrainerConfig(max_tokens=2048, activation_checkpointing="full")
    (line,) = problems(qwen(model, model=model("llama-3.1-8b"), trainer=trainer), machine)
    assert line.endswith(words)
    changed = dataclasses.replace(trainer, **settings)
    assert problems(qwen(model, model=model("llama-3.1-8b"), trainer=changed), machine) == []


def test_what_does_not_fit_on_a_host_without_gpus_is_refused(model):
    config = dataclasses.replace(smollm2(), model=model("llama-3.1-8b"))
    (line,) = problems(config, Machine(num_cores=16, free_gib=64))
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
    config = qwen(model, model=model("qwen3-30b-a3b"), trainer=TrainerConfig(lora=LoRA(rank=8)))
    (line,) = problems(config, Machine(num_cores=64, free_gib=1000))
    assert "trainer.lora.rank=8 of a model with experts needs a GPU" in line


def test_one_gpu_is_shared_and_the_cache_is_what_is_left(model):
    machine = parse_machine("1xH100-80")
    config = by_device(qwen(model), machine)
    assert (
        config.placement == "shared" and config.dtype == "bfloat16" and config.generator.cuda_graphs == "on"
    )
    explicit = qwen(model, generator=GeneratorConfig(kv_cache_gib=3.0))
    assert by_device(explicit, machine).generator.kv_cache_gib == 3.0
    alone = by_device(qwen(model), parse_machine("2xH100-80"))
    assert alone.placement == "separate" and alone.generator.kv_cache_gib == 0.0  # vLLM looks for itself
    planned = processes(config, machine)
    assert {p.role: p.device for p in planned} == {"trainer": 0, "generator": 0}
    # holds: meaning, most of the memory is planned and no more than there is
    assert 0.8 * 72.5 < sum(p.memory.total for p in planned) / GIB < 72.5


def test_each_default_by_device_holds_and_gives_way_to_a_setting(model):
    cpu, gpus = parse_machine("cpu"), parse_machine("2xH100-80")
    for default in DEVICE_DEFAULTS:
        section, _, leaf = default.setting.rpartition(".")
        for machine, value in ((cpu, default.cpu), (gpus, default.gpu)):
            config = by_device(qwen(model, generator=GeneratorConfig(), placement="auto"), machine)
            assert getattr(getattr(config, section) if section else config, leaf) == value, default.setting
    kept = qwen(
        model, dtype="float32", generator=GeneratorConfig(num_threads=3, cuda_graphs="off", kv_cache_gib=2.0)
    )
    assert by_device(kept, gpus) == dataclasses.replace(kept, placement="separate")


@pytest.mark.parametrize("text", ["", "H100", "0xH100-80", "8xXYZ-80", "8 x H100-80", "-1xH100-80"])
def test_devices_that_are_not_understood_are_refused(text):
    with pytest.raises(ConfigError, match="is not understood; write 8xH100-80"):
        parse_machine(text)


def test_roles_deal_out_gpus_in_turn(model):
    config = qwen(
        model, trainer=TrainerConfig(layout=Layout(shard=2)), generator=GeneratorConfig(num_replicas=2)
    )
    machine = Machine(16, 64.0, (GPU("H100", 78.8, (9, 0)),) * 2)
    planned = processes(by_device(config, machine), machine)
    assert [(p.role, p.rank, p.device) for p in planned] == [
        ("trainer", 0, 0), ("trainer", 1, 1), ("generator", 0, 0), ("generator", 1, 1),
    ]  # fmt: skip


def test_an_engine_that_shares_a_gpu_may_take_what_is_planned_for_nobody_else(model, tmp_path):
    machine = parse_machine("1xH100-80")
    config = by_device(qwen(model), machine)
    specs = specs_on(machine, config, tmp_path, tmp_path)
    by_role = {p.role: p.memory.total / GIB for p in processes(config, machine)}
    budget = specs.trainer.config.device_memory_gib
    assert budget == pytest.approx(machine.gpus[0].gib * 0.92 - by_role["generator"])
    assert by_role["trainer"] < budget < machine.gpus[0].gib
    two = parse_machine("2xH100-80")
    assert specs_on(two, qwen(model), tmp_path, tmp_path).trainer.config.device_memory_gib is None


STARTED_BY = {"train": (), "eval": evaluate.NOT_STARTED, "replay": replay.NOT_STARTED}


@pytest.mark.parametrize("without", STARTED_BY.values(), ids=STARTED_BY)
@pytest.mark.parametrize("num_gpus", range(1, 7))
def test_budgets_are_of_what_is_started_where_it_is_started(model, tmp_path, num_gpus, without):
    """The devices that the launcher deals out are those that the budgets were made for, and they exist."""
    machine = Machine(16, 64.0, (GPU("H200", 139.0, (9, 0)),) * num_gpus)
    config = qwen(
        model,
        placement="auto",
        judge=JudgeConfig(model=model("qwen3-1.7b"), kv_cache_gib=1.0),
        kl=KL(coef=0.1),
        advantages=GAE(),
    )
    specs = specs_on(machine, config, tmp_path, tmp_path, without)
    assert set(specs.roles) == {"trainer", "generator", "critic", "reference", "judge", "reward"} - {*without}
    places = place(specs.roles, 8, num_devices=num_gpus, shared=specs.share_devices)
    assert max(device for where in places.values() for device in where.devices) < num_gpus
    assert specs.share_devices == (len(specs.roles) - ("reward" in specs.roles) > num_gpus)
    config = by_device(config, machine, without)
    memories = role_memories(config, machine)
    for role in specs.roles.keys() & {*ENGINE_ROLES}:
        (device,) = places[role].devices
        others = sum(
            memories[other].total
            for other, where in places.items()
            if device in where.devices and other != role
        )
        room = machine.gpus[0].gib * USABLE - others / GIB
        budget = getattr(specs, role).config.device_memory_gib
        assert budget == (pytest.approx(room) if specs.share_devices else None), role
    unstarted = {"critic": specs.critic, "reference": specs.reference, "judge": specs.judge}
    assert {role for role, part in unstarted.items() if part is None} == unstarted.keys() & {*without}
    assert ("generator" in without) == (specs.num_generators == 0)
    assert ("reward" in without) == (specs.num_reward_procs == 0)


@pytest.mark.parametrize("command", ["eval", "replay"])
def test_eval_and_replay_start_that(model, tmp_path, monkeypatch, command):
    machine = parse_machine("1xH200-141")
    module, started = {"eval": (evaluate, evaluate._answers), "replay": (replay, replay._learn_again)}[
        command
    ]
    launched = []

    def launch(specs, run_dir):
        launched.append((specs, run_dir))
        raise RunError("enough")

    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(module, "this_machine", lambda: machine)
    config = qwen(model, placement="auto", kl=KL(coef=0.1), advantages=GAE())
    where = tmp_path / "out"
    arguments = (config, 0, where) if command == "eval" else (config, tmp_path, 3, where)
    with pytest.raises(RunError, match="enough"):
        asyncio.run(started(*arguments))
    ((specs, run_dir),) = launched
    assert run_dir == where  # its logs stay
    assert specs == specs_on(machine, config, specs.trainer.model_dir, tmp_path, STARTED_BY[command])
    assert specs.trainer.config.device_memory_gib is not None
