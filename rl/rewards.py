"""Rewards are sums of floats: which of them count as equal, and which as success."""

from collections.abc import Sequence

_RELATIVE, _ABSOLUTE = 1e-7, 1e-12
"""Sums of parts differ by 1e-16 of their size, in float32 by 6e-8; around 0 by 1e-16 of their parts' size."""

_SHORT_OF_ONE = 1e-6
"""0.7 + 0.2 + 0.1 is 1 - 1e-16 where they are added one after the other."""


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether they differ by rounding at most. True of none."""
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    return high - low <= max(_ABSOLUTE, _RELATIVE * max(abs(low), abs(high)))


def is_success(reward: float) -> bool:
    """Whether it is 1 or more, but for rounding."""
    return reward >= 1 - _SHORT_OF_ONE
