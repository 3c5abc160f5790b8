"""A loss and an advantage estimator of your own: `rl train examples/own_algorithm.py:best_of_group`.

Both are functions (or frozen dataclasses with __call__, whose fields become settings). The estimator runs in
the controller; the loss goes to the trainer by value.
"""

from dataclasses import replace

import torch

from rl.config import RunConfig
from rl.configs.quickstart import quickstart
from rl.loss.base import LossOutput, TokenInputs, log_ratio


def only_the_best(groups):
    """An advantage estimator: the rollouts of the step, by prompt -> advantages.

    It gives one number for each rollout, or one for each of its tokens. The best of each group are
    reinforced; a group of equals teaches nothing.
    """
    advantages = []
    for group in groups:
        rewards = [rollout.reward for rollout in group]
        differ = bool(rewards) and max(rewards) > min(rewards)
        advantages.append([float(differ and reward == max(rewards)) for reward in rewards])
    return advantages


def squared_ratio(logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
    """A loss: logprobs [M] with gradient -> a sum over tokens, and metrics.

    Metrics named `name:sum` are shown as means over tokens. The surrogate with a soft wall in place of a
    clip: -sum_t w_t * (ratio_t * A_t - (ratio_t - 1)^2)
    """
    ratio = log_ratio(logprobs, inputs.old_logprobs).exp()
    terms = ratio * inputs.advantages - (ratio - 1).square()
    return LossOutput(-(terms * inputs.weights).sum(), {"ratio:sum": ratio.detach().sum()})


def best_of_group() -> RunConfig:
    """The quickstart with both."""
    return replace(quickstart(), loss=squared_ratio, advantages=only_the_best, minibatches=2)
