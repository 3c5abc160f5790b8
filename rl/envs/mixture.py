"""Several tasks in one run, each with held-out problems of its own."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rl.bounds import NonNegativeFloat
from rl.envs.base import Env, RolloutContext, derive_seed, held_out
from rl.envs.chat.env import ChatEnv
from rl.fields import check_fields, shown
from rl.interfaces import Tokenizer
from rl.types import Problem, Prompt, Rewards, Rollout, StopReason, Verdict

_THEIR_OWN = ("num_eval", "chat", "prompt_prefix", "stop")


@dataclass(frozen=True)
class Mixture(Env):
    """Each problem is of one of `tasks`, and is asked, answered and rewarded as that task has it.

    eval/accuracy/NAME is the accuracy on a task's held-out problems. Tasks have one turn.
    """

    tasks: tuple[tuple[str, Any], ...] = ()
    """Name and Env of each: (("sums", ReasoningGym(...)), ("words", QuestionFile(...)))."""

    weights: tuple[NonNegativeFloat, ...] = ()
    """How often each is drawn; empty: all alike. A task with 0 is held out as a whole."""

    @property
    def made_of(self) -> tuple[Env, ...]:
        return tuple(env for _, env in self.tasks if isinstance(env, Env))

    def validate(self) -> list[str]:
        names = [name for name, _ in self.tasks]
        if not names or len(self.made_of) < len(names):
            return ["env.tasks must be pairs of a name and an Env; name at least one"]
        problems = [
            f"env.tasks has a {type(env).__name__}, a task of several turns; a Mixture has those of one turn"
            for env in self.made_of
            if isinstance(env, ChatEnv)
        ]
        if len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
            problems.append(f"env.tasks has the names {names}; give each one of its own")
        if self.weights and (len(self.weights) != len(names) or not sum(self.weights)):
            problems.append(
                f"env.weights={self.weights} must be {len(names)} numbers, one for each of env.tasks, "
                f"not all 0"
            )
        for field in fields(Env):
            if field.name in _THEIR_OWN and getattr(self, field.name) != field.default:
                problems.append(f"env.{field.name} has no effect on a Mixture; set it in each of env.tasks")
        for name, env in self.tasks:
            _, wrong = check_fields(env)
            problems += [f"env.tasks, {name}: {line}" for line in [*wrong, *env.validate()]]
            if env.max_new_tokens > self.max_new_tokens:
                problems.append(
                    f"env.max_new_tokens={self.max_new_tokens} is less than the {env.max_new_tokens} of the "
                    f"task {shown(name)}; raise it to that"
                )
        return problems

    def train_problem(self, seed: int) -> Problem:
        draw = random.Random(derive_seed("task", seed))
        name, env = draw.choices(self.tasks, self.weights or None)[0]
        return replace(env.train_problem(derive_seed(name, seed)), task=name)

    def eval_problems(self) -> list[Problem]:
        return [replace(problem, task=name) for name, env in self.tasks for problem in held_out(env)]

    def encode(self, problem: Problem, tokenizer: Tokenizer) -> Prompt:
        return self._task(problem).encode(problem, tokenizer)

    async def drive(self, prompt: Prompt, n: int, context: RolloutContext) -> Sequence[Rollout]:
        task, params = self._task(prompt.problem), context.params
        stop = (*params.stop_token_ids, *task.stop_ids(context.tokenizer))
        own = replace(params, max_new_tokens=task.max_new_tokens, stop_token_ids=stop)
        return await task.drive(prompt, n, replace(context, params=own))

    def reward(
        self, problem: Problem, response: str, stop: StopReason
    ) -> float | Rewards | Mapping[str, float] | Verdict:
        return self._task(problem).reward(problem, response, stop)

    def prepare(self) -> None:
        for env in self.made_of:
            env.prepare()

    def demonstration(self, problem: Problem, seed: int) -> str:
        return self._task(problem).demonstration(problem, seed)

    def preference(self, problem: Problem, seed: int) -> tuple[str, str]:
        return self._task(problem).preference(problem, seed)

    def _task(self, problem: Problem) -> Env:
        return dict(self.tasks)[problem.task]
