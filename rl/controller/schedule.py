"""Schedule: which steps are left, and what is due after each."""

import time
from collections.abc import Callable
from dataclasses import dataclass


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

    def begin(self) -> None:
        """A step begins."""
        self._step_began = self._now()

    def is_due(self) -> bool:
        """Asked right after a step."""
        now = self._now()
        step_seconds = now - self._step_began
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
