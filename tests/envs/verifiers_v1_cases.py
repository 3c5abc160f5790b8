"""Environments of verifiers' v1 API. test_verifiers_v1.py runs these with verifiers 0.4 on the path."""

# holds: exact

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.envs.adapters.verifiers_v1 import VerifiersV1
from rl.envs.chat.template import ChatTemplate
from tests.envs.chat.playing import play_here
from tests.envs.chat.test_session import Writer
from tests.envs.conversations import Policy, write_words
from tests.envs.test_adapters import tokenizer  # noqa: F401  fixture
from tests.envs.test_any_words import SETTINGS, play_any
from tests.json_server import serving

pytestmark = pytest.mark.slow

UV = f"""#!/bin/sh
# What verifiers asks of uv; the script's packages are in this interpreter.
case "$*" in
    *--help*) echo --script ;;
    python*) echo {sys.executable} ;;
esac
"""

ECHOES = """
import verifiers.v1 as vf

__all__ = ["Echoes"]

class Tools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "tools"

    @vf.tool
    def echo(self, text: str) -> str:
        "Repeat it."
        return text

class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return 1 / (1 + len(trace.branches[-1].messages[-1].content or ""))

    @vf.reward
    async def echoed(self, trace) -> float:
        told = [m.content for m in trace.branches[-1].messages if m.role == "tool"]
        return float(len(told))

    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]

class Echoes(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for i in range(8):
            yield Task(vf.TaskData(prompt=f"Say {i}.", system_prompt="Be brief."), self.config.task)

if __name__ == "__main__":
    Tools.run()
"""


@dataclass(frozen=True)
class Case:
    environment: str
    options: tuple[tuple[str, object], ...] = ()
    conversations: Sequence[Sequence[str]] = ()
    """What the policy says in each turn."""
    words: Sequence[str] = ()
    """What a game draws its word from."""


CALCULATOR = "rl.envs.adapters.calculator_v1"
RIGHT = ["23", "no", "{question}", ""]
SUMS = [["{question}", "{answer}"], ["{question}", "0"], ["{answer}"], ["1+1", "2"], [""]]
CALL = '<tool_call>{"name": "tools_echo", "arguments": {"text": "abc"}}</tool_call>'
CASES = {
    "hangman": Case(
        "textarena",
        (("taskset.game", "Hangman-v0"),),
        [
            ["[letter]"],
            ["[l]", "I think [T] it is", "[letter]"],
            ["[l]", "[q]", "[x]", "[z]", "[j]", "[k]", "[w]", "[v]", "[letter]"],
            ["no brackets", "still none", "[letter]"],
            ["[other]", "a"],
        ],
        ["letter"],
    ),
    # Its tasks are asked in the same words, and differ in their seeds.
    "wordle": Case(
        "textarena",
        (("taskset.game", "Wordle-v0"),),
        [["[crane]"], ["[slate]", "[crane]"], ["[slate]", "[slate]", "no"], ["[stone]"] * 6, ["crane", "[cranes]"], [""]],
        ["crane"],
    ),
    "calculator": Case(CALCULATOR, (("taskset.rows", 8),), SUMS),
    "best of two": Case(CALCULATOR, (("taskset.rows", 8), ("id", "best-of-n"), ("n", 2)), [["{answer}"], ["0"]]),
    "tools": Case(
        "echoes",
        (),
        [["abc"], [CALL, "abc"], [CALL + CALL, ""], [CALL.replace("tools_echo", "nothing"), "a"], [CALL.replace("text", "word"), "a"]],
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """The packages of verifiers' harness are here already."""
    (tmp_path / "echoes.py").write_text(ECHOES)
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(UV)
    uv.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.setenv("NO_KEY", "none")


def made(case: Case) -> VerifiersV1:
    if case.words:
        write_words(Path.home(), case.words)
    return VerifiersV1(environment=case.environment, options=case.options, runtime="subprocess", num_eval=2, max_tasks=8)  # fmt: skip


def by_itself(env: VerifiersV1, index: int, texts: Sequence[str]) -> float:
    """The reward of verifiers' own run of a task, with its own harness, which needs no shell."""
    import verifiers.v1 as vf
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.env import RunSlot
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    from rl.envs.adapters.verifiers_v1 import _plugin, _put

    data: dict = {"taskset": {"id": _plugin(env.environment)}}
    for name, value in env.options:
        _put(data, name.split("."), value)
    for role in agent_config_fields(resolve_env_config(dict(data))):
        data[role] = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}

    async def run(port):
        made = load_environment(resolve_env_config(data))
        tasks = iter(made.taskset)
        task = next(task for i, task in enumerate(tasks) if i == index)
        client = EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="NO_KEY")
        async with made.serving():
            return await made.run_slot(RunSlot(task), ModelContext("policy", client, vf.SamplingConfig()))

    with serving(Policy) as server:
        server.texts = texts
        episode = asyncio.run(run(server.server_port))
    assert episode.ok, [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    return sum(rewards) / len(rewards)


@pytest.mark.parametrize("name", CASES)
def test_scores(name, tokenizer):  # noqa: F811
    case = CASES[name]
    env = made(case)
    assert env.validate() == []
    problem = env.generate(3)
    words = {"question": problem.question, "answer": ""}
    if case.environment == CALCULATOR:
        from rl.envs.adapters.calculator_v1 import value

        words["answer"] = value(problem.question)
    ours, theirs = [], []
    for conversation in case.conversations:
        texts = [text.replace("{question}", words["question"]).replace("{answer}", words["answer"]) for text in conversation]  # fmt: skip
        policy = Writer(tokenizer, ChatTemplate(tokenizer).end_id, texts + texts[-1:] * 9, random.Random(0))
        (rollout,) = play_here(env, tokenizer, policy, problem)
        assert rollout.score.error is None, rollout.score
        ours.append(rollout.score.reward)
        theirs.append(by_itself(env, int(problem.id), texts))
    assert ours == theirs
    assert len(set(ours)) > 1


@pytest.mark.parametrize("name", CASES)
def test_any_words(name, tokenizer):  # noqa: F811
    env = made(CASES[name])
    problem = env.generate(1)

    @given(data=st.data())
    @SETTINGS
    def episodes(data):
        play_any(data, tokenizer, env, problem)

    episodes()


def test_a_call_that_a_tools_server_refuses_is_told():
    from mcp import Client, MCPError
    from mcp.server import MCPServer

    from rl.envs.adapters.verifiers_v1_harness import _called

    server = MCPServer("refusing")

    @server.tool()
    def note(text: str) -> str:
        raise MCPError(-32602, "not these arguments")

    async def told():
        async with Client(server) as client:
            function = SimpleNamespace(name="note", arguments='{"text": "a"}')
            return await _called(SimpleNamespace(function=function), {"note": (client, "note")})

    assert asyncio.run(told()) == "Error: not these arguments"


def test_an_agent_that_is_not_trained_needs_a_client_of_its_own():
    """verifiers gives an agent without one the run's: the policy would play it, and be trained on it."""
    env = made(Case(CALCULATOR, (("taskset.rows", 8), ("id", "user-sim"))))
    (problem,) = env.validate()
    assert "the agent user is not trained" in problem
    client = (("user.client.type", "eval"), ("user.client.base_url", "http://127.0.0.1:9/v1"))
    assert all(name in problem for name, _ in client)
    assert replace(env, options=(*env.options, *client)).validate() == []
