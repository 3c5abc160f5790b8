"""A judge of your own: a model learns to grade, then another learns from its grades.

After `rl fetch smollm2`:

    rl train examples/own_judge.py:grader --run_dir runs/grader
    rl train examples/own_judge.py:writer --judge.model.path runs/grader/hf
"""

import random
from dataclasses import dataclass

from rl.bounds import PositiveInt
from rl.config import GeneratorConfig, JudgeConfig, RewardConfig, RunConfig, TrainerConfig
from rl.envs.base import Env
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode
from rl.envs.judge import Judge, verdict_in
from rl.loss.cross_entropy import CrossEntropy
from rl.models.sources import ModelDir
from rl.types import Problem, StopReason, Verdict

JUDGE = Judge(rubric="Grade how short the answer is: 10 for two words or fewer, one less for each two more.")
SUBJECTS = ("the sea", "a clock", "rain", "bread", "a bridge", "the moon", "a book", "snow", "tea")
_BEGINNINGS = ("{} is old", "I like {}", "{} waits for us", "we spoke of {}", "nobody forgets {}", "{}")
_ENDINGS = (
    "and the evening is long",
    "because my mother said so",
    "when the wind comes from the north",
    "as everybody in the village knows",
    "which is why people stay at home and talk",
    "but that is another story",
    "like a song",
    "in spring",
)


def question_of(subject: str) -> str:
    return f"Write about {subject}."


def grade_of(answer: str) -> int:
    """What the judge learns to say."""
    return max(0, 10 - max(0, len(answer.split()) - 1) // 2)


@dataclass(frozen=True)
class Grading(Env):
    """Answers of one to some forty words, with their grades."""

    max_new_tokens: PositiveInt = 12
    num_eval: PositiveInt = 64
    chat: bool = True

    def generate(self, seed: int) -> Problem:
        rng = random.Random(seed)
        subject = rng.choice(SUBJECTS)
        words = [rng.choice(_BEGINNINGS).format(subject), *rng.choices(_ENDINGS, k=rng.randrange(7))]
        answer = " ".join(words).capitalize() + "."
        messages = JUDGE.messages(question_of(subject), answer)
        return Problem(str(seed), messages=messages, answer=str(grade_of(answer)))

    def demonstration(self, problem: Problem, seed: int) -> str:
        return f'{{"grade": {problem.answer}}}'

    def reward(self, problem: Problem, response: str, stop: StopReason) -> Verdict:
        grade = verdict_in(response, "grade")
        if not isinstance(grade, int | float):
            return Verdict(0.0, False)
        off = abs(grade - int(problem.answer))
        return Verdict(max(0.0, 1 - off / 10), off <= 1)


@dataclass(frozen=True)
class Writing(ChatEnv):
    """Write about something; the judge grades it."""

    max_new_tokens: PositiveInt = 24
    num_eval: PositiveInt = 32
    judge: Judge = JUDGE

    def generate(self, seed: int) -> Problem:
        rng = random.Random(seed)
        first, second = rng.sample(SUBJECTS, 2)
        return Problem(str(seed), question_of(f"{first} and {second}"))

    def reward_episode(self, episode: Episode) -> float:
        if not episode.response.strip():  # the shortest of all, which a policy soon finds
            return 0.0
        verdict = self.judge.grade(episode.problem.question, episode.response)
        episode.notes["judge"] = verdict.answer
        return verdict.grade


def grader() -> RunConfig:
    """SmolLM2 learns to grade, from demonstrations."""
    return RunConfig(
        model=ModelDir("models/smollm2-135m-instruct"),
        env=Grading(),
        data="demonstrations",
        loss=CrossEntropy(),
        trainer=TrainerConfig(lr=5e-5, micro_batch_tokens=2048),
        max_seq_len=512,
        dtype="fastest",
        prompts_per_step=32,
        steps=60,
        eval_every=30,
    )


def writer() -> RunConfig:
    """SmolLM2 learns what the grader likes; its verdicts are in rollouts.jsonl."""
    return RunConfig(
        model=ModelDir("models/smollm2-135m-instruct"),
        env=Writing(),
        judge=JudgeConfig(model=ModelDir("runs/grader/hf"), kv_cache_gib=0.25),
        reward=RewardConfig(limit_seconds=60.0),
        trainer=TrainerConfig(lr=3e-5, micro_batch_tokens=2048),
        generator=GeneratorConfig(max_num_seqs=64),
        max_seq_len=512,
        dtype="fastest",
        prompts_per_step=4,
        group_size=8,
        steps=20,
        eval_every=10,
    )
