"""What `batching.pack` has to know of an engine."""

from typing import Any

from rl.models.engine_config import EngineConfig


def packing(config: EngineConfig, hf_config: dict[str, Any], shares_prefixes: bool) -> dict[str, Any]:
    """Arguments of `pack`, all but `max_tokens`. hf_config: the contents of config.json."""
    return {
        "num_ranks": config.layout.data_parallel,
        "multiple_of": config.row_multiple,
        "share_prefixes": shares_prefixes,
        "attention_cost": attention_cost(hf_config),
    }


def attention_cost(hf_config: dict[str, Any]) -> float:
    """FLOPs of a token's look at one other, where those of its way through the layers' weights are 1.

    A layer has about 12 D^2 weights, hidden size D, each of which costs 2; a look costs 2 D for the score and
    2 D for the value. So attention costs as much as the rest once a token sees 6 D others.
    """
    text = hf_config.get("text_config") or hf_config
    dim = text.get("hidden_size") or text.get("n_embd")
    return 1 / (6 * dim) if dim else 0.0
