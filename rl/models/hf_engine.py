"""HFEngine: any architecture of transformers' AutoModelForCausalLM, under FSDP2.

Sequences are packed, and leading tokens that they share computed once, where the architecture's attention
can be told of it. Where it cannot (state-space layers, soft-capped attention, windows that are only in the
mask), they are padded rows: n sequences cost n times the longest, of which `pack` is told. When the
engine is built, its logits are compared with those of transformers' own forward: that decides how it computes
rows, and whether the model can be used (hf_self_check.py).
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rl.errors import ConfigError, message_of
from rl.micro_batch import MicroBatch
from rl.models import hf, hf_checks
from rl.models.activation_checkpointing import CHECKPOINTING
from rl.models.agreement import agreed
from rl.models.disk_tensors import DiskTensors, convert, disk_tensors
from rl.models.engine import Engine
from rl.models.export import named_state, shards, whole_tensors
from rl.models.hf_model import HFModel
from rl.models.hf_self_check import check_selective, choose_rows
from rl.models.lora import Adapter, Site, freeze
from rl.models.platform import DEVICE_TYPE, reshard, sum_gradients_over_ranks
from rl.weight_sync.manifest import LocalShard


class HFEngine(Engine):
    """See Engine for the contract. Layouts: replicate x shard."""

    _model: HFModel
    _disk: DiskTensors  # what a directory holds of the model

    @property
    def packing(self) -> dict[str, Any]:
        return super().packing | {"pads": not self._model.packed}

    def _build(self) -> nn.Module:
        config, layout = self.config, self.config.layout
        if layout.procs_per_row > 1:
            raise ConfigError(
                f"HFEngine has only replicate and shard, not {layout}; "
                f"use TitanEngine, or more of layout.shard"
            )
        for name in ("float8", "compile"):
            if getattr(config, name):
                raise ConfigError(f"HFEngine has no {name}; use TitanEngine, or set {name} to False")
        hf_checks.check_rope_is_fixed(self._hf_config, self.max_seq_len)
        self._model = model = self._read_on_first_rank()
        if config.adapters:
            freeze(model, self._dtype)
            layers = [(n, m) for n, layer in model.layers().items() for n, m in _named_linears(n, layer)]
            # PEFT reads an adapter of one as an adapter of the stacked experts too.
            without = {name.split(".")[-2] for name in self._disk.names_converted}
            # One weight of several layers cannot have the adapter of each merged into it (Zamba2).
            uses = Counter(m.weight for _, m in layers)
            without |= {n.rpartition(".")[2] for n, m in layers if uses[m.weight] > 1}
            self._sites = [
                Site(n.removeprefix("lm."), m) for n, m in layers if n.rpartition(".")[2] not in without
            ]
        if (policy := CHECKPOINTING[config.activation_checkpointing]()) is not None:
            model.checkpoint_layers(policy.build(dump_folder=""))
            with agreed():
                if dist.get_rank() == 0 and config.activation_checkpointing == "selective":
                    check_selective(model)
        sizes = (layout.replicate, layout.shard)
        mesh = init_device_mesh(DEVICE_TYPE, sizes, mesh_dim_names=("replicate", "shard"))
        mesh = mesh if layout.replicate > 1 else mesh["shard"]
        precision = MixedPrecisionPolicy(
            param_dtype=self._dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        whole = [t.detach() for t in (*model.parameters(), *model.buffers())]
        for layer in model.layers_to_shard():
            fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=layout.shard > 1)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        sum_gradients_over_ranks(model, layout.data_parallel)
        if dist.get_world_size() == 1:
            model.to(self.device)
        else:
            model.to_empty(device=self.device)
            self._take_from_first_rank((*model.parameters(), *model.buffers()), whole)
        self._check_dtype()
        if self.config.dropout:
            drawn = np.random.SeedSequence([self.config.dropout_seed, dist.get_rank()])
            torch.manual_seed(int(drawn.generate_state(1)[0]))
        return model

    def _read_on_first_rank(self) -> HFModel:
        """The whole model, on the host and checked; on other ranks its shapes alone. A collective."""
        model = None
        chosen: list[Any] = [None]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed or 0)
            with agreed():  # whatever transformers makes of a broken directory
                if dist.get_rank() == 0:
                    model = HFModel(self._causal_lm(), self.config.head == "value")
                    # Of dropout each sequence has its own.
                    shares = choose_rows(model, self.config.share_prefixes and not self.config.dropout)
                    chosen = [(model.packed, shares, self._checked_disk_tensors(model.lm))]
                else:
                    with torch.device("meta"):
                        model = HFModel(_random_lm(self._model_dir), self.config.head == "value")
        assert model is not None
        dist.broadcast_object_list(chosen, src=0)
        packed, self._shares_prefixes, self._disk = chosen[0]
        model.use(packed)
        return model

    def _checked_disk_tensors(self, lm: transformers.PreTrainedModel) -> DiskTensors:
        """Raises ConfigError where weight sync would not give a generator the tensors of the directory."""
        tensors = disk_tensors(lm, dict(named_state(lm)))
        if self.config.seed is None and (unknown := sorted(tensors.names - hf.tensor_names(self._model_dir))):
            raise ConfigError(
                f"transformers writes {len(unknown)} tensors of {type(lm).__name__} under names that "
                f"{self._model_dir} does not have, such as {unknown[0]}; load the directory with "
                f"transformers, and save it with save_pretrained"
            )
        return tensors

    @torch.no_grad()
    def _take_from_first_rank(self, tensors: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]) -> None:
        """One tensor at a time, to the device. `whole`: what rank 0 read; other ranks ignore theirs."""
        for tensor, read in zip(tensors, whole, strict=True):
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            if dist.get_rank() == 0:
                full.copy_(read)
            dist.broadcast(full, src=0)
            if isinstance(tensor, DTensor):
                full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(full)

    @torch.no_grad()
    def _check_dtype(self) -> None:
        """Raises ConfigError where the architecture cannot compute in the dtype. A collective."""
        two = np.arange(2)
        self._model.eval()
        try:
            self._model.compute(two, two, two, None)
        except RuntimeError as error:
            name = type(self._model.lm).__name__
            raise ConfigError(
                f"{name} does not compute in {self.config.dtype} ({message_of(error):.120}); "
                f"set dtype to float32"
            ) from error
        reshard(self._model)

    def _causal_lm(self) -> transformers.PreTrainedModel:
        """On the host, in fp32."""
        hf_checks.check_unquantized(self._hf_config)
        try:
            if self.config.seed is not None:
                return _random_lm(self._model_dir)
            return self._read(self._model_dir)
        except (ValueError, KeyError) as error:
            message = f"transformers has no causal language model for {self._model_dir}: {error}"
            raise ConfigError(message) from error

    def _read(self, model_dir: Path) -> transformers.PreTrainedModel:
        hf.check_weights(model_dir)
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
        self._check_loaded(model, loaded, model_dir)
        return model

    @staticmethod
    def draw(model_dir: str | Path, seed: int) -> dict[str, torch.Tensor]:
        """transformers gives them their names on disk."""
        with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as directory:
            torch.manual_seed(seed)
            _random_lm(model_dir).save_pretrained(directory)
            return {n: t for path in hf.weight_files(directory) for n, t in load_file(path).items()}

    def _check_loaded(
        self, model: transformers.PreTrainedModel, loaded: dict[str, Any], model_dir: Path
    ) -> None:
        """Raises ConfigError where transformers made a tensor up, or left one out; RunError for a shape."""
        names = hf.tensor_names(model_dir)
        for name, shape, expected in sorted(loaded["mismatched_keys"]):
            raise hf.other_shape(name, shape, expected)
        if missing := sorted(loaded["missing_keys"]):
            raise ConfigError(
                f"model directory {model_dir} lacks {len(missing)} tensors that its config.json asks "
                f"for, such as {missing[0]}"
            )
        if unknown := set(loaded["unexpected_keys"]) - {hf.HEAD}:
            raise ConfigError(hf.no_place(model_dir, unknown))
        tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
        if tied and hf.HEAD in names:
            hf.check_tied(model_dir, model.get_input_embeddings().weight.detach())

    def _name(self, parameter: str) -> str:
        return super()._name(parameter).removeprefix("lm.")

    def _run(self, micro: MicroBatch, with_targets: bool) -> Any:
        targets = micro.targets if with_targets else None
        return self._model.compute(micro.tokens, micro.positions, micro.predictors, targets)

    def _model_shards(self, merge: Adapter | None) -> Iterator[LocalShard]:
        converted = {name for names in self._disk.converted for name in names}
        kept = {name: tensor for name, tensor in self._tensors.items() if name not in converted}
        for shard in shards(kept, self._dtype, self.config.layout, self._split, merge):
            yield replace(shard, name=self._disk.renamed.get(shard.name, shard.name))
        for names in self._disk.converted:
            group = {name: self._tensors[name] for name in names}
            whole = dict(whole_tensors(group, self._dtype, self._split, merge))  # on every rank
            if dist.get_rank() == 0:
                for name, tensor in convert(self._model.lm, whole).items():
                    yield LocalShard(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor, tensor.dtype)

    def _write_hf(self, out_dir: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """transformers gives tensors their names on disk. Rank 0 holds the whole model meanwhile."""
        # It refuses to write some settings for sampling that it reads; the file itself is copied.
        self._model.lm.generation_config = transformers.GenerationConfig()
        self._model.lm.save_pretrained(out_dir, state_dict=dict(tensors))
        hf.make_readable(out_dir)
        hf.copy_companions(self._model_dir, out_dir, self._dtype)

    @torch.no_grad()
    def load_weights(self, model_dir: str | Path) -> None:
        self._suspension.require("load_weights")
        read = self._model  # other ranks read nothing
        with agreed():
            if dist.get_rank() == 0:
                read = HFModel(self._read(Path(model_dir)), self.config.head == "value")
        tensors, whole = ([tensor for _, tensor in named_state(m)] for m in (self._model, read))
        self._take_from_first_rank(tensors, whole)


def _random_lm(model_dir: str | Path) -> transformers.PreTrainedModel:
    """On the host, in fp32."""
    hf_config = transformers.AutoConfig.from_pretrained(model_dir)
    return transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)


def _named_linears(prefix: str, layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(f"{prefix}.{n}", m) for n, m in layer.named_modules() if isinstance(m, nn.Linear)]
