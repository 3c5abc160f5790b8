"""What autograd saves for backward of a decoder's layers, counted by torch's hooks.

Under FakeTensorMode nothing is computed, so layers of any size fit. `python -m tests.models.saved_tensors JOB`
counts for layouts: real tensors of one rank, of a process group whose collectives do nothing.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import checkpoint

from rl.models import attention, hf
from rl.models.activation_checkpointing import CHECKPOINTING, SelectiveCheckpointing
from rl.models.attention import pack_documents, row_pieces
from rl.models.decoder_config import model_spec
from rl.models.gpu_attention import gpu_documents
from rl.models.hf_model import HFModel
from rl.models.layout import Layout
from rl.models.lora import Site, freeze
from rl.types import LoRA

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims

Count = Callable[[dict, int], float]
"""(contents of config.json, tokens of a row) -> bytes."""


def of_a_layer(count: Count, config: dict, tokens: int) -> float:
    """Bytes of a token, of the second of two equal layers.

    What does not grow with the row, as an adapter in the compute dtype, is left out.
    """

    def of_a_token(num_layers: int) -> float:
        sized = config | {"num_hidden_layers": num_layers, "vocab_size": 512}
        return (count(sized, 2 * tokens) - count(sized, tokens)) / tokens

    return of_a_token(2) - of_a_token(1)


class RMSNormOfGPUs(torch.autograd.Function):
    """Saves what torch's kernel saves: derivatives.yaml of torch 2.13, _fused_rms_norm."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """With the kernels of one in the places where what they save is another than a CPU's."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch("rl.models.gpu_attention.activate_flash_attention", lambda: "FA3"))
        stack.enter_context(
            mock.patch("torch.rms_norm", lambda x, _, weight, eps: RMSNormOfGPUs.apply(x, weight, eps))
        )

        def by_rows(q: Any, k: Any, v: Any, documents: Any, scale: Any, window: Any) -> torch.Tensor:
            return attention._by_sdpa(q, k, v, documents, scale, window, 0.0)

        stack.enter_context(mock.patch("rl.models.attention.blockwise_attention", by_rows))
        stack.enter_context(
            mock.patch("rl.models.attention.expands_heads", lambda _, dtype: dtype == torch.float32)
        )
        # Checkpointing keeps what their attention gives.
        attention_of_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        ops = SelectiveCheckpointing.get_save_ops
        stack.enter_context(
            mock.patch.object(
                SelectiveCheckpointing, "get_save_ops", lambda policy: ops(policy) | {attention_of_cpu}
            )
        )
        # There autocast computes the router in fp32.
        linear = torch.nn.functional.linear
        stack.enter_context(mock.patch("torch.autocast", _router_in_fp32(linear)))
        yield


def _router_in_fp32(linear: Callable) -> Callable:
    @contextmanager
    def autocast(device_type: str, dtype: torch.dtype) -> Iterator[None]:
        with mock.patch("torch.nn.functional.linear", lambda x, w, b=None: linear(x.to(dtype), w.to(dtype))):
            yield

    return autocast


class Saved:
    """Storages that backward holds on to, each counted once; not those of parameters and buffers."""

    def __init__(self, own: list[torch.Tensor]):
        self._own = {_storage(tensor)._cdata for tensor in own}
        self._storages: dict[int, Any] = {}  # kept, so that no other takes its address

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage._cdata not in self._own:
            self._storages.setdefault(storage._cdata, storage)
        return tensor

    def _add_all(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self.add(tensor)

    @contextmanager
    def counting(self, layers: list[nn.Module], checkpointed: bool) -> Iterator[None]:
        """Of checkpointed layers: their inputs, and what the policy keeps."""
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor))
            if checkpointed:
                for layer in layers:
                    layer.register_forward_pre_hook(lambda _, args: self._add_all(args[:1]))
                keep = checkpoint._VersionWrapper.__init__

                def kept(wrapper: Any, value: Any) -> None:
                    if isinstance(value, torch.Tensor):
                        self.add(value)
                    keep(wrapper, value)

                stack.enter_context(mock.patch.object(checkpoint._VersionWrapper, "__init__", kept))
            yield


def _storage(tensor: torch.Tensor) -> Any:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def titan(dtype: torch.dtype, on_gpu: bool, lora: LoRA | None, checkpointing: str) -> Count:
    packed = not on_gpu or dtype == torch.float32

    def count(config: dict, tokens: int) -> float:
        config = config | {"max_position_embeddings": tokens}
        spec = model_spec(config, packed_attention=packed)
        spec.model.update_from_config(config=SimpleNamespace(parallelism=_parallelism(Layout())))
        documents = (pack_documents if packed else gpu_documents)(np.arange(tokens), torch.device("cpu"))
        with _fake(dtype, on_gpu, _even_split(config, tokens)):
            model = spec.model.build()
            return _count(model, list(model.layers.values()), documents, tokens, dtype, lora, checkpointing)

    return count


def transformers_model(
    dtype: torch.dtype, on_gpu: bool, lora: LoRA | None, checkpointing: str, packed: bool = True
) -> Count:
    def count(config: dict, tokens: int) -> float:
        of_model = {name: value for name, value in config.items() if name != "architectures"}
        documents = pack_documents(np.arange(tokens), torch.device("cpu")) if packed else None
        with _fake(torch.float32, on_gpu, _even_split(config, tokens)):
            lm = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(**of_model), dtype=dtype
            )
            model = HFModel(lm, with_value_head=False)
            model.use(packed)
            return _count(model, list(model.layers().values()), documents, tokens, dtype, lora, checkpointing)

    return count


def _even_split(config: dict, tokens: int) -> list[int]:
    """How many tokens each expert has."""
    experts = config.get("num_experts", 1)
    return [tokens * config.get("num_experts_per_tok", 1) // experts] * experts


@contextmanager
def _fake(dtype: torch.dtype, on_gpu: bool, tokens_of_experts: list[int]) -> Iterator[None]:
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda _: tokens_of_experts, create=True))
        if on_gpu:
            stack.enter_context(as_on_a_gpu())
        torch.set_default_dtype(dtype)
        stack.callback(torch.set_default_dtype, before)
        yield


def _count(
    model: nn.Module,
    layers: list[nn.Module],
    documents: Any,
    tokens: int,
    dtype: torch.dtype,
    lora: LoRA | None,
    checkpointing: str,
) -> int:
    own = [*model.parameters(), *model.buffers()]
    if lora is not None:
        freeze(model, dtype)
        own += _adapt(model, lora)
    saved = Saved(own)
    if checkpointing != "none":
        policy = CHECKPOINTING[checkpointing]().build(dump_folder="")
        model.checkpoint_layers(policy) if isinstance(model, HFModel) else policy.apply(model)
    row = torch.zeros(1, tokens, dtype=torch.long)
    every = torch.zeros(tokens, dtype=torch.long)
    with saved.counting(layers, checkpointing != "none"):
        model(row, row, documents, every, every)
    return saved.bytes


def _adapt(model: nn.Module, lora: LoRA) -> list[torch.Tensor]:
    """Adapters at the layers that are targets; their weights."""
    weights: list[torch.Tensor] = []
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for module_name, linear in linears:
        name = hf.hf_name(f"{module_name}.weight").removesuffix(".weight")
        if name.rpartition(".")[2] in lora.targets:
            site = Site(name, linear)
            a, b = torch.empty(lora.rank, linear.in_features), torch.empty(linear.out_features, lora.rank)
            site.active = nn.Parameter(a), nn.Parameter(b), 1.0
            weights += site.active[:2]
    return weights


# ---- layouts


def _parallelism(layout: Layout) -> ParallelismConfig:
    return ParallelismConfig(
        data_parallel_shard_degree=layout.shard,
        context_parallel_degree=layout.context_parallel,
        tensor_parallel_degree=layout.tensor_parallel,
        spmd_backend="partial_dtensor",
    )


def of_layout(layout: Layout) -> Count:
    """In fp32 on a CPU. tokens: of the whole row."""

    def count(config: dict, tokens: int) -> float:
        spec = model_spec(config | {"max_position_embeddings": tokens}, packed_attention=True)
        parallelism = _parallelism(layout)
        spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
        dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        dims.build_mesh()
        with torch.device("meta"):
            model = spec.model.build()
        model = spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False, components=["model"]),
            ac_config=None,
            dump_folder="",
        )
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_states(buffer_device=torch.device("cpu"))
        pieces = row_pieces(tokens, layout.context_parallel)
        documents = pack_documents(np.arange(tokens), torch.device("cpu"), pieces, 0)
        positions = torch.from_numpy(pieces[0])[None]
        every = torch.zeros(len(pieces[0]), dtype=torch.long)
        saved = Saved([])
        with saved.counting([], False):
            model(torch.zeros_like(positions), positions, documents, every, every)
        for tensor in (*model.parameters(), *model.buffers()):
            saved._storages.pop(_storage(tensor)._cdata, None)
        return saved.bytes

    return count


def main(job: list) -> None:
    """[[layout's fields, config.json, tokens], ...] -> bytes of a token, of each."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    answers = []
    for fields, config, tokens in job:
        layout = Layout(**fields)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.num_procs)
        answers.append(of_a_layer(of_layout(layout), config, tokens))
        dist.destroy_process_group()
    print(json.dumps(answers))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
