"""Engine: a language model, what learns in it and its checkpoints behind Tinker's verbs. The contract, and all that engines share.

An engine knows neither Monarch nor roles: a policy trainer, a critic, a reference (used through `forward` alone), a server
or a script under torchrun drive it alike. Every rank of the process group calls every method, in the same order.

- `forward(batch)`: logprobs; `forward_backward(batch, loss)`: adds a gradient; `optim_step(params)`: applies what was added.
- Losses are sums over tokens, and gradients accumulate as sums; `OptimParams.grad_scale` divides once. So N calls of
  `forward_backward` and one `optim_step` equal one call on the joined batch.
- Learning rate, betas, eps, weight decay, clip norm and gradient scale come with the call: the caller owns schedules.
- `adapter`: which LoRA adapter computes and learns; None is the model itself. An engine whose adapters learn (`EngineConfig.adapters`) keeps
  the model frozen; `adapters.add`, `load`, `save` and `remove` manage them.
- `train_mode()`, `eval_mode()`: bring what they need to the device, and put it back where it was. `to` moves it for good.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from rl.errors import ConfigError, NotFinite, RunError
from rl.interfaces import Loss
from rl.loss.base import TokenInputs
from rl.models import hf
from rl.models.adapters import Adapters
from rl.models.checkpoint import Checkpoints, rng_state, set_rng_state
from rl.models.checkpoint_dir import read_record, tensor_names
from rl.models.engine_config import EngineConfig
from rl.models.export import shards, whole_tensors
from rl.models.learner import Learner
from rl.models.lora import Site
from rl.models.platform import fail_together, init_process_group
from rl.types import Batch, MicroBatch, OptimParams
from rl.weight_sync.manifest import LocalShard

VALUE_HEAD = "value_head.weight"


class Engine(ABC):
    """Attributes: `config`; `device`; `dp_rank`, which part of a Batch this rank computes; `adapters`, an Adapters."""

    def __init__(self, model_dir: str | Path, config: EngineConfig = EngineConfig()):
        """model_dir: a Hugging Face directory.

        Raises ConfigError for a model or settings that are not supported, or a missing or broken weights file.
        """
        self.config = config
        self.device = init_process_group(config.timeout_seconds)
        if config.layout.num_procs != dist.get_world_size():
            raise ConfigError(f"{config.layout} needs {config.layout.num_procs} processes but {dist.get_world_size()} run; start as many")
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._model_dir = Path(model_dir)
        self._hf_config = hf.read_config(model_dir)
        self.dp_rank = dist.get_rank() // config.layout.procs_per_row
        self._sites: list[Site] = []  # where adapters can be attached; the subclass fills it
        self._tp_mesh: Any = None
        self._model = self._build()
        self._tensors = {self._name(n): p for n, p in self._model.named_parameters()}
        self._base = None if config.adapters else Learner(self._tensors)
        self.adapters = Adapters(config, self._sites, self._tp_mesh, self.device)
        self._checkpoints = Checkpoints(config.timeout_seconds)
        self._mode: Literal["train", "eval"] | None = None
        self._on = {"model": self.device, "optimizer": self.device}

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, in tokens."""
        limit = hf.max_positions(self._hf_config)
        return min(limit, self.config.max_seq_len or limit)

    # ---- what a kind of engine provides

    @abstractmethod
    def _build(self) -> nn.Module:
        """The model with its weights, sharded by FSDP2; in fp32, or in the compute dtype where adapters learn."""

    @abstractmethod
    def _run(self, micro: MicroBatch, with_targets: bool) -> Any:
        """(logprobs [M] with gradient, entropy [M] without), fp32 nats; without targets the logits [M, V].

        With a value head: (values [M] with gradient, zeros).
        """

    def _name(self, parameter: str) -> str:
        """A parameter's name in checkpoints: Hugging Face's, where it is one of Hugging Face's tensors."""
        return parameter.replace("._checkpoint_wrapped_module", "").replace("_orig_mod.", "")

    def _split(self, name: str, num_experts: int) -> list[str] | None:
        """The names of the tensors that are stacked in this one along its first dimension; None for the usual, one tensor."""
        return None

    # ---- the verbs

    @torch.no_grad()
    def forward(self, batch: Batch, adapter: str | None = None) -> dict[int, np.ndarray]:
        """Logprobs of this rank's target tokens: sample index -> [target tokens of the sample], fp32 nats. Without dropout.

        With a value head: the value before each of them.
        """
        self._require("forward", model=True)
        logprobs: dict[int, np.ndarray] = {}
        with self._computing(adapter):
            self._model.eval()
            for micro in self._micro_batches(batch):
                scores = self._run(micro, with_targets=True)[0].cpu().numpy()
                for sample in np.unique(micro.sample_ids):
                    logprobs[int(sample)] = scores[micro.sample_ids == sample]
        return logprobs

    def forward_backward(self, batch: Batch, loss: Loss, adapter: str | None = None) -> dict[str, float]:
        """Add the gradient of `loss`, a sum over the batch's target tokens, to what has accumulated since `optim_step`.

        Returns this rank's share of the metrics, named `name:sum` or `name:max`; data-parallel ranks are combined by the
        caller. Raises NotFinite on every rank where the loss is not finite on one, and drops all that has accumulated.
        """
        self._require("forward_backward", model=True)
        if self._mode == "eval":
            raise RunError("forward_backward inside eval_mode; use train_mode")
        learner = self._learner(adapter)
        totals: dict[str, torch.Tensor] = {}
        with self._computing(adapter, learner):
            self._model.train()
            for micro in self._micro_batches(batch):
                logprobs, entropy = self._run(micro, with_targets=True)
                inputs = TokenInputs(
                    *(self._tensor(a) for a in (micro.generator_logprobs, micro.advantages, micro.weights, micro.sample_ids)),
                    loss_inputs={name: self._tensor(column) for name, column in micro.loss_inputs.items()},
                )
                output = loss(logprobs, inputs)
                _check_finite(output.loss)
                output.loss.backward()
                measured = {**output.metrics, "loss:sum": output.loss.detach(), "tokens:sum": len(micro.targets)}
                if self.config.head == "tokens":
                    measured |= _parity(logprobs.detach(), inputs.generator_logprobs) | {"entropy:sum": entropy.sum()}
                _accumulate(totals, measured)
        return dict(zip(totals, torch.stack(list(totals.values())).tolist(), strict=True))  # one copy to the host

    def optim_step(self, params: OptimParams, adapter: str | None = None) -> dict[str, float]:
        """Scale, clip and apply the accumulated gradient, then clear it. Returns `grad_norm`, before clipping.

        Raises RunError where there is no gradient and NotFinite where it is not finite, with the weights untouched.
        """
        self._require("optim_step", model=True, optimizer=True)
        return self._learner(adapter).step(params)

    def reset_optimizer(self, adapter: str | None = None) -> None:
        """Forget the optimizer's moments and any accumulated gradient."""
        self._learner(adapter).reset()

    @torch.no_grad()
    def logits(self, batch: Batch, adapter: str | None = None) -> list[torch.Tensor]:
        """This rank's [M, V] logits that predict its target tokens, for each micro-batch: for inspection."""
        self._require("logits", model=True)
        with self._computing(adapter):
            self._model.eval()
            return [self._run(micro, with_targets=False) for micro in self._micro_batches(batch)]

    @contextmanager
    def _computing(self, adapter: str | None, learner: Learner | None = None) -> Iterator[None]:
        """Whatever happens, nothing gathered is left behind; a failure leaves no half of a gradient in `learner`."""
        try:
            with self.adapters.attached(adapter):
                yield
        except BaseException:
            if learner is not None:
                learner.clear()
            self._reshard()
            raise
        if learner is None:  # backward reshards by itself
            self._reshard()

    # ---- where it is

    def train_mode(self) -> Any:
        """A context for forward_backward and optim_step: model and optimizer are on the device within it."""
        return self._in_mode("train", {"model", "optimizer"})

    def eval_mode(self) -> Any:
        """A context for forward: the model is on the device within it, and the optimizer is left where it is."""
        return self._in_mode("eval", {"model"})

    @contextmanager
    def _in_mode(self, mode: Literal["train", "eval"], needed: set[str]) -> Iterator[None]:
        if self._mode is not None:
            raise RunError(f"{mode}_mode inside {self._mode}_mode; leave that first")
        was = dict(self._on)
        self._move({part: self.device for part in needed})
        self._mode = mode
        try:
            yield
        finally:
            self._mode = None
            self._move(was)

    def to(self, device: str | torch.device, *, model: bool = True, optimizer: bool = True) -> None:
        """Move the model with its adapters and gradients, or the optimizer's state, or both: "cpu" frees the device's memory."""
        if self._mode is not None:
            raise RunError(f"to() inside {self._mode}_mode, which would undo it; leave that first")
        device = torch.device(device)
        if device.type not in ("cpu", self.device.type):
            raise RunError(f"to({str(device)!r}): this engine computes on {self.device}; give that, or 'cpu'")
        target = torch.device("cpu") if device.type == "cpu" else self.device
        self._move({part: target for part, wanted in (("model", model), ("optimizer", optimizer)) if wanted})

    def _move(self, places: dict[str, torch.device]) -> None:
        for part, device in places.items():
            if self._on[part] == device:
                continue
            if part == "model":
                self._reshard()  # what is gathered does not move
                self._model.to(device)
                self.adapters.move_parameters(device)
            else:
                for learner in self._learners().values():
                    learner.move_optimizer(device)
            self._on[part] = device
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _require(self, verb: str, **parts: bool) -> None:
        away = [part for part in parts if self._on[part] != self.device]
        if away:
            raise RunError(
                f"{verb}: the {' and the '.join(away)} is on the host; use train_mode() or eval_mode(), or to({str(self.device)!r})"
            )

    # ---- what learns

    def _learner(self, adapter: str | None) -> Learner:
        if adapter is not None:
            return self.adapters.learner(adapter)
        if self._base is None:
            raise RunError(f"the model itself is frozen; name the adapter that learns, one of {list(self.adapters)}")
        return self._base

    def _learners(self) -> dict[str, Learner]:
        """By their names in a checkpoint."""
        return {"model": self._base} if self._base else {f"adapter.{n}": learner for n, learner in self.adapters.learners().items()}

    # ---- weights, out

    @torch.no_grad()
    def export(self, adapter: str | None = None, *, merged: bool = False) -> Iterator[LocalShard]:
        """This rank's shards in the compute dtype; every replica's shard is yielded by one rank.

        The model's tensors under Hugging Face names; with `adapter`, that adapter's alone under PEFT's names, or `merged`:
        the model's with the adapter added.
        """
        layout = self.config.layout
        if adapter is not None and not merged:
            yield from shards(self.adapters[adapter].parameters, self._dtype, layout, self._split)
        else:
            yield from shards(self._tensors, self._dtype, layout, self._split, self.adapters[adapter] if adapter else None)

    @torch.no_grad()
    def save_hf(self, out_dir: str | Path, adapter: str | None = None) -> None:
        """Export a Hugging Face directory in the compute dtype, that transformers and vLLM load; with `adapter`, merged.

        Gathers one tensor at a time.
        """
        tensors, failure = self._whole_tensors(adapter), None
        try:
            if dist.get_rank() == 0:
                self._write_hf(Path(out_dir), tensors)
        except OSError as error:
            failure = RunError(f"{out_dir} could not be written: {error}")
        for _ in tensors:  # every rank takes part in every gather, whatever happens on the first
            pass
        fail_together(failure)

    def _whole_tensors(self, adapter: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        return whole_tensors(self._tensors, self._dtype, self._split, self.adapters[adapter] if adapter else None)

    def _write_hf(self, out_dir: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """On rank 0."""
        hf.save_model(out_dir, self._model_dir, tensors, self._dtype)

    def save_adapter(self, adapter: str, out_dir: str | Path) -> None:
        """Write an adapter in PEFT's format."""
        self.adapters.save(adapter, out_dir, str(self._model_dir))

    @torch.no_grad()
    def load_weights(self, model_dir: str | Path) -> None:
        """Take over the weights of a directory that `save_hf` wrote; a value head, which it does not have, becomes 0.

        Raises ConfigError where it lacks a tensor of this model, RunError where one has another shape.
        """
        self._load_tensors(self._model, hf.HFWeights(model_dir))

    # ---- checkpoints

    def save(self, path: str | Path, state: dict[str, Any] | None = None, *, keep_last: int = 0, wait: bool = True) -> None:
        """What learns, the optimizer's moments and the random state, with `state`: the caller's plain data (step, schedule).

        The directory appears under its name only when it is complete. Without `wait`, returns when everything is copied to
        the host, and writes while training goes on; `wait_for_save`, or the next `save`, raises what went wrong.
        keep_last: number of checkpoints to keep beside each other, 0 for all.
        """
        record = {"state": state or {}, "adapters": self.adapters.record()}
        self._checkpoints.save(Path(path), self._state() | rng_state(self.device), record, keep_last)
        if wait:
            self._checkpoints.wait()

    def wait_for_save(self) -> None:
        """Until the last checkpoint is complete. Raises RunError where it could not be written."""
        self._checkpoints.wait()

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load what any layout saved, adapters included; returns the caller's `state`.

        The random state is restored where as many processes saved it. Raises RunError where there is no complete checkpoint.
        """
        path = Path(path)
        record = read_record(path)
        if bool(record["adapters"]) != self.config.adapters:
            holds = "adapters" if record["adapters"] else "a model's weights"
            raise RunError(f"{path} holds {holds}, which is not what learns here; set EngineConfig.adapters (trainer.lora.rank) as it was")
        self.adapters.match(record["adapters"])
        random, saved = rng_state(self.device), tensor_names(path)
        same_world = {n for n in saved if n.startswith("rng.")} == {
            f"rng.{r}.{k.split('.')[-1]}" for r in range(dist.get_world_size()) for k in random
        }
        random = random if same_world else {}
        self._checkpoints.load(path, self._state() | random)
        set_rng_state(random, self.device)
        for learner in self._learners().values():
            learner.clear()
        return record["state"]

    def _state(self) -> dict[str, Any]:
        return {name: learner.state() for name, learner in self._learners().items()}

    # ---- for the kinds of engine

    def _micro_batches(self, batch: Batch) -> tuple[MicroBatch, ...]:
        """This rank's part. Every rank raises where one would."""
        if len(batch.ranks) != self.config.layout.data_parallel:
            raise RunError(f"a batch packed for {len(batch.ranks)} data-parallel ranks, of which there are {self.config.layout.data_parallel}; "
                           f"pack with num_ranks=layout.data_parallel")  # fmt: skip
        if batch.longest > self.max_seq_len:
            raise RunError(
                f"a sequence of {batch.longest} tokens exceeds the {self.max_seq_len} positions of the model; shorten it, or raise max_seq_len"
            )
        return batch.ranks[self.dp_rank]

    def _load_tensors(self, model: nn.Module, read: Any) -> None:
        """read: a parameter's name -> the full tensor. Every rank reads it and keeps its shard."""
        for parameter, param in model.named_parameters():
            name = self._name(parameter)
            names = self._split(name, param.shape[0])
            if name == VALUE_HEAD:
                param.data.zero_()
                continue
            full = (read(name) if names is None else torch.stack([read(n) for n in names])).to(self.device, param.dtype)
            if full.shape != param.shape:
                raise RunError(f"{name} has shape {tuple(full.shape)} in the weights but {tuple(param.shape)} by config.json")
            if isinstance(param, DTensor):
                full = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
            param.data.copy_(full)

    def _reshard(self) -> None:
        """FSDP keeps its last modules gathered for a backward that a forward alone does not have."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _check_finite(loss: torch.Tensor) -> None:
    failure = None
    if not (finite := torch.isfinite(loss.detach())):
        failure = NotFinite(f"the loss is {loss.item()}", "loss")
    if dist.get_world_size() > 1:
        good = finite.float()
        dist.all_reduce(good, op=dist.ReduceOp.MIN)
        if good:
            return
        fail_together(failure)
    elif failure:
        raise failure


def _parity(logprobs: torch.Tensor, generator_logprobs: torch.Tensor) -> dict[str, torch.Tensor | float]:
    """How far the trainer is from the generator on the same tokens."""
    diff = (logprobs - generator_logprobs).abs()
    ratio = (logprobs - generator_logprobs).exp()
    return {
        "logprob_diff:sum": diff.sum(),
        "logprob_diff:max": diff.max() if len(diff) else 0.0,
        "ratio_outside:sum": ((ratio < 0.9) | (ratio > 1.1)).sum(),
    }


def _accumulate(totals: dict[str, torch.Tensor], measured: dict[str, Any]) -> None:
    device = measured["loss:sum"].device
    for name, value in measured.items():
        value = torch.as_tensor(value, dtype=torch.float32, device=device)
        if name in totals:
            value = torch.maximum(totals[name], value) if name.endswith(":max") else totals[name] + value
        totals[name] = value
