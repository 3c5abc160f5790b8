"""Wave: requests that arrive one by one and are admitted together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that are admitted in the same step, in the order of their positions, however they arrive.

    So that the same requests are always computed in the same batches: in bf16 a token's logprob depends on
    its batch.
    """

    id: int
    position: int
    size: int
