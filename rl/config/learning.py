"""Learning: what the loop of a run follows, beside its Plan. It is made of the settings once.

After that nothing reads a RunConfig: what the run does is in the Plan, in this, and nowhere else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rl.config.algorithm import Algorithm
from rl.config.checkpoint_rules import checkpoint_notes
from rl.config.defaults import max_logprob_diff, warmup_lr
from rl.config.run import ReferenceKind, RunConfig
from rl.config.scoring import fingerprint
from rl.config.settle import longest_sequence
from rl.envs.base import Env
from rl.types import OptimParams


@dataclass(frozen=True)
class Pace:
    """How many groups a step takes, and how old they may be."""

    groups_per_step: int
    num_steps: int  # of the whole run: no more is started than these will take
    max_offpolicy_steps: int = 0
    max_filtered_per_step: int = 0


@dataclass(frozen=True)
class LRSchedule:
    """Step (from 1) -> share of the learning rate. The first step after the warm-up has all of it.

    With a kind that goes down, the warm-up takes at most half of the steps, so that the rate goes
    down in a short run too.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"]
    num_steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.0
    decay_ratio: float = 0.2

    def __call__(self, step: int) -> float:
        rises = self.warmup_steps if self.kind == "constant" else min(self.warmup_steps, self.num_steps // 2)
        if step <= rises:
            return step / rises
        if self.kind == "constant":
            return 1.0
        first = rises  # steps after which it goes down
        if self.kind == "wsd":
            first = max(first, self.num_steps - round(self.decay_ratio * self.num_steps))
        done = max(0, step - 1 - first) / max(1, self.num_steps - first)
        left = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1 - done
        return self.min_ratio + (1 - self.min_ratio) * left


@dataclass(frozen=True)
class Warmup:
    """Supervised steps before the first RL step. batch_size: demonstrations of each. lr: constant."""

    steps: int
    batch_size: int
    lr: float


@dataclass(frozen=True)
class Rhythm:
    """What is due after which steps, and what is kept of it. The fields are those of RunConfig."""

    eval_every: int
    save_every: int
    save_every_minutes: float
    refresh_reference_every: int
    keep_checkpoints: int
    record_batches: int


@dataclass(frozen=True)
class Learning:
    """See the module. max_seq_len: tokens of a sequence, prompt included."""

    algorithm: Algorithm
    env: Env
    seed: int
    group_size: int
    max_seq_len: int
    pace: Pace
    groups_per_part: int
    rhythm: Rhythm
    optim: OptimParams
    lr_schedule: LRSchedule
    critic_optim: OptimParams
    value_clip: float
    warmup: Warmup
    reference_kind: ReferenceKind
    max_logprob_diff: float
    """Nats a token; inf: no limit."""
    checkpoint_notes: Mapping[str, Any]
    """What each checkpoint says of its run."""
    scored_by: str
    """A fingerprint of what makes a group and its scores, beside the policy."""

    @property
    def num_parts(self) -> int:
        return self.pace.groups_per_step // self.groups_per_part


def learning_of(config: RunConfig, dtype: str = "float32") -> Learning:
    """Of a config that has no problems. Before anything is scored: the env's code is read as it is now.

    dtype: what the Plan settled config.dtype to.
    """
    trainer, steps = config.trainer, config.steps
    optim = OptimParams(
        trainer.lr,
        betas=trainer.betas,
        eps=trainer.eps,
        weight_decay=trainer.weight_decay,
        decay_all=trainer.decay_all,
        max_grad_norm=trainer.max_grad_norm,
    )
    longest = longest_sequence(config)
    return Learning(
        algorithm=replace(config.algorithm, max_new_tokens=config.env.most_sampled(longest)),
        env=config.env,
        seed=config.seed,
        group_size=config.group_size,
        max_seq_len=longest,
        pace=Pace(
            groups_per_step=config.prompts_per_step,
            num_steps=steps,
            max_offpolicy_steps=config.max_offpolicy_steps,
            max_filtered_per_step=config.resampling_rounds * config.prompts_per_step,
        ),
        groups_per_part=config.stream_groups or config.prompts_per_step,
        rhythm=Rhythm(
            eval_every=config.eval_every,
            save_every=config.save_every,
            save_every_minutes=config.save_every_minutes,
            refresh_reference_every=config.reference.refresh_every,
            keep_checkpoints=config.keep_checkpoints,
            record_batches=config.record_batches,
        ),
        optim=optim,
        lr_schedule=LRSchedule(
            trainer.lr_schedule,
            steps,
            trainer.lr_warmup_steps,
            trainer.lr_min_ratio,
            trainer.lr_decay_ratio,
        ),
        critic_optim=replace(optim, lr=config.critic.lr, max_grad_norm=config.critic.max_grad_norm),
        value_clip=config.critic.value_clip,
        warmup=Warmup(config.warmup.steps, config.warmup.batch_size, warmup_lr(config)[0]),
        reference_kind=config.reference_kind,
        max_logprob_diff=max_logprob_diff(config, dtype)[0],
        checkpoint_notes=checkpoint_notes(config),
        scored_by=fingerprint(config, dtype),
    )
