"""What of a public model's config.json is taken, and what is refused."""

from contextlib import nullcontext

import pytest

from rl.errors import ConfigError
from rl.models.decoder_config import model_spec
from rl.models.experts import expert_width, num_experts
from rl.models.hf import max_positions
from rl.models.hf_checks import check_config, check_dropout, check_supported
from rl.plan.model_shape import ModelShape

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 256,
    "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
LISTS = {"num_experts": [4, 8], "moe_intermediate_size": [32, 32], "num_experts_per_tok": [2, 2]}


@pytest.mark.parametrize("fields", [{"num_local_experts": 0, "num_experts_per_tok": 0}, LISTS])
def test_a_model_may_have_no_experts_or_other_ones_in_each_layer(fields):
    """As transformers writes a dense GraniteMoeHybrid, and HunYuan's."""
    check_config({"hidden_size": 64, "num_hidden_layers": 2} | fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_experts": [4, -1]}, "num_experts=.*at least 0"),
        ({"moe_intermediate_size": [32, "a"]}, "moe_intermediate_size=.*at least 1"),
        ({"intermediate_size": [0, 32]}, "intermediate_size=.*at least 1"),
        ({"hidden_size": [64, 64]}, "hidden_size=.*at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_experts": [10**30]}, "a size that a model has"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok=True"),
    ],
)
def test_what_is_no_size_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        check_config(fields)


def test_experts_of_which_none_is_chosen_are_refused():
    with pytest.raises(ConfigError, match="config.json has no num_experts_per_tok"):
        check_supported(QWEN3_MOE | {"num_experts_per_tok": 0})


def test_lists_are_for_the_engine_that_takes_them():
    assert num_experts(LISTS) == 8 and expert_width(LISTS) == 0
    with pytest.raises(ConfigError, match="no whole number"):
        ModelShape.of(QWEN3_MOE | LISTS)
    with pytest.raises(ConfigError, match="num_experts of each layer, .* set trainer.engine=hf"):
        check_supported(QWEN3_MOE | LISTS)


@pytest.mark.parametrize("layers", [None, []])
def test_no_dense_layers_may_be_null(layers):
    spec = model_spec(QWEN3_MOE | {"mlp_only_layers": layers}, packed_attention=True)
    assert all(hasattr(layer, "moe") and layer.moe is not None for layer in spec.model.layers)


def test_positions_of_a_model_of_several_parts_are_its_texts():
    assert max_positions({"text_config": {"max_position_embeddings": 256}}) == 256
    assert max_positions({"n_positions": 8, "text_config": {"max_position_embeddings": 256}}) == 8
    assert max_positions({}) == max_positions({"text_config": None}) == 2**62


def test_experts_heads_and_positions_are_there_where_a_config_leaves_them_out_or_spaces_them_out():
    """As older files of Llama do, and Qwen's with experts in every second layer."""
    sparse = model_spec(QWEN3_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 4}, packed_attention=True)
    assert [layer.moe is not None for layer in sparse.model.layers] == [False, True, False, True]
    assert sparse.model.layers[1].moe.router.route_norm is False
    plain = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    config = model_spec(plain, packed_attention=True).model
    assert config.layers[0].attention.rope.theta == 10000.0
    shapes = {name: tuple(p.shape) for name, p in config.build().named_parameters()}
    assert shapes["layers.0.attention.qkv_linear.wk.weight"] == (64, 64)  # 4 heads of 16
    assert shapes["tok_embeddings.weight"] == shapes["lm_head.weight"] == (256, 64)  # not tied


@pytest.mark.parametrize(
    ("hf", "has"),
    [
        ({"model_type": "qwen2"}, False),
        ({"model_type": "qwen2", "attention_dropout": 0.1}, True),
        ({"model_type": "gpt2"}, True),  # by transformers' default
        ({"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, False),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, False),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "attention_dropout": 0.1}},
            True,
        ),
    ],
)
def test_dropout_is_refused_of_a_model_that_has_none(hf, has):
    with nullcontext() if has else pytest.raises(ConfigError, match="has no dropout; leave it out"):
        check_dropout(hf)


@pytest.mark.parametrize(("part", "is_refused"), [(0.5, True), (1.0, False), (None, False)])
def test_a_rope_of_part_of_a_head_is_refused_wherever_it_is_written(part, is_refused):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
    for hf in ({"partial_rotary_factor": part}, {"rope_parameters": rope}):
        with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.5") if is_refused else nullcontext():
            check_supported(QWEN3_MOE | hf)
