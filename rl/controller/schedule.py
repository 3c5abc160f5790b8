"""Schedule: which steps are left, and what is due after each."""

import time
from collections.abc import Callable
from dataclasses import dataclass


class SaveClock:
    """Which steps have a checkpoint due by time: those whose next step would end too late for it.

    So what is lost with a process is at most `minutes` of work, where no step and no evaluation takes longer
    than the one before it, and what was done while the checkpoint was written.
    """

    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic):
        """minutes: 0 is never. now: seconds."""
        self._seconds = 60 * minutes
        self._now = now
        self._saved = self._step_began = now()  # a warm-up is work, too
        self._evaluation_seconds = 0.0  # of the last

    def begin(self) -> None:
        """A step begins."""
        self._step_began = self._now()

    def evaluated(self, seconds: float) -> None:
        """How long steps have waited for an evaluation."""
        self._evaluation_seconds = seconds

    def is_due(self, evaluates: bool = False) -> bool:
        """Asked right after a step. evaluates: the next step waits for an evaluation."""
        now = self._now()
        expected = now - self._step_began + (self._evaluation_seconds if evaluates else 0.0)
        return 0 < self._seconds < now + expected - self._saved

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

    def newest_evaluated(self, step: int) -> int:
        """The newest step up to this one after which an evaluation is due."""
        return step if self.evaluates(step) else step - step % self.eval_every

    def saves(self, step: int) -> bool:
        """Asked once, right after the step."""
        waits = self.evaluates(step) and not self.evaluate_beside
        is_due = self.save_clock is not None and self.save_clock.is_due(waits)
        return is_due or step == self.last or (self.save_every > 0 and step % self.save_every == 0)

    def refreshes(self, step: int) -> bool:
        return self.refresh_every > 0 and step % self.refresh_every == 0
