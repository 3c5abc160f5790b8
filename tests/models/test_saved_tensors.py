"""The Plan's arithmetic of activations against what autograd saves, at the sizes of real models."""

# holds: meaning, the Plan promises a tenth

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from rl.errors import ConfigError
from rl.models.engine_config import EngineConfig
from rl.models.known_shapes import known_config
from rl.models.layout import Layout
from rl.plan.activations import Learning, activations
from rl.plan.model_shape import ModelShape
from rl.types import LoRA
from tests.models.saved_tensors import of_a_layer, titan, transformers_model

ROOT = Path(__file__).parent.parent.parent
TOKENS = 128
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LEARNING = {
    "weights": Learning(weights=True),
    "adapters": Learning(targets=ALL, rank=16),
    "adapters of attention": Learning(targets=ALL[:4], rank=16),
    "adapters of q and v": Learning(targets=("q_proj", "v_proj"), rank=16),
}
DEVICES = {
    "GPU": (True, "bfloat16"),
    "GPU in fp32": (True, "float32"),
    "CPU in bf16": (False, "bfloat16"),
    "CPU": (False, "float32"),
}


def planned(config, engine, kind, learning, on_gpu):
    """Bytes of a token, of one of the layers."""
    shape = ModelShape.of(config)

    def total(num_layers):
        sized = dataclasses.replace(
            shape, num_layers=num_layers, num_moe_layers=num_layers if shape.num_moe_layers else 0
        )
        return activations(sized, engine, kind, learning, not on_gpu) / engine.micro_batch_tokens

    return total(2) - total(1)


def check(model, device, learning, checkpointing, kind, count_of):
    on_gpu, dtype = DEVICES[device]
    config, learns = known_config(model), LEARNING[learning]
    engine = EngineConfig(dtype=dtype, activation_checkpointing=checkpointing)
    lora = None if learns.weights else LoRA(rank=learns.rank, targets=learns.targets)
    saved = of_a_layer(count_of(getattr(torch, dtype), on_gpu, lora, checkpointing), config, TOKENS)
    expected = planned(config, engine, kind, learns, on_gpu)
    assert expected == pytest.approx(saved, rel=0.1), f"{expected / saved:.3f} of {saved} bytes"


MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B")
QUICK = {
    "titan": {
        ("Qwen/Qwen3-0.6B", "GPU"),
        ("Qwen/Qwen3-30B-A3B", "GPU"),
        ("meta-llama/Llama-3.1-8B", "CPU in bf16"),
    },
    "hf": {("Qwen/Qwen3-0.6B", "GPU")},
}


def cases(kind):
    for case in itertools.product(MODELS, DEVICES, LEARNING, ("none", "selective", "full")):
        model, device, learning, checkpointing = case
        if kind == "hf" and "A3B" in model and DEVICES[device][1] == "float32":
            continue  # FakeTensorMode refuses what transformers computes experts with in fp32
        quick = (model, device) in QUICK[kind] and learning in ("weights", "adapters of q and v")
        quick = quick and checkpointing != "full"
        yield pytest.param(*case, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("model", "device", "learning", "checkpointing"), cases("titan"))
def test_titan(model, device, learning, checkpointing):
    check(model, device, learning, checkpointing, "titan", titan)


@pytest.mark.parametrize(("model", "device", "learning", "checkpointing"), cases("hf"))
def test_hf(model, device, learning, checkpointing):
    check(model, device, learning, checkpointing, "hf", transformers_model)


PADDED = ("gemma2", "granite_swa", "granitemoe_swa", "nemotron", "stablelm", "vaultgemma")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", PADDED)
def test_scores_of_padded_rows(model_type, dtype):
    """They grow with the square of a row, unlike all else: what two rows save beyond twice what one saves."""
    if model_type == "granitemoe_swa" and dtype == "float32":
        pytest.skip("FakeTensorMode refuses what transformers computes experts with in fp32")
    config = SMALL | {"model_type": model_type, "vocab_size": 512, "max_position_embeddings": 8192}
    config |= {"num_local_experts": 1, "num_experts_per_tok": 1} if "moe" in model_type else {}
    if model_type == "stablelm":  # its heads are the hidden size's parts
        config.pop("head_dim")
    count = transformers_model(getattr(torch, dtype), False, None, "none", packed=False)

    def of_a_layer(tokens):
        one, two = (count(config | {"num_hidden_layers": layers}, tokens) for layers in (1, 2))
        return two - one

    saved = (of_a_layer(2 * TOKENS) - 2 * of_a_layer(TOKENS)) / (
        2 * TOKENS**2
    )  # of a token, for each it sees
    shape = ModelShape.of(config | {"num_hidden_layers": 1})
    long, short = (
        activations(
            shape, EngineConfig(dtype=dtype, max_seq_len=length), "hf", LEARNING["weights"], on_cpu=True
        )
        / EngineConfig().micro_batch_tokens
        for length in (2048, 1024)
    )
    assert saved <= 1.01 * (long - short) / 1024 <= 1.6 * saved


def test_every_model_of_padded_rows_whose_sizes_are_known_has_its_scores_counted():
    """By docs/models.md, which says how each is computed."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (ROOT / "docs" / "models.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    padded = [row[0] for row in rows if row[1] == "padded" and row[-1] == "right"]
    assert len(padded) > len(PADDED)
    for model_type in padded:
        config = transformers.AutoConfig.for_model(model_type).to_dict()
        try:
            shape = ModelShape.of(config)
        except ConfigError:  # then the Plan does not count its memory
            assert model_type not in PADDED
        else:
            assert model_type in PADDED
            assert shape.score_bytes


SMALL = {
    "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 320, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip
DENSE = SMALL | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
EXPERTS = SMALL | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 4, "moe_intermediate_size": 48,
}  # fmt: skip
LAYOUTS = [
    Layout(tensor_parallel=2),
    Layout(context_parallel=2),
    Layout(shard=2),
    Layout(context_parallel=2, tensor_parallel=2),
]
SPLIT = [
    (layout, config)
    for config in (DENSE, EXPERTS)
    for layout in LAYOUTS
    if config is DENSE or layout.context_parallel == 1
]


@pytest.mark.slow
def test_layouts():
    """In a process of its own, as ranks of groups whose collectives do nothing."""
    job = [[dataclasses.asdict(layout), config, 4 * TOKENS] for layout, config in SPLIT]
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.saved_tensors", json.dumps(job)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for (layout, config), saved in zip(SPLIT, json.loads(done.stdout.splitlines()[-1]), strict=True):
        engine = EngineConfig(layout=layout)
        expected = planned(
            config | {"vocab_size": 512, "num_hidden_layers": 2}, engine, "titan", LEARNING["weights"], False
        )
        assert expected == pytest.approx(saved, rel=0.1), f"{layout}: {expected / saved:.3f} of {saved} bytes"
