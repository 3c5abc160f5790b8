"""The table of causes: each failure of an episode or a reward, whose it is, and what comes of its sample.

Here a process that hangs, exits or is lost is one that says so; tests/envs/chat/test_episodes.py has real ones.
"""

# holds: exact

from dataclasses import dataclass

import pytest

from rl.causes import CAUSES, is_policys
from rl.controller.rollouts import check_rewards
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import ServerLost
from rl.envs.chat.tools import tool
from rl.envs.failures import failure_of
from rl.envs.judge import JudgeUnreachable
from rl.envs.sandbox import NoSandbox
from rl.errors import BadReturn, EpisodeFailed, EpisodeLost, RunError
from rl.types import Group, Problem, Rollout, Score, StopReason, VersionRange
from tests.envs.chat import playing
from tests.envs.chat.playing import Ended
from tests.envs.chat.templates import make_tokenizer
from tests.envs.chat.words import Writer


@dataclass(frozen=True)
class Failing(ChatEnv):
    """What fails, and how, stands in the problem: "reward: timeout"."""

    max_turns: int = 2
    num_eval: int = 2

    def _fail(self, episode, here):
        where, _, how = episode.problem.question.partition(": ")
        if where == here and how in HOW:
            raise HOW[how]()
        if where == here and how.startswith("tasks, "):
            raise TOGETHER[how.removeprefix("tasks, ")]()

    def start(self, episode):
        self._fail(episode, "start")

    @tool
    def use(self, episode) -> str:
        """Use it."""
        self._fail(episode, "tool")
        return "used"

    def step(self, episode):
        self._fail(episode, "step")
        return "unwritable" if episode.problem.question == "step: template" else None

    def reward_episode(self, episode):
        self._fail(episode, "reward")
        return "good" if episode.problem.question == "reward: type" else 1.0


HOW = {
    "raised": lambda: ValueError("\ud800 no number"),
    "type": lambda: BadReturn("3"),
    "timeout": lambda: Ended(EpisodeFailed("over 1 s", "timeout")),
    "crashed": lambda: Ended(EpisodeFailed("ended with code 3", "crashed")),
    "memory": MemoryError,
    "server": lambda: ServerLost("gone"),
    "sandbox": lambda: NoSandbox("no namespaces"),
    "judge": lambda: JudgeUnreachable("no answer"),
    "lost": lambda: Ended(EpisodeLost()),
}
TOGETHER = {  # of tasks of one group
    "server": lambda: ExceptionGroup("tasks", [ServerLost("gone"), ServerLost("gone")]),
    "raised": lambda: ExceptionGroup("tasks", [JudgeUnreachable("no answer"), ValueError("no number")]),
}
CALL = '<tool_call>{"name": "use", "arguments": {}}</tool_call>'

# what fails: how -> the cause; None: the policy is told, and the episode goes on
TABLE = [
    *((f"start: {how}", "start") for how in ("raised", "type", "timeout", "crashed", "memory")),
    *((f"start: {how}", how) for how in ("server", "sandbox", "judge", "lost")),
    *((f"tool: {how}", None) for how in ("raised", "memory")),
    *((f"tool: {how}", how) for how in ("timeout", "crashed", "server", "sandbox", "judge", "lost")),
    *((f"{where}: {how}", how) for where in ("step", "reward") for how in HOW),
    ("tool: tasks, server", "server"),
    ("tool: tasks, raised", None),
    *((f"{where}: tasks, {how}", how) for where in ("step", "reward") for how in TOGETHER),
    ("step: template", "template"),
    ("the prompt: too_long", "too_long"),
    ("nothing", None),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Its template, a program, fails at one word."""
    made = make_tokenizer("qwen2_5", tmp_path_factory.mktemp("tokenizer"))
    render = made.render

    def failing(messages, *rest):
        if any("unwritable" in message["content"] for message in messages):
            raise ValueError("no such word")
        return render(messages, *rest)

    made.render = failing
    return made


def play(tokenizer, question, max_tokens=20_000):
    text = CALL if question.startswith("tool") else "hello"
    policy = Writer(tokenizer, tokenizer.eos_id, [(text, False)] * 8)
    return playing.play_here(Failing(), tokenizer, policy, Problem("1", question), max_tokens=max_tokens)[0]


@pytest.mark.parametrize(("question", "cause"), TABLE, ids=[row[0] for row in TABLE])
def test_each_failure_is_told_scored_or_dropped_by_whose_it_is(tokenizer, question, cause):
    rollout = play(tokenizer, question, 20 if "too_long" in question else 20_000)
    score = rollout.score
    if cause is None:
        assert (score.error, score.reward) == (None, 1)
        told = question != "nothing"
        assert told == any("Error: " in str(message["content"]) for message in rollout.messages)
        return
    assert score.cause == cause and score.reward == 0 and not score.correct
    assert score.is_dropped == (not is_policys(cause)) and score.error.encode()


def test_every_cause_has_a_row_and_those_of_the_policy_are_its_score():
    rows = {cause for _, cause in TABLE if cause}
    assert rows == set(CAUSES)
    scored = {cause for cause in CAUSES if is_policys(cause)}
    assert scored == {"raised", "type", "timeout", "crashed", "memory", "template"}
    assert Score(0.0, "an unknown cause").is_dropped and not Score(0.0).is_dropped


def test_nothing_is_the_policys_failure_before_its_first_turn(tokenizer):
    for question, _ in TABLE:
        if question.startswith("start"):
            rollout = play(tokenizer, question)
            assert rollout.score.is_dropped and not rollout.turn_lengths


def failed(cause):
    return Score(0.0, "it failed", cause=cause)


@pytest.mark.parametrize("cause", CAUSES)
def test_what_the_policy_brings_about_never_ends_a_run_that_has_trained(cause):
    groups = [Group(0, (), (failed(cause),) * 2)]
    with pytest.raises(RunError, match="all 2 rewards failed"):
        check_rewards(groups)
    if is_policys(cause):
        check_rewards(groups, has_trained=True)
    else:
        with pytest.raises(RunError, match="all 2 rewards failed"):
            check_rewards(groups, has_trained=True)


def test_a_step_of_which_nothing_was_sampled_ends_a_run_that_reads_no_rewards_too():
    """Such as a distillation whose server is gone: it would go on without learning, to its end."""
    lost = Group(0, (), (Score(0.0, "the server is gone", cause="lost"),) * 2)
    with pytest.raises(RunError, match="all 2 rewards failed, the first: the server is gone"):
        check_rewards([lost], has_trained=True, reads_rewards=False)
    sampled = Rollout(Problem("1", "q", "a"), (), "", StopReason.STOP, VersionRange(0, 0))
    check_rewards([lost, Group(1, (sampled,), lost.scores[:1])], has_trained=True, reads_rewards=False)


def test_a_reward_function_of_one_turn_fails_by_the_same_table():
    for how, make in HOW.items():
        try:
            raise make()
        except Exception as error:
            assert failure_of(error, "take less").cause == how
        except Ended:
            pass  # rl/envs/verifier.py sees its process end
