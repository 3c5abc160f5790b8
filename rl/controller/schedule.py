"""Schedule: which steps are left, and what is due after each."""

from dataclasses import dataclass


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

    def evaluates(self, step: int) -> bool:
        return step == self.last or step % self.eval_every == 0

    def saves(self, step: int) -> bool:
        return step == self.last or (self.save_every > 0 and step % self.save_every == 0)

    def refreshes(self, step: int) -> bool:
        return self.refresh_every > 0 and step % self.refresh_every == 0
