"""What autograd saves of a micro-batch for backward, in bytes of one process. Arithmetic alone.

T tokens of a micro-batch, D hidden size, F hidden size of a feed-forward layer, K experts of a token.
Tensor parallelism splits q, k, v and F, and D between the layers; context parallelism splits T.

Read from the layers of torchtitan 0.3.0 and transformers 5. tests/models/test_saved_tensors.py compares it
with what autograd is seen to save.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rl.models.engine_config import EngineConfig
from rl.plan.model_shape import BYTES, ModelShape

_FP32 = 4
_QKV, _OUT, _GATE_UP, _DOWN = ("q_proj", "k_proj", "v_proj"), "o_proj", ("gate_proj", "up_proj"), "down_proj"


@dataclass(frozen=True)
class Learning:
    """What has a gradient: the model's weights, or adapters at some of its layers, or nothing."""

    weights: bool = False
    targets: Collection[str] = ()
    rank: int = 0

    @property
    def anything(self) -> bool:
        return self.weights or bool(self.rank)

    def inputs(self, *layers: str) -> int:
        """How many of the linear layers save their input."""
        return len(layers) if self.weights else sum(layer in self.targets for layer in layers)


def activations(
    shape: ModelShape, config: EngineConfig, kind: str, learning: Learning, on_cpu: bool
) -> float:
    """Of `micro_batch_tokens`, with the table of cosines and sines. kind: of the engine, "titan" or "hf"."""
    layer = _Layer(shape, config, kind, learning, on_cpu)
    num_sparse = shape.num_moe_layers
    num_dense = shape.num_layers - num_sparse
    saved = {"dense": layer.saved(sparse=False), "sparse": layer.saved(sparse=True)}
    largest = max(saved["dense"] if num_dense else 0.0, saved["sparse"] if num_sparse else 0.0)
    if not learning.anything:
        total = largest
    elif config.activation_checkpointing == "none":
        total = num_dense * saved["dense"] + num_sparse * saved["sparse"] + layer.after_last()
    elif config.activation_checkpointing == "full":
        total = shape.num_layers * layer.input() + largest + layer.after_last()
    else:
        kept = num_dense * layer.kept(sparse=False) + num_sparse * layer.kept(sparse=True)
        total = kept + largest + layer.after_last()
    table = config.max_seq_len * 2 * shape.head_dim * _FP32 if kind == "titan" else 0.0
    return total * config.micro_batch_tokens + table


class _Layer:
    """Bytes of one token of a row, on one rank."""

    def __init__(self, shape: ModelShape, config: EngineConfig, kind: str, learning: Learning, on_cpu: bool):
        self._shape, self._learning, self._kind, self._on_cpu = shape, learning, kind, on_cpu
        self._size = BYTES[config.dtype]
        self._tp, self._cp = config.layout.tensor_parallel, config.layout.context_parallel
        is_fp32 = config.dtype == "float32"
        # torch's SDPA over rows of equal length, where neither varlen attention nor the CPU's can be used.
        self._by_rows = not on_cpu and (kind == "hf" or is_fp32 or self._cp > 1)
        self._expands_heads = not on_cpu and is_fp32
        self._one_expert_at_a_time = kind == "titan" and is_fp32
        # Of all the scores of a query, in a row of the longest sequence.
        self._scores = shape.num_heads / self._tp * config.max_seq_len * shape.score_bytes * (kind == "hf")
        self._q = shape.num_heads * shape.head_dim / self._tp
        self._k = shape.num_kv_heads * shape.head_dim / self._tp

    def saved(self, sparse: bool) -> float:
        """Where nothing is computed again."""
        return self._attention() + self._scores + (self._experts() if sparse else self._feed_forward())

    def kept(self, sparse: bool) -> float:
        """Under selective checkpointing: its input, every second matrix product, and attention's output.

        The CPU's attention is computed again, as are grouped products of experts.
        """
        outputs = [width for i, width in enumerate(self._products(sparse)) if i % 2 == 0]
        if sparse and self._one_expert_at_a_time:  # half of three products of each
            outputs.append(self._shape.top_k * (self._shape.expert_dim / self._tp + self._shape.dim / 2))
        attention = (not self._on_cpu) * self._q * self._size + self._statistics()
        return self.input() + (sum(outputs) * self._size + attention) / self._cp

    def input(self) -> float:
        return self._shape.dim * self._size / self._tp / self._cp

    def after_last(self) -> float:
        """What the last norm and the head take in."""
        return (self._norm(self._shape.dim) / self._tp + 2 * self._shape.dim * self._size) / self._cp

    def _attention(self) -> float:
        shape, size, learning = self._shape, self._size, self._learning
        of_queries = self._norm(shape.dim) / self._tp + self._gathered(*_QKV)
        if shape.qk_norm:
            of_queries += self._norm(self._q) + self._norm(self._k)
        if self._kind == "titan":
            of_queries += 2 * shape.head_dim * _FP32  # cosines and sines of the token's position
        of_queries += self._q * size  # as attention takes it
        keys = 2 * (self._q if self._expands_heads else self._k) * size
        # Its output, which the next layer shares with varlen attention alone; the CPU's computes it again.
        num_outputs = (not self._on_cpu) + (bool(learning.inputs(_OUT)) and (self._on_cpu or self._by_rows))
        of_queries += num_outputs * self._q * size + self._statistics()
        return of_queries / self._cp + keys  # keys and values are those of the whole row

    def _feed_forward(self) -> float:
        inner = self._shape.hidden_dim * self._size / self._tp
        of_inputs = self._norm(self._shape.dim) / self._tp + self._gathered(*_GATE_UP)
        return (of_inputs + (3 + self._learning.inputs(_DOWN)) * inner) / self._cp

    def _experts(self) -> float:
        """Each of K experts has a copy of the token, and its output. Tensor parallelism splits F alone."""
        shape, weights = self._shape, self._learning.weights
        of_tokens = self._norm(shape.dim) / self._tp + shape.num_experts * _FP32  # with the router's scores
        if weights:
            of_tokens += shape.dim * (self._size if self._on_cpu else _FP32)  # the router's input
        routed = (3 + weights) * shape.expert_dim / self._tp + weights * shape.dim
        output = shape.dim * (_FP32 if self._kind == "titan" else self._size)  # to be scaled by the scores
        return (of_tokens + shape.top_k * (routed * self._size + output)) / self._cp

    def _norm(self, width: float) -> float:
        """torch's kernel for GPUs saves its input. Elsewhere a norm is made of parts that compute in fp32."""
        weights = self._learning.weights
        if self._kind == "hf":
            return width * (_FP32 + self._size * weights)
        return width * (_FP32 * (1 + weights) if self._on_cpu else self._size)

    def _gathered(self, *layers: str) -> float:
        """The input that linear layers share; under tensor parallelism each gathers one of its own."""
        copies = self._learning.inputs(*layers)
        return self._shape.dim * self._size * (copies if self._tp > 1 else min(copies, 1))

    def _statistics(self) -> float:
        """The logarithm of each softmax's sum, which the CPU's attention computes again."""
        return 0.0 if self._on_cpu else self._shape.num_heads * _FP32 / self._tp

    def _products(self, sparse: bool) -> Iterator[float]:
        """The widths that a layer's matrix products give, in their order."""
        dim, inner = self._shape.dim, self._shape.hidden_dim / self._tp
        layers = [*zip(_QKV, (self._q, self._k, self._k), strict=True), (_OUT, dim)]
        if not sparse:
            layers += [*((name, inner) for name in _GATE_UP), (_DOWN, dim)]
        for name, width in layers:
            yield width
            if name in self._learning.targets:
                yield self._learning.rank
                yield width
