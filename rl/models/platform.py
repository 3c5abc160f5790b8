"""The device and its process group: every workaround that lets torchtitan 0.3.0 run on a CPU lives here.

Import this module before any other part of torchtitan.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.fsdp import FSDPModule

from rl.models.cuda import prepare_gpu

import torchtitan.tools.utils as titan_utils

if not torch.accelerator.is_available():
    # Without an accelerator torchtitan assumes CUDA.
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

from torchtitan.distributed import utils as titan_dist
from torchtitan.distributed.context_parallel import api as context_parallel

DEVICE_TYPE: str = titan_utils.device_type


class _GatherKeysAndValues(torch.autograd.Function):
    """What torch's flex_cp_allgather does, in one blocking collective.

    torch has two at a time, with which gloo corrupts memory.
    """

    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, v: torch.Tensor, seq_dim: int, group_name: GroupName
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.group, ctx.seq_dim = _resolve_process_group(group_name), seq_dim
        local = torch.stack([k, v])
        parts = local.new_empty(ctx.group.size(), *local.shape)
        dist.all_gather(list(parts.unbind()), local, group=ctx.group)
        keys, values = (torch.cat(parts[:, i].unbind(), seq_dim) for i in range(2))
        return keys, values

    @staticmethod
    def backward(
        ctx: Any, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        parts = torch.stack(torch.stack([grad_k, grad_v]).chunk(ctx.group.size(), ctx.seq_dim + 1))
        local = parts.new_empty(parts.shape[1:])
        dist.reduce_scatter(local, list(parts.unbind()), group=ctx.group)
        return local[0], local[1], None, None


if DEVICE_TYPE == "cpu":
    context_parallel.flex_cp_allgather = _GatherKeysAndValues.apply


def init_process_group(timeout_seconds: float) -> torch.device:
    """Join the group that torchrun's environment names, or make one of this process alone.

    Returns the device to use.
    """
    titan_dist.set_spmd_backend("partial_dtensor")  # the default, spmd_types, needs a newer torch than 2.13
    device = torch.device("cpu")
    if DEVICE_TYPE == "cuda":
        prepare_gpu()
    if DEVICE_TYPE != "cpu":
        # Under torchrun every process sees all devices; the launcher shows each process only its own.
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
        device = torch.device(DEVICE_TYPE, torch.accelerator.current_device_index())
    if not dist.is_initialized():
        backend = "gloo" if DEVICE_TYPE == "cpu" else f"{DEVICE_TYPE}:nccl,cpu:gloo"
        alone: dict[str, Any] = {}
        if "RANK" not in os.environ:
            alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), **alone)
    return device


def new_group(
    timeout_seconds: float, ranks: Sequence[int] | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """A group whose collectives do not wait for longer than this; torch's default is up to half an hour."""
    return dist.new_group(ranks, timeout=timedelta(seconds=timeout_seconds), backend=backend)


def reshard(model: torch.nn.Module) -> None:
    """FSDP keeps its last modules gathered for a backward that a forward alone does not have."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sum_gradients_over_ranks(model: torch.nn.Module, num_ranks: int) -> None:
    """Make FSDP add gradients instead of averaging them: losses are sums over tokens.

    num_ranks: over how many it adds.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if num_ranks == 1:
            # None, torch's default: dividing by 1 would copy every gradient once more.
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]
        else:
            module.set_gradient_divide_factor(1.0)
            if DEVICE_TYPE == "cpu":
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
