"""Rewards are sums of floats: which of them count as equal, and which as success."""

from collections.abc import Sequence

_RELATIVE, _ABSOLUTE = 1e-6, 1e-9
"""0.7 + 0.2 + 0.1 is 1 - 1e-16, and in float32 1 + 1e-7."""


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether they differ by rounding at most. True of none."""
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    return high - low <= max(_ABSOLUTE, _RELATIVE * max(abs(low), abs(high)))


def is_success(reward: float) -> bool:
    """Whether it is 1 or more, but for rounding."""
    return reward >= 1 - _RELATIVE
