"""How long work takes on a machine, by a model's sizes: sums of multiplications, bytes moved, and calls."""

from collections.abc import Mapping
from dataclasses import dataclass

from rl.plan.model_shape import BYTES, ModelShape

# Small operations of a decoder layer: norms, projections, rotation, attention, gate. Backward has twice as many.
_LAYER_OPS, _LAYER_OPS_BACKWARD = 20, 40
# Values that a layer writes and reads again for each token, in multiples of its width and of its MLP's.
_WIDTHS, _MLP_WIDTHS = 16, 5
# Passes over a token's logits, in float32: forward and backward of the head; sampling with logprobs.
_LOGIT_PASSES, _SAMPLING_PASSES = 6, 6
# Bytes of a parameter that AdamW reads and writes: gradient, weight and two moments; and the gradient's norm before it.
_ADAMW_BYTES = 4 * (4 + 3 + 2)
# Copies of a weight until a generator has it: out of shared memory, into its parameter, packed for its processor.
_LOAD_COPIES = 3


@dataclass(frozen=True)
class Device:
    """What computes: some cores, or a GPU.

    flops: dtype -> rows -> floating-point operations a second, where so many rows are multiplied by a matrix. memory:
    bytes a second, read or written. op: seconds that the smallest operation takes. random: seconds of a random number.
    """

    flops: Mapping[str, Mapping[int, float]]
    memory: float
    op: float
    random: float = 0.0

    def rate(self, dtype: str, rows: float) -> float:
        """Of the most rows that were measured and are no more than these."""
        known = self.flops[dtype]
        return known[max((each for each in known if each <= rows), default=min(known))]


@dataclass(frozen=True)
class Overheads:
    """What a call takes whatever the model, in seconds.

    train: a micro-batch's forward and backward, optim: a step of the optimizer, decode: a step of a generator,
    sequence: each sequence in it, publish, load: of a version, reward: of a group.
    """

    train: float
    optim: float
    decode: float
    sequence: float
    publish: float
    load: float
    reward: float


@dataclass(frozen=True)
class Controls:
    """What the controller pays Monarch, and what comes and goes with failures.

    call: seconds of the controller's core for a call and its answer, byte: for each byte of them, latency: of an
    answer on the same host. start: of a process, model included. detect: until a death is noticed. repair: until a
    lost host is back.
    """

    call: float
    byte: float
    latency: float
    start: float = 20.0
    detect: float = 2.0
    repair: float = 60.0


@dataclass(frozen=True)
class Machine:
    """Of each host. devices: number of threads -> what so many cores are; 0 for a GPU.

    cut: the share of a warmed-up policy's answers that reach their limit of tokens.
    """

    devices: Mapping[int, Device]
    overheads: Overheads
    controls: Controls
    link: float  # bytes a second between two hosts, each way
    cut: float = 0.0

    def device(self, threads: int, on_gpu: bool) -> Device:
        if on_gpu:
            return self.devices[0]
        return self.devices[max(n for n in self.devices if 0 < n <= max(threads, min(self.devices)))]


@dataclass(frozen=True)
class Work:
    """Of one model in one dtype on one device.

    parts: ranks that have a part of each layer each. context: tokens of a sequence that decodes, on average.
    recomputes: activations are computed again in backward.
    """

    shape: ModelShape
    dtype: str
    device: Device
    overheads: Overheads
    parts: int = 1
    context: int = 0
    recomputes: bool = False

    @property
    def weight_bytes(self) -> float:
        return self.shape.num_parameters * BYTES[self.dtype]

    @property
    def _used(self) -> float:
        """Parameters that a token meets in the layers."""
        shape = self.shape
        of_layers = shape.matrices - shape.vocabulary
        if shape.num_moe_layers:
            idle = shape.num_experts - shape.top_k
            of_layers -= shape.num_moe_layers * idle * 3 * shape.dim * shape.expert_dim
        return of_layers / self.parts

    def _layers(self, tokens: float, passes: int) -> float:
        """Seconds of all layers for so many tokens. passes: 1 forward, 3 with backward."""
        shape, device = self.shape, self.device
        width = shape.top_k * shape.expert_dim if shape.num_moe_layers else shape.hidden_dim
        moved = (
            (_WIDTHS * shape.dim + _MLP_WIDTHS * width / self.parts) * shape.num_layers * BYTES[self.dtype]
        )
        multiplied = 2 * self._used / device.rate(self.dtype, tokens)
        return tokens * passes * (multiplied + moved / device.memory)

    def train(self, tokens: int, targets: int, pairs: int, learns: bool = True) -> float:
        """A micro-batch: forward, and backward where it learns.

        tokens: computed; targets: scored; pairs: of a token and one that it attends to.
        """
        shape, device = self.shape, self.device
        passes = (4 if self.recomputes else 3) if learns else 1
        ops = shape.num_layers * (_LAYER_OPS + (_LAYER_OPS_BACKWARD if learns else 0)) * device.op
        logits = shape.vocab_size / self.parts
        head = (3 if learns else 1) * 2 * shape.dim * logits / device.rate(self.dtype, targets)
        head += (_LOGIT_PASSES if learns else _LOGIT_PASSES / 3) * logits * 4 / device.memory
        width = shape.num_heads * shape.head_dim / self.parts
        attention = passes * 4 * width * shape.num_layers * pairs / device.rate(self.dtype, tokens)
        return self.overheads.train + ops + self._layers(tokens, passes) + attention + targets * head

    def optim(self, ranks: int) -> float:
        """One step of a model whose parameters are dealt out over so many ranks."""
        return self.overheads.optim + self.shape.num_parameters * _ADAMW_BYTES / ranks / self.device.memory

    def decode(self, sequences: int) -> float:
        """One token of each."""
        shape, device = self.shape, self.device
        ops = shape.num_layers * _LAYER_OPS * device.op
        weights = self.weight_bytes / self.parts / device.memory
        logits = shape.vocab_size * shape.dim / self.parts
        multiplied = 2 * (self._used + logits) / device.rate(self.dtype, sequences)
        sampled = shape.vocab_size * (_SAMPLING_PASSES * 4 / device.memory + device.random)
        kept = self.context * shape.kv_bytes(self.dtype, self.parts) / device.memory
        each = self.overheads.sequence + multiplied + sampled + kept
        return self.overheads.decode + ops + weights + sequences * each

    def prefill(self, tokens: int) -> float:
        return self._layers(tokens, 1)

    def publish(self, ranks: int) -> float:
        """Each rank of one copy of the model writes its part of the fp32 weights in the dtype that travels."""
        moved = self.shape.num_parameters * (4 + BYTES[self.dtype]) / ranks
        return self.overheads.publish + moved / self.device.memory

    def load(self) -> float:
        """From shared memory of its own host."""
        return self.overheads.load + 2 * _LOAD_COPIES * self.weight_bytes / self.parts / self.device.memory
