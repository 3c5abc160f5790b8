"""Experience: what a step learns from. Groups are scored by reference, critic and policy, and advantages are estimated."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rl.batching import to_sample
from rl.controller.config import RunConfig
from rl.controller.launch import Fleet
from rl.errors import RunError
from rl.loss.advantages.base import Trajectory
from rl.loss.kl import estimate
from rl.types import Group, Rollout, Sample, Score

Scorer = Callable[[Sequence[Sample]], Awaitable[list[np.ndarray]]]


@dataclass(frozen=True)
class Unit:
    """Samples that stay together in a minibatch: a prompt's rollouts, a demonstration, a pair."""

    samples: list[Sample]
    num_tokens: int  # in the mean, those of samples without a gradient included, which are not in `samples`
    num_sequences: int


@dataclass(frozen=True)
class Experience:
    units: list[Unit]
    groups: list[Group] = field(default_factory=list)  # all that was sampled, where something was
    metrics: dict[str, float] = field(default_factory=dict)
    samples_per_unit: int = 1  # consecutive samples that share a micro-batch


async def assess(groups: Sequence[Group], config: RunConfig, fleet: Fleet) -> Experience:
    """Forward passes that the run's settings ask for, all at the same time, and advantages.

    Where the advantages need none of them, they are spared for samples that will not learn.
    """
    members = [list(zip(g.rollouts, g.scores, strict=True)) for g in groups]
    counts = [[i for i, (_, score) in enumerate(g) if score.error is None or not config.reads_rewards] for g in members]
    scored = [[g[i] for i in those] for g, those in zip(members, counts, strict=True)]
    samples = [
        [to_sample(g[i][0], id=f"{g[i][0].problem.id}, rollout {i}") for i in those] for g, those in zip(members, counts, strict=True)
    ]
    scorers = _scorers(config, fleet)
    advantages_first = not config.needs_critic and not config.kl.in_reward
    if not advantages_first:
        samples = await with_scorers(samples, scorers)
    rewards, metrics = _token_rewards(scored, samples, config)
    samples = estimate_advantages(samples, rewards, config)
    if config.reads_rewards:
        metrics["advantages/nonzero"] = float(np.mean([s.advantages.any() for group in samples for s in group] or [0.0]))
    samples = [
        [s for (rollout, _), s in zip(pairs, group, strict=True) if not config.shaping.drops(rollout.stop)]
        for pairs, group in zip(scored, samples, strict=True)
    ]
    kept = _with_gradient(samples, config)
    if advantages_first:
        kept = await with_scorers(kept, scorers)
    units = [
        Unit(weighted(those, config), sum(int(s.target_mask.sum()) for s in everyone), len(everyone))
        for those, everyone in zip(kept, samples, strict=True)
    ]
    return Experience(units, list(groups), metrics)


def _scorers(config: RunConfig, fleet: Fleet) -> dict[str, Scorer]:
    """The columns that this run's loss reads, each with who knows it."""
    scorers: dict[str, Scorer] = {}
    of_rewards = config.kl.in_reward and config.correction.old_logprobs == "trainer"
    if of_rewards or (config.correction.reads_the_trainers and config.num_updates > 1):  # else they are those of the one update itself
        scorers["old_logprobs"] = fleet.trainer.scores
    if fleet.reference is not None:
        scorers["ref_logprobs"] = fleet.reference.scores
    if fleet.critic is not None:
        scorers["values"] = fleet.critic.scores
    return scorers


async def with_scorers(groups: list[list[Sample]], scorers: dict[str, Scorer]) -> list[list[Sample]]:
    samples = [s for group in groups for s in group]
    if not scorers or not samples:
        return groups
    columns = await asyncio.gather(*(score(samples) for score in scorers.values()))
    full = iter(s.with_loss_inputs(**dict(zip(scorers, values, strict=True))) for s, values in zip(samples, zip(*columns, strict=True), strict=True))
    return [[next(full) for _ in group] for group in groups]


def _token_rewards(
    scored: list[list[tuple[Rollout, Score]]], samples: list[list[Sample]], config: RunConfig
) -> tuple[list[list[np.ndarray]], dict[str, float]]:
    """[M] for each rollout: the verifier's reward where it belongs, shaped, less the KL penalty."""
    rewards, bonuses, kls = [], [], []
    for pairs, group in zip(scored, samples, strict=True):
        lengths = [int(s.target_mask.sum()) for s in group]
        added = config.shaping([score.reward for _, score in pairs], lengths, config.env.max_new_tokens)
        bonuses += added
        rewards.append([spread_reward(rollout, score, bonus) for (rollout, score), bonus in zip(pairs, added, strict=True)])
        if config.kl.in_reward:
            penalties = [_kl(sample, config) for sample in group]
            kls += penalties
            rewards[-1] = [r - config.kl.coef * kl for r, kl in zip(rewards[-1], penalties, strict=True)]
    metrics = {}
    if any(bonuses):
        metrics["reward/shaping"] = float(np.mean(bonuses))
    if kls:
        metrics["kl"] = float(np.concatenate(kls).mean())
    return rewards, metrics


def spread_reward(rollout: Rollout, score: Score, bonus: float = 0.0) -> np.ndarray:
    """[M] float64: the reward at the last token, or each turn's at its end, or each token's; `bonus` at the last.

    A turn without a token is rewarded at the token before it, or else at the first.
    """
    rewards = np.zeros(sum(rollout.turn_lengths))
    if not len(rewards):
        return rewards
    if score.parts.tokens:
        rewards += score.parts.tokens
    elif score.parts.turns:
        for end, reward in zip(np.cumsum(rollout.turn_lengths), score.parts.turns, strict=True):
            rewards[max(end - 1, 0)] += reward
    else:
        rewards[-1] = score.reward
    rewards[-1] += bonus
    return rewards


def _kl(sample: Sample, config: RunConfig) -> np.ndarray:
    policy = sample.loss_inputs.get("old_logprobs", sample.generator_logprobs)[sample.target_mask]
    reference = sample.loss_inputs["ref_logprobs"][sample.target_mask]
    return estimate(torch.from_numpy(policy).double(), torch.from_numpy(reference).double(), config.kl.estimator).numpy()


def estimate_advantages(samples: list[list[Sample]], rewards: list[list[np.ndarray]], config: RunConfig) -> list[list[Sample]]:
    """The samples with their advantages; with a critic, also with the loss input `returns`.

    Raises RunError where the estimator does not give a finite advantage for each token.
    """
    if not config.reads_rewards:
        return samples
    none = np.zeros(0)
    groups = [
        [Trajectory(r, s.loss_inputs["values"][s.target_mask].astype(np.float64) if config.needs_critic else none) for s, r in zip(*g, strict=True)]
        for g in zip(samples, rewards, strict=True)
    ]
    columns = {"advantages": config.advantages(groups)} | ({"returns": config.advantages.returns(groups)} if config.needs_critic else {})
    for name, values in columns.items():
        _check(name, values, groups, config)
    return [
        [
            replace(
                s.with_loss_inputs(**{name: s.scatter(np.asarray(values[g][i])) for name, values in columns.items() if name != "advantages"}),
                advantages=s.scatter(np.asarray(columns["advantages"][g][i])),
            )
            for i, s in enumerate(group)
        ]
        for g, group in enumerate(samples)
    ]


def _check(name: str, values: Sequence[Sequence[float | np.ndarray]], groups: list[list[Trajectory]], config: RunConfig) -> None:
    estimator = getattr(config.advantages, "__name__", type(config.advantages).__name__)
    if [len(g) for g in values] != [len(g) for g in groups]:
        raise RunError(f"advantages {estimator} returned {name} for {[len(g) for g in values]} rollouts of {[len(g) for g in groups]}; "
                       f"return as many, group by group")  # fmt: skip
    for got, group in zip(values, groups, strict=True):
        for value, trajectory in zip(got, group, strict=True):
            if np.ndim(value) and np.shape(value) != trajectory.rewards.shape:
                raise RunError(
                    f"advantages {estimator} returned {np.shape(value)} {name} for {trajectory.rewards.shape} tokens; return one for each"
                )
            if not np.isfinite(value).all():
                raise RunError(f"advantages {estimator} returned {name} that are not finite, for rewards {[t.reward for t in group]}")


def _with_gradient(samples: list[list[Sample]], config: RunConfig) -> list[list[Sample]]:
    """Without those that have none; where none has one, one group is kept, to measure parity with the generator."""
    if config.needs_critic or config.kl.in_loss or not getattr(config.loss, "drops_zero_advantages", False):
        return samples
    kept = [[s for s in group if s.advantages.any()] for group in samples]
    if not any(kept) and (first := next((i for i, group in enumerate(samples) if group), None)) is not None:
        kept[first] = samples[first]
    return kept


def weighted(samples: list[Sample], config: RunConfig) -> list[Sample]:
    """Each token's share in the loss; the denominator comes with optim_step."""
    if config.loss_agg != "seq_mean":
        return samples
    return [replace(s, weights=s.weights / max(1, s.target_mask.sum())) for s in samples]
