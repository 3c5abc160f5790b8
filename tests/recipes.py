"""Recipes of the integration tests; `rl train tests/recipes.py:NAME` finds them as a user's own file."""

import dataclasses
import time
from dataclasses import dataclass

from configs.quickstart import quickstart
from rl.controller.config import GeneratorConfig, RewardConfig, RunConfig, TrainerConfig, WarmupConfig, WeightSyncConfig
from rl.envs.sort_letters import ALPHABET, SortLetters
from rl.models.layout import Layout
from rl.models.sources import TinyQwen3
from rl.types import LoRA, Problem, StopReason


def letters_in_place(problem: Problem, response: str) -> float:
    """So that an untrained model gets a signal."""
    return sum(x == y for x, y in zip(response, problem.answer, strict=False)) / len(problem.answer)


@dataclass(frozen=True)
class PartialCredit(SortLetters):
    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        return letters_in_place(problem, response)


@dataclass(frozen=True)
class Misbehaving(SortLetters):
    """Its reward raises for some problems, hangs for others, and once in a while ends its process."""

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        first = problem.question[0]
        if first == "a":
            raise ValueError("no reward for the letter a")
        if first == "b":
            time.sleep(3600)
        if first == "c":
            import os

            os._exit(7)
        return letters_in_place(problem, response)


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


def fsdp2_and_two_generators() -> RunConfig:
    """4 processes: 2 trainer ranks and 2 generators; a reward that misbehaves."""
    return _small(
        env=Misbehaving(num_eval=32),
        trainer=TrainerConfig(layout=Layout(shard=2), lr=2e-3, betas=(0.9, 0.99)),
        generator=GeneratorConfig(num_replicas=2, kv_cache_gib=0.0625),
        reward=RewardConfig(num_procs=1, limit_seconds=1.0),
    )


def tp2_and_torchstore() -> RunConfig:
    """3 processes: tensor parallel over 2 and a generator, with torchstore between them."""
    return _small(
        model=TinyQwen3(alphabet=ALPHABET, num_kv_heads=2),
        trainer=TrainerConfig(layout=Layout(tensor_parallel=2), lr=2e-3, activation_checkpointing="selective"),
        weight_sync=WeightSyncConfig(transport="torchstore"),
    )


def lora_and_context_parallel() -> RunConfig:
    """3 processes: context parallel over 2 and a generator that is sent an adapter."""
    layout = Layout(context_parallel=2)
    return _small(trainer=TrainerConfig(layout=layout, lr=1e-2, lora=LoRA(rank=8)), keep_checkpoints=1)


def transformers_engine() -> RunConfig:
    """3 processes: HFEngine under FSDP2 x 2 and a generator."""
    return _small(trainer=TrainerConfig(engine="hf", layout=Layout(shard=2), lr=2e-3, activation_checkpointing="full"))


def no_learning_rate() -> RunConfig:
    """A control: with lr 0 nothing may change."""
    return _small(trainer=TrainerConfig(lr=0.0), warmup=WarmupConfig(steps=60))
