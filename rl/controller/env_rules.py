"""What is wrong with a run's environment: it is asked, before anything starts, for what the run will ask."""

import dataclasses
import traceback

import cloudpickle

from rl.controller.config import RunConfig
from rl.envs.base import Env
from rl.errors import ConfigError
from rl.types import Problem


def check_env(config: RunConfig) -> list[str]:
    """One line for each problem."""
    return _not_an_env(config.env) or config.env.validate() or _at_work(config)


def _not_an_env(env: Env) -> list[str]:
    """What keeps it from being one: methods that are missing, fields that do not suit."""
    kind, found = type(env), []
    if kind.generate is Env.generate and kind.train_problem is Env.train_problem:
        found.append(f"env {kind.__name__} has no generate(self, seed), which makes a problem; add it")
    if kind.reward is Env.reward:
        found.append(
            f"env {kind.__name__} has no reward(self, problem, response, stop), which verifies; add it"
        )
    try:
        hash(env)
    except TypeError as error:
        fields = [f.name for f in dataclasses.fields(env) if not _hashable(getattr(env, f.name))]
        where = (
            f"its field {fields[0]} is a {type(getattr(env, fields[0])).__name__}" if fields else str(error)
        )
        found.append(f"env {kind.__name__} cannot be hashed: {where}; use frozen=True, and tuples")
    try:
        cloudpickle.dumps(env)
    except Exception as error:  # whatever a field of the user's raises
        found.append(
            f"env {kind.__name__} cannot be sent to other processes ({error}); open files and connections "
            f"in prepare()"
        )
    return found


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _at_work(config: RunConfig) -> list[str]:
    """Ask it for problems, and for what is learned from them."""
    env = config.env
    try:
        held_out = env.eval_problems()
        problem = env.train_problem(config.seed)
        for made in [problem, *held_out]:
            _check_problem(made)
        if config.warmup.steps > 0 or config.data == "demonstrations":
            env.demonstration(problem, config.seed)
        if config.data == "preferences":
            env.preference(problem, config.seed)
        text = "".join(p.question + p.answer for p in [problem, *held_out])
        if unknown := config.model.unknown_characters(text):
            return [f"the task uses characters that model.alphabet lacks: {unknown!r}; add them"]
    except ConfigError as error:
        return [str(error)]
    except Exception as error:  # the user's own code: say so, rather than show our stack
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename} line {last.lineno}"
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return [
            f"env {type(env).__name__} failed to make a problem ({where}: {what}); fix it, or its settings"
        ]
    return []


def _check_problem(problem: object) -> None:
    if not isinstance(problem, Problem):
        raise ConfigError(
            f"generate() returned a {type(problem).__name__}; return a Problem(id, question, answer)"
        )
    for name in ("id", "question", "answer"):
        if not isinstance(value := getattr(problem, name), str):
            raise ConfigError(
                f"generate() made a Problem whose {name} is a {type(value).__name__}; make it a string"
            )
    if not problem.question.strip():
        raise ConfigError(f"generate() made the problem {problem.id!r} with an empty question; ask something")
