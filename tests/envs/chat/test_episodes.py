"""Environments that misbehave: each costs its own sample, is named, and nothing else notices. Real processes."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import psutil
import pytest

from rl.causes import note_outage
from rl.envs.base import RolloutContext
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import ServerLost, ToolResult
from rl.envs.chat.host import EpisodeHost
from rl.envs.chat.tool_calls import CallFormat
from rl.envs.chat.tools import as_tool, tool
from rl.envs.pipes import receive, send
from rl.errors import ConfigError, EpisodeLost, RunError
from rl.types import (
    Completion,
    Problem,
    Prompt,
    Rewards,
    SamplingParams,
    StopReason,
    Verdict,
    VersionRange,
)
from tests.envs.chat import playing
from tests.envs.chat.templates import make_tokenizer
from tests.virtual_time import run_virtually

CALL = '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'


@dataclass(frozen=True)
class Bad(ChatEnv):
    """What goes wrong stands in the problem's question."""

    max_new_tokens: int = 400
    turn_seconds: float = 1.5
    max_turns: int = 3
    max_memory_gib: float = 0.25
    max_result_chars: int = 1000

    def generate(self, seed):
        return Problem(str(seed), "fine")

    def start(self, episode):
        if episode.problem.question == "start raises":
            raise ValueError("no start")

    @tool
    async def slow(self, seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "waited"

    @tool
    def work(self, what: str, episode) -> object:
        """Misbehave.

        Args:
            what: in which way.
        """
        episode.state["asked"] = what
        match what:
            case "raises":
                raise KeyError("lost")
            case "hangs":
                time.sleep(60)
            case "calls sys.exit":
                sys.exit(5)
            case "exits":
                os._exit(3)
            case "leaves a child":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # left behind"])
            case "prints":
                for _ in range(2000):
                    print("x" * 5000)
            case "long result":
                return "y" * 10**6
            case "memory":
                return len(bytearray(2**30))
            case "object":
                return {1, 2}
            case "number":
                return 7
            case "done":
                episode.done = True
        return "ok"

    def step(self, episode):
        match episode.problem.question:
            case "step raises":
                raise RuntimeError("no step")
            case "step of a wrong type":
                return 3
            case "a lock":
                return [{"role": "user", "content": "more", "lock": threading.Lock()}]
            case "two turns":
                return None if len(episode.answers) == 2 else "again"
            case "never ends":
                return "more"

    async def reward_episode(self, episode):
        match episode.problem.question:
            case "reward hangs":
                time.sleep(60)
            case "reward of a wrong type":
                return "good"
            case "a dictionary":
                return {"right": 0.75, "short": 0.25}
            case "bad turns":
                return Rewards(turns=(1.0, 1.0, 1.0, 1.0))
            case "turns":
                return Rewards(turns=tuple(0.5 for _ in episode.turn_tokens))
        return float(episode.state.get("asked") != "raises") + 0 * len(episode.tool_results)


class Says:
    """A policy that says given texts."""

    def __init__(self, tokenizer, texts, stop=StopReason.STOP):
        self.tokenizer, self.texts, self.stop = tokenizer, texts, stop

    async def sample(self, prompt, n, params):
        said = sum(text in self.tokenizer.decode(prompt) for text in self.texts)
        tokens = [
            *self.tokenizer.encode_plain(self.texts[min(said, len(self.texts) - 1)]),
            self.tokenizer.eos_id,
        ]
        return [Completion(tokens, [-1.0] * len(tokens), VersionRange(4, 4), self.stop)] * n


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer("qwen2_5", tmp_path_factory.mktemp("tokenizer"))


def play(tokenizer, question, *texts, env=None, max_tokens=4000, stop=StopReason.STOP):
    policy, problem = Says(tokenizer, texts, stop), Problem("1", question)
    return playing.play(env or Bad(), tokenizer, policy, problem, max_tokens=max_tokens, reward_seconds=1.5)


def left_behind():
    return [p for p in psutil.process_iter(["cmdline"]) if "# left behind" in str(p.info["cmdline"])]


def work(what):
    return CALL.replace("NAME", "work").replace("ARGUMENTS", json.dumps({"what": what}))


# The policy is told, and the episode goes on.
TOLD = [
    ("raises", work("raises"), "Error: KeyError: 'lost'"),
    ("no such tool", CALL.replace("NAME", "nothing").replace("ARGUMENTS", "{}"), "Error: there is no tool nothing; there are slow, work"),
    ("missing argument", CALL.replace("NAME", "work").replace("ARGUMENTS", "{}"), "Error: what: Field required"),
    ("wrong argument", CALL.replace("NAME", "slow").replace("ARGUMENTS", '{"seconds": "x"}'), "seconds: Input should be a valid number"),
    ("extra argument", CALL.replace("NAME", "slow").replace("ARGUMENTS", '{"seconds": 0, "x": 1}'), "x: Extra inputs"),
    ("malformed", "<tool_call>{oops</tool_call>", "Error: the call is not JSON"),
    ("memory", work("memory"), "Error: MemoryError"),
    ("long result", work("long result"), "[cut: 1000000 characters]"),
    ("object", work("object"), "{1, 2}"),
    ("number", work("number"), "7"),
    ("prints", work("prints"), "ok"),
    ("leaves a child", work("leaves a child"), "ok"),
    ("async", CALL.replace("NAME", "slow").replace("ARGUMENTS", '{"seconds": 0.01}'), "waited"),
]  # fmt: skip


@pytest.fixture(scope="module")
def rollouts(tokenizer):
    """Of each row of TOLD and FAILED, all of one host: none notices the one before."""
    texts = {name: ("fine", text, "I see.") for name, text, _ in TOLD}
    texts |= {name: (question, text) for name, question, text, *_ in FAILED}
    episodes = [
        (Says(tokenizer, said, StopReason.STOP), Problem("1", asked)) for asked, *said in texts.values()
    ]
    played = playing.play_each(Bad(), tokenizer, episodes, max_tokens=4000, reward_seconds=1.5)
    assert len(texts) == len(TOLD) + len(FAILED)
    return {name: rollout for name, (rollout,) in zip(texts, played, strict=True)}


@pytest.mark.parametrize(("name", "told"), [(row[0], row[2]) for row in TOLD], ids=[row[0] for row in TOLD])
def test_the_policy_is_told_and_the_episode_goes_on(rollouts, name, told):
    rollout = rollouts[name]
    assert rollout.score.error is None and rollout.response == "I see."
    assert any(told in message["content"] for message in rollout.messages[2:])
    assert rollout.counts["turns"] == 2
    deadline = time.monotonic() + 5
    while left_behind() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_behind()


# The episode fails: the policy can bring it about, and it is scored 0; else its sample is dropped.
FAILED = [
    ("hangs", "fine", work("hangs"), "timeout", "the tool work took over 1.5 s (env.turn_seconds)"),
    ("hangs, async", "fine", CALL.replace("NAME", "slow").replace("ARGUMENTS", '{"seconds": 9}'), "timeout", "the tool slow took over"),
    ("exits", "fine", work("exits"), "crashed", "ended with code 3"),
    ("calls sys.exit", "fine", work("calls sys.exit"), "crashed", "ended with code 5"),
    ("step with a lock", "a lock", "a", "type", "what the environment returned cannot be sent: "),
    ("start raises", "start raises", "a", "start", "ValueError: no start (test_episodes.py line"),
    ("step raises", "step raises", "a", "raised", "RuntimeError: no step"),
    ("step of a wrong type", "step of a wrong type", "a", "type", "step() returned 3; return a string"),
    ("reward hangs", "reward hangs", "a", "timeout", "reward.limit_seconds"),
    ("reward of a wrong type", "reward of a wrong type", "a", "type", "returned 'good'; return a number"),
    ("bad turns", "bad turns", "a", "type", "gave 4 rewards for 1 turns"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cause", "why"), [(row[0], *row[3:]) for row in FAILED], ids=[row[0] for row in FAILED]
)
def test_an_episode_fails_with_its_cause(rollouts, name, cause, why):
    rollout = rollouts[name]
    assert why in rollout.score.error and rollout.score.cause == cause
    assert rollout.score.reward == 0 and rollout.score.is_dropped == (cause == "start")


def test_one_that_hangs_holds_nobody_back(tokenizer):
    class Both(Says):
        async def sample(self, prompt, n, params):
            self.texts = [work("hangs")] if params.seed % 2 else ["a"]
            return await super().sample(prompt, n, params)

    began = time.monotonic()
    rollouts = playing.play(Bad(), tokenizer, Both(tokenizer, []), Problem("1", "fine"), n=8)
    assert time.monotonic() - began < 60  # what one of them sleeps
    assert {rollout.score.cause for rollout in rollouts} == {"", "timeout"}


def test_a_prompt_beyond_the_context_costs_its_sample_and_a_later_turn_ends_the_episode(tokenizer):
    (rollout,) = play(tokenizer, "fine " * 200, "a", max_tokens=500)
    assert rollout.score.cause == "too_long" and "max_seq_len" in rollout.score.error
    assert rollout.versions is None and rollout.turn_lengths == []
    (rollout,) = play(tokenizer, "never ends", "abc " * 60, max_tokens=1200)
    assert rollout.score.error is None and rollout.stop == StopReason.LENGTH


def test_budgets_end_an_episode_and_its_reward_sees_it(tokenizer):
    (rollout,) = play(tokenizer, "never ends", "a")
    assert (rollout.counts["turns"], rollout.stop) == (3, StopReason.LENGTH)
    (rollout,) = play(tokenizer, "never ends", work("raises"), stop=StopReason.LENGTH)
    assert rollout.counts == {"turns": 1, "tool_calls": 0}  # a turn that was cut off calls nothing
    env = Bad(episode_seconds=0.8)
    (rollout,) = play(
        tokenizer, "fine", CALL.replace("NAME", "slow").replace("ARGUMENTS", '{"seconds": 1.2}'), env=env
    )
    assert rollout.score.cause == "timeout" and "env.episode_seconds" in rollout.score.error


def test_rewards_by_turn_and_by_name(tokenizer):
    (rollout,) = play(tokenizer, "a dictionary", "a")
    assert rollout.score.reward == 1 and rollout.score.components == {"right": 0.75, "short": 0.25}
    (rollout,) = play(tokenizer, "turns", "a")
    assert rollout.score.parts == Rewards(turns=(0.5,))
    (rollout,) = play(tokenizer, "fine", work("done"), "never said")
    assert rollout.counts == {"turns": 1, "tool_calls": 1, "tool_errors": 0}
    (rollout,) = play(tokenizer, "two turns", "first one", "second one")
    assert [m["content"] for m in rollout.messages[1:]] == ["first one", "again", "second one"]


def test_an_environment_that_does_not_get_ready_is_named():
    @dataclass(frozen=True)
    class Unready(Bad):
        def prepare(self):
            raise ImportError("no such package")

    with pytest.raises(RunError, match="prepare.. of the environment failed: ImportError: no such package"):
        EpisodeHost(Unready(), 1.0)


def test_tools_are_described_by_hints_and_docstrings():
    def price(fruit: str, count: int = 1, episode=None) -> str:
        """The price.

        Args:
            fruit: its name.
        """

    schema = as_tool(price).schema["function"]
    assert schema["description"] == "The price."
    assert schema["parameters"]["properties"]["fruit"] == {"type": "string", "description": "its name."}
    assert schema["parameters"]["required"] == ["fruit"] and "episode" not in str(schema)

    def broken(x: subprocess.Popen) -> str:
        """It has a type that JSON does not know."""

    with pytest.raises(ConfigError, match="the tool broken cannot be described"):
        as_tool(broken)


@pytest.mark.parametrize("mode", ["ranks", "raises", "too few"])
def test_a_group_is_compared_and_where_that_fails_it_fails_for_all(tokenizer, mode):
    @dataclass(frozen=True)
    class Longest(ChatEnv):
        def generate(self, seed):
            return Problem(str(seed), "say")

        def reward_group(self, episodes):
            if mode == "raises":
                raise ValueError("no comparison")
            longest = max(len(episode.response) for episode in episodes)
            return [float(len(e.response) == longest) for e in episodes[: 1 if mode == "too few" else None]]

    class Various(Says):
        async def sample(self, prompt, n, params):
            self.texts = ["x" * (1 + params.seed % 50)]
            return await super().sample(prompt, n, params)

    rollouts = playing.play(Longest(), tokenizer, Various(tokenizer, []), Problem("1", "say"), n=4)
    if mode == "ranks":
        longest = max(len(rollout.response) for rollout in rollouts)
        assert [r.score.reward for r in rollouts] == [float(len(r.response) == longest) for r in rollouts]
        assert rollouts[0].score.components.keys() == {"episode", "group"}
    else:
        cause = "raised" if mode == "raises" else "type"
        assert {(rollout.score.reward, rollout.score.cause) for rollout in rollouts} == {(0.0, cause)}


@pytest.mark.parametrize("lost", [0, 1])
def test_one_alone_is_compared_with_nobody(tokenizer, lost):
    """As in an evaluation, and where the others of its group were lost. A verdict stays the episode's own."""

    @dataclass(frozen=True)
    class Tournament(ChatEnv):
        def generate(self, seed):
            return Problem(str(seed), "say", "42")

        def reward_episode(self, episode):
            if lost and episode.response == "lose":
                raise ServerLost("it is gone")
            return 0.75 * (episode.response == "42") + 0.25

        def reward_group(self, episodes):
            return [2.0 / (len(episodes) - 1) for _ in episodes]

    class Various(Says):
        async def sample(self, prompt, n, params):
            self.texts = [["41", "lose"][len(asked)] if lost else "41"]
            asked.append(params.seed)
            return await super().sample(prompt, n, params)

    asked = []
    rollouts = playing.play(
        Tournament(), tokenizer, Various(tokenizer, []), Problem("1", "say", "42"), n=1 + lost
    )
    (kept,) = [rollout.score for rollout in rollouts if rollout.score.error is None]
    assert kept.reward == 0.25 and not kept.correct and "group" not in (kept.components or {})
    pair = playing.play(Tournament(), tokenizer, Says(tokenizer, ["41"]), Problem("1", "say", "42"), n=2)
    assert [(r.score.reward, r.score.correct) for r in pair] == [(2.25, False)] * 2


def test_a_group_is_compared_by_all_that_its_episodes_had(tokenizer):
    seen = []

    @dataclass(frozen=True)
    class Thrifty(ChatEnv):
        max_turns: int = 3

        def generate(self, seed):
            return Problem(str(seed), "say")

        @tool
        def look(self, what: str) -> str:
            """Look something up.

            Args:
                what: the thing.
            """
            return f"there is no {what}"

        def reward_episode(self, episode):
            episode.notes["turns"] = len(episode.turn_texts)
            return 0.0

        def reward_group(self, episodes):
            seen.extend((e.tool_results, e.turn_texts, e.num_opening, e.notes, e.answers) for e in episodes)
            return [0.0 for _ in episodes]

    texts = ['<tool_call>{"name": "look", "arguments": {"what": "x"}}</tool_call>', "42"]
    problem = Problem("1", "say")
    assert all(
        r.score.error is None
        for r in playing.play_here(Thrifty(), tokenizer, Says(tokenizer, texts), problem, n=2)
    )
    of_each = ([ToolResult("look", {"what": "x"}, "there is no x")], texts, 1, {"turns": 2}, ["", "42"])
    assert seen == [of_each] * 2


@pytest.mark.parametrize("written", ["hermes", "llama3", "pythonic"])
@pytest.mark.parametrize(
    "answer", ['{"name": "Bob", "age": 7}', '{"age": 7}', "<tool_call>{}</tool_call>", "[f(x=1)]"]
)
def test_without_tools_an_answer_is_an_answer_whatever_it_looks_like(tokenizer, written, answer):
    @dataclass(frozen=True)
    class Asks(ChatEnv):
        call_format: CallFormat = written

        def generate(self, seed):
            return Problem(str(seed), "In JSON: who?")

        def reward_episode(self, episode):
            return float(episode.response == answer)

    (rollout,) = playing.play_here(Asks(), tokenizer, Says(tokenizer, [answer]), Problem("1", "who?"))
    assert rollout.score.reward == 1.0 and rollout.response == answer
    assert (rollout.counts["turns"], rollout.counts["tool_calls"]) == (1, 0)


@pytest.mark.parametrize(("losses", "cause"), [(1, ""), (3, ""), (4, "lost")])
def test_an_episode_whose_worker_died_begins_again_with_the_same_seeds(tokenizer, losses, cause):
    """As a pool's process does: the first so many fail in the middle, for no fault of the episode."""
    left, asked = [losses], []

    class Noting(Says):
        async def sample(self, prompt, n, params):
            asked.append(params.seed)
            return await super().sample(prompt, n, params)

    class Dying:
        def __init__(self, host):
            self.host = host

        @asynccontextmanager
        async def open(self, problem, seed):
            async with self.host.open(problem, seed) as episode:
                if left[0]:
                    left[0] -= 1

                    async def lose(*_):
                        raise EpisodeLost

                    episode.step = lose
                yield episode

    policy, problem = Noting(tokenizer, ["one turn"]), Problem("1", "fine")
    (rollout,) = playing.play(Bad(), tokenizer, policy, problem, through=Dying)
    assert rollout.score.cause == cause and rollout.counts["turns"] == 1
    assert len(set(asked)) == 1 and len(asked) == min(losses + 1, 4)


@pytest.mark.parametrize("seen", ["at once", "by its socket alone", "after it was started again"])
def test_where_the_forking_process_is_killed_episodes_begin_again(tokenizer, seen):
    """On a busy machine its sockets close well before it can be waited for."""

    class Killing(Says):
        killed = False

        async def sample(self, prompt, n, params):
            if not self.killed:
                self.killed = True
                self.host._process.kill()
                if seen == "after it was started again":
                    self.host._process.wait()  # its forks are gone: this episode is lost, not answered first
                if seen == "by its socket alone":
                    self.host._process.poll = lambda: None
            elif seen == "after it was started again":
                while not self.host.num_restarts:
                    await asyncio.sleep(0.05)
            return await super().sample(prompt, n, params)

    policy = Killing(tokenizer, ["fine"])

    def through(host):
        policy.host = host
        return host

    rollouts = playing.play(Bad(), tokenizer, policy, Problem("1", "fine"), n=3, through=through)
    assert [rollout.score.error for rollout in rollouts] == [None] * 3
    assert [rollout.score.reward for rollout in rollouts] == [1.0] * 3


FORK_OUTLIVES_PARENT = """
import os, socket, sys, time
from rl.envs.chat import process
from tests.envs.chat.test_episodes import Bad

parent = os.getpid()

def wait_until_parent_is_gone():
    while os.getppid() == parent:
        time.sleep(0.01)

process.end_with_parent = wait_until_parent_is_gone
host = socket.socketpair()[0]
process._fork(Bad(), (), socket.socket(fileno=int(sys.argv[1])), os.dup(2), host)
os._exit(0)
"""


def test_a_fork_whose_parent_is_killed_first_ends_too():
    """The kernel's signal at a parent's death comes only to a process that asked for it before."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", FORK_OUTLIVES_PARENT, str(theirs.fileno())]
    with ours, theirs:
        subprocess.run(command, pass_fds=[theirs.fileno()], check=True, timeout=120)
        theirs.close()
        with pytest.raises((EOFError, ConnectionError)):
            send(ours.fileno(), (Problem("1", "fine"), 1))
            receive(ours.fileno(), 30)


@dataclass(frozen=True)
class Drawing(ChatEnv):
    """Draws as an episode begins."""

    def generate(self, seed):
        return Problem(str(seed), "draw")

    def start(self, episode):
        episode.notes["drawn"] = [random.random(), float(np.random.random())]

    def reward_episode(self, episode):
        return 1.0


def test_episodes_draw_other_numbers_and_each_the_same_ones_again(tokenizer):
    """By random and by numpy: a fork has the state of the process that it is forked from."""
    drawn = []
    for _ in range(2):
        rollouts = playing.play(Drawing(), tokenizer, Says(tokenizer, ["a"] * 4), Problem("1", "draw"), n=4)
        drawn.append([tuple(rollout.score.notes["drawn"]) for rollout in rollouts])
    assert drawn[0] == drawn[1]
    assert len({by_random for by_random, _ in drawn[0]}) == len({by_numpy for _, by_numpy in drawn[0]}) == 4


@pytest.mark.parametrize("outage", [False, True])
def test_an_episode_that_takes_too_long_is_scored_0_unless_its_generator_died(tokenizer, outage):
    """Then the wait was none of its own, and it begins again."""

    class Waiting(Says):
        num_asked = 0

        async def sample(self, prompt, n, params):
            self.num_asked += 1
            if self.num_asked == 2:
                if outage:
                    note_outage("generator-0 died")
                await asyncio.Event().wait()
            return await super().sample(prompt, n, params)

    rollouts = []

    async def walk():
        env, policy = Bad(episode_seconds=1.0), Waiting(tokenizer, ["first one", "second one"])
        context = RolloutContext(policy, tokenizer, SamplingParams(400), 4000, playing.Here(env))
        rollouts.extend(await env.drive(Prompt(Problem("1", "two turns"), ()), 1, context))

    run_virtually(walk())
    (rollout,) = rollouts
    scored = (rollout.score.cause, rollout.score.reward, rollout.counts["turns"])
    assert scored == (("", 1.0, 2) if outage else ("timeout", 0.0, 1))


@pytest.mark.parametrize(
    ("own", "summed"),
    [
        (Rewards(turns=(0.5, 0.25)), Rewards(turns=(0.5, 1.25))),
        (Rewards(tokens=(0.0, 0.5, 0.0, 0.25)), Rewards(tokens=(0.0, 0.5, 0.0, 1.25))),
    ],
    ids=["turns", "tokens"],
)
def test_what_a_comparison_adds_is_the_last_turns_and_its_verdict_stands(tokenizer, own, summed):
    @dataclass(frozen=True)
    class Ranked(ChatEnv):
        def step(self, episode):
            return "again" if len(episode.answers) == 1 else None

        def reward_episode(self, episode):
            return own

        def reward_group(self, episodes):
            return [Verdict(1.0, True) for _ in episodes]

    rollouts = playing.play_here(Ranked(), tokenizer, Says(tokenizer, ["a"]), Problem("1", "say"), n=2)
    for score in (rollout.score for rollout in rollouts):
        assert (score.error, score.reward, score.correct, score.parts) == (None, 1.75, True, summed)


@pytest.mark.parametrize(("losses", "score"), [(3, (1.0, "")), (4, (0.0, "lost"))])
def test_a_comparison_whose_worker_died_begins_again(tokenizer, monkeypatch, losses, score):
    compare, left = playing.HereEpisode.score_group, [losses]

    async def lose(episode, members):
        if left[0]:
            left[0] -= 1
            raise EpisodeLost
        return await compare(episode, members)

    monkeypatch.setattr(playing.HereEpisode, "score_group", lose)

    @dataclass(frozen=True)
    class Ranked(ChatEnv):
        def reward_episode(self, episode):
            return 0.0

        def reward_group(self, episodes):
            return [1.0 for _ in episodes]

    rollouts = playing.play_here(Ranked(), tokenizer, Says(tokenizer, ["a"]), Problem("1", "say"), n=2)
    assert [(rollout.score.reward, rollout.score.cause) for rollout in rollouts] == [score] * 2


@pytest.mark.parametrize("compares", [False, True])
def test_an_environment_may_verify_the_last_answer_alone(tokenizer, compares):
    """By `reward`, as an Env does; what a comparison adds comes on top of it."""

    @dataclass(frozen=True)
    class Answering(ChatEnv):
        def reward(self, problem, response, stop):
            return 0.5 * (response == problem.answer) + 0.25 * (stop == StopReason.STOP)

    @dataclass(frozen=True)
    class Compared(Answering):
        def reward_group(self, episodes):
            return [1.0 for _ in episodes]

    env = Compared() if compares else Answering()
    problem = Problem("1", "say", "42")
    rollouts = playing.play_here(env, tokenizer, Says(tokenizer, ["42"]), problem, n=2)
    assert [rollout.score.reward for rollout in rollouts] == [1.75 if compares else 0.75] * 2


def test_an_episode_has_eight_turns_where_nothing_else_is_set(tokenizer):
    @dataclass(frozen=True)
    class Endless(ChatEnv):
        def step(self, episode):
            return "more"

        def reward_episode(self, episode):
            return 0.0

    (rollout,) = playing.play_here(Endless(), tokenizer, Says(tokenizer, ["a"]), Problem("1", "say"))
    assert (rollout.counts["turns"], rollout.stop) == (8, StopReason.LENGTH)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (work("number"), {"tool_calls": 1, "tool_errors": 0}),
        (work("raises"), {"tool_calls": 1, "tool_errors": 1}),
        (work("long result"), {"tool_calls": 1, "tool_errors": 0, "cut_results": 1}),
        ("<tool_call>{oops</tool_call>", {"tool_calls": 0, "malformed_calls": 1}),
    ],
    ids=["fine", "raises", "long", "malformed"],
)
def test_what_became_of_calls_is_counted(tokenizer, text, counts):
    policy = Says(tokenizer, ["fine", text, "I see."])
    (rollout,) = playing.play_here(Bad(), tokenizer, policy, Problem("1", "fine"))
    assert rollout.counts == {"turns": 2, **counts}


def test_an_episodes_coroutines_run_in_one_event_loop(tokenizer):
    """So what start() opens, as a session of HTTP, serves its tools and its reward."""

    @dataclass(frozen=True)
    class Connected(ChatEnv):
        async def start(self, episode):
            episode.state["loop"] = asyncio.get_running_loop()

        @tool
        async def ask(self, episode) -> str:
            """Ask."""
            return str(asyncio.get_running_loop() is episode.state["loop"])

        async def reward_episode(self, episode):
            is_here = asyncio.get_running_loop() is episode.state["loop"]
            return float(is_here and episode.tool_results[0].content == "True")

    ask = CALL.replace("NAME", "ask").replace("ARGUMENTS", "{}")
    policy = Says(tokenizer, [ask, "done"])
    (rollout,) = playing.play_here(Connected(), tokenizer, policy, Problem("1", "say"))
    assert (rollout.score.error, rollout.score.reward) == (None, 1.0)


# test_episodes.py
def test_a_docstring_that_describes_what_a_tool_does_not_take_is_refused():
    def price(fruit: str) -> str:
        """The price.

        Args:
            count: how many.
        """

    with pytest.raises(ConfigError, match="of the tool price describes count, which it does not take"):
        as_tool(price)
