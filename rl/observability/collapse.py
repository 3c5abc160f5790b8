"""Words for a policy that has stopped to learn because it no longer tries anything."""

from collections import deque
from collections.abc import Mapping

_STEPS = 10
_ENTROPY = 0.1  # nats a token
_SIGNAL = 0.4  # share of groups whose rewards differ
_SOLVED = 0.9  # mean reward: above it certainty is what was asked for


class CollapseWatch:
    """Says once when a policy collapses: for ten steps hardly any entropy, and groups of equal rewards."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, ...]] = deque(maxlen=_STEPS)
        self._said = False

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """metrics: of a step. The message, at the step at which it is due."""
        names = ("entropy", "group/with_signal", "reward/mean")
        if self._said or any(metrics.get(name, float("nan")) != metrics.get(name) for name in names):
            return None
        self._recent.append(tuple(metrics[name] for name in names))
        if len(self._recent) < _STEPS:
            return None
        entropy, signal, reward = (sum(column) / _STEPS for column in zip(*self._recent, strict=True))
        if entropy >= _ENTROPY or signal >= _SIGNAL or reward >= _SOLVED:
            return None
        self._said = True
        return (
            f"the policy has collapsed: over {_STEPS} steps its entropy is {entropy:.2f} nats a token, and "
            f"in {1 - signal:.0%} of the groups all rewards are the same, at a mean reward of {reward:.2f}; "
            f"look at entropy.target, trainer.lr, trainer.lr_schedule, group_size and resampling_rounds"
        )
