"""Runs reward functions in a child process, so that one that hangs or crashes costs only its own sample.

`python -m rl.envs.verifier` is that child: rl/envs/pipes.py over standard input and output.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import cloudpickle

from rl.envs.base import Env
from rl.envs.failures import described, failure_of
from rl.envs.pipes import receive, send, send_pickled
from rl.errors import RunError
from rl.processes import adopt_orphans, end_with_parent, kill_tree, mark_descendants
from rl.types import Rewards, Rollout, Score, Verdict

START_SECONDS = 240.0  # to start Python, import what the Env needs, and prepare(); below deadlines.start


class NotStartedAgain(RunError):
    """A process that runs an environment's code ended, and did not start once more. It did before."""


class Verifier:
    """Scores rollouts one by one in its child, which it replaces when a call outlasts `limit_seconds`.

    Who calls `score` from another thread has given up the call before: that ends after the rollout it is at.
    """

    def __init__(self, env: Env, limit_seconds: float):
        self._env = cloudpickle.dumps(env)
        self._limit = limit_seconds
        self._child = self._start()
        self._one_at_a_time = threading.Lock()
        self._newest = object()

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One for each; fewer where the call was given up. Raises NotStartedAgain."""
        call = self._newest = object()
        scores = list[Score]()
        with self._one_at_a_time:
            for rollout in rollouts:
                if self._newest is not call:
                    break
                scores.append(self._score(rollout))
        return scores

    def close(self) -> None:
        """End the child and what its reward function has started, in whatever session.

        Of a child that has ended by itself, what stayed in its session.
        """
        if self._child.poll() is None:
            kill_tree(self._child.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _score(self, rollout: Rollout) -> Score:
        if self._child.poll() is not None:
            try:
                self._child = self._start()
            except RunError as error:
                raise NotStartedAgain(str(error)) from error
        try:
            request = cloudpickle.dumps((rollout.problem, rollout.response, rollout.stop))
            to_child, from_child = _pipes(self._child)
            send_pickled(to_child, request)
            return check_parts(receive(from_child, self._limit), rollout.turn_lengths)
        except TimeoutError:
            self.close()
            problem = f"the reward function took over {self._limit:g} s (reward.limit_seconds)"
            return Score(0.0, problem, cause="timeout")
        except (EOFError, BrokenPipeError):
            try:
                code: int | str = self._child.wait(timeout=1)
            except subprocess.TimeoutExpired:
                code = "unknown: it closed its connection"
            self.close()
            return Score(0.0, f"the reward function ended its process with code {code}", cause="crashed")

    def _start(self) -> subprocess.Popen:
        child = subprocess.Popen(
            [sys.executable, "-u", "-P", "-m", "rl.envs.verifier"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            to_child, from_child = _pipes(child)
            send(to_child, sys.path)  # where a recipe finds the modules beside it
            send_pickled(to_child, self._env)
            failure = receive(from_child, START_SECONDS)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            child.kill()
            raise not_started(error, "the reward function", "the reward actor's log") from error
        if failure is not None:
            kill_tree(child.pid)  # a thread that prepare() started may hold it up
            child.wait()
            raise RunError(f"prepare() of the environment failed: {failure}; fix it")
        return child


def not_started(error: Exception, name: str, log: str) -> RunError:
    """Of a process that prepares an environment: what it does not answer is its prepare()."""
    if isinstance(error, TimeoutError):
        return RunError(
            f"prepare() of the environment took over {START_SECONDS:.0f} s; load less there, or load it "
            f"where it is first used"
        )
    return RunError(f"the process of {name} did not start; see {log}")


def _pipes(child: subprocess.Popen) -> tuple[int, int]:
    assert child.stdin is not None and child.stdout is not None
    return child.stdin.fileno(), child.stdout.fileno()


def score_of(reward: float | Rewards | Mapping[str, float] | Verdict) -> Score:
    """Of what a reward function returned; a failure where that is no reward."""
    if isinstance(reward, Verdict):
        if isinstance(reward.reward, Verdict) or not isinstance(reward.correct, bool):
            problem = f"{reward!r:.60} has to have a reward, and correct=True or False"
            return Score(0.0, problem, cause="type")
        return replace(score_of(reward.reward), verdict=reward.correct)
    if isinstance(reward, Mapping):
        return _sum_of(reward)
    if not isinstance(reward, Rewards) and not _is_number(reward):
        problem = f"the reward function returned {reward!r:.60}; return a number, Rewards or Verdict"
        return Score(0.0, problem, cause="type")
    parts = reward if isinstance(reward, Rewards) else Rewards()
    if any(isinstance(turn, Mapping) for turn in parts.turns):
        return _sum_of_turns(parts)
    if bad := [part for part in (*parts.turns, *parts.tokens) if not _is_number(part)]:
        return Score(
            0.0, f"{bad[0]!r:.60} in {type(parts).__name__} is no number; give numbers", cause="type"
        )
    parts = Rewards(tuple(map(float, parts.turns)), tuple(map(float, parts.tokens)))
    total = float(sum(parts.turns) + sum(parts.tokens)) if isinstance(reward, Rewards) else float(reward)
    if not math.isfinite(total):
        return Score(0.0, f"the reward is {reward}", cause="type")
    if bool(parts.turns) == bool(parts.tokens) and isinstance(reward, Rewards):
        return Score(0.0, f"{reward} has to have turns or tokens", cause="type")
    return Score(total, None, parts)


def _sum_of_turns(parts: Rewards) -> Score:
    """Of turns with named parts. A number beside them is the part `unnamed`, unless it is 0."""
    if parts.tokens:
        return Score(0.0, f"{parts!r:.60} has to have turns or tokens", cause="type")
    turns: list[dict[str, float]] = []
    components: dict[str, float] = {}
    for turn in parts.turns:
        named = turn if isinstance(turn, Mapping) else {"unnamed": turn} if turn != 0 else {}
        if not all(_is_number(part) and math.isfinite(part) for part in named.values()):
            problem = (
                f"the reward function returned {dict(named)!r:.60} for a turn; give each part a finite number"
            )
            return Score(0.0, problem, cause="type")
        turns.append({str(name): float(part) for name, part in named.items()})
        for name, part in turns[-1].items():
            components[name] = components.get(name, 0.0) + part
    sums = tuple(float(sum(turn.values())) for turn in turns)
    return Score(sum(sums), None, Rewards(sums), components, tuple(turns))


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, str)


def _sum_of(named: Mapping[str, float]) -> Score:
    components = {str(name): float(part) for name, part in named.items() if _is_number(part)}
    total = sum(components.values())
    if len(components) < len(named) or not named or not math.isfinite(total):
        problem = f"the reward function returned {dict(named)!r:.60}; give each part a finite number"
        return Score(0.0, problem, cause="type")
    return Score(total, components=components)


def check_parts(score: Score, turn_lengths: Sequence[int]) -> Score:
    """One reward for each turn or token, or a failure that says so."""
    expectations = (
        ("turns", score.parts.turns, len(turn_lengths)),
        ("tokens", score.parts.tokens, sum(turn_lengths)),
    )
    for name, value, expected in expectations:
        if value and len(value) != expected:
            problem = f"the reward function gave {len(value)} rewards for {expected} {name}"
            return Score(0.0, problem, cause="type")
    return score


def _serve() -> None:
    requests, answers = os.dup(0), os.dup(1)
    # What a reward function reads or prints must not mix with requests and answers.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    end_with_parent()
    adopt_orphans()
    mark_descendants()
    try:
        sys.path[:] = receive(requests)
        env: Env = receive(requests)
        env.prepare()
    except Exception as error:  # the user's own code: named by whoever started this process
        traceback.print_exc()
        send(answers, described(error))
        return
    send(answers, None)
    while True:
        problem, response, stop = receive(requests)
        try:
            score = score_of(env.reward(problem, response, stop))
        except SystemExit as error:
            _exit_now(error.code)
        except Exception as error:  # the task's boundary: counted and logged by the controller
            traceback.print_exc()
            failure = failure_of(error, "have the reward take less: it may take all that the machine has")
            score = Score(0.0, str(failure), cause=failure.cause)
        send(answers, score)


def _exit_now(code: object) -> NoReturn:
    """As Python exits, but at once: its own way waits for threads, and takes seconds on a slow machine."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        _serve()
