"""Small random models of any architecture that transformers has: its default config with small sizes."""

from typing import Any

SIZES: dict[str, Any] = {
    # widths
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 192),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    "vocab_size": 128,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 256),
    # attention
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "v_head_dim"), 32),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 32),
    "qk_head_dim": 64, "rotary_dim": 16, "sliding_window": 16,
    "index_n_heads": 2, "index_head_dim": 32, "index_topk": 8,
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "moe_topk"), 2),
    "top_k_experts": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    # state spaces and linear attention
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 8),
    "mamba_d_ssm": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    # Gemma 3n
    "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 32, "altup_num_inputs": 2,
    "num_kv_shared_layers": 0,
}  # fmt: skip
_NONE_BY_DEFAULT = ("num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok")
_TOKENS = {"bos_token_id": 0, "pad_token_id": 0, "sep_token_id": 0, "cls_token_id": 0, "eos_token_id": 1}
_LISTS_OF_LAYERS = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "no_rope_layers",
    "layer_type_list",
)

_LATENT = {"num_key_value_heads": 4}  # multi-head latent attention has as many as heads
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _LATENT),
    **dict.fromkeys(("longcat_flash", "minicpm3", "kimi_linear"), _LATENT),
    **{name: {"logit_scale": 1.0} for name in ("cohere", "cohere2", "cohere2_moe")},  # else logits are tiny
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
    },
    "deepseek_v2": _LATENT | {"num_experts_per_tok": 2, "n_group": 1},
    "gpt_neo": {
        "hidden_size": 128,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 16,
    },
    "falcon": {"ffn_hidden_size": 512},
    "glm4_moe": {"head_dim": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"attention_chunk_size": 64, "interleave_moe_layer_step": 2},
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid"},
}
"""What the sizes above do not fit."""


def small_config(model_type: str, **changes: Any) -> Any:
    """transformers' default config of an architecture, made small."""
    import transformers

    default = transformers.AutoConfig.for_model(model_type).to_dict()
    sizes = {
        name: size
        for name, size in SIZES.items()
        if name in default
        and (type(default[name]) is int or (default[name] is None and name in _NONE_BY_DEFAULT))
    }
    tokens = {name: token for name, token in _TOKENS.items() if default.get(name) is not None}
    num_layers = next((n for k, n in sizes.items() if k.endswith(("layers", "layer"))), 2)
    layers = {}
    for name in _LISTS_OF_LAYERS:
        if isinstance(kinds := default.get(name), list) and len(kinds) > num_layers:
            layers[name] = (list(dict.fromkeys(kinds)) * num_layers)[:num_layers]
    return transformers.AutoConfig.for_model(
        model_type, **{**sizes, **tokens, **layers, **SPECIAL.get(model_type, {}), **changes}
    )


def random_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """In fp32, in eval mode. No parameter and no persistent buffer keeps the value that it begins with."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = small_config(model_type, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    persistent = model.state_dict().keys()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name in persistent and buffer.is_floating_point():
                buffer.add_(0.1 * torch.rand(buffer.shape, generator=generator))
    return model
