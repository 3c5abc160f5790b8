"""Adapters: the LoRA adapters that learn on one frozen model, each with an optimizer of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from rl.errors import ConfigError, RunError
from rl.models.agreement import agreed, not_written
from rl.models.engine_config import EngineConfig
from rl.models.learner import Learner, whole
from rl.models.lora import Adapter, Site, detach_all, read_adapter, write_adapter
from rl.models.platform import new_group
from rl.types import LoRA

OPTIMIZER = "optimizer.safetensors"
"""Beside an adapter in PEFT's format: AdamW's moments."""


class Adapters:
    """By name. Every rank calls every method, in the same order."""

    def __init__(
        self,
        config: EngineConfig,
        sites: list[Site],
        tp_mesh: Any,
        device: torch.device,
        require: Callable[[str], None] = lambda verb: None,
    ):
        """sites: where adapters can be attached. require: raises where a verb cannot be done now."""
        self.frozen = config.adapters
        self._sites = sites
        self._tp_mesh = tp_mesh
        self._device = device
        self._require = require
        self._members: dict[str, tuple[Adapter, Learner]] = {}
        self._same_weights = _ranks_with_the_same_weights(config) if self.frozen else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __getitem__(self, name: str) -> Adapter:
        return self._member(name)[0]

    def learner(self, name: str) -> Learner:
        return self._member(name)[1]

    def _member(self, name: str) -> tuple[Adapter, Learner]:
        self._require("adapters")
        if name not in self._members:
            raise RunError(
                f"there is no adapter {name!r}; there are {list(self) or 'none'}: add it with adapters.add"
            )
        return self._members[name]

    def add(self, name: str, lora: LoRA, seed: int = 0) -> None:
        """A new adapter, which changes nothing until it learns (B is 0); `seed` draws its A.

        Raises ConfigError where the model itself learns, the name is taken or the targets do not exist.
        """
        self._require("adapters.add")
        if not self.frozen:
            raise ConfigError(
                "this engine's own weights learn; build it with EngineConfig(adapters=True) for adapters"
            )
        if name in self._members:
            raise ConfigError(f"there is an adapter {name!r} already; choose another name or remove it")
        adapter = Adapter(lora, self._sites, seed, self._tp_mesh, self._device)
        self._members[name] = adapter, Learner(adapter.parameters, self._same_weights, undo=True)

    def load(self, name: str, path: str | Path) -> None:
        """Add an adapter from a directory that PEFT or `save` wrote, on all ranks or none. A collective."""
        with self._as_before_where_it_fails():
            self._read(name, path)

    @contextmanager
    def _as_before_where_it_fails(self) -> Iterator[None]:
        """What fails within it on any rank changes the adapters of none. A collective."""
        before = dict(self._members)
        try:
            with agreed():
                yield
        except BaseException:
            self._members = before
            raise

    def _read(self, name: str, path: str | Path) -> None:
        lora, tensors = read_adapter(path)
        self.add(name, lora)
        self[name].load(tensors)

    def save(self, name: str, out_dir: str | Path, base_model: str) -> None:
        """Write an adapter in PEFT's format. base_model: what adapter_config.json says that it belongs to."""
        tensors = {n: whole(p.detach()).cpu() for n, p in self[name].parameters.items()}
        with agreed(not_written(out_dir)):
            if dist.get_rank() == 0:
                write_adapter(Path(out_dir), self[name].lora, base_model, tensors)

    def save_state(self, name: str, out_dir: str | Path, base_model: str) -> None:
        """As `save`, with the optimizer's moments beside it: all that `load_state` goes on from."""
        self.save(name, out_dir, base_model)
        state = {
            f"{parameter}/{key}": whole(tensor).cpu()
            for parameter, tensors in self.learner(name).state().items()
            for key, tensor in tensors.items()
            if key != "value"
        }
        with agreed(not_written(out_dir)):
            if dist.get_rank() == 0:
                save_file(state, Path(out_dir) / OPTIMIZER)

    @torch.no_grad()
    def load_state(self, name: str, path: str | Path, optimizer: bool = True) -> None:
        """Add an adapter from a directory that `save_state` wrote, in the place of one with that name.

        Without `optimizer`, its moments are new. Raises ConfigError where they are not there. Where it fails
        on any rank, the one with that name stays on all. A collective.
        """
        with self._as_before_where_it_fails():
            if optimizer and not (Path(path) / OPTIMIZER).is_file():
                raise ConfigError(f"{path} has no optimizer state; load its weights alone")
            self._members.pop(name, None)
            self._read(name, path)
            if optimizer:
                self._load_moments(name, path)

    def _load_moments(self, name: str, path: str | Path) -> None:
        saved = load_file(Path(path) / OPTIMIZER)
        for parameter, tensors in self.learner(name).state().items():
            for key, tensor in tensors.items():
                if key != "value":
                    if f"{parameter}/{key}" not in saved:
                        raise ConfigError(
                            f"{path} lacks the optimizer's {key} of {parameter}; load its weights alone"
                        )
                    value = saved[f"{parameter}/{key}"]
                    if isinstance(tensor, DTensor):
                        value = distribute_tensor(
                            value, tensor.device_mesh, tensor.placements, src_data_rank=None
                        )
                    tensor.copy_(value)

    @torch.no_grad()
    def copy(self, source: str, target: str) -> None:
        """Give one adapter the weights of another of the same shape; its optimizer is left as it is."""
        theirs = self[source].parameters
        for name, parameter in self[target].parameters.items():
            parameter.copy_(theirs[name])

    def remove(self, name: str) -> None:
        self._member(name)
        del self._members[name]

    @contextmanager
    def attached(self, name: str | None) -> Iterator[None]:
        """The model computes with this adapter within the context; None is the model alone."""
        if name is not None:
            self[name].attach()
        try:
            yield
        finally:
            detach_all(self._sites)

    def record(self) -> dict[str, Any]:
        """Plain data from which `match` makes the same adapters."""
        return {name: asdict(adapter.lora) for name, (adapter, _) in self._members.items()}

    def match(self, record: dict[str, Any], frozen: bool | None, path: Path) -> None:
        """Become the adapters of a record, so that their weights can be loaded.

        frozen: whether the model was; None in a checkpoint that does not say. path: of the checkpoint. Raises
        RunError where the record has adapters and here the model itself learns, or the reverse.
        """
        frozen = bool(record) if frozen is None else frozen
        if frozen != self.frozen:
            holds = "adapters" if frozen else "a model's weights"
            raise RunError(
                f"{path} holds {holds}, which is not what learns here; "
                f"set EngineConfig.adapters (trainer.lora.rank) as it was"
            )
        for name in [n for n in self if n not in record]:
            self.remove(name)
        for name, fields in record.items():
            lora = LoRA.from_record(fields)
            if name in self._members and self[name].lora != lora:
                self.remove(name)
            if name not in self._members:
                self.add(name, lora)

    def learners(self) -> dict[str, Learner]:
        return {name: learner for name, (_, learner) in self._members.items()}


def _ranks_with_the_same_weights(config: EngineConfig) -> dist.ProcessGroup | None:
    """Those with the same tensor-parallel shard of each adapter: they add their gradients in optim_step."""
    stride, world = config.layout.tensor_parallel, dist.get_world_size()
    if stride == world:
        return None
    groups = [new_group(config.timeout_seconds, range(first, world, stride)) for first in range(stride)]
    return groups[dist.get_rank() % stride]
