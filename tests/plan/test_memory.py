"""The memory plan's arithmetic, part by part, against numbers worked by hand for a model of a few elements."""

# holds: exact

import dataclasses
import json

import pytest

from rl.models.engine_config import EngineConfig
from rl.models.generator.vllm_config import Fill, VLLMConfig
from rl.models.layout import Layout
from rl.plan.demand import ModelFacts
from rl.plan.memory import GIB, engine_memory, generator_memory, longest_sequence_bytes
from rl.plan.model_shape import TIED, ModelShape
from rl.plan.phases import remaining
from rl.types import LoRA
from tests.models.architectures import MODEL_TYPES

# Of a layer: attention 8*8 + 8*4 + 8*4 + 8*8 = 192 elements of matrices, feed-forward 3*8*16 = 384; norms 2*8.
# Embeddings and head: 10*8 each. In all 3*576 + 160 = 1888 of matrices and 3*16 + 8 = 56 of norms.
DENSE = ModelShape(
    dim=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, hidden_dim=16, vocab_size=10, tied=False,
    qk_norm=False,
)  # fmt: skip
# The last two of its layers have 5 experts of 3*8*6 = 144, and a router of 8 for each: 760 in place of 384.
EXPERTS = dataclasses.replace(DENSE, num_moe_layers=2, num_experts=5, top_k=2, expert_dim=6)
# With a rank of 2: 2 * (16 + 12 + 12 + 16 of attention, 3*24 of the feed-forward) = 256 a layer.
ADAPTER, ADAPTER_ELEMENTS = LoRA(rank=2), 768
WHOLE, QUARTER = 1888 + 56, 1888 // 4 + 56 // 2
# Bytes of a token, on a CPU in bf16. A norm in fp32 parts saves 8*8; what it gives takes 2*8; cosines and sines 2*4*4;
# queries and attention's output 2*8 each, keys and values 2*4 each; the feed-forward part 4*16 elements. An expert has
# 4*6 elements and a copy of the token, and gives 4*8; the router has 4*5 of scores, and its input.
ATTENTION = 64 + 16 + 32 + 2 * 16 + 2 * 8
LAYER, SPARSE_LAYER = ATTENTION + 64 + 16 + 128, ATTENTION + 64 + 20 + 16 + 2 * ((24 + 8) * 2 + 32)
HEAD = 64 + 2 * 16  # the last norm, and what the head takes
TABLE = 8192 * 2 * 4 * 4  # cosines and sines of EngineConfig's max_seq_len positions
TOKENS = 5


def engine(dtype="bfloat16", layout=Layout(), **settings):
    return EngineConfig(layout=layout, dtype=dtype, micro_batch_tokens=TOKENS, **settings)


SPLIT = Layout(shard=2, tensor_parallel=2)
# Halved, but for what each of q, k, v, gate and up gathers, cosines and sines, the router, and copies of the token.
SPLIT_ATTENTION = 32 + 3 * 16 + 32 + (2 * 16 + 2 * 8) / 2
SPLIT_LAYER = SPLIT_ATTENTION + 32 + 2 * 16 + 128 / 2
SPLIT_SPARSE_LAYER = SPLIT_ATTENTION + 32 + 20 + 16 + 2 * ((24 / 2 + 8) * 2 + 32)
CASES = {
    "in fp32": (
        DENSE, engine("float32"), LoRA(), True,
        {
            "weights": 4 * WHOLE, "gradients": 4 * WHOLE, "optimizer": 8 * WHOLE, "gathered": 576 * 8,
            "activations": TOKENS * (3 * (128 + 64 + 32 + 3 * 32 + 256) + 64 + 64), "head": TOKENS * 10 * 12,
        },
    ),
    "in bf16": (
        DENSE, engine(), LoRA(), True,
        {
            "weights": 4 * WHOLE, "gradients": 4 * WHOLE, "optimizer": 8 * WHOLE,
            "gathered": WHOLE * 2 + 576 * 6, "activations": TOKENS * (3 * LAYER + HEAD),
            "head": TOKENS * 10 * (2 + 12),
        },
    ),
    "a reference": (
        DENSE, engine(), LoRA(), False,
        {
            "weights": 4 * WHOLE, "gradients": 0, "optimizer": 0, "gathered": WHOLE * 2,
            "activations": TOKENS * (2 * 32 + 32 + 16 + 16 + 3 * 32), "head": TOKENS * 10 * (2 + 8),
        },
    ),
    "a critic": (DENSE, engine(head="value"), LoRA(), True, {"weights": 4 * (WHOLE - 80), "head": 0}),
    "split four ways": (
        DENSE, engine(layout=SPLIT), LoRA(), True,
        {
            "weights": 4 * QUARTER, "gradients": 4 * QUARTER, "optimizer": 8 * QUARTER,
            "gathered": ((2 * 576 + 160) * 2 + 576 * 6) / 2,
            "activations": TOKENS * (3 * SPLIT_LAYER + 32 + 32), "head": TOKENS * 10 * (2 + 12),
        },
    ),
    "two ranks for each row": (
        DENSE, engine(layout=Layout(context_parallel=2)), LoRA(), True,
        {"weights": 4 * WHOLE / 2, "activations": TOKENS * (3 * ((LAYER - 16) / 2 + 16) + HEAD / 2)},
    ),
    "two copies": (DENSE, engine(layout=Layout(replicate=2)), LoRA(), True, {"weights": 4 * WHOLE}),
    "an adapter": (
        DENSE, engine(adapters=True), ADAPTER, True,
        {
            "weights": 2 * WHOLE + 4 * ADAPTER_ELEMENTS, "gradients": 4 * ADAPTER_ELEMENTS,
            "optimizer": 8 * ADAPTER_ELEMENTS, "gathered": 0,
            "activations": TOKENS * (3 * (LAYER - 64) + HEAD - 32),  # norms that do not learn save half
        },
    ),
    "an adapter, split four ways": (
        DENSE, engine(adapters=True, layout=SPLIT), ADAPTER, True,
        {
            "weights": 2 * QUARTER + 4 * ADAPTER_ELEMENTS / 2, "gradients": 4 * ADAPTER_ELEMENTS / 2,
            "gathered": (2 * 576 + 160) * 2 / 2,
        },
    ),
    "a reference beside adapters": (
        DENSE, engine(adapters=True), ADAPTER, False,
        {"weights": 2 * WHOLE, "gradients": 0, "optimizer": 0, "gathered": 0},
    ),
    "layers computed again": (
        DENSE, engine(activation_checkpointing="full"), LoRA(), True,
        {"activations": TOKENS * (3 * 16 + LAYER + HEAD)},
    ),
    "half of them": (
        DENSE, engine(activation_checkpointing="selective"), LoRA(), True,
        # its input; and what q, v, gate and down give
        {"activations": TOKENS * (3 * (16 + 2 * (8 + 4 + 16 + 8)) + LAYER + HEAD)},
    ),
    "experts": (
        EXPERTS, engine(), LoRA(), True,
        {
            "weights": 4 * (WHOLE + 2 * (760 - 384)), "gathered": (WHOLE + 752) * 2 + (192 + 760) * 6,
            "activations": TOKENS * (LAYER + 2 * SPARSE_LAYER + HEAD),
        },
    ),
    "experts, layers computed again": (
        EXPERTS, engine(activation_checkpointing="full"), LoRA(), True,
        {"activations": TOKENS * (3 * 16 + SPARSE_LAYER + HEAD)},
    ),
    "experts, split four ways": (
        EXPERTS, engine(layout=SPLIT), LoRA(), True,
        {"activations": TOKENS * (SPLIT_LAYER + 2 * SPLIT_SPARSE_LAYER + 64)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_engines_parts_are_those_worked_by_hand(case):
    shape, config, lora, learns, expected = CASES[case]
    parts = dict(engine_memory(shape, config, lora, learns, on_cpu=True).parts)
    parts["activations"] -= TABLE
    assert {name: parts[name] for name in expected} == expected


def test_norms_and_attention_of_a_gpu_save_less():
    """A norm its input alone; attention its output, which the next layer shares, and 4 bytes of each head."""
    layer = 2 * 16 + 2 * 16 + 32 + 2 * 16 + 2 * 8 + 2 * 4 + 128
    parts = engine_memory(DENSE, engine(), LoRA(), True, on_cpu=False).parts
    assert parts["activations"] == TOKENS * (3 * layer + 16 + 32) + TABLE


def test_a_generators_parts_are_those_worked_by_hand():
    """On two ranks: half of the matrices and all norms of each; logits of 7 sequences, 4096 tokens at a time."""
    config = VLLMConfig("", dtype="bfloat16", max_model_len=100, max_num_seqs=7, tensor_parallel=2)
    weights = 1888 * 2 / 2 + 56 * 2
    expected = {
        "weights": weights, "loading": 2 * weights, "cache": GIB / 4,
        "activations": 4096 * (32 + 3 * 16 / 2) * 2 + 7 * 10 * (2 + 8),
    }  # fmt: skip
    parts = generator_memory(DENSE, config, on_cpu=True).parts
    assert {name: parts[name] for name in expected} == expected
    on_gpu = generator_memory(DENSE, dataclasses.replace(config, kv_cache_gib=Fill(50.0)), on_cpu=False).parts
    assert on_gpu["loading"] == 10 * 8 * 2 and on_gpu["cache"] == 0  # one tensor at a time
    wide = generator_memory(EXPERTS, dataclasses.replace(config, max_model_len=9999), on_cpu=True).parts
    assert wide["activations"] == 9999 * (32 + 3 * 16 / 2) * 2 + 700
    many = dataclasses.replace(EXPERTS, top_k=4)  # 4 * 6 is wider than 16
    assert generator_memory(many, config, on_cpu=True).parts["activations"] == 4096 * (32 + 36) * 2 + 700


def test_a_sequence_takes_whole_blocks_of_the_cache_and_one_more():
    config = VLLMConfig("", dtype="bfloat16", max_model_len=64, block_size=32)
    a_token = 2 * 3 * 1 * 4 * 2  # keys and values of three layers
    assert longest_sequence_bytes(DENSE, config) == 3 * 32 * a_token
    assert longest_sequence_bytes(DENSE, dataclasses.replace(config, max_model_len=65)) == 4 * 32 * a_token
    half = dataclasses.replace(config, tensor_parallel=2)
    assert longest_sequence_bytes(DENSE, half) == 3 * 32 * a_token  # each rank has the one head
    two_heads = dataclasses.replace(DENSE, num_kv_heads=2)
    assert longest_sequence_bytes(two_heads, half) == 3 * 32 * a_token


def test_a_process_without_a_model_takes_about_what_torch_does():
    """The quickstart's models are of a few MiB: what its processes take is torch, torchtitan and vLLM."""
    on_cpu = [engine_memory(DENSE, engine(), LoRA(), True, on_cpu=True).total]
    on_cpu += [generator_memory(DENSE, VLLMConfig("", kv_cache_gib=0), on_cpu=True).total]
    on_gpu = [engine_memory(DENSE, engine(), LoRA(), True, on_cpu=False).total]
    on_gpu += [generator_memory(DENSE, VLLMConfig("", kv_cache_gib=0), on_cpu=False).total]
    assert all(0.4 * GIB < total < 1.2 * GIB for total in on_cpu), on_cpu
    assert all(1 * GIB < total < 3 * GIB for total in on_gpu), on_gpu


CONFIG = {
    "hidden_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 10
}  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "num_moe"),
    [
        ({}, 0),
        ({"num_experts": 4}, 6),
        ({"num_local_experts": 4}, 6),
        ({"num_experts": 4, "decoder_sparse_step": 2}, 3),
        ({"num_experts": 4, "mlp_only_layers": [0, 5]}, 4),
        ({"num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [0, 1, 9]}, 2),
    ],
)
def test_which_layers_have_experts(extra, num_moe):
    """Of those whose turn it is (every second: the layers 1, 3 and 5) all but the ones that are named."""
    assert ModelShape.of(CONFIG | extra).num_moe_layers == num_moe


def test_what_config_json_leaves_out():
    shape = ModelShape.of(CONFIG)
    assert (shape.num_kv_heads, shape.head_dim, shape.tied, shape.qk_norm) == (2, 4, False, False)
    shape = ModelShape.of(CONFIG | {"head_dim": 3, "num_key_value_heads": 1, "model_type": "qwen3_moe"})
    assert (shape.num_kv_heads, shape.head_dim, shape.qk_norm) == (1, 3, True)
    assert shape.vectors == 6 * (2 * 8 + 2 * 3) + 8


def test_experts_by_any_name_with_those_of_all_tokens():
    """GLM-4.5-Air: 106 billion parameters, by its card."""
    air = {
        "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552,
        "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    shape = ModelShape.of(air)
    assert (shape.num_moe_layers, shape.num_experts, shape.shared_dim) == (45, 128, 1408)
    assert shape.num_parameters == pytest.approx(106e9, rel=0.02)
    attention, expert, router = 4096 * 128 * (2 * 96 + 2 * 8), 3 * 4096 * 1408, 128 * 4096
    assert shape.layer_matrices == attention + 128 * expert + router + expert
    assert ModelFacts.of(air, 1000).expert_width == 1408


@pytest.mark.parametrize(
    "extra", [{"kv_lora_rank": 512}, {"moe_num_experts": 8}, {"model_type": "llama4_text"}]
)
def test_of_another_decoder_no_sizes_are_known(extra):
    assert ModelFacts.of(CONFIG | extra, 100).shape is None


def test_of_files_with_more_elements_than_such_a_decoder_has_no_sizes_are_known():
    count = ModelShape.of(CONFIG).num_parameters
    for num_elements, known in ((0, True), (count // 2, True), (count, True), (2 * count, False)):
        assert (ModelFacts.of(CONFIG, 100, num_elements=num_elements).shape is not None) == known
    tied = CONFIG | {"tie_word_embeddings": True}
    both = ModelShape.of(tied).num_parameters + 10 * 8  # the head is written, too
    assert ModelFacts.of(tied, 100, num_elements=both).shape is not None
    twice = int(1.04 * (ModelShape.of(tied).num_parameters + CONFIG["vocab_size"] * CONFIG["hidden_size"]))
    assert ModelFacts.of(tied, 100, num_elements=twice).shape is not None
    assert ModelFacts.of(tied, 100, num_elements=int(1.02 * twice)).shape is None


def test_which_models_have_tied_embeddings_unless_they_say_otherwise():
    """As transformers' classes have it."""
    from transformers import AutoConfig

    tied = {name for name in MODEL_TYPES if getattr(AutoConfig.for_model(name), "tie_word_embeddings", False)}
    assert tied == TIED
    assert ModelShape.of(CONFIG | {"model_type": "gemma2"}).tied
    assert not ModelShape.of(CONFIG | {"model_type": "gemma2", "tie_word_embeddings": False}).tied


NO_DEFAULT = ("dbrx", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe", "nemotron")
"""Architectures whose default sizes are no whole model's."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in NO_DEFAULT])
def test_no_architecture_has_more_elements_than_are_counted(model_type):
    """Of its default sizes, as transformers makes it without memory; or nothing is known of it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    shape = ModelFacts.of(json.loads(hf.to_json_string(use_diff=False)), 100).shape
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert shape is None or shape.num_parameters > 0.95 * counted  # holds: exact, biases are not counted


def test_a_suspended_generator_keeps_on_a_cpu_what_vllm_does_not_pack():
    """The embeddings, and experts; on a GPU nothing but its overhead."""

    def kept(shape, on_cpu):
        memory = generator_memory(shape, VLLMConfig("", dtype="float32"), on_cpu)
        return remaining(memory, "suspended").total - memory.parts["overhead"]

    assert kept(DENSE, on_cpu=True) == 10 * 8 * 4
    assert kept(EXPERTS, on_cpu=True) == 10 * 8 * 4 + 2 * 5 * 144 * 4
    assert kept(DENSE, on_cpu=False) == 0


def test_layers_of_experts_have_adapters_at_their_attention_alone():
    """56 a rank of attention, 72 of a feed-forward part, which one of the three layers has."""
    assert EXPERTS.adapter_elements(LoRA(rank=2)) == 2 * (3 * 56 + 72)


def test_a_step_has_room_for_a_token_of_every_sequence():
    """vLLM refuses another."""
    assert VLLMConfig("", max_model_len=64, max_num_seqs=8192).step_tokens == 8192


def test_a_checkpoint_is_written_from_a_copy_of_weights_and_moments():
    """Between steps what a step takes is free for it; beside them nothing is."""
    plain = engine_memory(DENSE, engine(), LoRA(), True, on_cpu=True)
    between, beside = (
        engine_memory(DENSE, engine(), LoRA(), True, on_cpu=True, saves=True, overlap=overlap)
        for overlap in (False, True)
    )
    copy = plain.parts["weights"] + plain.parts["optimizer"]
    of_a_step = sum(plain.parts[part] for part in ("gradients", "gathered", "activations", "head"))
    assert between.staged == beside.staged == copy and plain.staged == 0
    assert between.total == plain.total + max(0, copy - of_a_step) and beside.total == plain.total + copy
    large = dataclasses.replace(DENSE, hidden_dim=10**8)
    parts = [engine_memory(large, engine(), LoRA(), True, True, saves=saves).parts for saves in (False, True)]
    assert parts[1]["checkpoint"] > 0 and {**parts[1], "checkpoint": 0} == {**parts[0], "checkpoint": 0}
    on_gpu = engine_memory(DENSE, engine(), LoRA(), True, on_cpu=False, saves=True)
    assert "checkpoint" not in on_gpu.parts and on_gpu.staged == copy  # it is on the host
    assert not engine_memory(DENSE, engine(), LoRA(), False, on_cpu=True, saves=True).staged  # a reference
    assert remaining(beside, "suspended").parts["checkpoint"] == copy


def test_the_reference_is_one_more_adapter_with_moments_of_its_own():
    lora = LoRA(rank=4, targets=("q_proj",))
    one, two = (
        engine_memory(DENSE, engine(adapters=True), lora, True, on_cpu=True, num_adapters=count, saves=True)
        for count in (1, 2)
    )
    adapter = DENSE.adapter_elements(lora) * 4
    assert two.parts["weights"] - one.parts["weights"] == adapter
    assert two.parts["optimizer"] == 2 * one.parts["optimizer"] == 4 * adapter
    assert two.parts["gradients"] == one.parts["gradients"] == adapter
    assert two.staged == 2 * one.staged == 6 * adapter
