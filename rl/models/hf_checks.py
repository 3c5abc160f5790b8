"""Which config.json files the engines and the generator can compute."""

import logging
import math
import re
from pathlib import Path
from typing import Any

from rl.bounds import MOST
from rl.errors import ConfigError, message_of
from rl.models.experts import expert_width
from rl.models.hf import rope_parameters, text_config
from rl.models.layout import why_no_split

SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM")

_COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "n_positions",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
_OF_EXPERTS = ("num_experts", "num_local_experts", "num_experts_per_tok")
"""0 where a model of a kind that may have experts has none."""
_OF_LAYERS = (*_OF_EXPERTS, "intermediate_size", "moe_intermediate_size")
"""A list where layers differ."""
_MOST_LAYERS = 10_000  # transformers makes a list as long
_NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range")
_OF_OTHER_HEADS = re.compile("classif|summary|qa_")
_OBJECTS = ("rope_scaling", "rope_parameters", "text_config", "quantization_config")


def check_config(config: dict[str, Any]) -> None:
    """Raises ConfigError where a value of a config.json is of a wrong type, or a number is not positive."""

    def wrong(key: str, expected: str, value: Any = None) -> ConfigError:
        value = config[key] if value is None else value
        return ConfigError(
            f"config.json has {key}={value!r:.40}, which is not {expected}; fetch the model again"
        )

    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise wrong("architectures", "a list of names")
    for key in (key for key in _COUNTS if config.get(key) is not None):
        values = config[key] if key in _OF_LAYERS and isinstance(config[key], list) else [config[key]]
        least = 0 if key in _OF_EXPERTS else 1
        if any(not isinstance(value, int) or isinstance(value, bool) or value < least for value in values):
            raise wrong(key, f"a whole number of at least {least}")
        if any(value > (_MOST_LAYERS if key == "num_hidden_layers" else MOST) for value in values):
            raise wrong(key, "a size that a model has")
    rope = config.get("rope_parameters")
    theta = {"rope_theta": rope["rope_theta"]} if isinstance(rope, dict) and "rope_theta" in rope else {}
    numbers = {**config, **theta}
    for key in (key for key in _NUMBERS if numbers.get(key) is not None):
        value = numbers[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise wrong(key, "a number over 0", value)
    for key in (key for key in _OBJECTS if config.get(key) is not None):
        if not isinstance(config[key], dict):
            raise wrong(key, "an object")
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and shared and heads % shared:
        raise wrong("num_key_value_heads", f"a divisor of num_attention_heads={heads}")


def check_unquantized(config: dict[str, Any]) -> None:
    """Raises ConfigError for weights that would be quantized again in each version and export."""
    if config.get("quantization_config"):
        raise ConfigError(
            "config.json has a quantization_config, which is not supported; "
            "use the model's unquantized weights"
        )


def check_supported(config: dict[str, Any]) -> None:
    """Raises ConfigError for a config.json that asks for what the decoders do not compute."""
    check_unquantized(config)
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"architecture {architecture} is not supported; use one of {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            raise ConfigError(
                f"config.json has {key}={config[key]}, which is not supported; use a model without it"
            )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(
            f"config.json has hidden_act={activation!r}, which is not supported; use a model with 'silu'"
        )
    rope = rope_parameters(config)
    if (kind := rope["rope_type"]) not in ("default", "llama3"):
        raise ConfigError(
            f"config.json has rope_type={kind!r}, which is not supported; "
            f"use a model with 'default' or 'llama3'"
        )
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if part not in (None, 1.0):
        raise ConfigError(
            f"config.json has partial_rotary_factor={part}, which is not supported; use a model without it"
        )
    needed = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps"]
    needed += ["intermediate_size", "max_position_embeddings"]
    if architecture == "Qwen3MoeForCausalLM":
        needed += ["num_experts_per_tok", "moe_intermediate_size"]
    if missing := [key for key in needed if not config.get(key)]:
        raise ConfigError(f"config.json has no {', '.join(missing)}; fetch the model again")
    if lists := [key for key in _OF_LAYERS if isinstance(config.get(key), list)]:
        raise ConfigError(
            f"config.json has {lists[0]} of each layer, which is not supported; set trainer.engine=hf"
        )


def check_dropout(config: dict[str, Any]) -> None:
    """Raises ConfigError where the model has no dropout, by config.json and transformers' defaults."""
    from transformers import AutoConfig

    settings = AutoConfig.for_model(**text_config(config)).to_dict()
    rates = [value for name, value in settings.items() if "drop" in name and not _OF_OTHER_HEADS.search(name)]
    if not any(isinstance(rate, int | float) and rate > 0 for rate in rates):
        raise ConfigError(
            "trainer.dropout=True has no effect, because the model has no dropout; leave it out, or give "
            "config.json a rate, as attention_dropout"
        )


def check_expert_width(config: dict[str, Any], dtype: str, tensor_parallel: int) -> None:
    """Raises ConfigError where torch's grouped product does not take a rank's part of the experts."""
    if why := why_no_split(expert_width(config), dtype, tensor_parallel):
        raise ConfigError(why)


def check_rope_is_fixed(config: dict[str, Any], max_tokens: int) -> None:
    """Raises ConfigError where RoPE would depend on the batch, and differ between trainer and generator."""
    text = text_config(config)
    rope = rope_parameters(text)
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # by layer type
    for kind in kinds:
        name = str(kind.get("rope_type", "default"))
        if "dynamic" in name:
            raise ConfigError(
                f"config.json has rope_type={name!r}, by which transformers and vLLM compute different "
                f"positions; use a model with another rope_type"
            )
        short = kind.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
        if name in ("longrope", "su") and short and max_tokens > short:
            raise ConfigError(
                f"config.json has rope_type={name!r}, whose factors change with the longest sequence of a "
                f"batch from {short} tokens on; set max_seq_len to at most {short}"
            )


def check_known(model_dir: str | Path) -> None:
    """Raises ConfigError for a config.json that transformers, and so vLLM, cannot read."""
    from transformers import AutoConfig

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of what is an error here
    try:
        AutoConfig.from_pretrained(str(model_dir))
    except Exception as error:  # its checks raise many kinds
        problem = f"transformers cannot read {model_dir}/config.json ({message_of(error):.200})"
        raise ConfigError(f"{problem}; fetch it again") from error
