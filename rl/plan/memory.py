"""How much memory an engine or a generator will take on each of its devices. Arithmetic alone.

D hidden size, F hidden size of a feed-forward layer, N query heads, K key heads, H head size, V vocabulary.
All sizes are bytes of one process, at the worst moment of a step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rl.models.engine_config import CHUNK_ELEMENTS, EngineConfig
from rl.models.generator.vllm_config import VLLMConfig
from rl.plan.activations import Learning, activations
from rl.plan.model_shape import BYTES, ModelShape
from rl.types import LoRA

GIB = 2**30
_FP32 = 4
OVERHEAD_GPU = 1.5 * GIB
"""Of a process on a GPU: CUDA's context, NCCL's buffers, and what the allocator cannot use. An estimate."""
OVERHEAD_CPU = {"engine": 0.65 * GIB, "generator": 0.80 * GIB}
"""Of a process on a CPU: torch, and torchtitan or vLLM, before there is a model. The quickstart's peaks."""
GIB_OF_PROCESS = {"engine": 0.8, "generator": 1.0, "worker": 0.25}
"""Of its host's memory, before it loads a model, by the kind of its role: as on a CPU, rounded up. With CUDA
it is more, by what was not measured."""
_OF_A_STEP = ("gradients", "gathered", "activations", "head")
"""Parts of an engine's memory that are free between steps."""
_GRAPHS = 0.5 * GIB  # CUDA graphs of a generator; an estimate


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, by what they hold.

    kept: of its weights, what it has while it is suspended. staged: of an engine that saves checkpoints, the
    copy on its host that one is written from.
    """

    parts: Mapping[str, float]
    kept: float = 0.0
    staged: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def engine_memory(
    shape: ModelShape,
    config: EngineConfig,
    lora: LoRA,
    learns: bool,
    on_cpu: bool,
    kind: str = "titan",
    num_adapters: int = 1,
    saves: bool = False,
    overlap: bool = False,
) -> Memory:
    """Of a rank of a trainer, critic (`learns`) or reference. With a rank in `lora`, the adapter learns.

    kind: of the engine, "titan" or "hf". num_adapters: 2 with the reference's, whose moments the first
    checkpoint makes. saves: checkpoints are written, with `overlap` beside steps, else between them.
    """
    layout, size = config.layout, BYTES[config.dtype]
    if config.head == "value" and kind == "titan":
        shape = replace(shape, tied=True)  # a vector is in the place of the language model's head
    tp, fsdp = layout.tensor_parallel, layout.parameter_shards
    of_rank = shape.matrices / (fsdp * tp) + shape.vectors / fsdp
    frozen = config.adapters
    parts = {"weights": of_rank * (size if frozen else _FP32)}
    adapter = shape.adapter_elements(lora) / tp if frozen and learns and lora.rank else 0.0
    parts["weights"] += num_adapters * adapter * _FP32
    learned = (adapter if frozen else of_rank) if learns else 0.0
    saved = num_adapters * learned
    parts["gradients"] = learned * _FP32
    parts["optimizer"] = 2 * saved * _FP32
    parts["gathered"] = _gathered(shape, config, learns and not frozen, size)
    parts["activations"] = activations(shape, config, kind, _learning(config, lora, learns), on_cpu)
    parts["head"] = _head(shape, config, learns)
    staged = 3 * saved * _FP32 if saves else 0.0
    if staged and on_cpu:
        of_a_step = 0.0 if overlap else sum(parts[part] for part in _OF_A_STEP)
        parts["checkpoint"] = max(0.0, staged - of_a_step)
    parts["overhead"] = OVERHEAD_CPU["engine"] if on_cpu else OVERHEAD_GPU
    return Memory(parts, staged=staged)


def _learning(config: EngineConfig, lora: LoRA, learns: bool) -> Learning:
    if not learns:
        return Learning()
    return Learning(targets=lora.targets, rank=lora.rank) if config.adapters else Learning(weights=True)


def _gathered(shape: ModelShape, config: EngineConfig, learns: bool, size: int) -> float:
    """What FSDP2 holds in the compute dtype: all of the model where one rank has it, else two layers."""
    layout = config.layout
    tp, fsdp = layout.tensor_parallel, layout.parameter_shards
    if fsdp > 1:
        elements = 2 * shape.layer_matrices + shape.vocabulary
    else:
        elements = shape.num_parameters if size != _FP32 and not config.adapters else 0
    # The gradient of a layer, or of the vocabulary, in the compute dtype and as it is reduced in fp32.
    reduced = max(shape.layer_matrices, shape.vocab_size * shape.dim) * (size + _FP32) if learns else 0
    return (elements * size + reduced) / tp


def _head(shape: ModelShape, config: EngineConfig, learns: bool) -> float:
    """Logits in the compute dtype and fp32, their softmax, and what an entropy bonus adds; under TP whole."""
    if config.head == "value":
        return 0.0
    held = min(config.micro_batch_tokens * shape.vocab_size, CHUNK_ELEMENTS)
    cast = 0 if config.dtype == "float32" else BYTES[config.dtype]
    return held * (cast + (3 if learns else 2) * _FP32)


def generator_memory(shape: ModelShape, config: VLLMConfig, on_cpu: bool) -> Memory:
    """Of a rank of a generator. A cache of no given size counts as nothing: vLLM takes what is left."""
    size, tp = BYTES[config.dtype], config.tensor_parallel
    cache = config.kv_cache_gib if isinstance(config.kv_cache_gib, float | int) else 0.0
    tokens = config.step_tokens
    width = 4 * shape.dim + 3 * max(shape.hidden_dim, shape.top_k * shape.expert_dim) / tp
    sampled = min(config.max_num_seqs, tokens) * shape.vocab_size
    weights = shape.matrices * size / tp + shape.vectors * size
    # On a CPU the version that it reads is mapped, and its own weights are packed once more for oneDNN; on a
    # GPU one tensor at a time is copied.
    loading = 2 * weights if on_cpu else shape.vocab_size * shape.dim * size
    # What vLLM does not pack on a CPU stays there (rl/models/generator/sleep.py).
    unpacked = shape.vocab_size * shape.dim + shape.num_moe_layers * shape.expert_elements
    return Memory(
        {
            "weights": weights,
            "loading": loading,
            "cache": cache * GIB,
            "activations": tokens * width * size + sampled * (size + 2 * _FP32),
            "overhead": OVERHEAD_CPU["generator"] if on_cpu else OVERHEAD_GPU + _GRAPHS,
        },
        kept=unpacked * size / tp if on_cpu else 0.0,
    )


def longest_sequence_bytes(shape: ModelShape, config: VLLMConfig) -> float:
    """The cache that one sequence of max_model_len tokens needs: vLLM does not start with less.

    vLLM keeps one block for itself.
    """
    blocks = math.ceil(config.max_model_len / config.block_size) + 1
    return blocks * config.block_size * shape.kv_bytes(config.dtype, config.tensor_parallel)
