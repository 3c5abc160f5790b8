"""VLLMConfig: apart from the engine, so that whoever composes one need not import vLLM."""

from dataclasses import dataclass
from typing import Literal

_STEP_TOKENS = 4096
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM makes room; an adapter of another rank takes that of the next."""


def served_rank(rank: int) -> int:
    """The rank for which vLLM makes room."""
    return min((served for served in LORA_RANKS if served >= rank), default=rank)


@dataclass(frozen=True)
class Fill:
    """A cache of whatever vLLM finds free on a GPU. expected_gib: an estimate, which is nobody's budget."""

    expected_gib: float


@dataclass(frozen=True)
class VLLMConfig:
    """How a generator computes. The model's directory gives its shape."""

    model_dir: str
    weights: Literal["published", "directory"] = "published"  # they come with `Load`, or are the directory's
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: int = 2048
    max_num_seqs: int = 256
    kv_cache_gib: float | Fill = 0.25
    block_size: int = 32  # tokens; prompts share whole blocks of their prefixes
    compile: bool = False
    cuda_graphs: bool = False
    tensor_parallel: int = (
        1  # ranks, under a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    )
    shared_directory: str = ""  # an owned directory: with it goes what its ranks keep in shared memory
    max_lora_rank: int = 0  # of an adapter, of which `max_adapters` are held at a time; 0 for no adapters
    max_adapters: int = 1
    lora_targets: tuple[str, ...] = ()  # layers that adapters have; empty: embedding, head and experts too
    sleeps: bool = False  # on a GPU: it will be told to leave its device, which vLLM has to know
    scaled_logprobs: bool = False  # of what tokens are drawn from, with temperature, top-k and top-p
    stop_texts: bool = False  # load the tokenizer, for SamplingParams.stop_texts and json_schema

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        return max(self.max_model_len, self.max_num_seqs, _STEP_TOKENS)
