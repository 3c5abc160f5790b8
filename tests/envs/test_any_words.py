"""Whatever the policy writes to another library's environment: its episode ends by the table of causes."""

# holds: exact

import importlib.util
import json
from dataclasses import dataclass

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.envs.adapters.mcp import MCPEnv
from rl.envs.adapters.openenv import OpenEnv
from rl.envs.adapters.trl import TRLTask
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.loop import chat_template
from rl.types import Problem
from tests.envs.chat.playing import play_here
from tests.envs.chat.words import Writer, check, turns
from tests.envs.test_adapters import nemo_gym, openenv, tokenizer  # noqa: F401  fixtures

SETTINGS = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


def play_any(data, its_tokenizer, env, problem):
    end = chat_template(its_tokenizer, env.call_format).end_id
    policy = Writer(its_tokenizer, end, data.draw(turns("hermes")))
    (rollout,) = play_here(env, its_tokenizer, policy, problem)
    check(rollout)


class Repeater:
    def reset(self, **row):
        return " now"

    def echo(self, text: object) -> object:
        """Repeat it.

        Args:
            text: what to repeat.
        """
        return text

    def get_reward(self):
        return 0.5


def length(prompts, completions, **columns):
    return [1 / len(completions[0][-1]["content"])]


@given(data=st.data())
@SETTINGS
def test_trl(tokenizer, data):  # noqa: F811
    rows = ({"prompt": "go on", "answer": "3"},) * 9
    env = TRLTask(rows=lambda: rows, reward_funcs=(length,), environment_factory=Repeater, max_turns=3)
    play_any(data, tokenizer, env, env.generate(1))


@given(data=st.data())
@SETTINGS
def test_openenv(tokenizer, openenv, data):  # noqa: F811
    texts = OpenEnv(url=openenv[1], action="message", observation="text", max_turns=3)
    tools = OpenEnv(url=openenv[1], max_turns=3)
    openenv[0].sessions = 10**6
    play_any(data, tokenizer, data.draw(st.sampled_from([texts, tools])), Problem("7", "x"))


@given(data=st.data())
@SETTINGS
def test_nemo_gym(tokenizer, nemo_gym, data):  # noqa: F811
    play_any(data, tokenizer, nemo_gym, nemo_gym.generate(4))


def notes_server():
    from mcp.server import MCPServer

    server = MCPServer("notes")

    @server.tool()
    def echo(text: str) -> str:
        "Repeat it."
        return text

    return server


@dataclass(frozen=True)
class Notes(MCPEnv):
    server: tuple[str, ...] = ("in this process",)
    max_turns: int = 3

    def _target(self):
        return notes_server()

    def reward_episode(self, episode):
        return 1.0


@given(data=st.data())
@SETTINGS
def test_mcp(tokenizer, data):  # noqa: F811
    play_any(data, tokenizer, Notes(), Problem("1", "note"))


ECHO = {"name": "echo", "parameters": {"type": "object", "properties": {"text": {}}}}


@dataclass(frozen=True)
class Agent(AgentEnv):
    max_turns: int = 3

    def agent(self, episode, base_url, api_key):
        messages = [{"role": "user", "content": "go on"}]
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for _ in range(3):
                tools = [{"type": "function", "function": ECHO}]
                reply = client.chat.completions.create(model="policy", messages=messages, tools=tools)
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or ():
                    content = json.dumps(json.loads(call.function.arguments)["text"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
                if not message.tool_calls:
                    messages.append({"role": "user", "content": "and now?"})

    def reward_episode(self, episode):
        return 1 / len(episode.response)


@given(data=st.data())
@SETTINGS
def test_agents(tokenizer, data):  # noqa: F811
    play_any(data, tokenizer, Agent(), Problem("1", "go on"))


@pytest.mark.slow
@given(data=st.data())
@SETTINGS
def test_textarena(tokenizer, data):  # noqa: F811
    from rl.envs.adapters.textarena import TextArena

    env = TextArena(max_turns=3, max_new_tokens=900)
    play_any(data, tokenizer, env, Problem("3", "x"))


@pytest.mark.slow
@given(data=st.data())
@SETTINGS
def test_skyrl_gym(tokenizer, tmp_path_factory, data):  # noqa: F811
    from rl.envs.adapters.skyrl_gym import SkyRLGym
    from rl.envs.question_file import QuestionFile

    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text('{"question": "2 + 2?", "answer": "4"}\n{"question": "2 + 3?", "answer": "5"}\n')
    env = SkyRLGym(questions=QuestionFile(path=str(rows), match="exact"), max_turns=3, num_eval=1)
    play_any(data, tokenizer, env, env.train_problem(0))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None or importlib.util.find_spec("verifiers.legacy") is None,
    reason="needs verifiers' v0 API",
)
@given(data=st.data())
@SETTINGS
def test_verifiers_v0(tokenizer, data):  # noqa: F811
    from rl.envs.adapters.verifiers import Verifiers

    env = Verifiers(environment="rl.envs.adapters.calculator_v0", options=(("rows", 40),), max_turns=3)
    play_any(data, tokenizer, env, env.generate(1))
