"""Recipes of the integration tests; `rl train tests/recipes.py:NAME` finds them as a user's own file."""

import dataclasses
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from configs import gpu
from configs.quickstart import quickstart
from rl.config import (
    CriticConfig,
    GeneratorConfig,
    ReferenceConfig,
    RewardConfig,
    RunConfig,
    TrainerConfig,
    WarmupConfig,
    WeightSyncConfig,
)
from rl.envs.mixture import Mixture
from rl.envs.sort_letters import ALPHABET, SortLetters
from rl.loss.advantages.gae import GAE
from rl.loss.base import LossOutput, TokenInputs
from rl.loss.clip import Clip
from rl.loss.correction import Correction
from rl.loss.cross_entropy import CrossEntropy
from rl.loss.distillation import Distillation
from rl.loss.dpo import DPO
from rl.loss.dro import DRO
from rl.loss.kl import KL
from rl.loss.shaping import Shaping
from rl.models.layout import Layout
from rl.models.sources import ModelDir, TinyQwen3
from rl.types import LoRA, Problem, StopReason
from tests.devices import NUM_GPUS


def letters_in_place(problem: Problem, response: str) -> float:
    """So that an untrained model gets a signal."""
    return sum(x == y for x, y in zip(response, problem.answer, strict=False)) / len(problem.answer)


@dataclass(frozen=True)
class PartialCredit(SortLetters):
    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        return letters_in_place(problem, response)


@dataclass(frozen=True)
class Misbehaving(SortLetters):
    """Its reward raises for one problem of twelve steps, hangs for another, and ends its process for a third."""

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        first = problem.question[:2]
        if first == "bs":
            raise ValueError("no reward for bs")
        if first == "ap":
            time.sleep(3600)
        if first == "ld":
            os._exit(7)
        return letters_in_place(problem, response)


@dataclass(frozen=True)
class Deserting(SortLetters):
    """Its reward starts processes that outlive it, in its session and in their own, and hangs for some problems."""

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        if problem.question[0] == "a":
            for own_session in (False, True):
                subprocess.Popen(["sleep", "4"], start_new_session=own_session)
            time.sleep(3600)
        return letters_in_place(problem, response)


def deserting() -> RunConfig:
    return _small(env=Deserting(num_eval=8), reward=RewardConfig(limit_seconds=1.0))


def _small(**changes: object) -> RunConfig:
    config = dataclasses.replace(
        quickstart(),
        env=PartialCredit(num_eval=32),
        warmup=WarmupConfig(steps=20, batch_size=32),
        steps=4,
        prompts_per_step=8,
        group_size=4,
        eval_every=2,
        save_every=2,
    )
    return dataclasses.replace(config, **changes)


def asynchronous() -> RunConfig:
    """4 processes: a trainer, 2 generators and a reward that misbehaves, all at work at the same time."""
    return _small(
        env=Misbehaving(num_eval=32),
        reward=RewardConfig(num_procs=1, limit_seconds=0.5),
        trainer=TrainerConfig(lr=2e-3, betas=(0.9, 0.99)),
        generator=GeneratorConfig(num_replicas=2, kv_cache_gib=0.0625),
        max_offpolicy_steps=1,
        trace=True,
    )


def drained_mixture() -> RunConfig:
    """Two tasks, one of them drawn three times as often; DRO; no completion goes on with newer weights."""
    short, long = PartialCredit(num_eval=16, max_letters=5), PartialCredit(num_eval=16, min_letters=6)
    return _small(
        env=Mixture(tasks=(("short", short), ("long", long)), weights=(3.0, 1.0)),
        loss=DRO(),
        generator=GeneratorConfig(num_replicas=2, kv_cache_gib=0.0625, updates="drain"),
        max_offpolicy_steps=1,
        steps=12,
        record_rollouts=32,
    )


def mortal() -> RunConfig:
    """Enough steps to die in. With chaos.TWO 4 processes: 2 trainer ranks and 2 generators."""
    return _small(
        trainer=TrainerConfig(lr=2e-3, betas=(0.9, 0.99), max_restarts=20),
        generator=GeneratorConfig(kv_cache_gib=0.0625, max_restarts=20),
        reward=RewardConfig(num_procs=1, max_restarts=20),
        steps=12,
        eval_every=4,
        record_rollouts=32,  # all of a step
    )


@dataclass(frozen=True)
class DiesOnce(Clip):
    """Its first call on rank 1 kills the process: rank 0 then waits for it in backward's collective."""

    died: str = ""  # a file that remembers it

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        if torch.distributed.get_rank() == 1 and not Path(self.died).exists():
            Path(self.died).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(logprobs, inputs)


def mortal_in_its_loss() -> RunConfig:
    config = mortal()
    assert isinstance(config.loss, Clip)
    return dataclasses.replace(config, loss=DiesOnce(**vars(config.loss), died=os.environ["DIED"]))


def mortal_with_critic() -> RunConfig:
    return dataclasses.replace(mortal(), advantages=GAE(), critic=CriticConfig(lr=2e-3))


def mortal_with_lora() -> RunConfig:
    config = mortal()
    trainer = dataclasses.replace(config.trainer, lr=1e-2, lora=LoRA(rank=8))
    return dataclasses.replace(config, trainer=trainer)


def tp2_and_torchstore() -> RunConfig:
    """5 processes: a trainer and a generator under tensor parallelism over 2, with torchstore between them."""
    return _small(
        model=TinyQwen3(alphabet=ALPHABET, num_kv_heads=2),
        trainer=TrainerConfig(
            layout=Layout(tensor_parallel=2), lr=2e-3, activation_checkpointing="selective"
        ),
        generator=GeneratorConfig(tensor_parallel=2, kv_cache_gib=0.0625),
        weight_sync=WeightSyncConfig(transport="torchstore"),
    )


def lora_and_context_parallel() -> RunConfig:
    """3 processes: context parallel over 2 and a generator that is sent an adapter."""
    layout = Layout(context_parallel=2)
    return _small(
        trainer=TrainerConfig(layout=layout, lr=1e-2, lora=LoRA(rank=8)),
        keep_checkpoints=1,
        kl=KL(coef=0.1),
        reference=ReferenceConfig(refresh_every=1),
    )


def ppo_with_everything() -> RunConfig:
    """5 processes: trainer, generator, critic, reference, reward; and every part of an algorithm at once."""
    return _small(
        trainer=TrainerConfig(lr=2e-3, betas=(0.9, 0.99)),
        loss=Clip(low=0.2, high=0.28, dual=3.0),
        advantages=GAE(discount=0.99, lam=0.9),
        critic=CriticConfig(lr=2e-3),
        kl=KL(coef=0.05, estimator="k1", into="reward"),
        reference=ReferenceConfig(refresh_every=2),
        correction=Correction(old_logprobs="trainer", tis_clip=2.0, mask_high=5.0),
        shaping=Shaping(overlong_tokens=3, length_coef=0.1),
        loss_agg="seq_mean",
        minibatches=2,
        epochs=2,
        resampling_rounds=1,
    )


def teacher() -> RunConfig:
    """What `student` learns from."""
    return _small(
        env=SortLetters(num_eval=32, corruption=0.0), data="demonstrations", loss=CrossEntropy(), group_size=RunConfig.group_size,
        trainer=TrainerConfig(lr=3e-3), prompts_per_step=32, steps=40, eval_every=20, save_every=0,
    )  # fmt: skip


def student() -> RunConfig:
    """Distillation by HFEngine, under FSDP2 x 2; needs --reference.model.path."""
    return _small(
        loss=Distillation(),
        reference=ReferenceConfig(model=ModelDir("")),
        trainer=TrainerConfig(engine="hf", layout=Layout(shard=2), lr=5e-4, activation_checkpointing="full"),
        prompts_per_step=16,
        steps=20,
    )


def pairs() -> RunConfig:
    return _small(
        data="preferences",
        loss=DPO(beta=0.5),
        group_size=RunConfig.group_size,
        trainer=TrainerConfig(lr=1e-3),
        steps=20,
        save_every=0,
    )


def explodes() -> RunConfig:
    """The loss is finite, but the gradient of one sample is not: the first rollout of the last prompt's."""
    return _small(loss=infinite_slope, advantages=marked, save_every=0)


def marked(groups):
    return [
        [7.0 if (g, i) == (len(groups) - 1, 0) else 1.0 for i in range(len(group))]
        for g, group in enumerate(groups)
    ]


def infinite_slope(logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
    change, at_fault = logprobs - logprobs.detach(), inputs.advantages == 7.0
    return LossOutput(change[~at_fault].sum() + change[at_fault].sqrt().sum(), {})


def no_learning_rate() -> RunConfig:
    """A control: with lr 0 nothing may change."""
    return _small(trainer=TrainerConfig(lr=0.0), warmup=WarmupConfig(steps=60))


def _tiny(recipe: RunConfig, **layout: int) -> RunConfig:
    """A recipe for GPUs, as far as four CPU processes go; needs --model.path and --env.path."""
    return dataclasses.replace(
        recipe,
        env=dataclasses.replace(recipe.env, num_eval=4, max_new_tokens=8),
        trainer=dataclasses.replace(recipe.trainer, micro_batch_tokens=128, layout=Layout(**layout)),
        max_seq_len=128,
        generator=dataclasses.replace(recipe.generator, kv_cache_gib=0.0625, num_replicas=1, max_num_seqs=16),
        placement="auto",
        steps=2,
        prompts_per_step=4,
        group_size=2,
    )


def tiny_qwen3_0_6b() -> RunConfig:
    return _tiny(gpu.qwen3_0_6b())


def tiny_qwen3_1_7b() -> RunConfig:
    return _tiny(gpu.qwen3_1_7b(), shard=2)


def tiny_llama_3_1_8b_lora() -> RunConfig:
    return _tiny(gpu.llama_3_1_8b_lora(), shard=2)


def tiny_qwen3_30b_a3b_lora() -> RunConfig:
    """On a CPU without the adapter, which vLLM's experts have no kernels for there."""
    recipe = gpu.qwen3_30b_a3b_lora()
    if not NUM_GPUS:
        recipe = dataclasses.replace(recipe, trainer=dataclasses.replace(recipe.trainer, lora=LoRA()))
    return _tiny(recipe, shard=2)


def of_transformers() -> RunConfig:
    """Another architecture in the quickstart's setting: give --model.path."""
    return dataclasses.replace(
        quickstart(),
        model=ModelDir("a directory"),
        env=SortLetters(num_eval=4),
        warmup=WarmupConfig(),
        trainer=TrainerConfig(engine="hf", micro_batch_tokens=256, lr_warmup_steps=0),
        max_seq_len=256,
        steps=2,
        prompts_per_step=4,
        group_size=4,
    )
