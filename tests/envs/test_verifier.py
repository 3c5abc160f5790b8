"""A reward function runs in a process of its own, and can only hurt its own sample.

That process imports this module, which therefore imports little.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import rl.envs.verifier as verifier_module
from rl.envs.base import Env
from rl.envs.verifier import NotStartedAgain, Verifier
from rl.errors import RunError
from rl.types import Problem, Rewards, Rollout, Segment, StopReason, VersionRange


@dataclass(frozen=True)
class Odd(Env):
    def reward(self, problem, response, stop):
        print("a reward that prints does not disturb the answers")
        if response == "raise":
            raise KeyError("gone")
        if response == "memory":
            raise MemoryError
        if response == "hang":
            time.sleep(60)
        if response == "exit":
            threading.Thread(target=time.sleep, args=(60,)).start()  # Python would wait for it
            raise SystemExit(3)
        if response == "close":
            os.closerange(3, 100)
            time.sleep(60)
        if response.startswith("spawn"):
            child = subprocess.Popen(["sleep", "60"])
            Path(response.removeprefix("spawn ")).write_text(str(child.pid))
            child.wait()
        if response == "read":
            return float(sys.stdin.readline() == "")
        return float(response)


def rollout(response):
    prompt = (Segment([1], False, [0.0]),)
    return Rollout(Problem("1", "q", "a"), prompt, response, StopReason.STOP, VersionRange(0, 0))


def test_scores_of_a_call_that_was_given_up_are_nobody_elses():
    """The worker's thread goes on with a group whose run begins again at a checkpoint."""
    verifier, given_up = Verifier(Slow(), limit_seconds=5), list[float]()
    try:
        old = threading.Thread(target=lambda: given_up.extend(verifier.score([rollout("100")] * 8)))
        old.start()
        time.sleep(0.5)
        scores = verifier.score([rollout(str(number)) for number in range(8)])
        old.join(20)
    finally:
        verifier.close()
    assert [score.reward for score in scores] == list(range(8))
    assert 0 < len(given_up) < 8


@dataclass(frozen=True)
class Printing(Env):
    def reward(self, problem, response, stop):
        print("seen", response)
        if response == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0


def test_what_a_reward_prints_is_there_however_its_process_ends(monkeypatch, capfd):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    verifier = Verifier(Printing(), limit_seconds=30)
    try:
        assert [score.cause for score in verifier.score([rollout("1"), rollout("2")])] == ["", "crashed"]
    finally:
        verifier.close()
    out, err = capfd.readouterr()
    assert "seen 1\n" in out + err and "seen 2\n" in out + err


@dataclass(frozen=True)
class Slow(Env):
    def reward(self, problem, response, stop):
        time.sleep(0.2)
        return float(response)


def test_a_reward_function_can_only_hurt_its_own_sample():
    verifier = Verifier(Odd(), limit_seconds=2)
    try:
        started = time.monotonic()
        scores = verifier.score([rollout(r) for r in ("0.25", "raise", "hang", "0.5", "exit", "1", "memory")])
        assert time.monotonic() - started < 60  # what one of them sleeps
    finally:
        verifier.close()
    assert [s.reward for s in scores if s.error is None] == [0.25, 0.5, 1.0]
    assert "KeyError" in scores[1].error
    assert "over 2 s" in scores[2].error
    assert "code 3" in scores[4].error
    assert (
        scores[6].cause == "memory" and "have the reward take less" in scores[6].error
    )  # it has no such setting


def test_a_reward_that_is_not_a_number_closes_its_files_or_starts_programs(tmp_path):
    pid_file = tmp_path / "pid"
    verifier = Verifier(Odd(), limit_seconds=2)
    try:
        started = time.monotonic()
        scores = verifier.score([rollout(r) for r in ("nan", "close", f"spawn {pid_file}", "read", "0.5")])
        assert time.monotonic() - started < 60  # what one of them sleeps
    finally:
        verifier.close()
    assert scores[0].error == "the reward is nan"
    assert "closed its connection" in scores[1].error
    assert "over 2 s" in scores[2].error
    assert [s.reward for s in scores[3:]] == [1.0, 0.5]
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid_file.read_text())).status() == psutil.STATUS_ZOMBIE


@dataclass(frozen=True)
class Unprepared(Env):
    def prepare(self):
        threading.Thread(target=time.sleep, args=(60,)).start()  # Python would wait for it
        raise OSError("no server")


def test_a_prepare_that_fails_is_told_at_once_whatever_it_has_started():
    started = time.monotonic()
    with pytest.raises(RunError, match="prepare.. of the environment failed: OSError: no server"):
        Verifier(Unprepared(), limit_seconds=5)
    assert time.monotonic() - started < 50  # holds: meaning, the thread takes 60


@dataclass(frozen=True)
class Loads(Env):
    def prepare(self):
        time.sleep(60)


def test_a_prepare_that_takes_too_long_is_named(monkeypatch):
    monkeypatch.setattr(verifier_module, "START_SECONDS", 1.0)
    with pytest.raises(RunError, match=r"prepare\(\) of the environment took over 1 s; load less there"):
        Verifier(Loads(), limit_seconds=5)


@dataclass(frozen=True)
class PreparesOnce(Env):
    """Its reward ends the process, and its data server is away as it starts again."""

    mark: str = ""

    def prepare(self):
        with open(self.mark, "x"):
            pass

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        os._exit(3)


def test_a_process_that_does_not_start_again_is_told_from_one_that_never_did(tmp_path):
    """The second is the environment's to mend, the first may pass: another worker takes its place."""
    verifier = Verifier(PreparesOnce(mark=str(tmp_path / "mark")), 10.0)
    (score,) = verifier.score([rollout("a")])
    assert score.cause == "crashed"
    with pytest.raises(NotStartedAgain, match="prepare.. of the environment failed: FileExistsError"):
        verifier.score([rollout("a")])
    from rl.actors.remote import ProcessDied
    from rl.actors.reward import RewardWorker

    worker, score_of = RewardWorker.__new__(RewardWorker), RewardWorker.score._method.__wrapped__
    worker._verifier = verifier
    with pytest.raises(ProcessDied, match="FileExistsError"):
        asyncio.run(score_of(worker, [rollout("a")]))


@dataclass(frozen=True)
class Parts(Env):
    """Its reward is what the question says."""

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        return eval(problem.question, {"Rewards": Rewards})


def test_rewards_of_turns_and_tokens_are_counted():
    verifier = Verifier(Parts(), 5.0)

    def score(reward):
        turns = (
            Segment([1], False, [0.0]),
            Segment([2, 3], True, [0.0] * 2),
            Segment([4], False, [0.0]),
            Segment([5], True, [0.0]),
        )
        made = Rollout(Problem("1", reward, ""), turns, "", StopReason.STOP, VersionRange(0, 0))
        return verifier.score([made])[0]

    try:
        of_turns = score("Rewards(turns=(0.5, 1))")
        assert (of_turns.reward, of_turns.parts) == (1.5, Rewards(turns=(0.5, 1.0)))
        assert score("Rewards(tokens=(1, 2, 3))").parts.tokens == (1, 2, 3)
        assert score("1").parts == Rewards()
        assert score("Rewards(turns=(1,))").error == "the reward function gave 1 rewards for 2 turns"
        assert score("Rewards(tokens=(1,))").error == "the reward function gave 1 rewards for 3 tokens"
        assert "has to have turns or tokens" in score("Rewards()").error
        assert "the reward is" in score("Rewards(turns=(float('nan'), 1))").error
    finally:
        verifier.close()
