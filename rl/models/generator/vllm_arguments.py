"""Arguments for vLLM's engine that depend on the device, apart from it: no test need import vLLM."""

from typing import Any

import torch

from rl.models.generator.vllm_config import VLLMConfig


def graph_args(config: VLLMConfig) -> dict[str, Any]:
    """Graphs of whole decoding steps, without compiling the model first, as torchtitan's own RL does."""
    if config.compile or not config.cuda_graphs:
        return {}
    return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


def memory_args(config: VLLMConfig) -> dict[str, Any]:
    """Of the key-value cache. vLLM refuses to start where the utilization it is given is not free, whatever
    the cache: the other processes of a GPU have theirs, so with a cache of a given size it is given none."""
    if config.kv_cache_gib is None:
        return {}
    given = {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30)}
    return given | ({"gpu_memory_utilization": 0.01} if torch.cuda.is_available() else {})
