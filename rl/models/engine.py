"""TitanEngine: a torchtitan model, its optimizer and its checkpoints behind Tinker's verbs.

It knows neither Monarch nor roles: a policy trainer, a reference (used through `forward` alone) or a script under torchrun
drive it alike. Every rank of the process group calls every method, in the same order.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl.errors import RunError
from rl.interfaces import Loss
from rl.loss.policy import TokenInputs
from rl.models import hf
from rl.models.attention import SelectiveCheckpointing, pack_documents
from rl.models.decoder import model_spec
from rl.models.layout import Layout
from rl.models.platform import DEVICE_TYPE, init_process_group, sum_gradients_over_ranks, titan_dist
from rl.types import Batch, MicroBatch, OptimParams
from rl.weight_sync.manifest import LocalShard

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import create_varlen_metadata_for_document

_CHECKPOINTING = {"none": lambda: None, "selective": SelectiveCheckpointing.Config, "full": FullAC.Config}


class TitanEngine:
    """A language model that scores tokens, learns, saves, and exports its weights.

    Attributes: `device`; `dtype`, in which it computes (weights, gradients and optimizer state are fp32); `dp_rank`.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        layout: Layout = Layout(),
        dtype: Literal["float32", "bfloat16"] = "float32",
        activation_checkpointing: Literal["none", "selective", "full"] = "none",
        max_seq_len: int | None = None,
        seed: int | None = None,
        timeout_seconds: float = 600,
    ):
        """model_dir: a Hugging Face directory, whose weights are loaded; with `seed` they are drawn at random instead,
        the same ones under every layout. max_seq_len: longest sequence it will see, where that is less than config.json's.

        Raises ConfigError for an unsupported model or a missing or broken weights file.
        """
        self.device = init_process_group(timeout_seconds)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._model_dir = Path(model_dir)
        self._hf_config = hf.read_config(model_dir)
        if max_seq_len is not None:  # each layer keeps a RoPE table of that length
            limit = self._hf_config["max_position_embeddings"]
            self._hf_config["max_position_embeddings"] = min(limit, max_seq_len)
        self._layout = layout
        self.dp_rank = dist.get_rank() // layout.tensor_parallel
        # torchtitan's varlen attention is for GPUs and computes in bf16 whatever it is given.
        self._packed_sdpa = DEVICE_TYPE == "cpu" or self.dtype == torch.float32
        self._model = self._build(activation_checkpointing)
        self._load(hf.HFWeights(model_dir) if seed is None else self._random_weights(seed))
        self._optimizer = self._new_optimizer()

    # ---- the verbs

    @torch.no_grad()
    def forward(self, batch: Batch) -> dict[int, np.ndarray]:
        """Logprobs of this rank's scored tokens: sample index -> [scored tokens of the sample], fp32 nats."""
        logprobs: dict[int, np.ndarray] = {}
        for micro in batch.ranks[self.dp_rank]:
            scores = self._score(micro)[0].cpu().numpy()
            for sample in np.unique(micro.sample_ids):
                logprobs[int(sample)] = scores[micro.sample_ids == sample]
        self._reshard()
        return logprobs

    def forward_backward(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """Add the gradient of `loss`, a sum over the batch's scored tokens, to what has accumulated since `optim_step`.

        Returns this rank's share of the metrics, named `name:sum` or `name:max`; ranks are combined by the caller.
        Raises RunError where the loss is not finite, before it can reach the weights.
        """
        totals: dict[str, float] = {}
        for micro in batch.ranks[self.dp_rank]:
            logprobs, entropy = self._score(micro)
            inputs = TokenInputs(*(self._tensor(a) for a in (micro.generator_logprobs, micro.advantages, micro.weights, micro.sample_ids)))
            output = loss(logprobs, inputs)
            if not torch.isfinite(output.loss):
                bad = sorted(set(micro.sample_ids[~torch.isfinite(logprobs).cpu().numpy()].tolist()))
                raise RunError(f"the loss is {output.loss.item()}; samples with a non-finite logprob: {bad or 'none'}")
            output.loss.backward()
            measured = _parity(logprobs.detach(), inputs.generator_logprobs) | output.metrics
            measured |= {"loss:sum": output.loss.detach(), "entropy:sum": entropy.sum(), "tokens:sum": len(micro.scored)}
            _accumulate(totals, measured)
        return totals

    def optim_step(self, params: OptimParams) -> dict[str, float]:
        """Scale, clip and apply the accumulated gradient, then clear it. Returns `grad_norm`, before clipping.

        Raises RunError, with the weights untouched, where the gradient is not finite.
        """
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        if not parameters:
            raise RunError("optim_step without a gradient; call forward_backward first")
        torch._foreach_mul_([_local(p.grad) for p in parameters], params.grad_scale)
        norm = titan_dist.clip_grad_norm_(parameters, params.max_grad_norm or float("inf"), foreach=True)
        if not torch.isfinite(norm):
            self._optimizer.zero_grad()
            raise RunError(
                f"the gradient norm is {norm.item()}; the step was not applied. Look at the loss before it, and lower trainer.lr"
            )
        for group in self._optimizer.param_groups:
            group |= {"lr": params.lr, "betas": params.betas, "eps": params.eps, "weight_decay": params.weight_decay}
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"grad_norm": norm.item()}

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments and any accumulated gradient."""
        self._optimizer.zero_grad()
        self._optimizer = self._new_optimizer()

    # ---- weights, out

    def export(self) -> Iterator[LocalShard]:
        """This rank's shards under Hugging Face names, in the compute dtype; every replica's shard is yielded by one rank."""
        for name, param in self._model.named_parameters():
            shape, offsets = tuple(param.shape), (0,) * param.ndim
            if isinstance(param, DTensor):
                replicas = [axis for axis, p in enumerate(param.placements) if p.is_replicate()]
                if any(param.device_mesh.get_coordinate()[axis] for axis in replicas):
                    continue
                shape, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
            local = _local(param.detach()).to(self.dtype)
            if local.numel():
                assert tuple(local.shape) == tuple(shape), (name, local.shape, shape)
                yield LocalShard(hf.hf_name(name), tuple(param.shape), tuple(offsets), local)

    def save_hf(self, out_dir: str | Path) -> None:
        """Export a Hugging Face directory in the compute dtype, that transformers and vLLM load. Gathers one tensor at a time."""
        tensors = ((hf.hf_name(n), _full(p.detach()).to(self.dtype).cpu().contiguous()) for n, p in self._model.named_parameters())
        if dist.get_rank() == 0:
            hf.save_model(Path(out_dir), self._model_dir, tensors, self.dtype)
        else:
            for _ in tensors:  # take part in the gathers
                pass
        dist.barrier()

    # ---- checkpoints

    def save_checkpoint(self, path: str | Path) -> None:
        """Weights and optimizer. The directory appears under its name only when it is complete."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        dcp.save(self._state(), checkpoint_id=str(partial))
        if dist.get_rank() == 0:
            partial.rename(path)
        dist.barrier()

    def load_checkpoint(self, path: str | Path) -> None:
        """Load what any layout saved. Raises RunError where there is no complete checkpoint."""
        if not (Path(path) / ".metadata").is_file():
            raise RunError(f"{path} is not a complete checkpoint; give a directory that save_checkpoint wrote")
        state = self._state()
        dcp.load(state, checkpoint_id=str(path))
        set_state_dict(self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    # ---- how it is built

    def _build(self, activation_checkpointing: str) -> torch.nn.Module:
        parallelism = ParallelismConfig(
            data_parallel_replicate_degree=self._layout.replicate,
            data_parallel_shard_degree=self._layout.shard,
            tensor_parallel_degree=self._layout.tensor_parallel,
            spmd_backend="partial_dtensor",
        )
        spec = model_spec(self._hf_config, packed_sdpa=self._packed_sdpa)
        spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
        dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        dims.build_mesh()
        with torch.device("meta"):
            model = spec.model.build()
        compute = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[self.dtype]
        model = spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param=compute, mixed_precision_reduce="float32"),
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=_CHECKPOINTING[activation_checkpointing](),
            dump_folder="",
        )
        sum_gradients_over_ranks(model)
        model.to_empty(device=self.device)
        with torch.no_grad():
            model.init_states(buffer_device=self.device)
        return model

    def _load(self, read: Any) -> None:
        """read: Hugging Face name -> the full tensor. Every rank reads it and keeps its shard."""
        for name, param in self._model.named_parameters():
            full = read(hf.hf_name(name)).to(self.device, torch.float32)
            if full.shape != param.shape:
                raise RunError(f"{hf.hf_name(name)} has shape {tuple(full.shape)} in the weights but {tuple(param.shape)} by config.json")
            if isinstance(param, DTensor):
                full = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
            param.data.copy_(full)

    def _random_weights(self, seed: int) -> Any:
        """Drawn unsharded: torch's sharded random numbers are wrong on a CPU, and depend on the layout."""
        config = model_spec(self._hf_config, packed_sdpa=True).model
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            model = config.build()
            model.init_states()
        return {hf.hf_name(n): p.detach() for n, p in model.named_parameters()}.__getitem__

    def _new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self._model.parameters(), fused=True)

    # ---- scoring

    @torch.no_grad()
    def logits(self, batch: Batch) -> list[torch.Tensor]:
        """This rank's [M, V] logits that predict its scored tokens, for each micro-batch: for inspection."""
        logits = [self._run(micro, with_targets=False) for micro in batch.ranks[self.dp_rank]]
        self._reshard()
        return logits

    def _reshard(self) -> None:
        """FSDP keeps its last modules gathered for a backward that a forward alone does not have."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _score(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run(micro, with_targets=True)

    def _run(self, micro: MicroBatch, with_targets: bool) -> Any:
        tokens, positions, scored = (self._tensor(a) for a in (micro.tokens, micro.positions, micro.scored))
        if self._packed_sdpa:
            documents = pack_documents(micro.positions, self.device)
        else:
            documents = create_varlen_metadata_for_document(positions[None])
        return self._model(tokens[None], positions[None], documents, scored, tokens[scored] if with_targets else None)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _parity(logprobs: torch.Tensor, generator_logprobs: torch.Tensor) -> dict[str, torch.Tensor | float]:
    """How far the trainer is from the generator on the same tokens."""
    diff = (logprobs - generator_logprobs).abs()
    ratio = (logprobs - generator_logprobs).exp()
    return {
        "logprob_diff:sum": diff.sum(),
        "logprob_diff:max": diff.max() if len(diff) else 0.0,
        "ratio_outside:sum": ((ratio < 0.9) | (ratio > 1.1)).sum(),
    }


def _accumulate(totals: dict[str, float], measured: dict[str, Any]) -> None:
    for name, value in measured.items():
        value = float(value)
        totals[name] = max(totals.get(name, value), value) if name.endswith(":max") else totals.get(name, 0.0) + value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
