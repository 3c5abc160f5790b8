"""Tiny model directories for tests."""

import json
from pathlib import Path

CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "initializer_range": 0.1,
}
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "granite": "GraniteForCausalLM",
    "cohere": "CohereForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "falcon": "FalconForCausalLM",
    "mamba": "MambaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
}


def write_config(path: Path, model_type: str = "qwen3", **changes: object) -> Path:
    """A directory with nothing but config.json."""
    kind = {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]]}
    config = CONFIG | kind | {"tie_word_embeddings": True} | changes
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_model(path: Path, model_type: str = "qwen3", **changes: object):
    """A directory with random weights, written by transformers. Returns transformers' model, in fp32."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = CONFIG | {"tie_word_embeddings": True} | changes
    if model_type == "falcon":  # derives it
        del config["head_dim"]
    hf_config = transformers.AutoConfig.for_model(model_type, **config)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()
    model.save_pretrained(path)
    return model
