"""TitanEngine: Qwen3 (dense and MoE) and Llama 3 through torchtitan.

With FSDP2, HSDP, tensor and context parallelism, float8 and torch.compile.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from rl.errors import ConfigError, RunError, one_line
from rl.micro_batch import MicroBatch
from rl.models import hf
from rl.models.activation_checkpointing import CHECKPOINTING
from rl.models.attention import pack_documents, row_pieces
from rl.models.decoder_config import model_spec
from rl.models.engine import Engine
from rl.models.gpu_attention import gpu_documents
from rl.models.hf_checks import check_expert_width
from rl.models.layout import why_no_vocabulary
from rl.models.load_weights import VALUE_HEAD, load_directory, load_tensors
from rl.models.lora import Site, freeze
from rl.models.platform import DEVICE_TYPE, sum_gradients_over_ranks

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import RoPE


@contextmanager
def _without_trainer() -> Iterator[None]:
    """A torchtitan model asks whether its config is torchtitan's Trainer.Config; here none is.

    The module of that class imports datasets, pandas and pyarrow: 0.8 s and 120 MiB of each rank.
    """
    name = "torchtitan.trainer"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = module = ModuleType(name)
    module.__dict__["Trainer"] = SimpleNamespace(Config=type("Config", (), {}))
    try:
        yield
    finally:
        del sys.modules[name]


class TitanEngine(Engine):
    """See Engine for the contract."""

    def _build(self) -> nn.Module:
        config, layout = self.config, self.config.layout
        check_expert_width(self._hf_config, config.dtype, layout.tensor_parallel)
        if why := why_no_vocabulary(self._hf_config["vocab_size"], layout):
            raise ConfigError(f"trainer.layout.{why}")
        # The length of the RoPE table. What fills a row up has positions too.
        self._hf_config["max_position_embeddings"] = max(self.max_seq_len, config.row_multiple)
        # torchtitan's varlen attention is for GPUs, computes only in bf16 and has no context parallelism.
        self._packed_attention = (
            DEVICE_TYPE == "cpu" or config.dtype == "float32" or layout.context_parallel > 1
        )
        self._shares_prefixes = config.share_prefixes
        if config.compile and self._packed_attention:
            raise ConfigError(
                "compile=True needs a GPU, dtype=bfloat16 and no context parallelism; set it to False"
            )
        if config.dropout:
            raise ConfigError("TitanEngine has no dropout; use HFEngine, or set dropout to False")
        parallelism = ParallelismConfig(
            data_parallel_replicate_degree=layout.replicate,
            data_parallel_shard_degree=layout.shard,
            context_parallel_degree=layout.context_parallel,
            tensor_parallel_degree=layout.tensor_parallel,
            # Unsharded weights need not be gathered, that is cast, once more for backward.
            fsdp_reshard_after_forward="never" if layout.parameter_shards == 1 else "default",
            spmd_backend="partial_dtensor",
        )
        spec = model_spec(self._hf_config, packed_attention=self._packed_attention, head=config.head)
        for converter in self._converters():
            spec.model = converter.convert(spec.model)
        with _without_trainer():
            spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
        dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        dims.build_mesh()
        self._context_group = dims.get_mesh("cp").get_group() if layout.context_parallel > 1 else None
        self._context_rank = dist.get_rank() // layout.tensor_parallel % layout.context_parallel
        self._tp_mesh = dims.get_mesh("tp") if layout.tensor_parallel > 1 else None
        with torch.device("meta"):
            model = spec.model.build()
        if config.adapters:
            freeze(model, self._dtype)
            linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
            has_experts = any(hf.expert_names(n, 1) for n, _ in model.named_parameters())
            self._sites = [Site(name, m) for n, m in linears if (name := _layer_name(n, has_experts))]
        model = spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param=config.dtype, mixed_precision_reduce="float32"),
            parallelism=parallelism,
            compile_config=CompileConfig(enable=config.compile, components=["model"]),
            ac_config=CHECKPOINTING[config.activation_checkpointing](),
            dump_folder="",
        )
        sum_gradients_over_ranks(model, layout.data_parallel * layout.context_parallel)
        model.to_empty(device=self.device)
        with torch.no_grad():
            model.init_states(buffer_device=self.device)
        _share_rope_tables(model)
        if config.seed is not None:
            drawn = self.draw(self._model_dir, config.seed)
            load_tensors(model, lambda name, part: drawn[name][part], self._name, self._split, self.device)
            return model
        read = load_directory(model, self._model_dir, self._name, self._split, self.device)
        read.check_all_read(without_head=config.head == "value")
        return model

    def _converters(self) -> list[Any]:
        """torchtitan's converters of the model's config. None of 0.3.0's hooks into the optimizer's step."""
        if not self.config.float8:
            return []
        try:
            from torchtitan.components.quantization.float8 import Float8LinearConverter

            settings = Float8LinearConverter.Config(
                emulate=DEVICE_TYPE == "cpu",
                filter_fqns=["lm_head", "router.gate"],
                model_compile_enabled=self.config.compile,
            )
            return [settings.build()]
        except ImportError as error:
            raise ConfigError(
                f"float8=True needs torchao ({one_line(error)}); install it: pip install torchao==0.18.0"
            ) from error
        except ValueError as error:  # this GPU has no float8
            raise ConfigError(f"float8=True: {one_line(error)}; set float8 to False") from error

    def _name(self, parameter: str) -> str:
        name = hf.hf_name(super()._name(parameter))
        return VALUE_HEAD if name == "lm_head.weight" and self.config.head == "value" else name

    def _split(self, name: str, num_experts: int) -> list[str] | None:
        return hf.expert_names(name, num_experts)

    @staticmethod
    def draw(model_dir: str | Path, seed: int) -> dict[str, torch.Tensor]:
        """Unsharded: torch's sharded random numbers are wrong on a CPU, and depend on the layout."""
        spec = model_spec(hf.read_config(model_dir), packed_attention=True).model
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            model = spec.build()
            model.init_states()
        tensors: dict[str, torch.Tensor] = {}
        for parameter, p in model.named_parameters():
            name = hf.hf_name(parameter)
            names = hf.expert_names(name, len(p))
            tensors |= {name: p.detach()} if names is None else dict(zip(names, p.detach(), strict=True))
        return tensors

    def _run(self, micro: MicroBatch, with_targets: bool) -> Any:
        if len(micro.tokens) % self.config.row_multiple:
            raise RunError(
                f"a row of {len(micro.tokens)} tokens is not a multiple of {self.config.row_multiple}; "
                f"pack with multiple_of=config.row_multiple"
            )
        if self._context_group is not None:
            return self._run_context_parallel(micro, with_targets)
        tokens, positions = self._tensor(micro.tokens), self._tensor(micro.positions)
        targets = self._tensor(micro.targets) if with_targets else None
        documents: Any
        if self._packed_attention:
            documents = pack_documents(micro.positions, self.device)
        else:
            documents = gpu_documents(micro.positions, self.device)
        return self._model(tokens[None], positions[None], documents, self._tensor(micro.predictors), targets)

    def _run_context_parallel(self, micro: MicroBatch, with_targets: bool) -> Any:
        """Each rank holds pieces of the row, and computes for the targets whose predecessor it holds.

        Then the outputs of all are joined: the loss is the same on every rank of the group, and each takes
        the gradient of its own outputs.
        """
        layout = self.config.layout
        pieces = row_pieces(len(micro.tokens), layout.context_parallel)
        own_positions = pieces[self._context_rank]
        own_targets = np.flatnonzero(np.isin(micro.predictors, own_positions))  # which of the target tokens
        predictors = np.searchsorted(own_positions, micro.predictors[own_targets])
        targets = self._tensor(micro.targets[own_targets]) if with_targets else None
        documents = pack_documents(micro.positions, self.device, pieces, self._context_rank)
        tokens, positions = (
            self._tensor(micro.tokens[own_positions])[None],
            self._tensor(micro.positions[own_positions])[None],
        )
        outputs = self._model(tokens, positions, documents, self._tensor(predictors), targets)
        index, total = self._tensor(own_targets), len(micro.targets)
        if not with_targets:
            return self._join(outputs, index, total)
        logprobs, entropy = outputs
        return self._join(logprobs, index, total), self._join(entropy, index, total)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _join(self, outputs: torch.Tensor, index: torch.Tensor, total: int) -> torch.Tensor:
        """[m, ...] of each rank -> [M, ...] on all of them; the gradient flows into this rank's."""
        everyone = outputs.new_zeros(total, *outputs.shape[1:]).index_copy(0, index, outputs.detach())
        dist.all_reduce(everyone, group=self._context_group)
        return everyone.index_copy(0, index, outputs)


def _share_rope_tables(model: nn.Module) -> None:
    """Every layer makes the same table of cosines and sines, of `max_seq_len` positions."""
    tables = [module for module in model.modules() if isinstance(module, RoPE)]
    for module in tables:
        module.cache = tables[0].cache


def _layer_name(module: str, has_experts: bool) -> str | None:
    """The Hugging Face name of a linear layer that adapters may target.

    Beside experts no dense MLP: PEFT reads an adapter of it as one of the experts too.
    """
    name = hf.hf_name(f"{module}.weight").removesuffix(".weight")
    is_left_out = name.endswith("mlp.gate") or (has_experts and ".mlp." in name)
    return name if name.startswith("model.layers.") and not is_left_out else None
