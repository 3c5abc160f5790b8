"""What vLLM's engine is given, apart from it: no test need import vLLM."""

import os
from pathlib import Path
from typing import Any

import torch

from rl.models.generator.vllm_config import Fill, VLLMConfig, served_rank
from rl.owned_directory import note_beside


def engine_args(config: VLLMConfig, on_cpu: bool) -> dict[str, Any]:
    """Of EngineArgs, but for weight transfer."""
    return {
        "model": config.model_dir,
        "skip_tokenizer_init": not config.stop_texts,
        "load_format": "dummy" if config.weights == "published" else "auto",
        "dtype": config.dtype,
        "enforce_eager": not (config.compile or config.cuda_graphs),
        **graph_args(config),
        "max_model_len": config.max_model_len,
        "logprobs_mode": "processed_logprobs" if config.scaled_logprobs else "raw_logprobs",
        "max_num_seqs": config.max_num_seqs,
        # vLLM rewinds the seeded generator of a prompt that it cuts in two; torch's CPU generator cannot.
        "enable_chunked_prefill": not on_cpu,
        "max_num_batched_tokens": config.step_tokens,
        **memory_args(config),
        "block_size": config.block_size,
        # vLLM's default on GPUs: its queue of batches was not tested with updates in flight.
        "async_scheduling": False,
        "disable_log_stats": True,
        "enable_sleep_mode": config.sleeps and not on_cpu,
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "external_launcher" if config.tensor_parallel > 1 else None,
        **_lora_args(config),
    }


def _lora_args(config: VLLMConfig) -> dict[str, Any]:
    if not config.max_lora_rank:
        return {}
    held = {"max_loras": config.max_adapters, "max_cpu_loras": config.max_adapters}
    targets = {"lora_target_modules": list(config.lora_targets)} if config.lora_targets else {}
    return {"enable_lora": True, "max_lora_rank": served_rank(config.max_lora_rank), **held, **targets}


def graph_args(config: VLLMConfig) -> dict[str, Any]:
    """Graphs of whole decoding steps, without compiling the model first, as torchtitan's own RL does.

    Of a model that is compiled vLLM chooses which, if any.
    """
    if config.compile:
        return {} if config.cuda_graphs else {"compilation_config": {"cudagraph_mode": "NONE"}}
    if not config.cuda_graphs:
        return {}
    return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


def memory_args(config: VLLMConfig) -> dict[str, Any]:
    """Of the key-value cache. vLLM refuses to start where the utilization it is given is not free, whatever
    the cache: the other processes of a GPU have theirs, so with a cache of a given size it is given none."""
    if isinstance(config.kv_cache_gib, Fill):
        return {}
    cache = {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30)}
    return cache | ({"gpu_memory_utilization": 0.01} if torch.cuda.is_available() else {})


def take_own_device() -> None:
    """vLLM takes the GPU of its local rank (gpu_worker.py): one of those that this process is shown.

    On a CPU it would take the memory of one NUMA node alone; a Plan counts the host's. That the cache fits
    what is free on one node, vLLM still asks.
    """
    torch.ops._C.init_cpu_memory_env = lambda nodes: None  # type: ignore[attr-defined]
    if "LOCAL_RANK" in os.environ and (count := torch.cuda.device_count()):
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % count)


def name_shared_memory(directory: str) -> None:
    """Give this engine's ranks a name of their own for what they share on a CPU.

    vLLM 0.32 makes one of the rendezvous' address, which is "env://" under an external launcher: two engines
    on one host would write into each other's memory. vLLM leaves it there; it goes with the owned directory.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    of_one_engine = _CPUSHMDistributed.make_group_name

    def make_group_name(communicator: Any) -> str:
        owner = f"rl-{Path(directory).name}" if directory else "rl"
        name = f"{owner}-{os.environ['MASTER_PORT']}-{of_one_engine(communicator).strip('/-')}"
        if directory:
            note_beside(Path(directory), f"{name}_{communicator.rank}")  # so vLLM calls this rank's part
        return name

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
