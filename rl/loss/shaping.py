"""Shaping: what is added to rewards for the length of a response."""

from collections.abc import Sequence
from dataclasses import dataclass

from rl.bounds import NonNegativeFloat, NonNegativeInt
from rl.fields import refuse
from rl.types import StopReason


@dataclass(frozen=True)
class Shaping:
    """Applies only to training; metrics and evaluation show the verifier's rewards."""

    overlong_tokens: NonNegativeInt = 0
    """DAPO's soft punishment (arXiv 2503.14476, equation 13): over the last so many of what a rollout may
    sample (env.max_new_tokens; in an episode of turns times env.max_turns, but for an AgentEnv within
    max_seq_len) the reward falls by up to overlong_penalty. A rollout of several turns counts all that it
    sampled."""

    overlong_penalty: NonNegativeFloat = 1.0
    """What a rollout that samples all that it may loses."""

    length_coef: NonNegativeFloat = 0.0
    """Weight of Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3): in its group the shortest
    response gets 0.5, the longest -0.5, and a wrong one (reward under 1) never more than 0."""

    drop_truncated: bool = False
    """Responses that were cut off do not learn (DAPO's overlong filtering); their rewards still count in
    their group's mean."""

    def __post_init__(self) -> None:
        refuse(self)

    def unread(self, prefix: str) -> list[str]:
        """A line for each field that was changed and has no effect, with the prefix before its name."""
        penalty, tokens = f"{prefix}overlong_penalty", f"{prefix}overlong_tokens"
        if self.overlong_penalty != Shaping.overlong_penalty and not self.overlong_tokens:
            return [f"{penalty}={self.overlong_penalty} has no effect with {tokens}=0; set it"]
        if self.overlong_tokens and not self.overlong_penalty:
            return [f"{tokens}={self.overlong_tokens} has no effect with {penalty}=0; set it"]
        return []

    def __call__(self, correct: Sequence[bool], lengths: Sequence[int], max_new_tokens: int) -> list[float]:
        """Which of a group's rollouts are right [G], and lengths [G] -> what is added to each reward."""
        shortest, longest = min(lengths, default=0), max(lengths, default=0)
        added = []
        for is_right, length in zip(correct, lengths, strict=True):
            bonus = 0.0
            if self.overlong_tokens:
                over = length - (max_new_tokens - self.overlong_tokens)
                bonus -= self.overlong_penalty * min(max(over / self.overlong_tokens, 0.0), 1.0)
            if self.length_coef and longest > shortest:
                place = 0.5 - (length - shortest) / (longest - shortest)
                bonus += self.length_coef * (place if is_right else min(0.0, place))
            added.append(bonus)
        return added

    def drops(self, stop: StopReason) -> bool:
        return self.drop_truncated and stop == StopReason.LENGTH
