"""The configuration of a decoder, from the contents of a Hugging Face config.json."""

from functools import partial
from typing import Any, Literal

from torch import nn

import rl.models.platform  # noqa: F401  sets torchtitan's device first
from rl.models.attention import PackedAttention
from rl.models.decoder import Experts, Llama3Policy, Llama3RoPE, LogprobHead, Qwen3Policy, ValueHead
from rl.models.experts import num_experts
from rl.models.gpu_attention import VarlenOrFlex
from rl.models.hf import rope_parameters
from rl.models.hf_checks import check_supported

from torchtitan.models.common import CosSinRoPE, Embedding, RMSNorm
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec


def model_spec(
    hf: dict[str, Any], *, packed_attention: bool, head: Literal["tokens", "value"] = "tokens"
) -> ModelSpec:
    """hf: the contents of config.json. `packed_attention` chooses PackedAttention over VarlenOrFlex.

    Raises ConfigError as `check_supported` does.
    """
    check_supported(hf)
    is_llama = hf["architectures"][0] == "LlamaForCausalLM"
    attention = PackedAttention.Config() if packed_attention else VarlenOrFlex.Config()
    return ModelSpec(
        name="llama3" if is_llama else "qwen3",
        flavor="from_hf",
        model=_decoder_config(hf, is_llama, attention, head),
        parallelize_fn=parallelize_llama if is_llama else parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,  # torchtitan's moves biases of experts, which these models do not have
        state_dict_adapter=None,
    )


def _decoder_config(hf: dict[str, Any], is_llama: bool, attention: Any, head: str) -> Decoder.Config:
    dim, vocab_size = hf["hidden_size"], hf["vocab_size"]
    head_dim = hf.get("head_dim") or dim // hf["num_attention_heads"]
    normal = _normal(hf)
    tied = hf.get("tie_word_embeddings", False) and head == "tokens"
    lm_head = LogprobHead.Config(in_features=dim, out_features=vocab_size, param_init=normal)
    if head == "value":
        lm_head = ValueHead.Config(in_features=dim, out_features=1, param_init={"weight": nn.init.zeros_})
    block = Llama3TransformerBlock if is_llama else Qwen3TransformerBlock
    layers = [
        block.Config(
            attention_norm=_norm(hf, dim),
            ffn_norm=_norm(hf, dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=hf["num_attention_heads"],
                n_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
                head_dim=head_dim,
                wqkv_param_init=normal,
                wo_param_init=normal,
                inner_attention=attention,
                rope=_rope(hf, head_dim),
                qk_norm=None if is_llama else _norm(hf, head_dim),
            ),
            **_feed_forward(hf, layer),
        )
        for layer in range(hf["num_hidden_layers"])
    ]
    return (Llama3Policy if is_llama else Qwen3Policy).Config(
        dim=dim,
        vocab_size=vocab_size,
        norm=_norm(hf, dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size,
            embedding_dim=dim,
            param_init={"weight": skip_param_init} if tied else normal,
        ),
        lm_head=lm_head,
        layers=layers,
    )


def _normal(hf: dict[str, Any]) -> dict[str, Any]:
    return {"weight": partial(nn.init.normal_, std=hf.get("initializer_range", 0.02))}


def _norm(hf: dict[str, Any], size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=hf["rms_norm_eps"], param_init={"weight": nn.init.ones_})


def _feed_forward(hf: dict[str, Any], layer: int) -> dict[str, Any]:
    """A dense or a sparse feed-forward part, by the rules of Qwen3-MoE's config.json."""
    dim, normal = hf["hidden_size"], _normal(hf)
    count = num_experts(hf)
    in_turn = (layer + 1) % hf.get("decoder_sparse_step", 1) == 0
    sparse = count and layer not in (hf.get("mlp_only_layers") or []) and in_turn
    if not sparse:
        sizes = {"dim": dim, "hidden_dim": hf["intermediate_size"]}
        return {"feed_forward": make_ffn_config(**sizes, w1_param_init=normal, w2w3_param_init=normal)}
    top_k, hidden_dim = hf["num_experts_per_tok"], hf["moe_intermediate_size"]
    experts = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), normal["weight"])
    return {
        "moe": make_moe_config(
            num_experts=count,
            router=make_router_config(
                dim=dim,
                num_experts=count,
                gate_param_init=normal,
                top_k=top_k,
                score_func="softmax",
                route_norm=hf.get("norm_topk_prob", False),
            ),
            routed_experts=RoutedExperts.Config(
                inner_experts=Experts.Config(
                    dim=dim, hidden_dim=hidden_dim, num_experts=count, param_init=experts
                ),
                token_dispatcher=make_token_dispatcher_config(
                    num_experts=count, top_k=top_k, comm_backend="standard"
                ),
            ),
            load_balance_coeff=None,
        )
    }


def _rope(hf: dict[str, Any], head_dim: int) -> CosSinRoPE.Config:
    rope = rope_parameters(hf)
    common = {"dim": head_dim, "max_seq_len": hf["max_position_embeddings"], "theta": rope["rope_theta"]}
    if rope["rope_type"] == "default":
        return CosSinRoPE.Config(**common)
    return Llama3RoPE.Config(
        **common,
        scaling="llama",
        scaling_factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
    )
