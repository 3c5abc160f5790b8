"""From groups of rollouts to what a step learns from.

`build_training_batch` takes one step after the other over one record:

usable -> (forward passes) -> rewards of tokens -> advantages -> without those that are dropped
-> (forward passes)
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar, cast

import numpy as np
import torch

from rl.batching import segments_sample
from rl.config.algorithm import Algorithm
from rl.controller.member import Member, scatter_reward
from rl.errors import RunError
from rl.interfaces import EstimatorWithCritic
from rl.loss.advantages.base import Trajectory, check_estimates
from rl.loss.advantages.base import estimate as estimate_values
from rl.loss.aggregate import token_divisor
from rl.loss.kl import estimate
from rl.loss.shaping import Shaping
from rl.types import Group, Rewards, Sample
from rl.waiting import finish_all, in_thread

Scorers = Mapping[str, Callable[[Sequence[Sample]], Awaitable[list[np.ndarray]]]]
"""Loss input -> who computes it: the samples -> [T] each. "old_logprobs", "ref_logprobs", "values"."""


@dataclass(frozen=True)
class TrainingGroup:
    """Samples that stay together in a minibatch: a prompt's rollouts, a demonstration, a pair."""

    samples: list[Sample]
    num_tokens: int  # in the mean; those of samples without a gradient, which are not in `samples`, included
    num_sequences: int


@dataclass(frozen=True)
class Streamed:
    """Groups whose gradient the trainer already holds, and what forward_backward returned for them."""

    groups: list[TrainingGroup]
    learned: dict[str, float]


@dataclass(frozen=True)
class TrainingBatch:
    """What a step learns from."""

    groups: list[TrainingGroup]  # still to be trained on
    rollouts: list[Group] = field(default_factory=list)  # what the groups were made of, streamed ones too
    filtered: list[Group] = field(default_factory=list)  # sampled for it, and not trained on
    means: dict[str, tuple[float, int]] = field(default_factory=dict)  # metric -> sum, and of how many
    samples_per_unit: int = 1  # consecutive samples that share a micro-batch
    streamed: tuple[Streamed, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        return {name: total / max(1, count) for name, (total, count) in self.means.items()}

    @property
    def all_groups(self) -> list[TrainingGroup]:
        """Streamed ones too."""
        return [*(group for part in self.streamed for group in part.groups), *self.groups]

    @property
    def sampled(self) -> list[Group]:
        """All that was sampled for it, in the order of indices."""
        return sorted([*self.rollouts, *self.filtered], key=lambda group: group.index)

    def samples_of(self, group: Group) -> Sequence[Sample]:
        """Those of a group that are trained on."""
        pairs = zip(self.rollouts, self.all_groups, strict=True)
        return next((training_group.samples for rollouts, training_group in pairs if rollouts is group), ())

    def joined(self, part: "TrainingBatch") -> "TrainingBatch":
        """This and the next part of the same batch."""
        means = dict(self.means)
        for name, (total, count) in part.means.items():
            before, count_before = means.get(name, (0.0, 0))
            means[name] = before + total, count_before + count
        return replace(
            self,
            groups=[*self.groups, *part.groups],
            rollouts=[*self.rollouts, *part.rollouts],
            filtered=[*self.filtered, *part.filtered],
            means=means,
        )


_Groups = list[list[Member]]
_T = TypeVar("_T")

_MANY_ROLLOUTS, _MANY_TOKENS = 128, 200_000
"""Fewer take a few milliseconds."""


async def build_training_batch(
    groups: Sequence[Group], algorithm: Algorithm, scorers: Scorers
) -> TrainingBatch:
    """Forward passes all run at the same time. A large batch is computed in threads, beside the event loop.

    Where the advantages allow it, forward passes run only for samples that will learn.
    """
    num_rollouts = sum(len(group.rollouts) for group in groups)
    num_tokens = sum(sum(rollout.turn_lengths) for group in groups for rollout in group.rollouts)
    is_large = num_rollouts >= _MANY_ROLLOUTS or num_tokens >= _MANY_TOKENS

    async def compute(function: Callable[[], _T]) -> _T:
        return await in_thread(function) if is_large else function()

    members = await compute(lambda: [_usable(group, algorithm) for group in groups])
    if algorithm.advantages_need_forward:
        members = await _with_forward_passes(members, scorers)
    counted, learning, means = await compute(lambda: _with_advantages(members, algorithm))
    if not algorithm.advantages_need_forward:
        learning = await _with_forward_passes(learning, scorers)
    pairs = zip(learning, counted, strict=True)
    training_groups = [_training_group(taught, all_, algorithm) for taught, all_ in pairs]
    return TrainingBatch(training_groups, list(groups), means=means)


def _with_advantages(
    members: _Groups, algorithm: Algorithm
) -> tuple[_Groups, _Groups, dict[str, tuple[float, int]]]:
    """Those that count in the mean, those of them that learn, and metrics."""
    members, means = _with_rewards(members, algorithm)
    if algorithm.reads_rewards:
        members = estimate_advantages(members, algorithm)
        nonzero = [m.has_advantages for group in members for m in group]
        means["advantages/nonzero"] = float(sum(nonzero)), len(nonzero)
    counted = [[m for m in group if not algorithm.shaping.drops(m.rollout.stop)] for group in members]
    return counted, _with_gradient(counted, algorithm), means


def _usable(group: Group, algorithm: Algorithm) -> list[Member]:
    """Without those that are dropped, where rewards are read, or where nothing was sampled."""
    members = []
    for i, (rollout, score) in enumerate(zip(group.rollouts, group.scores, strict=True)):
        if not (score.is_dropped and (algorithm.reads_rewards or rollout.versions is None)):
            samples = tuple(segments_sample(branch, id=group.sample_id(i)) for branch in rollout.branches)
            members.append(Member(rollout, score, samples))
    return members


async def _with_forward_passes(groups: _Groups, scorers: Scorers) -> _Groups:
    if not scorers:
        return groups
    samples = [sample for group in groups for member in group for sample in member.samples]
    full = iter(await with_loss_inputs(samples, scorers))
    return [
        [replace(member, samples=tuple(islice(full, len(member.samples)))) for member in group]
        for group in groups
    ]


async def with_loss_inputs(samples: Sequence[Sample], scorers: Scorers) -> list[Sample]:
    """The samples with what each scorer says of them."""
    if not scorers or not samples:
        return list(samples)
    computed = await finish_all(compute(samples) for compute in scorers.values())
    of_each_sample = zip(*computed, strict=True)
    return [
        sample.with_loss_inputs(**dict(zip(scorers, values, strict=True)))
        for sample, values in zip(samples, of_each_sample, strict=True)
    ]


def _with_rewards(groups: _Groups, algorithm: Algorithm) -> tuple[_Groups, dict[str, tuple[float, int]]]:
    """The verifier's reward where it belongs, shaped, less the KL penalty.

    Raises RunError for rewards of turns or tokens that the advantages would not read: `rl check` refuses
    those that it sees, and sees none of what a judge gives.
    """
    if not algorithm.reads_turns and any(m.score.parts != Rewards() for group in groups for m in group):
        raise RunError(
            f"rewards of turns, or tokens, are not read by advantages {type(algorithm.advantages).__name__}: "
            f"all would have the same advantage; use GAE() or ReinforcePP(), or return one reward"
        )
    rewarded: _Groups = []
    bonuses, kls = [], []
    for group in groups:
        lengths = [m.num_targets for m in group]
        added = algorithm.shaping([m.score.correct for m in group], lengths, algorithm.max_new_tokens)
        bonuses += added
        rewarded.append([])
        for member, bonus in zip(group, added, strict=True):
            rewards = scatter_reward(member.rollout, member.score, bonus)
            if algorithm.kl.in_reward:
                kls.append(_kl(member, algorithm))
                rewards = rewards - algorithm.kl.coef * kls[-1]
            # Without a token there is none to reward, and the group compares all the same.
            reward = float(rewards.sum()) if len(rewards) else member.score.reward + bonus
            rewarded[-1].append(replace(member, rewards=rewards, reward=reward))
    means = {}
    if algorithm.shaping != Shaping():
        means["reward/shaping"] = float(sum(bonuses)), len(bonuses)
    if kls:
        means["kl"] = float(sum(kl.sum() for kl in kls)), sum(map(len, kls))
    return rewarded, means


def _kl(member: Member, algorithm: Algorithm) -> np.ndarray:
    if algorithm.correction.old_logprobs == "trainer":
        policy = member.of_targets("old_logprobs")
    else:
        policy = np.concatenate([s.generator_logprobs[s.target_mask] for s in member.samples])
    reference = member.of_targets("ref_logprobs")
    logprobs = torch.from_numpy(policy).double(), torch.from_numpy(reference).double()
    return estimate(*logprobs, algorithm.kl.estimator).numpy()


def estimate_advantages(groups: _Groups, algorithm: Algorithm) -> _Groups:
    """The samples with their advantages; with a critic, also with the loss input `returns`.

    Raises RunError where the estimator does not give a finite advantage for each token.
    """
    estimator = algorithm.advantages
    trajectories = [[_trajectory(member, algorithm.needs_critic) for member in group] for group in groups]
    advantages = estimate_values(estimator, trajectories)
    returns = None
    if algorithm.needs_critic:
        returns = cast(EstimatorWithCritic, estimator).returns(trajectories)
        check_estimates("returns", returns, trajectories, estimator)
    done: _Groups = []
    for g, group in enumerate(groups):
        done.append([])
        for i, member in enumerate(group):
            parts = zip(member.samples, member.split(advantages[g][i]), strict=True)
            samples = [sample.with_advantages(part) for sample, part in parts]
            if returns is not None:
                parts = zip(samples, member.split(np.asarray(returns[g][i])), strict=True)
                samples = [sample.with_loss_inputs(returns=sample.scatter(part)) for sample, part in parts]
            done[-1].append(replace(member, samples=tuple(samples)))
    return done


def _trajectory(member: Member, with_values: bool) -> Trajectory:
    rewards = member.by_time(member.rewards)
    if not with_values:
        return Trajectory(rewards, member.reward)
    values = member.by_time(member.of_targets("values").astype(np.float64))
    return Trajectory(rewards, member.reward, values)


def _with_gradient(groups: _Groups, algorithm: Algorithm) -> _Groups:
    """Without those that have none; if none has one, keep one group, to measure parity with the generator.

    One with targets, where there is one.
    """
    if not algorithm.drops_zero_advantages:
        return groups
    kept = [[member for member in group if member.has_advantages] for group in groups]
    order = sorted(range(len(groups)), key=lambda i: not any(member.num_targets for member in groups[i]))
    first = next((i for i in order if groups[i]), None)
    if not any(kept) and first is not None:
        kept[first] = groups[first]
    return kept


def _training_group(learning: list[Member], counted: list[Member], algorithm: Algorithm) -> TrainingGroup:
    samples = [sample for member in learning for sample in weighted(member.samples, algorithm)]
    num_tokens = sum(member.num_targets for member in counted)
    return TrainingGroup(samples, num_tokens, len(counted))


def weighted(samples: Sequence[Sample], algorithm: Algorithm) -> Sequence[Sample]:
    """The samples of one rollout, or one demonstration, with each token's share in the loss as its weight.

    The denominator comes with optim_step.
    """
    divisor = token_divisor(algorithm.loss_agg, sum(s.num_targets for s in samples))
    return samples if divisor == 1 else [s.with_weights_divided(divisor) for s in samples]
