"""How a model is spread over processes."""

from dataclasses import dataclass

from rl.bounds import PositiveInt
from rl.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """How many processes: replicate x shard x context_parallel x tensor_parallel of them."""

    replicate: PositiveInt = 1
    """Copies of the model (HSDP's outer axis); gradients are summed over them."""

    shard: PositiveInt = 1
    """FSDP2: processes over which each copy's parameters, gradients and optimizer state are sharded."""

    context_parallel: PositiveInt = 1
    """Processes that share each row of tokens, for sequences too long for one; parameters are sharded over
    them too."""

    tensor_parallel: PositiveInt = 1
    """Processes that split each layer's matrices, with sequence parallelism between them."""

    @property
    def num_procs(self) -> int:
        return self.data_parallel * self.procs_per_row

    def check(self, num_procs: int) -> None:
        """Raises ConfigError where another number of processes runs."""
        if num_procs != self.num_procs:
            raise ConfigError(f"{self} needs {self.num_procs} processes but {num_procs} run; start as many")

    @property
    def data_parallel(self) -> int:
        """Ranks that read different sequences."""
        return self.replicate * self.shard

    @property
    def parameter_shards(self) -> int:
        """Parts that FSDP cuts each tensor of a copy into."""
        return self.shard * self.context_parallel

    @property
    def procs_per_row(self) -> int:
        """Neighbouring ranks that work on the same sequences."""
        return self.context_parallel * self.tensor_parallel


def why_no_split(expert_width: int, dtype: str, tensor_parallel: int) -> str:
    """Why torch's grouped product does not take a rank's part of the experts; empty where it does.

    In 16 bits it needs rows of whole 16 bytes. expert_width: config.json's; 0 where there are no experts.
    """
    if dtype == "float32" or expert_width % (8 * tensor_parallel) == 0:
        return ""
    part = f" over tensor_parallel={tensor_parallel}" if tensor_parallel > 1 else ""
    return (
        f"config.json has moe_intermediate_size={expert_width}, which{part} is no multiple of 8, as {dtype} "
        f"needs; set dtype to float32" + (", or tensor_parallel lower" if tensor_parallel > 1 else "")
    )


def why_no_vocabulary(vocab_size: int, layout: Layout) -> str:
    """Why a layout cannot split the embedding and the head; empty if it can.

    torch's FSDP cuts each of tensor parallelism's parts, and DTensor reads the pieces as if they were of one
    size: another piece than the one a rank has, where the parts are not (torch 2.13).
    """
    tp, fsdp = layout.tensor_parallel, layout.parameter_shards
    if tp == 1 or fsdp == 1 or vocab_size % tp == 0:
        return ""
    return (
        f"tensor_parallel={tp} does not divide the model's vocab_size={vocab_size}, as it has to with shard "
        f"or context_parallel over 1; use tensor_parallel=1, or fill the vocabulary up to a multiple of {tp}"
    )


def row_multiple(layout: Layout, float8: bool = False) -> int:
    """What a row's number of tokens must be a multiple of."""
    halves = 2 if layout.context_parallel > 1 else 1  # a piece from the front and one from the back for each
    blocks = 16 if float8 else 1  # GPUs multiply float8 matrices in blocks of 16
    return layout.procs_per_row * halves * blocks
