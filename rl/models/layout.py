"""How a model is spread over processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How the model is spread over processes: replicate x shard x tensor_parallel of them."""

    replicate: int = 1
    """Copies of the model (HSDP's outer axis); gradients are summed over them."""

    shard: int = 1
    """FSDP2: processes over which each copy's parameters, gradients and optimizer state are sharded."""

    tensor_parallel: int = 1
    """Processes that split each layer's matrices, with sequence parallelism between them."""

    @property
    def num_procs(self) -> int:
        return self.replicate * self.shard * self.tensor_parallel

    @property
    def data_parallel(self) -> int:
        """Ranks that read different sequences."""
        return self.replicate * self.shard
