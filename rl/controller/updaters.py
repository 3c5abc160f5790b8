"""What learns in a run and when, who computes what its losses read, and how it is sampled."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from rl.actors.actors import Actors
from rl.actors.generator_pool import GeneratorPool
from rl.config.algorithm import Algorithm
from rl.config.learning import Learning
from rl.controller.buffer import RolloutBuffer
from rl.controller.held_groups import read_prompts
from rl.controller.rollouts import Rollouts
from rl.controller.schedule import SaveClock, Schedule
from rl.controller.training_batch import Scorers
from rl.controller.update import Updater
from rl.envs.chat.agent import door_for
from rl.interfaces import Tokenizer
from rl.loss.value import ClippedValue
from rl.types import Group, PolicyVersion


def updaters(learning: Learning, actors: Actors) -> tuple[Updater, Updater | None]:
    """What learns: the policy, and the critic where there is one."""
    factor, objective = learning.lr_schedule, learning.algorithm.objective
    policy = Updater(actors.trainer, actors.adapter, objective, learning.optim, factor)
    if actors.critic is None:
        return policy, None
    loss = ClippedValue(learning.value_clip)
    return policy, Updater(actors.critic, None, loss, learning.critic_optim, factor)


def scorers(algorithm: Algorithm, actors: Actors) -> Scorers:
    """The loss inputs that the algorithm reads, each with who knows it."""
    scorers: dict[str, Any] = {}
    if algorithm.samples_rollouts and algorithm.reads_old_logprobs:
        scorers["old_logprobs"] = lambda samples: actors.trainer.forward_samples(samples, actors.adapter)
    if actors.reference is not None:
        scorers["ref_logprobs"] = actors.reference.compute_logprobs
    if actors.critic is not None:
        scorers["values"] = actors.critic.forward_samples
    return scorers


def schedule_from(first: int, learning: Learning, actors: Actors, save_clock: SaveClock) -> Schedule:
    """What each step from this one on does beside learning."""
    rhythm = learning.rhythm
    return Schedule(
        first=first,
        last=learning.pace.num_steps,
        eval_every=rhythm.eval_every,
        save_every=rhythm.save_every,
        refresh_every=rhythm.refresh_reference_every if actors.reference else 0,
        publish_every_step=learning.algorithm.samples_rollouts,
        evaluate_beside=learning.pace.max_offpolicy_steps > 0,
        save_clock=save_clock,
    )


def rollouts(learning: Learning, tokenizer: Tokenizer, actors: Actors) -> Rollouts:
    """How the policy is sampled and verified."""
    return Rollouts(
        learning.env,
        tokenizer,
        actors.rewards.score,
        learning.group_size,
        learning.seed,
        learning.max_seq_len,
        actors.adapter,
        actors.rewards,
        door_for(learning.env, tokenizer, actors.address),
    )


def rollout_buffer(
    learning: Learning,
    sampled: Rollouts,
    generators: GeneratorPool,
    state: Mapping[str, Any],
    own_checkpoint: str,
) -> RolloutBuffer:
    """state: the controller's, of a checkpoint, or of a run's beginning. own_checkpoint: empty where it is
    another run's."""

    async def generate(index: int, version: PolicyVersion) -> Group:
        return await sampled.train_group(index, generators.at_least(version))

    prompts = state.get("prompts")
    before = read_prompts(own_checkpoint, prompts, learning.scored_by) if prompts else None
    has_signal = attrgetter("has_signal")
    return RolloutBuffer(generate, learning.pace, has_signal, num_steps_done=state["step"], state=before)
