"""What learns in a run, who computes what its losses read, and how it is sampled."""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from rl.actors.actors import Actors
from rl.actors.generator_pool import GeneratorPool
from rl.config.algorithm import Algorithm
from rl.config.run import RunConfig
from rl.config.settle import longest_sequence
from rl.controller.buffer import Pace, RolloutBuffer
from rl.controller.held_groups import read_prompts
from rl.controller.rollouts import Rollouts
from rl.controller.schedule import LRSchedule
from rl.controller.training_batch import Scorers
from rl.controller.update import Updater
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.endpoint import AgentEndpoint
from rl.interfaces import Tokenizer
from rl.loss.value import ClippedValue
from rl.types import Group, OptimParams, PolicyVersion


def updaters(config: RunConfig, actors: Actors) -> tuple[Updater, Updater | None]:
    """What learns: the policy, and the critic where there is one."""
    trainer = config.trainer
    optim = OptimParams(
        trainer.lr,
        betas=trainer.betas,
        eps=trainer.eps,
        weight_decay=trainer.weight_decay,
        decay_all=trainer.decay_all,
        max_grad_norm=trainer.max_grad_norm,
    )
    kind, num_steps, warmup = trainer.lr_schedule, config.steps, trainer.lr_warmup_steps
    factor = LRSchedule(kind, num_steps, warmup, trainer.lr_min_ratio, trainer.lr_decay_ratio)
    policy = Updater(actors.trainer, actors.adapter, config.algorithm.objective, optim, factor)
    if actors.critic is None:
        return policy, None
    loss = ClippedValue(config.critic.value_clip)
    optim = replace(optim, lr=config.critic.lr, max_grad_norm=config.critic.max_grad_norm)
    return policy, Updater(actors.critic, None, loss, optim, factor)


def scorers(algorithm: Algorithm, actors: Actors) -> Scorers:
    """The loss inputs that the algorithm reads, each with who knows it."""
    found: dict[str, Any] = {}
    if algorithm.samples_rollouts and algorithm.reads_old_logprobs:
        found["old_logprobs"] = lambda samples: actors.trainer.forward_samples(samples, actors.adapter)
    if actors.reference is not None:
        found["ref_logprobs"] = actors.reference.compute_logprobs
    if actors.critic is not None:
        found["values"] = actors.critic.forward_samples
    return found


def rollouts(config: RunConfig, tokenizer: Tokenizer, actors: Actors) -> Rollouts:
    """How the policy is sampled and verified."""
    return Rollouts(
        config.env,
        tokenizer,
        actors.rewards.score,
        config.group_size,
        config.seed,
        longest_sequence(config),
        actors.adapter,
        actors.rewards,
        AgentEndpoint(tokenizer) if isinstance(config.env, AgentEnv) else None,
    )


def rollout_buffer(
    config: RunConfig, sampled: Rollouts, generators: GeneratorPool, state: Mapping[str, Any], is_own: bool
) -> RolloutBuffer:
    """state: the controller's, of a checkpoint, or of a run's beginning. is_own: it is this run's."""
    pace = Pace(
        groups_per_step=config.prompts_per_step,
        num_steps=config.steps,
        max_offpolicy_steps=config.max_offpolicy_steps,
        max_filtered_per_step=config.resampling_rounds * config.prompts_per_step,
    )

    async def generate(index: int, version: PolicyVersion) -> Group:
        return await sampled.train_group(index, generators.at_least(version))

    prompts = state.get("prompts")
    before = read_prompts(config, prompts, is_own=is_own) if prompts else None
    has_signal = attrgetter("has_signal")
    return RolloutBuffer(generate, pace, has_signal, num_steps_done=state["step"], state=before)
