"""How token losses become one number: what each is divided by before they are summed, and what the sum is.

The sum and the division are apart, so that a step's gradient can be added up over micro-batches, ranks and
streamed parts, and divided once.
"""

from typing import Literal

LossAgg = Literal["token_mean", "seq_mean", "constant"]


def token_divisor(loss_agg: LossAgg, num_targets: int) -> int:
    """Of each target token of a sequence that has so many; a sequence with branches has those of all."""
    return max(1, num_targets) if loss_agg == "seq_mean" else 1


def denominator(loss_agg: LossAgg, num_tokens: int, num_sequences: int, max_new_tokens: int) -> float:
    """What the sum is divided by: num_tokens target tokens in num_sequences sequences.

    max_new_tokens: the most that a sequence may have, which `constant` (Dr.GRPO) divides by.
    """
    match loss_agg:
        case "token_mean":
            return max(1, num_tokens)
        case "seq_mean":
            return max(1, num_sequences)
        case "constant":
            return max(1, num_sequences) * max_new_tokens
