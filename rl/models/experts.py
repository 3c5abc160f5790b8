"""What the contents of a config.json say of experts."""

from collections.abc import Mapping
from typing import Any

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""By which names models have their number; transformers 5 writes the second for the first."""


def num_experts(hf: Mapping[str, Any]) -> int:
    """Of a layer, which a router chooses from, the most where layers differ; 0 where there are none."""
    count = next((hf[name] for name in COUNTS if hf.get(name)), 0)
    return max(count) if isinstance(count, list) else count


def expert_width(hf: Mapping[str, Any]) -> int:
    """Of each expert; 0 where there are none, or no number says it."""
    width = hf.get("moe_intermediate_size") if num_experts(hf) else 0
    return width if isinstance(width, int) else 0
