"""Several tasks in one run, each with held-out problems of its own."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from rl.bounds import NonNegativeFloat
from rl.envs.base import Env, RolloutContext, derive_seed, held_out
from rl.envs.chat.env import ChatEnv
from rl.errors import ConfigError
from rl.fields import shown
from rl.interfaces import Tokenizer
from rl.types import Problem, Prompt, Rewards, Rollout, StopReason, Verdict

_THEIR_OWN = ("num_eval", "chat", "prompt_prefix", "stop")


@dataclass(frozen=True)
class Mixture(Env):
    """Each problem is of one of `tasks`, and is asked, answered and rewarded as that task has it.

    eval/accuracy/NAME is the accuracy on a task's held-out problems, and eval/accuracy/NAME/TASK on those of
    them that have a task of their own. What one task holds out, no other trains on. Tasks have one turn.
    """

    tasks: tuple[tuple[str, Any], ...] = ()
    """Name and Env of each: (("sums", ReasoningGym(...)), ("words", QuestionFile(...)))."""

    weights: tuple[NonNegativeFloat, ...] = ()
    """How often each is drawn; empty: all alike. A task with 0 is held out as a whole."""

    @property
    def made_of(self) -> tuple[Env, ...]:
        return tuple(part for _, env in self.tasks if isinstance(env, Env) for part in env.made_of)

    @property
    def trains(self) -> tuple[Env, ...]:
        weights = self.weights or [1.0] * len(self.tasks)
        drawn = (env for (_, env), weight in zip(self.tasks, weights, strict=False) if weight)
        return tuple(part for env in drawn if isinstance(env, Env) for part in env.trains)

    def validate(self) -> list[str]:
        names = [name for name, _ in self.tasks]
        if not names or not all(isinstance(env, Env) for _, env in self.tasks):
            return ["env.tasks must be pairs of a name and an Env; name at least one"]
        problems = [
            f"env.tasks has a {type(env).__name__}, a task of several turns; a Mixture has those of one turn"
            for env in self.made_of
            if isinstance(env, ChatEnv)
        ]
        named = all(isinstance(name, str) and name and "/" not in name for name in names)
        if len(set(names)) < len(names) or not named:
            problems.append(f"env.tasks has the names {names}; give each one of its own, without a slash")
        if self.weights and (len(self.weights) != len(names) or not sum(self.weights)):
            problems.append(
                f"env.weights={self.weights} must be {len(names)} numbers, one for each of env.tasks, "
                f"not all 0"
            )
        for field in fields(Env):
            if field.name in _THEIR_OWN and getattr(self, field.name) != field.default:
                problems.append(f"env.{field.name} has no effect on a Mixture; set it in each of env.tasks")
        weights = self.weights if len(self.weights) == len(names) else [1.0] * len(names)
        for (name, env), weight in zip(self.tasks, weights, strict=True):
            own = env.validate() if weight else env.validate_held_out()
            problems += [f"env.tasks, {name}: {line}" for line in own]
            if env.max_new_tokens > self.max_new_tokens:
                problems.append(
                    f"env.max_new_tokens={self.max_new_tokens} is less than the {env.max_new_tokens} of the "
                    f"task {shown(name)}; raise it to that"
                )
        return problems

    def train_problem(self, seed: int) -> Problem:
        draw = random.Random(derive_seed("task", seed))
        name, env = draw.choices(self.tasks, self.weights or None)[0]
        excluded = _held_out_of_all(self)
        for attempt in range(1000):
            problem = env.train_problem(derive_seed(name, seed, *([attempt] if attempt else [])))
            if problem.asked not in excluded:
                return _of_task(name, problem)
        raise ConfigError(
            f"env.tasks, {name}: other tasks hold out nearly all of its problems; lower their num_eval"
        )

    def eval_problems(self) -> list[Problem]:
        return [_of_task(name, problem) for name, env in self.tasks for problem in held_out(env)]

    def encode(self, problem: Problem, tokenizer: Tokenizer) -> Prompt:
        env, task_problem = self._task(problem)
        return replace(env.encode(task_problem, tokenizer), problem=problem)

    async def drive(self, prompt: Prompt, n: int, context: RolloutContext) -> Sequence[Rollout]:
        (env, task_problem), params = self._task(prompt.problem), context.params
        ends = (*params.stop_token_ids, *env.stop_ids(task_problem, context.tokenizer))
        limits = replace(params, max_new_tokens=env.max_new_tokens, stop_token_ids=tuple(dict.fromkeys(ends)))
        driven = await env.drive(replace(prompt, problem=task_problem), n, replace(context, params=limits))
        return [replace(rollout, problem=prompt.problem) for rollout in driven]

    def end_id(self, problem: Problem, tokenizer: Tokenizer) -> int:
        env, task_problem = self._task(problem)
        return env.end_id(task_problem, tokenizer)

    def reward(
        self, problem: Problem, response: str, stop: StopReason
    ) -> float | Rewards | Mapping[str, float] | Verdict:
        env, task_problem = self._task(problem)
        return env.reward(task_problem, response, stop)

    def prepare(self) -> None:
        for env in self.made_of:
            env.prepare()

    def demonstration(self, problem: Problem, seed: int) -> str:
        env, task_problem = self._task(problem)
        return env.demonstration(task_problem, seed)

    def preference(self, problem: Problem, seed: int) -> tuple[str, str]:
        env, task_problem = self._task(problem)
        return env.preference(task_problem, seed)

    def _task(self, problem: Problem) -> tuple[Env, Problem]:
        """The task, and its problem as it made it."""
        name, _, of_its_own = problem.task.partition("/")
        return dict(self.tasks)[name], replace(problem, task=of_its_own)


def _of_task(name: str, problem: Problem) -> Problem:
    return replace(problem, task=f"{name}/{problem.task}" if problem.task else name)


@lru_cache(maxsize=8)
def _held_out_of_all(mixture: Mixture) -> frozenset[str]:
    return frozenset(problem.asked for problem in held_out(mixture))
