"""Algorithm: the parts of a run's algorithm, and what they need: the one place that asks them."""

from dataclasses import dataclass
from typing import Any

from rl.interfaces import AdvantageEstimator, Loss
from rl.loss.aggregate import LossAgg
from rl.loss.correction import Correction
from rl.loss.entropy import EntropyBonus
from rl.loss.kl import KL
from rl.loss.objective import Objective
from rl.loss.shaping import Shaping
from rl.types import DataKind


@dataclass(frozen=True)
class Algorithm:
    """How groups become updates. The fields are those of RunConfig.

    max_new_tokens: that a rollout may sample in all.
    """

    data: DataKind
    loss: Loss
    advantages: AdvantageEstimator
    loss_agg: LossAgg
    correction: Correction
    kl: KL
    entropy: EntropyBonus
    shaping: Shaping
    minibatches: int
    epochs: int
    max_new_tokens: int

    @property
    def objective(self) -> Objective:
        """What the trainer is given."""
        return Objective(self.loss, self.correction, self.kl, self.entropy.coef)

    @property
    def samples_rollouts(self) -> bool:
        return self.data == "rollouts"

    @property
    def learns_from(self) -> DataKind:
        """What the loss is made for; of one that does not say, whatever is chosen."""
        return getattr(self.loss, "learns_from", self.data)

    @property
    def reads_rewards(self) -> bool:
        """Whether the loss reads advantages."""
        return getattr(self.loss, "needs_rewards", True)

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef > 0 or getattr(self.loss, "needs_reference", False)

    @property
    def needs_teacher(self) -> bool:
        """Whether the reference has to be another model than the policy was."""
        return getattr(self.loss, "needs_teacher", False)

    @property
    def needs_critic(self) -> bool:
        return self.samples_rollouts and getattr(self.advantages, "needs_critic", False)

    @property
    def compares_in_groups(self) -> bool:
        """Whether a group of one teaches nothing."""
        return getattr(self.advantages, "compares_in_groups", False)

    @property
    def reads_turns(self) -> bool:
        """Whether a turn's reward changes the advantages of that turn other than those of the others."""
        return not self.reads_rewards or getattr(self.advantages, "reads_turns", True)

    @property
    def looks_at_the_batch(self) -> bool:
        """Whether the advantages of a group depend on other groups."""
        return self.reads_rewards and not getattr(self.advantages, "group_by_group", False)

    @property
    def num_updates(self) -> int:
        """Optimizer steps from one batch."""
        return self.minibatches * self.epochs

    @property
    def reads_old_logprobs(self) -> bool:
        """Whether the trainer's logprobs before the step are needed; if not, the one update's own serve."""
        in_reward = self.kl.in_reward and self.correction.old_logprobs == "trainer"
        return in_reward or (self.correction.reads_the_trainers and self.num_updates > 1)

    @property
    def advantages_need_forward(self) -> bool:
        """Whether the advantages depend on forward passes; if not, samples without a gradient skip them."""
        return self.needs_critic or self.kl.in_reward

    @property
    def drops_zero_advantages(self) -> bool:
        """Whether a sample of advantage 0 has no gradient."""
        dropped_by_loss: Any = getattr(self.loss, "drops_zero_advantages", False)
        return bool(dropped_by_loss) and not (self.needs_critic or self.kl.in_loss or self.entropy.used)
