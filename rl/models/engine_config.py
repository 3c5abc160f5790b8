"""EngineConfig: apart from the engines, so that whoever composes one need not import torchtitan."""

from dataclasses import dataclass
from typing import Literal

from rl.models.layout import Layout, row_multiple

Head = Literal["tokens", "value"]
CHUNK_ELEMENTS = 1 << 27
"""Logits held at a time, in elements (half a GiB in fp32); beyond it, backward recomputes them in chunks."""


@dataclass(frozen=True)
class EngineConfig:
    """How an engine computes."""

    layout: Layout = Layout()

    dtype: Literal["float32", "bfloat16"] = "float32"
    """In which it computes. What learns is always fp32, as are its gradients, their reduction and the
    optimizer's state."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in backward: none of them, the cheap ones, or all of each layer."""

    max_seq_len: int = 8192
    """Most tokens of a sequence; fewer where config.json's max_position_embeddings is less."""

    micro_batch_tokens: int = 8192
    """Most tokens of a micro-batch that `EngineHandle.pack` makes."""

    head: Head = "tokens"
    """tokens: logprobs, by the model's own head. value: one number before each token, by a new head that
    starts at 0."""

    adapters: bool = False
    """Freeze the model; adapters learn (see Adapters.add), or nothing does."""

    dropout: bool = False
    """HFEngine: the model's own dropout in forward_backward. Ratios to the generator's policy are then not
    1."""

    dropout_seed: int = 0
    """What dropout is drawn from, with the rank."""

    float8: bool = False
    """Compute linear layers in float8: on GPUs by torchao's rowwise recipe, emulated tensorwise on a CPU."""

    compile: bool = False
    """torch.compile each layer; on GPUs, in bfloat16 and without context parallelism."""

    share_prefixes: bool = True
    """Compute leading tokens that sequences share once (see MicroBatch). HFEngine does where its check
    shows that it can."""

    seed: int | None = None
    """Draw random weights instead of loading the directory's: the same ones under every layout."""

    device_memory_gib: float | None = None
    """On a GPU that others share: what this process may take of it. More raises torch's OutOfMemoryError."""

    timeout_seconds: float = 600
    """Longest that a collective may wait for another rank."""

    save_seconds: float = 1800
    """Longest that writing a checkpoint may take."""

    @property
    def row_multiple(self) -> int:
        """What to `pack` with: a row's number of tokens must be a multiple of it."""
        return row_multiple(self.layout, self.float8)
