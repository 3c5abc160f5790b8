"""A step's updates: minibatches and epochs, policy and critic, and which sample made a loss not finite."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rl.actors.engine import EngineHandle, combine
from rl.config.algorithm import Algorithm
from rl.controller.parity import Parity, PolicyMismatch, are_of_version, explain
from rl.controller.training_batch import Streamed, TrainingBatch, TrainingGroup
from rl.envs.base import derive_seed
from rl.errors import NotFinite, RunError
from rl.interfaces import Loss
from rl.loss import aggregate
from rl.observability.metrics import critic_metrics, learning_metrics
from rl.types import OptimParams, Sample
from rl.waiting import finish_all

_UPDATED = "weights"  # what NotFinite names after an update


class StepFailed(RunError):
    """A step whose loss, gradient or updated weights were not finite.

    `untouched`: no update of the step was applied.

    `find_sample` says which sample is to blame. It leaves the weights as they are, but not the optimizer's
    moments.
    """

    def __init__(self, message: str, untouched: bool, find_sample: Callable[[], Awaitable[str]]):
        super().__init__(message)
        self.untouched = untouched
        self.find_sample = find_sample


@dataclass(frozen=True)
class Updater:
    """What learns, of which engine, and by which loss and optimizer."""

    engine: EngineHandle
    adapter: str | None
    loss: Loss
    optim: OptimParams  # at the full learning rate
    lr_factor: Callable[[int], float]  # step -> share of the learning rate

    async def forward_backward(self, samples: Sequence[Sample], samples_per_unit: int) -> dict[str, float]:
        batch = await self.engine.pack(samples, samples_per_unit)
        learned = await self.engine.forward_backward(batch, self.loss, self.adapter)
        learned["computed:sum"] = batch.num_tokens
        learned["unshared:sum"] = batch.num_unshared_tokens
        learned["cuts:sum"] = batch.num_cuts
        return learned

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        return await self.engine.optim_step(params, self.adapter)

    def params(self, step: int, denominator: float) -> OptimParams:
        return self.optim.scaled(self.lr_factor(step), 1 / denominator)


async def learn(
    batch: TrainingBatch,
    step: int,
    algorithm: Algorithm,
    seed: int,
    policy: Updater,
    critic: Updater | None,
    parity: Parity | None = None,
) -> dict[str, float]:
    """`minibatches` * `epochs` optimizer steps of the policy, and as many of the critic. Returns metrics.

    parity: checked before the first update, where the policy that learns has sampled the batch. Raises
    PolicyMismatch where that ends the run, and StepFailed, which names the metric and the sample, where a
    loss or gradient is not finite.
    """
    parity = parity if are_of_version(batch.rollouts, step - 1) else None
    plan = [replace(batch, groups=part) for part in minibatches(batch.groups, algorithm, seed, step)]
    tasks = [_updates(policy, plan, step, algorithm, parity)]
    if critic is not None:
        tasks.append(_updates(critic, [replace(part, samples_per_unit=1) for part in plan], step, algorithm))
    try:
        learned = await finish_all(tasks)
    except PolicyMismatch as mismatch:
        if parity is None:
            raise
        where = await explain(policy.engine, policy.adapter, _samples(batch.all_groups), parity.limit)
        raise PolicyMismatch(f"step {step}: {mismatch}; {where}") from mismatch
    metrics = learning_metrics(learned[0], sampled=algorithm.samples_rollouts)
    metrics["lr"] = policy.params(step, 1.0).lr
    if parity is not None and parity.num_over:
        metrics["logprob_diff/steps_over_limit"] = parity.num_over
    return metrics | (critic_metrics(learned[1]) if critic is not None else {})


def minibatches(
    groups: Sequence[TrainingGroup], algorithm: Algorithm, seed: int, step: int
) -> list[list[TrainingGroup]]:
    """Every epoch deals the groups out again.

    Minibatches of which nothing has a gradient come last: parity is measured on the first.
    """
    plan = []
    for epoch in range(algorithm.epochs):
        order = np.random.default_rng(derive_seed(seed, "minibatches", step, epoch)).permutation(len(groups))
        parts = [[groups[i] for i in part] for part in np.array_split(order, algorithm.minibatches)]
        plan += sorted(parts, key=lambda part: not any(group.samples for group in part))
    return plan


def denominator(groups: Sequence[TrainingGroup], algorithm: Algorithm) -> float:
    """What the sum over a minibatch's tokens is divided by."""
    if algorithm.data == "preferences":
        return max(1, len(groups))
    num_tokens = sum(group.num_tokens for group in groups)
    num_sequences = sum(group.num_sequences for group in groups)
    return aggregate.denominator(algorithm.loss_agg, num_tokens, num_sequences, algorithm.max_new_tokens)


async def stream(batch: TrainingBatch, step: int, policy: Updater) -> TrainingBatch:
    """Add the gradient of these groups while others of their batch are still generated.

    Raises StepFailed where their loss is not finite.
    """
    try:
        learned = await policy.forward_backward(_samples(batch.groups), batch.samples_per_unit)
    except NotFinite as error:
        position = f"step {step}, groups {batch.rollouts[0].index} to {batch.rollouts[-1].index}"
        raise _failure(error, position, True, policy, batch, policy.params(step, 1.0)) from error
    return replace(batch, groups=[], streamed=(*batch.streamed, Streamed(batch.groups, learned)))


async def _updates(
    updater: Updater,
    plan: Sequence[TrainingBatch],
    step: int,
    algorithm: Algorithm,
    parity: Parity | None = None,
) -> list[dict[str, float]]:
    """One dictionary of sums for each optimizer step, with `denominator` and `grad_norm`."""
    updates: list[dict[str, float]] = []
    for part in plan:
        total = denominator(part.all_groups, algorithm)
        params = updater.params(step, total)
        try:
            learned = await updater.forward_backward(_samples(part.groups), part.samples_per_unit)
            learned = combine([*(earlier.learned for earlier in part.streamed), learned])
            if parity is not None and not updates:
                parity.check(learned["logprob_diff:sum"] / (learned["tokens:sum"] or math.nan))
            stepped = await updater.optim_step(params)
        except NotFinite as error:
            # Of two that learn at a time, the other may have gone ahead.
            # An adapter's update that leaves weights that are not finite is undone.
            unchanged = error.metric != _UPDATED or updater.adapter is not None
            untouched = not updates and not algorithm.needs_critic and unchanged
            position = f"step {step}, update {len(updates) + 1} of {len(plan)} of the {updater.engine.name}"
            raise _failure(error, position, untouched, updater, part, params) from error
        updates.append(learned | stepped | {"denominator": total})
    return updates


def _samples(groups: Sequence[TrainingGroup]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def _failure(
    error: NotFinite,
    position: str,
    untouched: bool,
    updater: Updater,
    part: TrainingBatch,
    params: OptimParams,
) -> StepFailed:
    if error.metric == _UPDATED:
        blame: Callable[[], Awaitable[str]] = _blame_no_sample
    else:
        blame = partial(_find_sample, updater, _samples(part.all_groups), part.samples_per_unit, params)
    return StepFailed(f"{position}: {error} ({error.metric})", untouched, blame)


async def _blame_no_sample() -> str:
    return "no sample is to blame: the update's gradient was finite"


async def _find_sample(
    updater: Updater, samples: list[Sample], samples_per_unit: int, params: OptimParams
) -> str:
    """Halve the batch until the sample is found whose loss or gradient alone is not finite."""
    probe = OptimParams(lr=0.0, grad_scale=params.grad_scale)

    async def fails(part: list[Sample]) -> bool:
        try:
            await updater.forward_backward(part, samples_per_unit)
            await updater.optim_step(probe)
        except NotFinite:
            return True
        return False

    everywhere = len(samples) > samples_per_unit
    while len(samples) > samples_per_unit:
        half = math.ceil(len(samples) / 2 / samples_per_unit) * samples_per_unit
        parts = [part for part in (samples[:half], samples[half:]) if await fails(part)]
        if not parts:
            first, num_others = samples[0].id, len(samples) - 1
            return f"it takes more than one sample: none of {first} and {num_others} others fails alone"
        everywhere &= len(parts) == 2
        samples = parts[0]
    names = " with ".join(s.id for s in samples)
    if everywhere:
        return (
            f"every sample that was tried fails alone, {names} among them, so look at the weights: "
            f"lower the learning rate, or fix the loss"
        )
    return f"the sample is {names}: look at its reward and logprobs, lower the learning rate, or fix the loss"
