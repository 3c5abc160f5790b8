"""Whatever the policy writes to another library's environment: its episode ends by the table of causes."""

# holds: exact

import asyncio
import json
from dataclasses import dataclass, replace

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.envs.adapters.mcp import MCPEnv
from rl.envs.adapters.openenv import OpenEnv
from rl.envs.adapters.trl import TRLTask
from rl.envs.base import RolloutContext
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.loop import chat_template
from rl.envs.expression import Expression
from rl.envs.mixture import Mixture
from rl.envs.question_file import QuestionFile
from rl.envs.reasoning import ReasoningGym
from rl.envs.sort_letters import SortLetters
from rl.envs.verifier import Verifier
from rl.types import Problem, SamplingParams
from tests.envs.chat.playing import play_here
from tests.envs.chat.words import FORMATS, NO_JSON, Writer, check, turns
from tests.envs.test_adapters import nemo_gym, openenv, tokenizer  # noqa: F401  fixtures

SETTINGS = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
NEW_ONES = settings(SETTINGS, derandomize=False, print_blob=True)
"""Other words each time, where a test is run by `make test-all` alone."""


def play_words(its_tokenizer, env, problem, written, words):
    """Of a policy that writes these turns, with its calls in this format."""
    env = replace(env, call_format=written)
    env.prepare()  # verifiers loads what it has in a main thread alone
    policy = Writer(its_tokenizer, chat_template(its_tokenizer, written).end_id, words)
    (rollout,) = play_here(env, its_tokenizer, policy, problem)
    check(rollout)


def play_any(data, its_tokenizer, env, problem):
    written = data.draw(st.sampled_from(FORMATS))
    play_words(its_tokenizer, env, problem, written, data.draw(turns(written)))


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


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "2 + 2?", "answer": "4"}\n{"question": "2 + 3?", "answer": "5"}\n')
    return str(path)


def of_trl():
    asked = ({"prompt": "go on", "answer": "3"},) * 9
    env = TRLTask(rows=lambda: asked, reward_funcs=(length,), environment_factory=Repeater, max_turns=3)
    return env, env.generate(1)


@pytest.fixture(params=["trl", "texts of openenv", "tools of openenv", "nemo_gym", "mcp", "agent"])
def played(request):
    """An environment, and a problem of its."""
    if request.param == "trl":
        return of_trl()
    if request.param == "nemo_gym":
        env = request.getfixturevalue("nemo_gym")
        return env, env.generate(4)
    if request.param == "mcp":
        return Notes(), Problem("1", "note")
    if request.param == "agent":
        return Agent(), Problem("1", "go on")
    server, url = request.getfixturevalue("openenv")
    server.sessions = 10**6
    if request.param == "tools of openenv":
        return OpenEnv(url=url, max_turns=3), Problem("7", "x")
    return OpenEnv(url=url, action="message", observation="text", max_turns=3), Problem("7", "x")


@given(data=st.data())
@SETTINGS
def test_any_words(tokenizer, played, data):  # noqa: F811
    play_any(data, tokenizer, *played)


def play_no_json(its_tokenizer, env, problem):
    for written in FORMATS:
        for text in NO_JSON[written]:
            play_words(its_tokenizer, env, problem, written, [(text, False)] * 2)


def test_calls_with_what_json_has_not(tokenizer, played):  # noqa: F811
    play_no_json(tokenizer, *played)


def of_textarena(_):
    from rl.envs.adapters.textarena import TextArena

    return TextArena(max_turns=3, max_new_tokens=900), Problem("3", "x")


def of_skyrl_gym(path):
    from rl.envs.adapters.skyrl_gym import SkyRLGym

    env = SkyRLGym(questions=QuestionFile(path=path, match="exact"), max_turns=3, num_eval=1)
    return env, env.train_problem(0)


def of_verifiers_v0(_):
    from rl.envs.adapters.verifiers import Verifiers

    env = Verifiers(environment="rl.envs.adapters.calculator_v0", options=(("rows", 40),), max_turns=3)
    return env, env.generate(1)


OF_PACKAGES = [of_textarena, of_skyrl_gym, of_verifiers_v0]


@pytest.mark.slow  # `make environments`
@pytest.mark.parametrize("made", OF_PACKAGES)
@given(data=st.data())
@NEW_ONES
def test_any_words_to_another_package(tokenizer, rows, made, data):  # noqa: F811
    play_any(data, tokenizer, *made(rows))


@pytest.mark.slow
@pytest.mark.parametrize("made", OF_PACKAGES)
def test_calls_with_what_json_has_not_to_another_package(tokenizer, rows, made):  # noqa: F811
    play_no_json(tokenizer, *made(rows))


@pytest.mark.slow
@given(data=st.data())
@settings(NEW_ONES, max_examples=100)
def test_more_words(tokenizer, played, data):  # noqa: F811
    play_any(data, tokenizer, *played)


OF_ONE_TURN = {
    "numbers of a file": lambda path: QuestionFile(path=path, num_eval=1),
    "texts of a file": lambda path: QuestionFile(path=path, num_eval=1, match="exact", chat=True),
    "expression": lambda _: Expression(),
    "a mixture": lambda path: Mixture(
        tasks=(("sums", QuestionFile(path=path, num_eval=1)), ("letters", SortLetters()))
    ),
}
OF_REASONING_GYM = {
    "numbers": lambda _: ReasoningGym(partial_credit="distance"),
    "numbers by its own credit": lambda _: ReasoningGym(partial_credit="dataset"),
    "tags": lambda _: ReasoningGym(dataset="letter_counting", answers="tag"),
    "lines": lambda _: ReasoningGym(dataset="spell_backward", answers="line"),
}
SLOW = [pytest.param(made, marks=pytest.mark.slow, id=name) for name, made in OF_REASONING_GYM.items()]


@pytest.fixture(params=[*(pytest.param(made, id=name) for name, made in OF_ONE_TURN.items()), *SLOW])
def answered(request, rows):
    """An environment that asks once, and the process of its reward."""
    env = request.param(rows)
    verifier = Verifier(env, 10.0)
    yield env, verifier
    verifier.close()


@given(data=st.data())
@SETTINGS
def test_any_words_as_an_answer(tokenizer, answered, data):  # noqa: F811
    env, verifier = answered
    problem = env.train_problem(data.draw(st.integers(0, 9)))
    policy = Writer(tokenizer, env.end_id(problem, tokenizer), data.draw(turns("hermes")))
    context = RolloutContext(policy, tokenizer, SamplingParams(900), 20_000)
    (rollout,) = asyncio.run(env.drive(env.encode(problem, tokenizer), 1, context))
    (score,) = verifier.score([rollout])
    check(replace(rollout, score=score))
