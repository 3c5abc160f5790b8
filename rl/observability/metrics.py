"""From groups, batches and what the trainer returned to the numbers of a step. Pure functions."""

import math
import statistics
from collections.abc import Mapping, Sequence

from rl.types import Batch, Group, StopReason


def step_metrics(groups: Sequence[Group], batch: Batch, learned: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """learned: what `forward_backward` returned. num_tokens: the loss's denominator.

    `logprob_diff/*` and `ratio_outside` compare trainer and generator on the tokens that were trained on.
    """
    tokens = learned["tokens:sum"] or math.nan
    return group_metrics(groups) | {
        "loss": learned["loss:sum"] / num_tokens,
        "entropy": learned["entropy:sum"] / tokens,
        "clip_fraction": learned["clip_fraction:sum"] / tokens,
        "logprob_diff/mean": learned["logprob_diff:sum"] / tokens,
        "logprob_diff/max": learned["logprob_diff:max"],
        "logprob_diff/ratio_outside": learned["ratio_outside:sum"] / tokens,
        "tokens/sampled": num_tokens,
        "tokens/trained": batch.num_scored_tokens,
    }


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    scores = [score for group in groups for score in group.scores]
    rewards = [score.reward for score in scores if score.error is None]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [sum(len(s.tokens) for s in rollout.segments if s.sampled) for rollout in rollouts]
    return {
        "reward/mean": statistics.fmean(rewards) if rewards else math.nan,
        "reward/std": statistics.pstdev(rewards) if rewards else math.nan,
        "reward/errors": len(scores) - len(rewards),
        "group/with_signal": statistics.fmean(len({s.reward for s in group.scores if s.error is None}) > 1 for group in groups),
        "rollout/length": statistics.fmean(lengths),
        "rollout/truncated": statistics.fmean(rollout.stop == StopReason.LENGTH for rollout in rollouts),
    }


def eval_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`eval/accuracy`: share of held-out problems with a reward of at least 1; a failed reward counts as wrong."""
    scores = [score for group in groups for score in group.scores]
    accuracy = statistics.fmean(score.reward >= 1 for score in scores)
    return {
        "eval/accuracy": accuracy,
        "eval/standard_error": math.sqrt(accuracy * (1 - accuracy) / len(scores)),
        "eval/reward": statistics.fmean(score.reward for score in scores),
        "eval/errors": sum(score.error is not None for score in scores),
    }
