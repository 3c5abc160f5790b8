"""What a run says once, when its numbers show it: a policy that collapses, a setting that saves nothing."""

from collections import deque
from collections.abc import Mapping
from typing import Protocol

_STEPS = 10
_ENTROPY = 0.1  # nats a token
_SIGNAL = 0.4  # share of groups whose rewards differ
_LOSSES = 3  # steps of which the losses' mean is taken
_NOISE = 3  # times what it falls by after a rise: the best of many means lies far below theirs
_RISE, _RISE_NATS = 0.25, 0.1  # how far it may be over the best: a share of it, and nats
_SOLVED = 0.9  # share of right answers: above it certainty is what was asked for


class Watch(Protocol):
    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """metrics: of a step. The message, at the step at which it is due."""


class CollapseWatch:
    """Says when a policy collapses, which no longer learns because it no longer tries anything.

    For ten steps it has hardly any entropy, and groups have equal rewards.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, ...]] = deque(maxlen=_STEPS)
        self._said = False

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        names = ("entropy", "group/with_signal", "reward/correct")
        if self._said or any(metrics.get(name, float("nan")) != metrics.get(name) for name in names):
            return None
        self._recent.append(tuple(metrics[name] for name in names))
        if len(self._recent) < _STEPS:
            return None
        entropy, signal, correct = (sum(column) / _STEPS for column in zip(*self._recent, strict=True))
        if entropy >= _ENTROPY or signal >= _SIGNAL or correct >= _SOLVED:
            return None
        self._said = True
        return (
            f"the policy has collapsed: over {_STEPS} steps its entropy is {entropy:.2f} nats a token, and "
            f"in {1 - signal:.0%} of the groups all rewards are the same, with {correct:.0%} of the answers "
            f"right; "
            f"look at entropy.target, trainer.lr, trainer.lr_schedule, group_size and resampling_rounds"
        )


class ParityWatch:
    """Says when generator and trainer begin to differ by more than the limit."""

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        if metrics.get("logprob_diff/steps_over_limit") != 1:
            return None
        return (
            f"the generator's logprobs differ from the trainer's by {metrics['logprob_diff/mean']:.2g} nats "
            f"a token on average, over max_logprob_diff; the run ends if this lasts"
        )


class LossWatch:
    """Says when the loss of supervised steps rises: the learning rate is too high for these weights."""

    def __init__(self, setting: str) -> None:
        """setting: the learning rate's."""
        self._setting = setting
        self._recent: deque[float] = deque(maxlen=_LOSSES)
        self._best = float("inf")
        self._change, self._falls, self._num_falls = 0.0, 0.0, 0
        self._said = False

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        loss = metrics["loss"]
        change = loss - self._recent[-1] if self._recent else 0.0
        if change < 0 < self._change:
            self._falls, self._num_falls = self._falls - change, self._num_falls + 1
        self._change = change
        self._recent.append(loss)
        mean = sum(self._recent) / len(self._recent)
        if len(self._recent) < _LOSSES or self._said:
            return None
        self._best = min(self._best, mean)
        # Where batches differ, a loss falls as often as it rises: by so much after a rise.
        noise = self._falls / max(1, self._num_falls)
        if mean < self._best + _RISE * abs(self._best) + _RISE_NATS + _NOISE * noise:
            return None
        self._said = True
        return (
            f"the loss rises: {mean:.2f} over the last {_LOSSES} steps, after {self._best:.2f} "
            f"at best; lower {self._setting}"
        )


class SharingWatch:
    """Says after ten steps when prefixes that are computed once save nothing."""

    def __init__(self) -> None:
        self._steps, self._computed, self._unshared = 0, 0.0, 0.0

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        self._steps += 1
        self._computed += metrics["tokens/computed"]
        self._unshared += metrics["tokens/computed_unshared"]
        if self._steps != _STEPS or self._computed < self._unshared:
            return None
        return (
            f"trainer.share_prefixes saved nothing in {_STEPS} steps: samples share next to no leading "
            f"tokens, or the model's rows cannot hold them once; results are the same without it"
        )
