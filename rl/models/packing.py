"""What `batching.pack` has to know of an engine, and what rows that share tokens share of the head."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rl.micro_batch import MicroBatch
from rl.models.engine_config import EngineConfig
from rl.models.hf import text_config

_MOST_LEFT = 0.9  # of the targets: above it sharing saves nothing


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
    text = text_config(hf_config)
    dim = text.get("hidden_size") or text.get("n_embd")
    return 1 / (6 * dim) if dim else 0.0


def score(run: Callable[[MicroBatch, bool], Any], micro: MicroBatch) -> tuple[torch.Tensor, ...]:
    """What run(micro, True) gives, [M] each.

    Where sequences that share tokens are scored on them too, as a group's on its prompt, each of those meets
    the vocabulary once.
    """
    pairs = micro.predictors << 32 | micro.targets
    once, index = np.unique(pairs, return_inverse=True)
    if len(once) > _MOST_LEFT * len(pairs):
        return run(micro, True)
    values = run(replace(micro, predictors=once >> 32, targets=once & 0xFFFFFFFF), True)
    places = torch.from_numpy(index).to(values[0].device)
    return tuple(value.index_select(0, places) for value in values)
