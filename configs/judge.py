"""Rewards from a language model, which generators of the run's own have: `--judge.model.path DIR_OR_ID`.

It has to be able to grade: SmolLM2-135M repeats the answer instead. One behind a URL: docs/environments.md.
"""

import random
from dataclasses import dataclass, replace

from rl.bounds import PositiveInt
from rl.config import JudgeConfig, RewardConfig, RunConfig, WarmupConfig
from rl.configs.smollm2 import smollm2
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode
from rl.envs.judge import Judge
from rl.models.sources import ModelDir
from rl.types import Problem

_SUBJECTS = (
    "the sea",
    "a clock",
    "rain",
    "bread",
    "a bridge",
    "the moon",
    "a library",
    "snow",
    "tea",
    "a cat",
)
_TONES = ("cheerful", "sad", "formal", "short", "surprising", "calm")
_RUBRIC = "You grade sentences. Grade from 0 to 10 how well the answer does what the question asks."


@dataclass(frozen=True)
class OneSentence(ChatEnv):
    """Write a sentence; a judge grades it."""

    judge: Judge = Judge(rubric=_RUBRIC)
    max_new_tokens: PositiveInt = 48
    num_eval: PositiveInt = 16

    def generate(self, seed: int) -> Problem:
        rng = random.Random(seed)
        return Problem(str(seed), f"Write one {rng.choice(_TONES)} sentence about {rng.choice(_SUBJECTS)}.")

    def reward_episode(self, episode: Episode) -> dict[str, float]:
        verdict = self.judge.grade(episode.problem.question, episode.response)
        episode.notes["judge"] = verdict.answer
        return {"grade": verdict.grade}


def judge() -> RunConfig:
    """SmolLM2 learns what the judge likes; its words are in rollouts.jsonl."""
    return replace(
        smollm2(),
        env=OneSentence(),
        judge=JudgeConfig(model=ModelDir("models/judge")),
        reward=RewardConfig(num_procs=1, limit_seconds=60.0),
        warmup=WarmupConfig(),
        steps=40,
        prompts_per_step=4,
        group_size=8,
        minibatches=1,
        resampling_rounds=0,
    )
