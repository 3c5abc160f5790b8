"""Sizes of public models by their id on the Hub: `rl plan` needs no network for them."""

import re

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


def _dense(base: dict, dim: int, layers: int, heads: int, intermediate: int, tied: bool) -> dict:
    sizes = {"hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads}
    return base | sizes | {"intermediate_size": intermediate, "tie_word_embeddings": tied}


_SHAPES = {
    "Qwen/Qwen3-0.6B": _dense(_QWEN3, 1024, 28, 16, 3072, True),
    "Qwen/Qwen3-1.7B": _dense(_QWEN3, 2048, 28, 16, 6144, True),
    "Qwen/Qwen3-4B": _dense(_QWEN3, 2560, 36, 32, 9728, True),
    "Qwen/Qwen3-8B": _dense(_QWEN3, 4096, 36, 32, 12288, False),
    "Qwen/Qwen3-14B": _dense(_QWEN3, 5120, 40, 40, 17408, False),
    "Qwen/Qwen3-32B": _dense(_QWEN3, 5120, 64, 64, 25600, False),
    "Qwen/Qwen3-30B-A3B": _dense(_QWEN3, 2048, 48, 32, 6144, False)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "meta-llama/Llama-3.1-8B": _dense(_LLAMA3, 4096, 32, 32, 14336, False),
    "meta-llama/Llama-3.1-70B": _dense(_LLAMA3, 8192, 80, 64, 28672, False),
    "meta-llama/Llama-3.2-1B": _dense(_LLAMA3, 2048, 16, 32, 8192, True),
    "meta-llama/Llama-3.2-3B": _dense(_LLAMA3, 3072, 28, 24, 8192, True),
}
KNOWN = tuple(_SHAPES)


def known_config(name: str) -> dict | None:
    """What matters of a public model's config.json; None for a model that is not in the table.

    name: an id, with or without @revision; -Base and -Instruct have the sizes of the model itself.
    """
    plain = re.sub(r"-(Base|Instruct)$", "", name.partition("@")[0])
    return dict(_SHAPES[plain]) if plain in _SHAPES else None
