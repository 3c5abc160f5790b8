"""What NVIDIA GPUs need that a CPU does not: all code that asks which kind of GPU it is on.

Decided by reading torch 2.13.0 and torchtitan 0.3.0, and tried on an H200 (docs/gpu.md).
"""

import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

FLASH_KERNELS = {9: "FA3", 10: "FA4"}
"""Major compute capability -> the kernels that torch can load for it. torch/nn/attention/_fa3.py serves 9
alone, and _fa4.py 9 and 10; torchtitan asks for FA4 from 10 on, which fails on 11 and 12."""


def activate_flash_attention() -> str:
    """Have torch compute varlen attention with the fastest kernels that are installed; returns their name.

    "FA2" is built into torch, and serves every GPU from major 8 on. FA3 and FA4 are packages of their own.
    """
    wanted = FLASH_KERNELS.get(torch.cuda.get_device_capability()[0])
    if wanted is None:
        return "FA2"
    if current_flash_attention_impl() != wanted:
        try:
            activate_flash_attention_impl(wanted)
        except (ImportError, RuntimeError, ValueError):  # not installed, or made for another torch
            return "FA2"
    return wanted


def prepare_gpu() -> None:
    """Settings of this process, before its first kernel."""
    # torch prefers cuDNN's attention on majors 9 and 10, which plans for every new shape, 400 ms each:
    # micro-batches are of new shapes all the time.
    torch.backends.cuda.enable_cudnn_sdp(False)


def limit_memory(gib: float) -> None:
    """What this process may take of its GPU, so that it fails, and not the process beside it."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib / total))


def expands_heads(device_type: str, dtype: torch.dtype) -> bool:
    """Whether SDPA is to be given keys and values repeated for each query head.

    On a GPU no kernel takes grouped heads in fp32 but the one that keeps all attention weights: flash needs
    16 bits, and the memory-efficient one has no groups.
    """
    return device_type == "cuda" and dtype == torch.float32
