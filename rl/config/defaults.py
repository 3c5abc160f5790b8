"""What 0 comes to in settings of learning, and the fact that decides."""

import math

from rl.config.run import RunConfig
from rl.plan.types import Settled

LOGPROB_LIMITS = {"float32": 3e-3, "bfloat16": 0.1}
"""Nats. In float32 recipes differ by 1e-7 to 1e-5. In bfloat16 rounding alone makes 0.01 to 0.03, as much as
a missed weight sync: there the limit finds a model that is computed wrongly, not one that is a step old."""


def warmup_lr(config: RunConfig) -> tuple[float, str]:
    """The learning rate of a run's warm-up, and why. 3e-3, for random weights, destroys others."""
    if config.warmup.lr:
        return config.warmup.lr, "asked for"
    if config.model.random_weights:
        return 3e-3, "the weights are random"
    return (5e-4, "an adapter learns") if config.trainer.lora.rank else (1e-4, "the weights are pretrained")


def max_logprob_diff(config: RunConfig, dtype: str) -> tuple[float, str]:
    """Nats a token by which generator and trainer may differ, and why.

    dtype: what config.dtype was settled to. What the trainer computes otherwise on purpose has no limit.
    """
    if config.max_logprob_diff:
        return config.max_logprob_diff, "asked for"
    if config.trainer.float8 or config.trainer.dropout:
        return math.inf, f"with {'float8' if config.trainer.float8 else 'dropout'} the two differ on purpose"
    return LOGPROB_LIMITS[dtype], f"rounding in {dtype} stays below"


def settled_of_learning(config: RunConfig, dtype: str) -> tuple[Settled, ...]:
    """Of a training run. dtype: as above."""
    rows = []
    if config.warmup.steps:
        lr, why = warmup_lr(config)
        rows.append(Settled("warmup.lr", f"{config.warmup.lr:g}", f"{lr:g}", why))
    if config.data == "rollouts":
        limit, why = max_logprob_diff(config, dtype)
        value = "no limit" if limit == math.inf else f"{limit:g}"
        rows.append(Settled("max_logprob_diff", f"{config.max_logprob_diff:g}", value, why))
    return tuple(rows)
