"""Schedule: which steps are left, and what is due after each. LRSchedule: each step's learning rate."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


class SaveClock:
    """Which steps have a checkpoint due by time: those whose next step would end too late for it.

    So what is lost with a process is at most `minutes` of work, where no step takes longer than the one
    before it, and what was done while the checkpoint was written.
    """

    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic):
        """minutes: 0 is never. now: seconds."""
        self._seconds = 60 * minutes
        self._now = now
        self._saved = self._step_began = now()  # a warm-up is work, too

    def begin(self) -> "SaveClock":
        """The first step begins."""
        self._step_began = self._now()
        return self

    def is_due(self) -> bool:
        """Asked once, right after a step."""
        now = self._now()
        step_seconds, self._step_began = now - self._step_began, now
        return 0 < self._seconds < now + step_seconds - self._saved

    def saved(self) -> None:
        self._saved = self._now()


@dataclass(frozen=True)
class Schedule:
    """Which step does what beside learning."""

    first: int
    last: int
    eval_every: int
    save_every: int = 0
    refresh_every: int = 0
    publish_every_step: bool = True  # else only before evaluations
    evaluate_beside: bool = False  # go on while an evaluation runs
    evaluate_first: bool = True  # the policy before the first step
    save_clock: SaveClock | None = None  # what saves by time, too

    def evaluates(self, step: int) -> bool:
        return step == self.last or step % self.eval_every == 0

    def saves(self, step: int) -> bool:
        """Asked once, right after the step."""
        is_due = self.save_clock is not None and self.save_clock.is_due()
        return is_due or step == self.last or (self.save_every > 0 and step % self.save_every == 0)

    def refreshes(self, step: int) -> bool:
        return self.refresh_every > 0 and step % self.refresh_every == 0


@dataclass(frozen=True)
class LRSchedule:
    """Step (from 1) -> share of the learning rate. The first step after the warm-up has all of it.

    With a kind that goes down, the warm-up takes at most half of the steps, so that the rate goes
    down in a short run too.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"]
    num_steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.0
    decay_ratio: float = 0.2

    def __call__(self, step: int) -> float:
        rises = self.warmup_steps if self.kind == "constant" else min(self.warmup_steps, self.num_steps // 2)
        if step <= rises:
            return step / rises
        if self.kind == "constant":
            return 1.0
        first = rises  # steps after which it goes down
        if self.kind == "wsd":
            first = max(first, self.num_steps - round(self.decay_ratio * self.num_steps))
        done = max(0, step - 1 - first) / max(1, self.num_steps - first)
        left = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1 - done
        return self.min_ratio + (1 - self.min_ratio) * left
