"""A step's updates: minibatches and epochs, policy and critic, and who is to blame for a loss that is not finite."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rl.actors.engine import EngineHandle
from rl.controller.config import RunConfig
from rl.controller.experience import Experience, Unit
from rl.controller.launch import Fleet
from rl.envs.base import derive_seed
from rl.errors import NotFinite, RunError
from rl.interfaces import Loss
from rl.loss.value import ClippedValue
from rl.observability.metrics import critic_metrics, learning_metrics
from rl.types import OptimParams, Sample


class StepFailed(RunError):
    """A step whose loss or gradient was not finite. `untouched`: no update of the step was applied before.

    `find_sample` says which sample is to blame; it leaves the weights as they are, but not the optimizer's moments.
    """

    def __init__(self, message: str, untouched: bool, find_sample: Callable[[], Awaitable[str]]):
        super().__init__(message)
        self.untouched = untouched
        self.find_sample = find_sample


@dataclass(frozen=True)
class Learner:
    """An engine with what it learns by."""

    engine: EngineHandle
    loss: Loss
    lr: float
    max_grad_norm: float


async def learn(experience: Experience, step: int, config: RunConfig, fleet: Fleet) -> dict[str, float]:
    """`minibatches` * `epochs` optimizer steps of the policy, and as many of the critic. Returns metrics.

    Raises StepFailed, which names the metric and the sample, where a loss or gradient is not finite.
    """
    trainer, critic = config.trainer, config.critic
    plan = minibatches(experience.units, config, step)
    policy = Learner(fleet.trainer, config.objective, trainer.lr, trainer.max_grad_norm)
    tasks = [_updates(policy, plan, experience.samples_per_unit, step, config)]
    if fleet.critic is not None:
        learner = Learner(fleet.critic, ClippedValue(critic.value_clip), critic.lr, critic.max_grad_norm)
        tasks.append(_updates(learner, plan, 1, step, config))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for failure in results:
        if isinstance(failure, BaseException):
            raise failure
    metrics = learning_metrics(results[0], sampled=config.data == "rollouts")
    return metrics | (critic_metrics(results[1]) if fleet.critic is not None else {})


def minibatches(units: Sequence[Unit], config: RunConfig, step: int) -> list[list[Unit]]:
    """Every epoch deals the units out again. Minibatches of which nothing has a gradient come last: parity is measured on the first."""
    plan = []
    for epoch in range(config.epochs):
        order = np.random.default_rng(derive_seed(config.seed, "minibatches", step, epoch)).permutation(len(units))
        parts = [[units[i] for i in part] for part in np.array_split(order, config.minibatches)]
        plan += sorted(parts, key=lambda part: not any(unit.samples for unit in part))
    return plan


def denominator(units: Sequence[Unit], config: RunConfig) -> float:
    """What the sum over a minibatch's tokens is divided by."""
    if config.data == "preferences":
        return max(1, len(units))
    num_sequences = max(1, sum(u.num_sequences for u in units))
    match config.loss_agg:
        case "token_mean":
            return max(1, sum(u.num_tokens for u in units))
        case "seq_mean":
            return num_sequences
        case "constant":
            return num_sequences * config.env.max_new_tokens


async def _updates(learner: Learner, plan: Sequence[Sequence[Unit]], together: int, step: int, config: RunConfig) -> list[dict[str, float]]:
    """One dictionary of sums for each optimizer step, with `denominator` and `grad_norm`."""
    updates = []
    for units in plan:
        samples, total = [s for u in units for s in u.samples], denominator(units, config)
        params = optim_params(learner, step, total, config)
        try:
            learned = await learner.engine.forward_backward(learner.engine.pack(samples, together), learner.loss)
            stepped = await learner.engine.optim_step(params)
        except NotFinite as error:
            untouched = not updates and not config.needs_critic  # of two that learn at a time, the other may have gone ahead
            message = f"step {step}, update {len(updates) + 1} of {len(plan)} of the {learner.engine.name}: {error} ({error.metric})"
            raise StepFailed(message, untouched, partial(_offender, learner, samples, together, params)) from error
        updates.append(learned | stepped | {"denominator": total})
    return updates


def optim_params(learner: Learner, step: int, total: float, config: RunConfig) -> OptimParams:
    """The learning rate rises over the first steps and then stays."""
    trainer = config.trainer
    lr = learner.lr * min(1.0, step / max(1, trainer.lr_warmup_steps))
    return OptimParams(lr, 1 / total, trainer.betas, trainer.eps, trainer.weight_decay, learner.max_grad_norm)


async def _offender(learner: Learner, samples: list[Sample], together: int, params: OptimParams) -> str:
    """Halve the batch until the sample is found whose loss or gradient alone is not finite."""
    probe = OptimParams(lr=0.0, grad_scale=params.grad_scale)

    async def fails(part: list[Sample]) -> bool:
        try:
            await learner.engine.forward_backward(learner.engine.pack(part, together), learner.loss)
            await learner.engine.optim_step(probe)
        except NotFinite:
            return True
        return False

    everywhere = len(samples) > together
    while len(samples) > together:
        half = math.ceil(len(samples) / 2 / together) * together
        parts = [part for part in (samples[:half], samples[half:]) if await fails(part)]
        if not parts:
            return f"it takes more than one sample: none of {samples[0].id} and {len(samples) - 1} others fails alone"
        everywhere &= len(parts) == 2
        samples = parts[0]
    names = " with ".join(s.id for s in samples)
    if everywhere:
        return f"every sample that was tried fails alone, {names} among them, so look at the weights: lower the learning rate, or fix the loss"
    return f"the sample is {names}: look at its reward and logprobs, lower the learning rate, or fix the loss"
