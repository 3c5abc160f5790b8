"""Bounds of the numbers that clients set, with a message for each."""

import math
from collections.abc import Mapping
from typing import Any

from rl.tinker.backend import UserError

_MAX_TEMPERATURE = 100


def check_adam(adam: Mapping[str, float]) -> None:
    """adam: Tinker's AdamParams. Raises UserError."""
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        if not 0 <= adam[name] < math.inf:
            raise UserError(f"{name}={adam[name]}; it has to be finite and at least 0")
    for name in ("beta1", "beta2"):
        if not 0 <= adam[name] < 1:
            raise UserError(f"{name}={adam[name]}; it has to be 0 to 1, without 1")


def check_sampling(params: Mapping[str, Any], vocab_size: int) -> None:
    """params: Tinker's SamplingParams. Raises UserError."""
    temperature, top_p, top_k = params["temperature"], params["top_p"], params["top_k"]
    if not 0 <= temperature <= _MAX_TEMPERATURE:
        raise UserError(f"temperature={temperature}; it has to be 0 to {_MAX_TEMPERATURE}")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p}; it has to be over 0 and at most 1")
    if top_k < 1 and top_k != -1:
        raise UserError(f"top_k={top_k}; it has to be at least 1, or -1 for all tokens")
    max_tokens = params.get("max_tokens")
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"max_tokens={max_tokens}; it has to be at least 1")
    stops = params.get("stop")
    for stop in stops if isinstance(stops, list) else []:
        if isinstance(stop, int) and not 0 <= stop < vocab_size:
            raise UserError(f"the stop token {stop} is outside the vocabulary of {vocab_size}")
