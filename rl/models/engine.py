"""Engine: a language model, what learns in it and its checkpoints, behind Tinker's verbs.

This is the contract, and what all engines share. An engine knows neither Monarch nor roles: a policy trainer,
a critic, a reference (which uses only `forward`), a server and a script under torchrun all drive it in the
same way. Every rank of the process group calls every method, in the same order.

- `forward(batch)`: logprobs; `forward_backward(batch, loss)`: adds a gradient; `optim_step`: applies it.
- Losses are sums over tokens, and gradients accumulate as sums; `OptimParams.grad_scale` divides once. So
  N calls of `forward_backward` and one `optim_step` equal one call on the joined batch.
- Learning rate, betas, eps, weight decay and clip norm come with each call: schedules are the caller's.
- `adapter`: which LoRA adapter computes and learns; None is the model itself. An engine whose adapters learn
  (`EngineConfig.adapters`) keeps the model frozen; `adapters.add`, `load`, `save` and `remove` manage them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rl.batching import check_batch
from rl.errors import RunError
from rl.interfaces import Loss
from rl.micro_batch import Batch, MicroBatch, Rows
from rl.models import hf
from rl.models.adapters import Adapters
from rl.models.checkpoint import Checkpoints
from rl.models.cuda import limit_memory
from rl.models.engine_config import EngineConfig
from rl.models.export import named_state, shards, whole_tensors, write_directory
from rl.models.learner import Learner
from rl.models.load_weights import load_directory
from rl.models.lora import Adapter, Site
from rl.models.loss_metrics import LossMetrics, by_sample, check_finite, loss_of, measure, token_inputs
from rl.models.packing import packing, score
from rl.models.platform import init_process_group, reshard
from rl.models.suspension import Suspension
from rl.types import OptimParams
from rl.weight_sync.manifest import LocalShard


class Engine(ABC):
    """Attributes: `config`; `device`; `dp_rank`, the part of a Batch that this rank computes; `adapters`."""

    def __init__(self, model_dir: str | Path, config: EngineConfig = EngineConfig()):
        """model_dir: a Hugging Face directory.

        Raises ConfigError for a model or settings that are not supported, or missing or broken weights.
        """
        self.config = config
        self.device = init_process_group(config.timeout_seconds)
        if config.device_memory_gib is not None and self.device.type == "cuda":
            limit_memory(config.device_memory_gib)
        config.layout.check(dist.get_world_size())
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._model_dir = Path(model_dir)
        self._hf_config = hf.read_config(model_dir)
        self.dp_rank = dist.get_rank() // config.layout.procs_per_row
        self._shares_prefixes = False  # whether rows may be trees; the subclass decides
        self._sites: list[Site] = []  # where adapters can be attached; the subclass fills it
        self._tp_mesh: Any = None
        self._model = self._build()
        self._tensors = {self._name(n): tensor for n, tensor in named_state(self._model)}
        self._base = None if config.adapters else Learner(self._tensors)
        self._suspension = Suspension(self.device)
        self.adapters = Adapters(config, self._sites, self._tp_mesh, self.device, self._suspension.require)
        self._checkpoints = Checkpoints(self.device, config.save_seconds, self.adapters, self._learners)

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, in tokens."""
        return min(hf.max_positions(self._hf_config), self.config.max_seq_len)

    @property
    def packing(self) -> dict[str, Any]:
        """What `batching.pack` is to be told, beside `max_tokens`."""
        return packing(self.config, self._hf_config, self._shares_prefixes)

    # ---- what each kind of engine provides

    @staticmethod
    @abstractmethod
    def draw(model_dir: str | Path, seed: int) -> dict[str, torch.Tensor]:
        """Random weights in fp32, unsharded, by their names in Hugging Face directories."""

    @abstractmethod
    def _build(self) -> nn.Module:
        """The model with weights, sharded by FSDP2; in fp32, or in the compute dtype where adapters learn."""

    @abstractmethod
    def _run(self, micro: MicroBatch, with_targets: bool) -> Any:
        """(logprobs [M], entropy [M]), both with gradient, fp32 nats; without targets the logits [M, V].

        With a value head: (values [M] with gradient, zeros).
        """

    def _name(self, parameter: str) -> str:
        """A parameter's name in checkpoints: Hugging Face's, where it is one of Hugging Face's tensors."""
        return parameter.replace("._checkpoint_wrapped_module", "").replace("_orig_mod.", "")

    def _split(self, name: str, num_experts: int) -> list[str] | None:
        """The names of the tensors that are stacked in this one along its first dimension; None: just one."""
        return None

    # ---- the verbs

    @torch.no_grad()
    def forward(self, batch: Batch, adapter: str | None = None) -> dict[int, np.ndarray]:
        """Logprobs of this rank's target tokens: sample index -> [target tokens of the sample], fp32 nats.

        Without dropout. With a value head: the value before each of them.
        """
        self._suspension.require("forward")
        logprobs: dict[int, np.ndarray] = {}
        with self._computing(adapter):
            self._model.eval()
            for micro in self._micro_batches(batch):
                logprobs |= by_sample(score(self._run, micro)[0], micro)
        return logprobs

    def forward_backward(
        self, batch: Batch, loss: Loss, adapter: str | None = None, taken: dict[int, np.ndarray] | None = None
    ) -> dict[str, float]:
        """Add the gradient of `loss`, a sum over the batch's target tokens, to that of earlier calls.

        Returns this rank's share of the metrics, named `name:sum` or `name:max`; the caller combines
        data-parallel ranks. `taken` takes what `forward` returns. Raises NotFinite on every rank where the
        loss is not finite on one, and drops all that has accumulated since `optim_step`.
        """
        self._suspension.require("forward_backward")
        learner = self._learner(adapter)
        metrics, losses = LossMetrics(self.device), list[torch.Tensor]()
        with self._computing(adapter, learner):
            # Not in train mode without dropout: architectures have more in it that is random than dropout.
            self._model.train(self.config.dropout)
            for micro in self._micro_batches(batch):
                logprobs, entropy = score(self._run, micro)
                inputs = token_inputs(micro, entropy if self.config.head == "tokens" else None, self.device)
                output = loss_of(loss, logprobs, inputs)
                output.loss.backward()
                losses.append(output.loss.detach())
                metrics.add(measure(output, logprobs.detach(), inputs))
                if taken is not None:
                    taken |= by_sample(logprobs, micro)
            check_finite(losses, self.device)
        return metrics.totals()

    def optim_step(self, params: OptimParams, adapter: str | None = None) -> dict[str, float]:
        """Scale, clip and apply the accumulated gradient, then clear it.

        Returns `grad_norm`, before clipping. Raises RunError where there is no gradient, and NotFinite where
        it, or a weight after the step, is not finite: see Learner.step.
        """
        self._suspension.require("optim_step")
        return self._learner(adapter).step(params)

    def reset_optimizer(self, adapter: str | None = None) -> None:
        """Forget the optimizer's moments and any accumulated gradient."""
        self._suspension.require("reset_optimizer")
        self._learner(adapter).reset()

    @torch.no_grad()
    def logits(self, batch: Batch, adapter: str | None = None) -> list[torch.Tensor]:
        """This rank's [M, V] logits that predict its targets, for each micro-batch: for inspection."""
        self._suspension.require("logits")
        with self._computing(adapter):
            self._model.eval()
            return [self._run(micro, with_targets=False) for micro in self._micro_batches(batch)]

    def _micro_batches(self, batch: Batch) -> Rows:
        """This rank's part. Every rank raises where one would."""
        check_batch(batch, self.config.layout.data_parallel, self.max_seq_len, self._shares_prefixes)
        return batch.ranks[self.dp_rank]

    @contextmanager
    def _computing(self, adapter: str | None, learner: Learner | None = None) -> Iterator[None]:
        """Leaves nothing gathered behind, whatever happens, nor half a gradient where it fails."""
        try:
            with self.adapters.attached(adapter):
                yield
        except BaseException:
            if learner is not None:
                learner.clear()
            reshard(self._model)
            raise
        if learner is None:  # backward reshards by itself
            reshard(self._model)

    # ---- where it is

    @torch.no_grad()
    def suspend(self, directory: str | Path) -> None:
        """Give back the device's memory of weights, gradients, adapters and moments, until `resume`.

        directory: for what they hold, if the device is the host. Other verbs raise RunError meanwhile.
        """
        reshard(self._model)  # what is gathered is there twice
        self._suspension.suspend(self._held(), Path(directory))

    @torch.no_grad()
    def resume(self) -> None:
        self._suspension.resume()

    def _held(self) -> Iterator[torch.Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
        for learner in self._learners().values():
            yield from learner.tensors()

    # ---- what learns

    def _learner(self, adapter: str | None) -> Learner:
        if adapter is not None:
            return self.adapters.learner(adapter)
        if self._base is None:
            raise RunError(f"the model is frozen; name the adapter that learns, one of {list(self.adapters)}")
        return self._base

    def _learners(self) -> dict[str, Learner]:
        """By their names in a checkpoint."""
        if self._base is not None:
            return {"model": self._base}
        return {f"adapter.{name}": learner for name, learner in self.adapters.learners().items()}

    # ---- weights, out

    @torch.no_grad()
    def export(self, adapter: str | None = None, *, merged: bool = False) -> Iterator[LocalShard]:
        """This rank's shards in the compute dtype; every replica's shard is yielded by one rank.

        The model's tensors under Hugging Face names; with `adapter`, only that adapter's under PEFT's names,
        or `merged`: the model's with the adapter added.
        """
        self._suspension.require("export")
        if adapter is not None and not merged:
            yield from shards(self.adapters[adapter].parameters, self._dtype, self.config.layout, self._split)
        else:
            yield from self._model_shards(self.adapters[adapter] if adapter else None)

    def _model_shards(self, merge: Adapter | None) -> Iterator[LocalShard]:
        return shards(self._tensors, self._dtype, self.config.layout, self._split, merge)

    @torch.no_grad()
    def save_hf(self, out_dir: str | Path, adapter: str | None = None) -> None:
        """Export a Hugging Face directory in the compute dtype, which transformers and vLLM load.

        With `adapter`, merged. Gathers one tensor at a time. Raises ConfigError for its own directory.
        """
        self._suspension.require("save_hf")
        added = self.adapters[adapter] if adapter else None
        tensors = whole_tensors(self._tensors, self._dtype, self._split, added)
        write_directory(hf.export_directory(out_dir, self._model_dir), tensors, self._write_hf)

    def _write_hf(self, out_dir: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Called on rank 0."""
        hf.save_model(out_dir, self._model_dir, tensors, self._dtype)

    def save_adapter(self, adapter: str, out_dir: str | Path) -> None:
        """Write an adapter in PEFT's format."""
        self.adapters.save(adapter, out_dir, str(self._model_dir))

    @torch.no_grad()
    def load_weights(self, model_dir: str | Path) -> None:
        """Take over the weights of a directory that `save_hf` wrote; a value head, which it lacks, becomes 0.

        All or nothing. Raises ConfigError where it lacks a tensor, RunError where one has another shape.
        """
        self._suspension.require("load_weights")
        load_directory(self._model, model_dir, self._name, self._split, self.device)

    # ---- checkpoints

    def save(
        self, path: str | Path, state: dict[str, Any] | None = None, *, keep_last: int = 0, wait: bool = True
    ) -> None:
        """Save what learns, the optimizer's moments and the random state.

        state: plain data of the caller's own (step, schedule), saved with it. keep_last: how many checkpoints
        to keep beside each other, 0 for all. The directory appears under its name only when it is complete.
        Without `wait`, returns when everything is copied to the host, and writes while training goes on;
        `wait_for_save`, or the next `save`, raises what went wrong.
        """
        self._suspension.require("save")
        self._checkpoints.save(Path(path), state or {}, keep_last)
        if wait:
            self._checkpoints.wait()

    def wait_for_save(self) -> None:
        """Until the last checkpoint is complete. Raises RunError where it could not be written."""
        self._checkpoints.wait()

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load what any layout saved, adapters included; returns the caller's `state`: see Checkpoints."""
        self._suspension.require("load")
        return self._checkpoints.load(Path(path))
