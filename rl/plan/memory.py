"""How much memory an engine or a generator will take on each of its devices. Arithmetic alone.

D hidden size, F hidden size of a feed-forward layer, N query heads, K key heads, H head size, V vocabulary.
All sizes are bytes of one process, at the worst moment of a step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.errors import ConfigError
from rl.models.engine_config import CHUNK_ELEMENTS, EngineConfig
from rl.models.generator.vllm_config import VLLMConfig
from rl.types import LoRA

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
_FP32 = 4
OVERHEAD_GPU = 1.5 * GIB
"""Of a process on a GPU: CUDA's context, NCCL's buffers, and what the allocator cannot use. An estimate."""
OVERHEAD_CPU = {"engine": 0.65 * GIB, "generator": 0.80 * GIB}
"""Of a process on a CPU: torch, and torchtitan or vLLM, before there is a model. The quickstart's peaks."""
_GRAPHS = 0.5 * GIB  # CUDA graphs of a generator; an estimate


@dataclass(frozen=True)
class ModelShape:
    """The sizes in a config.json: a decoder of equal layers, some or all of them of experts."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int  # F of a dense layer
    vocab_size: int
    tied: bool
    qk_norm: bool
    num_moe_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_dim: int = 0  # F of an expert

    @staticmethod
    def of(hf: Mapping[str, Any]) -> "ModelShape":
        """hf: the contents of config.json. Raises ConfigError where it names no such decoder."""
        try:
            dim, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
            experts = hf.get("num_experts") or hf.get("num_local_experts") or 0
            dense = set(hf.get("mlp_only_layers") or [])
            every = hf.get("decoder_sparse_step") or 1
            in_turn = layers // every - sum(i < layers and (i + 1) % every == 0 for i in dense)
            shape = ModelShape(
                dim=dim,
                num_layers=layers,
                num_heads=heads,
                num_kv_heads=hf.get("num_key_value_heads") or heads,
                head_dim=hf.get("head_dim") or dim // heads,
                hidden_dim=hf["intermediate_size"],
                vocab_size=hf["vocab_size"],
                tied=bool(hf.get("tie_word_embeddings", False)),
                qk_norm=str(hf.get("model_type", "")).startswith("qwen3"),
                num_moe_layers=in_turn if experts else 0,
                num_experts=experts,
                top_k=hf.get("num_experts_per_tok") or 0,
                expert_dim=hf.get("moe_intermediate_size") or (hf["intermediate_size"] if experts else 0),
            )
            if odd := [value for value in vars(shape).values() if not isinstance(value, int)]:
                raise TypeError(f"{odd[0]!r} is no whole number")
            return shape
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ConfigError(f"config.json does not give the sizes of a decoder: {error!r}") from error

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of the largest layer."""
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        experts = self.num_experts * (3 * self.dim * self.expert_dim + self.dim)  # with the router
        return attention + (experts if self.num_moe_layers else 3 * self.dim * self.hidden_dim)

    @property
    def matrices(self) -> int:
        """Elements of all matrices, the embeddings and the head among them."""
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        dense = 3 * self.dim * self.hidden_dim * (self.num_layers - self.num_moe_layers)
        experts = self.num_moe_layers * self.num_experts * (3 * self.dim * self.expert_dim + self.dim)
        return self.num_layers * attention + dense + experts + self.vocabulary

    @property
    def vocabulary(self) -> int:
        """Elements of the embeddings, and of the head where it is another tensor."""
        return self.vocab_size * self.dim * (1 if self.tied else 2)

    @property
    def vectors(self) -> int:
        """Elements of the norms."""
        return self.num_layers * (2 * self.dim + 2 * self.head_dim * self.qk_norm) + self.dim

    @property
    def num_parameters(self) -> int:
        return self.matrices + self.vectors

    def adapter_elements(self, lora: LoRA) -> int:
        """Of a LoRA adapter on dense layers."""
        q, k = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sides = {
            "q_proj": (self.dim, q), "k_proj": (self.dim, k), "v_proj": (self.dim, k),
            "o_proj": (q, self.dim), "gate_proj": (self.dim, self.hidden_dim),
            "up_proj": (self.dim, self.hidden_dim), "down_proj": (self.hidden_dim, self.dim),
        }  # fmt: skip
        return self.num_layers * lora.rank * sum(sum(sides[t]) for t in lora.targets if t in sides)

    def kv_bytes(self, dtype: str, tensor_parallel: int = 1) -> float:
        """Of one token in the key-value cache of a rank."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES[dtype] / tensor_parallel


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, by what they hold."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def engine_memory(shape: ModelShape, config: EngineConfig, lora: LoRA, learns: bool, on_cpu: bool) -> Memory:
    """Of a rank of a trainer, critic (`learns`) or reference. With a rank in `lora`, the adapter learns."""
    layout, size = config.layout, BYTES[config.dtype]
    tp, fsdp = layout.tensor_parallel, layout.shard * layout.context_parallel
    here = shape.matrices / (fsdp * tp) + shape.vectors / fsdp
    frozen = config.adapters
    parts = {"weights": here * (size if frozen else _FP32)}
    adapter = shape.adapter_elements(lora) / tp if frozen and learns and lora.rank else 0.0
    parts["weights"] += adapter * _FP32
    learned = (adapter if frozen else here) if learns else 0.0
    parts["gradients"] = learned * _FP32
    parts["optimizer"] = 2 * learned * _FP32
    parts["gathered"] = _gathered(shape, config, learns and not frozen, size)
    parts["activations"] = _activations(shape, config, learns) * size
    parts["head"] = _head(shape, config, learns)
    parts["overhead"] = OVERHEAD_CPU["engine"] if on_cpu else OVERHEAD_GPU
    return Memory(parts)


def _gathered(shape: ModelShape, config: EngineConfig, learns: bool, size: int) -> float:
    """What FSDP2 holds in the compute dtype: all of the model where one rank has it, else two layers."""
    layout = config.layout
    tp, fsdp = layout.tensor_parallel, layout.shard * layout.context_parallel
    if fsdp > 1:
        elements = 2 * shape.layer_matrices + shape.vocabulary
    else:
        elements = shape.num_parameters if size != _FP32 and not config.adapters else 0
    # The gradient of a layer, or of the vocabulary, in the compute dtype and as it is reduced in fp32.
    reduced = max(shape.layer_matrices, shape.vocab_size * shape.dim) * (size + _FP32) if learns else 0
    return (elements * size + reduced) / tp


def _activations(shape: ModelShape, config: EngineConfig, learns: bool) -> float:
    """Elements that backward needs of a micro-batch of micro_batch_tokens."""
    layout = config.layout
    tokens = config.micro_batch_tokens / layout.context_parallel
    tp = layout.tensor_parallel
    q, k = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # Inputs of both norms, split by sequence parallelism; what they give, gathered again.
    hidden = 2 * shape.dim / tp + 2 * shape.dim
    # Queries and keys before and after their norms and RoPE, as attention takes them, and what it gives.
    attention = (5 * q + 6 * k) / tp
    # What gate and up give, the gate's activation, and the product.
    dense = hidden + attention + 4 * shape.hidden_dim / tp
    routed = shape.top_k * (4 * shape.expert_dim + 2 * shape.dim) / tp
    sparse = hidden + attention + routed
    layers = shape.num_moe_layers * sparse + (shape.num_layers - shape.num_moe_layers) * dense
    largest = max(
        sparse if shape.num_moe_layers else 0.0, dense if shape.num_moe_layers < shape.num_layers else 0
    )
    if not learns:
        return tokens * largest
    if config.activation_checkpointing == "full":
        return tokens * (shape.num_layers * shape.dim / tp + largest)
    if config.activation_checkpointing == "selective":  # keeps about half: the outputs of every other matrix
        return tokens * (layers / 2 + largest)
    return tokens * layers


def _head(shape: ModelShape, config: EngineConfig, learns: bool) -> float:
    """Logits in the compute dtype and fp32, their softmax and its gradient; whole also under TP."""
    if config.head == "value":
        return 0.0
    held = min(config.micro_batch_tokens * shape.vocab_size, CHUNK_ELEMENTS)
    return held * (BYTES[config.dtype] + (3 if learns else 2) * _FP32)


def generator_memory(shape: ModelShape, config: VLLMConfig, on_cpu: bool) -> Memory:
    """Of a rank of a generator. A cache of no given size counts as nothing: vLLM takes what is left."""
    size, tp = BYTES[config.dtype], config.tensor_parallel
    cache = config.kv_cache_gib if isinstance(config.kv_cache_gib, float | int) else 0.0
    tokens = max(config.max_model_len, 4096)  # of a step, as vllm_engine.py asks for
    width = 4 * shape.dim + 3 * max(shape.hidden_dim, shape.top_k * shape.expert_dim) / tp
    sampled = min(config.max_num_seqs, tokens) * shape.vocab_size
    weights = shape.matrices * size / tp + shape.vectors * size
    # On a CPU the version that it reads is mapped, and its own weights are packed once more for oneDNN; on a
    # GPU one tensor at a time is copied.
    loading = 2 * weights if on_cpu else shape.vocab_size * shape.dim * size
    return Memory(
        {
            "weights": weights,
            "loading": loading,
            "cache": cache * GIB,
            "activations": tokens * width * size + sampled * (size + 2 * _FP32),
            "overhead": OVERHEAD_CPU["generator"] if on_cpu else OVERHEAD_GPU + _GRAPHS,
        }
    )


def longest_sequence_bytes(shape: ModelShape, config: VLLMConfig) -> float:
    """The cache that one sequence of max_model_len tokens needs: vLLM does not start with less.

    vLLM keeps one block for itself.
    """
    blocks = math.ceil(config.max_model_len / config.block_size) + 1
    return blocks * config.block_size * shape.kv_bytes(config.dtype, config.tensor_parallel)
