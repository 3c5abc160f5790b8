"""The device and its process group: every workaround that lets torchtitan 0.3.0 run on a CPU lives here.

Import this module before any other part of torchtitan.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.distributed.fsdp import FSDPModule

import torchtitan.tools.utils as titan_utils

if not torch.accelerator.is_available():
    # Without an accelerator torchtitan assumes CUDA.
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

from torchtitan.distributed import utils as titan_dist

DEVICE_TYPE: str = titan_utils.device_type


def init_process_group(timeout_seconds: float) -> torch.device:
    """Join the group that torchrun's environment names, or make one of this process alone. Returns the device to use."""
    titan_dist.set_spmd_backend("partial_dtensor")  # the default, spmd_types, needs a newer torch than 2.13
    device = torch.device("cpu")
    if DEVICE_TYPE != "cpu":
        # Under torchrun every process sees all devices; the launcher shows each process its own alone.
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)) % torch.accelerator.device_count())
        device = torch.device(DEVICE_TYPE, torch.accelerator.current_device_index())
    if not dist.is_initialized():
        backend = "gloo" if DEVICE_TYPE == "cpu" else f"{DEVICE_TYPE}:nccl,cpu:gloo"
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), **alone)
    return device


def sum_gradients_over_ranks(model: torch.nn.Module, num_ranks: int) -> None:
    """Make FSDP add gradients instead of averaging them: losses are sums over tokens. num_ranks: over which it adds."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if num_ranks == 1:
            module.set_gradient_divide_factor(None)  # dividing by 1 would copy every gradient once more
        else:
            module.set_gradient_divide_factor(1.0)
            if DEVICE_TYPE == "cpu":
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
