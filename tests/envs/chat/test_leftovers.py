"""Whatever an episode starts ends with it, in whatever session, and leaves no zombie."""

import asyncio
import os
import sys
import time
from dataclasses import dataclass

import psutil
import pytest

from rl.envs.base import Env
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.host import EpisodeHost
from rl.envs.verifier import Verifier
from rl.errors import EpisodeFailed
from rl.processes import kill_tree
from rl.types import Problem, StopReason
from tests.envs.test_verifier import rollout

START = """
import os, subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)", {mark!r}]
subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:  # a daemon, as one starts them
    os.setsid()
    if os.fork() == 0:
        os.execv(sleep[0], sleep)
    os._exit(0)
"""


@dataclass(frozen=True)
class Starting(ChatEnv):
    mark: str = ""
    ends: str = "killed"
    turn_seconds: float = 30.0

    def start(self, episode):
        exec(START.format(mark=self.mark))

    def reward_episode(self, episode):
        if self.ends == "crashed":
            os._exit(3)
        if self.ends == "hung":
            time.sleep(600)
        return 1.0


def marked(mark):
    """Processes that are alive."""
    processes = psutil.process_iter(["cmdline", "status"])
    return [p for p in processes if mark in (p.info["cmdline"] or ())]


def wait(condition):
    """For what the kernel or another process does next."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("ends", ["killed", "crashed", "hung", "closed"])
def test_nothing_that_an_episode_starts_outlives_it(ends):
    mark = f"rl-test-{ends}-{os.getpid()}"
    host = EpisodeHost(Starting(mark=mark, ends=ends), reward_seconds=0.5 if ends == "hung" else 30.0)

    async def live():
        async with host.open(Problem("1", "?"), 0) as episode:
            await episode.begin()
            assert wait(lambda: len(marked(mark)) == 2)
            if ends == "closed":
                host.close()
            elif ends in ("crashed", "hung"):
                with pytest.raises(EpisodeFailed):
                    await episode.score(StopReason.STOP, (), ())
            else:
                await episode.score(StopReason.STOP, (), ())

    try:
        asyncio.run(live())
        assert wait(lambda: not marked(mark))
        if ends != "closed":  # the host serves on, and has no zombies
            assert wait(lambda: not psutil.Process(host._process.pid).children(recursive=True))
    finally:
        host.close()
        for process in marked(mark):
            process.kill()


@dataclass(frozen=True)
class StartingReward(Env):
    mark: str = ""
    ends: str = "closed"

    def reward(self, problem, response, stop):
        exec(START.format(mark=self.mark))
        if self.ends == "hung":
            time.sleep(600)
        return 1.0


@pytest.mark.parametrize("ends", ["closed", "hung"])
def test_nothing_that_a_reward_function_starts_outlives_its_process(ends):
    mark = f"rl-test-reward-{os.getpid()}-{ends}"
    verifier = Verifier(StartingReward(mark=mark, ends=ends), limit_seconds=30.0 if ends == "closed" else 3.0)
    try:
        (score,) = verifier.score([rollout("x")])
        assert score.cause == ("timeout" if ends == "hung" else "")
        if ends == "closed":
            assert wait(lambda: len(marked(mark)) == 2)
            verifier.close()
        assert wait(lambda: not marked(mark))
    finally:
        verifier.close()
        for process in marked(mark):
            process.kill()


def test_what_prepare_starts_stays_for_all_episodes():
    mark = f"rl-test-prepare-{os.getpid()}"

    @dataclass(frozen=True)
    class Prepared(Starting):
        def prepare(self):
            import subprocess

            subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)", mark], start_new_session=True
            )

        def start(self, episode):
            return None

    host = EpisodeHost(Prepared(), reward_seconds=30.0)

    async def live():
        for _ in range(2):
            async with host.open(Problem("1", "?"), 0) as episode:
                await episode.begin()
                assert len(marked(mark)) == 1

    try:
        assert wait(lambda: marked(mark))
        asyncio.run(live())
        assert len(marked(mark)) == 1
    finally:
        host.close()
    assert wait(lambda: not marked(mark))


def test_a_tree_that_is_not_there_is_ended_already():
    kill_tree(2**22 + 1)
