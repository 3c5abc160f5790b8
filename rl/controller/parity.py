"""Parity: what a run does where generator and trainer compute different logprobs for the same tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.actors.engine import EngineHandle
from rl.errors import RunError
from rl.types import Group, PolicyVersion, Sample

STEPS = 10
"""In a row over the limit, after which a run ends."""
_MANY_TIMES = 10

_CERTAIN = 0.05  # nats: a token that is likelier says little of what a model computes
_FEWEST = 8  # tokens on each side of a position, to say that the two differ from there on


class PolicyMismatch(RunError):
    """The generator samples from another policy than the one that learns.

    Raised before the policy's first update of a step. A critic may have learned beside.
    """


def are_of_version(groups: Sequence[Group], version: PolicyVersion) -> bool:
    """Whether all their tokens were sampled by it; False where there is none."""
    return bool(groups) and all(group.oldest_version == version for group in groups if group.was_sampled)


class Parity:
    """Counts steps whose mean difference is over the limit.

    Only steps count whose tokens were all sampled by the version that learns: an older version is another
    policy. Ends the run where the first step that counts is over it, or STEPS in a row; of a part of a run
    that goes on from a checkpoint, where the first is over it many times.
    """

    def __init__(self, limit: float, state: Mapping[str, Any] | None = None):
        """limit: nats a token. state: of an earlier part of the run."""
        self.limit = limit
        self.num_over: int = state["num_over"] if state else 0  # steps in a row
        self._first: bool = state["first"] if state else True
        self._goes_on = not self._first  # its generators are new, and may compute something else

    @property
    def state(self) -> dict[str, Any]:
        """A part of checkpoints."""
        return {"num_over": self.num_over, "first": self._first}

    def check(self, mean: float) -> None:
        """mean: of |trainer - generator|, nats, of a step; NaN where nothing was trained on.

        Raises PolicyMismatch where the run is to end.
        """
        if math.isnan(mean):
            return
        first = self._first or (self._goes_on and mean > _MANY_TIMES * self.limit)
        self._first = self._goes_on = False
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
        tells = sample.target_mask & (np.minimum(ours, sample.generator_logprobs) < -_CERTAIN)
        positions.append(np.flatnonzero(tells))
        apart.append(np.abs(ours - sample.generator_logprobs)[tells])
    position, difference = np.concatenate(positions), np.concatenate(apart)
    if not len(position) or difference.mean() <= limit:
        return (
            "computed again without a gradient they agree, so look at what the trainer does only while it "
            "learns: trainer.dropout, or a loss or module of your own"
        )
    if begin := _begins_to_differ(position, difference, limit):
        agree = (position < begin).sum()
        return (
            f"tokens at positions below {begin} agree ({agree} of {len(position)}), so the weights are "
            f"there: from about there on generator and trainer attend differently (a sliding window, a RoPE "
            f"scaling); keep sequences shorter with max_seq_len, or use another model"
        )
    return (
        f"they differ wherever tokens were sampled, from position {position.min()} on: vLLM computes this "
        f"architecture otherwise, or lacks some of its weights; use another model, or raise max_logprob_diff "
        f"if the difference is known and wanted"
    )


def _begins_to_differ(position: np.ndarray, difference: np.ndarray, limit: float) -> int | None:
    """The position before which the mean is within the limit, and from which it is most clearly over it."""
    order = np.argsort(position, kind="stable")
    position, sums, num = position[order], np.cumsum(difference[order]), len(order)
    at = np.flatnonzero(np.diff(position)) + 1  # where another position begins
    at = at[(at >= _FEWEST) & (num - at >= _FEWEST)]
    before, after = sums[at - 1] / at, (sums[-1] - sums[at - 1]) / (num - at)
    clear = np.where((before <= limit) & (after > limit), (after - before) * np.sqrt(at * (num - at)), 0.0)
    return int(position[at[clear.argmax()]]) if clear.any() else None
