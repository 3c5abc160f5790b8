"""Parity: what a run does where generator and trainer compute different logprobs for the same tokens."""

import math
from collections.abc import Sequence

import numpy as np

from rl.actors.engine import EngineHandle
from rl.errors import RunError
from rl.models.engine_config import EngineConfig
from rl.types import Group, PolicyVersion, Sample

LIMITS = {"float32": 3e-3, "bfloat16": 0.1}
"""Nats. In float32 recipes differ by 1e-7 to 1e-5. In bfloat16 rounding alone makes 0.01 to 0.03, as much as
a missed weight sync: there the limit finds a model that is computed wrongly, not one that is a step old."""

STEPS = 10
"""In a row over the limit, after which a run ends."""


class PolicyMismatch(RunError):
    """The generator samples from another policy than the one that learns; no update was applied."""


def default_limit(config: EngineConfig) -> float:
    """config: the trainer's. What it computes otherwise than a generator on purpose has no limit."""
    return math.inf if config.float8 or config.dropout else LIMITS[config.dtype]


def are_of_version(groups: Sequence[Group], version: PolicyVersion) -> bool:
    """Whether all their tokens were sampled by it; False where there is none."""
    return bool(groups) and all(group.oldest_version == version for group in groups if group.was_sampled)


class Parity:
    """Counts steps whose mean difference is over the limit.

    Only steps count whose tokens were all sampled by the version that learns: an older version is another
    policy. Ends the run at its first such step, or after STEPS of them in a row.
    """

    def __init__(self, limit: float):
        """limit: nats a token."""
        self.limit = limit
        self.num_over = 0  # steps in a row
        self._first = True

    def check(self, mean: float) -> None:
        """mean: of |trainer - generator|, nats, of a step; NaN where nothing was trained on.

        Raises PolicyMismatch where the run is to end.
        """
        if math.isnan(mean):
            return
        first, self._first = self._first, False
        self.num_over = self.num_over + 1 if mean > self.limit else 0
        if self.num_over and (first or self.num_over >= STEPS):
            since = "" if first else f", for {self.num_over} steps"
            raise PolicyMismatch(
                f"the generator's logprobs differ from the trainer's by {mean:.2g} nats a token on average, "
                f"over max_logprob_diff={self.limit:g}{since}"
            )


async def explain(engine: EngineHandle, adapter: str | None, samples: Sequence[Sample], limit: float) -> str:
    """Where in the sequences the two differ, and what that points to."""
    logprobs = await engine.forward_samples(samples, adapter)
    positions, apart = [np.zeros(0, int)], [np.zeros(0)]
    for sample, ours in zip(samples, logprobs, strict=True):
        at = np.flatnonzero(sample.target_mask)
        positions.append(at)
        apart.append(np.abs(ours - sample.generator_logprobs)[at])
    position, difference = np.concatenate(positions), np.concatenate(apart)
    first = int(position[difference > limit].min(initial=2**31))
    before = int((position < first).sum())
    if before * 10 >= len(position):
        return (
            f"tokens at positions below {first} agree ({before} of {len(position)}), so the weights are "
            f"there: from there on generator and trainer attend differently (a sliding window, a RoPE "
            f"scaling); keep sequences shorter with trainer.max_tokens, or use another model"
        )
    lowest = int(position.min(initial=2**31))
    return (
        f"they differ wherever tokens were sampled, from position {lowest} on: vLLM computes this "
        f"architecture otherwise, or lacks some of its weights; use another model, or raise "
        f"max_logprob_diff if the difference is known and wanted"
    )
