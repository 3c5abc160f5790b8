"""LoRA (arXiv 2106.09685): adapters on the frozen linear layers of any engine, in PEFT's format outside.

An adapter's weights are whole on every data-parallel rank and split over tensor-parallel ranks as their layer
is. FSDP does not know of them, so that adapters come and go while the model stays. r rank, I input size,
O output size of a layer.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rl.errors import ConfigError
from rl.models.learner import whole
from rl.types import LoRA

_PREFIX = "base_model.model."
_WITHOUT_EFFECT = ("task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
                   "lora_dropout", "auto_mapping", "target_modules", "megatron_core",
                   "qalora_group_size")  # fmt: skip
"""Fields of PEFT's config that a loaded adapter's outputs do not depend on, or that its tensors repeat."""
_COMPUTED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian")}
"""Other ways to begin change the base model too, as PiSSA and OLoRA do."""


class Site:
    """A frozen linear layer to which an adapter can be attached. Made before the model is parallelized."""

    def __init__(self, name: str, linear: nn.Linear):
        """name: the layer's Hugging Face name."""
        self.name = name
        self.linear = linear
        self.active: tuple[nn.Parameter, nn.Parameter, float] | None = None  # A [r, I], B [O, r], scale
        self._base = linear.forward
        linear.forward = self._forward  # type: ignore[method-assign]

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        out = self._base(input)
        if self.active is None:
            return out
        a_rI, b_Or, scale = self.active
        return out + F.linear(F.linear(input, a_rI.to(input.dtype)), b_Or.to(input.dtype)) * scale


class Adapter:
    """The weights of one adapter, fp32, by PEFT's names."""

    def __init__(self, lora: LoRA, sites: Iterable[Site], seed: int, tp_mesh: Any, device: torch.device):
        """A is drawn as PEFT draws it, the same under every layout, and B is 0.

        Raises ConfigError for targets that do not exist.
        """
        if lora.rank < 1:
            raise ConfigError(f"lora.rank={lora.rank} must be at least 1 for an adapter")
        sites = list(sites)
        known = {site.name.rsplit(".", 1)[-1] for site in sites}
        if unknown := sorted(set(lora.targets) - known):
            raise ConfigError(
                f"lora.targets names {unknown}, which adapters of this model cannot have; use some of "
                f"{sorted(known)}"
            )
        self.lora = lora
        self._sites = [site for site in sites if site.name.rsplit(".", 1)[-1] in lora.targets]
        self.parameters: dict[str, nn.Parameter] = {}
        for site in self._sites:
            a, b = _initial(site, lora.rank, seed)
            placement_a, placement_b = _placements(site.linear.weight, tp_mesh)
            for name, tensor, placement in (("lora_A", a, placement_a), ("lora_B", b, placement_b)):
                parameter = _parameter(tensor.to(device), placement, tp_mesh)
                self.parameters[f"{_PREFIX}{site.name}.{name}.weight"] = parameter

    def attach(self) -> None:
        for site in self._sites:
            site.active = (*self.pair(site.name), self.lora.scale)

    def pair(self, site_name: str) -> tuple[nn.Parameter, nn.Parameter]:
        a, b = (self.parameters[f"{_PREFIX}{site_name}.{name}.weight"] for name in ("lora_A", "lora_B"))
        return a, b

    def delta(
        self, weight_name: str, offsets: tuple[int, ...], shape: tuple[int, ...]
    ) -> torch.Tensor | None:
        """What the adapter adds to a block of a weight [O, I], fp32; None where it adds nothing.

        A collective under tensor parallelism.
        """
        site_name = weight_name.removesuffix(".weight")
        if f"{_PREFIX}{site_name}.lora_A.weight" not in self.parameters:
            return None
        a_rI, b_Or = (whole(p.detach()) for p in self.pair(site_name))
        rows, columns = (slice(o, o + n) for o, n in zip(offsets, shape, strict=True))
        return self.lora.scale * (b_Or[rows] @ a_rI[:, columns])

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Full tensors by PEFT's names. Raises ConfigError where they are not this adapter's."""
        if tensors.keys() != self.parameters.keys():
            odd = sorted(tensors.keys() ^ self.parameters.keys())[:3]
            raise ConfigError(
                f"the adapter's tensors are not those of this model and these targets, for instance {odd}"
            )
        for name, p in self.parameters.items():
            if tensors[name].shape != p.shape:
                raise ConfigError(
                    f"{name} has shape {tuple(tensors[name].shape)} in the adapter "
                    f"but {tuple(p.shape)} in the model"
                )
            full = tensors[name].to(p.device, torch.float32)
            if isinstance(p, DTensor):
                full = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
            p.data.copy_(full)


def detach_all(sites: Iterable[Site]) -> None:
    for site in sites:
        site.active = None


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """The base of adapters: no gradients, parameters kept in the compute dtype."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(False)


def adapter_config(lora: LoRA, base_model: str) -> dict[str, Any]:
    """The contents of PEFT's adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def write_adapter(path: Path, lora: LoRA, base_model: str, tensors: dict[str, torch.Tensor]) -> None:
    """A directory that PEFT and vLLM load."""
    path.mkdir(parents=True, exist_ok=True)
    weights, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    save_file({name: t.contiguous() for name, t in tensors.items()}, weights, metadata={"format": "pt"})
    config.write_text(json.dumps(adapter_config(lora, base_model), indent=1))
    weights.chmod(config.stat().st_mode & 0o777)  # safetensors writes 0600, whatever the umask


def read_adapter(path: str | Path) -> tuple[LoRA, dict[str, torch.Tensor]]:
    """What PEFT or `write_adapter` wrote. Raises ConfigError where it is missing or not supported."""
    path = Path(path)
    if not (path / "adapter_config.json").is_file() or not (path / "adapter_model.safetensors").is_file():
        raise ConfigError(
            f"{path} is not an adapter: it needs adapter_config.json and adapter_model.safetensors"
        )
    config = json.loads((path / "adapter_config.json").read_text())
    for key, value in config.items():
        if key in ("r", "lora_alpha", *_WITHOUT_EFFECT):
            continue
        if value not in _COMPUTED.get(key, (None, False, 0, "", [], {})):
            raise ConfigError(
                f"{path}/adapter_config.json has {key}={value!r}, which is not supported; "
                f"use an adapter without it"
            )
    tensors = load_file(path / "adapter_model.safetensors")
    targets = sorted({name.rsplit(".", 3)[-3] for name in tensors})
    return LoRA(config["r"], config["lora_alpha"], tuple(targets)), tensors


def _initial(site: Site, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(_seed_of(site.name, seed))
    a = torch.empty(rank, site.linear.in_features)
    bound = 1 / math.sqrt(a.shape[1])  # kaiming_uniform_(a=sqrt(5))
    return a.uniform_(-bound, bound, generator=generator), torch.zeros(site.linear.out_features, rank)


def _seed_of(site_name: str, seed: int) -> int:
    """Of one site. A seed whose sum is more than torch takes is hashed, so that any int64 draws its own A."""
    mixed = seed * 1_000_003 + zlib.crc32(site_name.encode())
    if -(2**63) <= mixed < 2**64:
        return mixed
    return int.from_bytes(hashlib.blake2b(f"{seed} {site_name}".encode(), digest_size=8).digest())


def _placements(weight: torch.Tensor, tp_mesh: Any) -> tuple[Any, Any]:
    """Of A and B over the tensor-parallel ranks, following the layer's weight [O, I]."""
    if tp_mesh is None:
        return None, None
    assert isinstance(weight, DTensor), weight.shape
    axes = weight.device_mesh.mesh_dim_names
    assert axes is not None
    placement = weight.placements[axes.index("tp")]
    assert isinstance(placement, Shard), (weight.shape, placement)
    return (Replicate(), Shard(0)) if placement.dim == 0 else (Shard(1), Replicate())


def _parameter(tensor: torch.Tensor, placement: Any, tp_mesh: Any) -> nn.Parameter:
    if tp_mesh is not None:
        tensor = distribute_tensor(tensor, tp_mesh, [placement], src_data_rank=None)
    return nn.Parameter(tensor)
