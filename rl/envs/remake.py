"""Makes problems again in a fresh process, where they have to be the same: `python -m rl.envs.remake`.

The held-out problems of a run are made anew by each resume and by `rl eval`. Where generate() depends on the
process (the order of a set, hash(), a clock), they would be other problems, and training would draw them.
"""

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress

import cloudpickle

from rl.envs.base import Env, derive_seed, held_out
from rl.envs.pipes import receive, send, send_pickled
from rl.envs.problems import checked
from rl.envs.verifier import START_SECONDS, described
from rl.errors import ConfigError
from rl.processes import end_with_parent
from rl.types import Problem

_NUM_PROBLEMS = 3


def some_problems(env: Env, *, anew: bool) -> list[Problem]:
    """A few problems of each task: held-out ones, and one to train on.

    anew: an environment's own eval_problems() is called again.
    """
    return [checked(problem) for part in env.made_of for problem in _some_of(part, anew)]


def _some_of(env: Env, anew: bool) -> Iterator[Problem]:
    if has_own_held_out(env):
        problems = env.eval_problems() if anew else held_out(env)
        yield from problems[:_NUM_PROBLEMS]
    else:
        for i in range(_NUM_PROBLEMS):
            yield env.generate(derive_seed("eval", i))
    if type(env).generate is Env.generate:
        with suppress(ConfigError):  # all are held out, where a Mixture trains on none of them
            yield env.train_problem(0)
    else:
        yield env.generate(derive_seed("train", 0, 0))


def has_own_held_out(env: Env) -> bool:
    return type(env).eval_problems is not Env.eval_problems


def keys_elsewhere(env: Env) -> list[str] | str:
    """The keys of `some_problems` in a fresh process; or why the environment does not work there."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "rl.envs.remake"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    with child:
        try:
            send(child.stdin.fileno(), sys.path)  # where a recipe finds the modules beside it
            send_pickled(child.stdin.fileno(), cloudpickle.dumps(env))
            return receive(child.stdout.fileno(), START_SECONDS)
        except TimeoutError:
            return f"it took over {START_SECONDS:g} s to make a few problems"
        except (EOFError, OSError):
            return "the process ended"
        finally:
            child.kill()


def main() -> None:
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the environment prints must not mix with the answer
    end_with_parent()
    try:
        sys.path[:] = receive(requests)
        env: Env = receive(requests)
        answer: list[str] | str = [problem.key for problem in some_problems(env, anew=True)]
    except Exception as error:  # the user's own code: named by whoever started this process
        traceback.print_exc()
        answer = described(error)
    send(answers, answer)


if __name__ == "__main__":
    main()
