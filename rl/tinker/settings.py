"""Bounds of the numbers that clients set, with a message for each."""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.engine import Row

from rl.tinker.backend import UserError
from rl.types import LoRA

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_ALPHA = 32.0  # not in requests
_MAX_TEMPERATURE = 100
_MAX_METADATA_CHARACTERS = 1 << 14
_MAX_STOPS = 64  # generators look for each of them after each token
_MAX_STOP_CHARACTERS = 256
_MAX_STOP_TOKENS = 1024


def read_lora(config: Mapping[str, Any] | None, max_rank: int) -> tuple[LoRA, int]:
    """config: Tinker's LoraConfig. The adapter and its seed, any int64. Raises UserError."""
    config = config or {"rank": 32}
    rank = config["rank"]
    if not 1 <= rank <= max_rank:
        raise UserError(f"a LoRA rank of {rank}; this server takes 1 to {max_rank}")
    targets = _ATTENTION * config.get("train_attn", True) + _MLP * config.get("train_mlp", True)
    if not targets:
        raise UserError("nothing would learn: set train_attn or train_mlp (train_unembed is not offered)")
    seed = config.get("seed")
    return LoRA(rank, _ALPHA, targets), secrets.randbits(31) if seed is None else _as_int64(seed)


def _as_int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def check_ttl(seconds: int | None) -> None:
    """Raises UserError."""
    if seconds is not None and not 0 < seconds < 2**63:
        raise UserError("ttl_seconds has to be over 0")


def check_metadata(metadata: Any, display_name: str | None = None) -> None:
    """What a client says of its session, model or checkpoint: rows hold it. Raises UserError."""
    size = len(json.dumps(metadata)) + len(display_name or "")
    if size > _MAX_METADATA_CHARACTERS:
        raise UserError(f"user_metadata of {size} characters of JSON; it may have {_MAX_METADATA_CHARACTERS}")


def check_fits(checkpoint: Row, model: Row) -> None:
    """Raises UserError where the checkpoint's adapter is of another rank, or of other layers."""
    own, saved = LoRA.from_record(model.lora), LoRA.from_record(checkpoint.lora)
    if own.rank != saved.rank:
        differs = f"has rank {saved.rank} and the model rank {own.rank}"
    elif set(own.targets) != set(saved.targets):
        differs = f"trains {sorted(saved.targets)} and the model {sorted(own.targets)}"
    else:
        return
    raise UserError(f"{checkpoint.path} {differs}; load it into a new model")


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
    stops = params.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    check_stops([stop for stop in stops if isinstance(stop, str)])
    tokens = [stop for stop in stops if isinstance(stop, int)]
    if len(tokens) > _MAX_STOP_TOKENS:
        raise UserError(f"{len(tokens)} stop tokens; at most {_MAX_STOP_TOKENS} are offered")
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise UserError(f"the stop token {token} is outside the vocabulary of {vocab_size}")


def check_stops(texts: Sequence[str]) -> None:
    """Stop strings. Raises UserError."""
    if not all(texts):
        raise UserError("an empty stop string would end every sample at once; leave it out")
    if len(texts) > _MAX_STOPS:
        raise UserError(f"{len(texts)} stop strings; at most {_MAX_STOPS} are offered")
    longest = max(map(len, texts), default=0)
    if longest > _MAX_STOP_CHARACTERS:
        raise UserError(f"a stop string of {longest} characters; it may have {_MAX_STOP_CHARACTERS}")
