"""Other libraries' environments, unmodified, with a policy that says given texts."""

import json
import random
import socket
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest
import uvicorn
from mcp.server import MCPServer
from starlette.responses import PlainTextResponse
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

from rl.envs.adapters import openenv as openenv_module
from rl.envs.adapters.mcp import MCPEnv
from rl.envs.adapters.nemo_gym import NeMoGym
from rl.envs.adapters.openenv import OpenEnv
from rl.envs.adapters.trl import TRLTask
from rl.envs.chat.template import ChatTemplate
from rl.envs.reasoning import ReasoningGym
from rl.errors import ConfigError
from rl.http_server import Server, url_of
from rl.types import Problem, StopReason
from tests.envs.chat import playing
from tests.envs.chat.templates import make_tokenizer
from tests.envs.chat.test_session import Writer
from tests.json_server import serving


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer("qwen2_5", tmp_path_factory.mktemp("tokenizer"))


def play(tokenizer, env, problem, texts):
    writer = Writer(tokenizer, ChatTemplate(tokenizer).end_id, texts, random.Random(0))
    return playing.play(env, tokenizer, writer, problem)[0]


@pytest.mark.slow
def test_textarena(tokenizer):
    from rl.envs.adapters.textarena import TextArena

    env = TextArena(turn_seconds=60.0, max_new_tokens=900)
    assert env.validate() == []
    rollout = play(tokenizer, env, env.train_problem(3), [f"I guess [{i}]" for i in range(1, 21)])
    assert rollout.score.error is None
    assert "guess" in rollout.messages[0]["content"].lower() and rollout.counts["turns"] > 1
    said = [m["content"] for m in rollout.messages if m["role"] == "user"]
    assert all(said[0][:40] not in text for text in said[1:])  # the game's rules stand there once
    again = play(tokenizer, env, env.train_problem(3), [f"I guess [{i}]" for i in range(1, 21)])
    assert again.messages == rollout.messages and again.score == rollout.score
    for game, limit in (("Bandit-v0", 20), ("Mastermind-v0-hard", 30)):
        (line,) = replace(env, game=game).validate()
        assert f"ends by itself after {limit} turns" in line and f"set env.max_turns={limit + 1}" in line
    bandit = replace(env, game="Bandit-v0", max_turns=21)
    assert bandit.validate() == []
    rollout = play(tokenizer, bandit, bandit.train_problem(3), ["[red]"] * 21)
    assert rollout.counts["turns"] == 21 and rollout.stop is StopReason.STOP  # it says what it is worth


@pytest.mark.slow
def test_every_dataset_of_reasoning_gym_accepts_its_own_answer():
    import reasoning_gym

    refused = []
    for name in set(reasoning_gym.factory.DATASETS) - {"composite"}:  # which is made of others
        env = ReasoningGym(dataset=name, answers="tag")
        problem = env.generate(7)
        said = f"<answer>1</answer> So <answer>{problem.answer}</answer>."
        if problem.answer != "None" and env.reward(problem, said, StopReason.STOP) != 1:
            refused.append(name)
        assert env.reward(problem, problem.answer, StopReason.STOP) == 0, name
    assert not refused


@pytest.mark.slow
def test_skyrl_gym(tokenizer, tmp_path):
    from rl.envs.adapters.skyrl_gym import SkyRLGym
    from rl.envs.question_file import QuestionFile

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"question": "2 + {i}?", "answer": "{2 + i}"}}\n' for i in range(9)))
    env = SkyRLGym(
        questions=QuestionFile(path=str(path), match="exact"),
        num_eval=4,
        turn_seconds=60.0,
        max_turns=3,
        turn_rewards=True,
    )
    assert env.validate() == [] and len(env.eval_problems()) == 4
    unread = replace(env, questions=replace(env.questions, num_eval=2))
    assert unread.validate() == ["env.questions.num_eval=2 has no effect; set env.num_eval"]
    unread = replace(env, questions=replace(env.questions, prompt_prefix="Be brief.", max_new_tokens=5))
    assert unread.validate() == [
        "env.questions.prompt_prefix has no effect; set env.prompt_prefix",
        "env.questions.max_new_tokens has no effect; set env.max_new_tokens",
    ]
    problem = env.eval_problems()[2]
    rollout = play(tokenizer, env, problem, ["#### 5", "#### 4", "#### 4"])
    assert rollout.score.error is None and rollout.counts["turns"] >= 2
    assert rollout.score.parts.turns[0] < 1 and sum(rollout.score.parts.turns) >= 1
    # As in SkyRL, the environment sees the thoughts too.
    rollout = play(tokenizer, env, problem, ["<think>#### 4</think> I know.", "#### 5", "#### 5"])
    assert rollout.counts["turns"] == 1 and rollout.score.parts.turns[0] >= 1


RULES = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import register

class Rules(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()

    def init(self, prompt):
        rules = {"role": "system", "content": "The rules."}
        return [rules, {"role": "user", "content": "Again: " + prompt[-1]["content"]}], {}

    def step(self, action):
        return BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={})

register(id="rules", entry_point="rules_of_a_game:Rules")
"""


@pytest.mark.slow
def test_what_an_environment_of_skyrl_gym_makes_of_the_first_prompt_is_the_conversation(
    tokenizer, tmp_path, monkeypatch
):
    from rl.envs.adapters.skyrl_gym import SkyRLGym
    from rl.envs.question_file import QuestionFile

    (tmp_path / "rules_of_a_game.py").write_text(RULES)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "2 + 2?", "answer": "4"}\n' * 2)
    questions = QuestionFile(path=str(path), match="exact")
    env = SkyRLGym(environment="rules_of_a_game:rules", questions=questions, num_eval=1)
    rollout = play(tokenizer, env, env.eval_problems()[0], ["4"])
    assert rollout.score.error is None and rollout.score.reward == 1
    assert [(m["role"], m["content"]) for m in rollout.messages] == [
        ("system", "The rules."), ("user", "Again: 2 + 2?"), ("assistant", "4"),
    ]  # fmt: skip


@pytest.mark.slow
def test_rows_of_skyrl_gym_may_have_a_reward_spec_of_their_own(tokenizer, tmp_path):
    from rl.envs.adapters.skyrl_gym import SkyRLGym
    from rl.envs.question_file import QuestionFile

    spec = {"method": "rule", "ground_truth": {"target": ["Paris"]}}
    rows = [{"question": f"Capital {i}?", "answer": "Paris", "reward_spec": spec} for i in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = QuestionFile(path=str(path), match="exact")
    env = SkyRLGym(
        environment="search",
        options=(("search_url", "http://127.0.0.1:9"), ("topk", 1), ("timeout", 1), ("log_requests", False)),
        questions=questions,
        num_eval=1,
        turn_seconds=60.0,
    )
    for answer, reward in (("<answer>Paris</answer>", 1.0), ("<answer>Rome</answer>", 0.0)):
        score = play(tokenizer, env, env.train_problem(1), [answer]).score
        assert (score.error, score.reward) == (None, reward)


def test_trl_reward_functions_and_environments(tokenizer):
    seen = []

    def exact(prompts, completions, completion_ids, answer, **rest):
        assert len(prompts) == len(completions) == len(completion_ids) == 1
        seen.append((prompts, completions))
        return [float(completions[0][-1]["content"] == answer[0])]

    def no_opinion(prompts, completions, **rest):
        return [None]

    class Counter:
        def reset(self, **row):
            self.count = 0
            return " (count with the tool)"

        def add(self, number: int) -> int:
            """Add to the count.

            Args:
                number: how many.
            """
            self.count += number
            return self.count

        def get_reward(self):
            return 0.5 * (self.count == 3)

    rows = tuple({"prompt": f"Count to {i}", "answer": "3"} for i in range(9))
    env = TRLTask(
        rows=lambda: rows, reward_funcs=(exact, no_opinion), environment_factory=Counter, num_eval=2
    )
    assert env.validate() == [] and TRLTask(rows=lambda: rows[:1], num_eval=2).validate()
    call = '<tool_call>{"name": "add", "arguments": {"number": NUMBER}}</tool_call>'
    texts = [call.replace("NUMBER", "1"), call.replace("NUMBER", "2"), "3"]
    rollout = play(tokenizer, env, env.train_problem(1), texts)
    assert rollout.score.components == {"exact": 1.0, "environment": 0.5}
    assert rollout.messages[0]["content"].endswith(" (count with the tool)")
    assert [m["content"] for m in rollout.messages if m["role"] == "tool"] == ["1", "3"]


SERVER = """
from mcp.server import MCPServer
server = MCPServer("notes")
notes = []

@server.tool()
def note(text: str) -> str:
    "Write a note down."
    if text == "bad":
        raise ValueError("not that")
    notes.append(text)
    return " ".join(notes)

server.run()
"""


def test_tools_of_an_mcp_server_keep_their_state_for_an_episode(tokenizer, tmp_path):
    path = tmp_path / "server.py"
    path.write_text(SERVER)

    @dataclass(frozen=True)
    class Notes(MCPEnv):
        turn_seconds: float = 60.0
        max_memory_gib: float = 4.0

        def generate(self, seed):
            return Problem(str(seed), "note this")

        def reward_episode(self, episode):
            return float([r.content for r in episode.tool_results][-1] == "a b")

    env = Notes(server=(sys.executable, str(path)))
    call = '<tool_call>{"name": "note", "arguments": {"text": "TEXT"}}</tool_call>'
    texts = [call.replace("TEXT", text) for text in ("a", "bad", "b")]
    for _ in range(2):  # the second episode has a server of its own
        rollout = play(tokenizer, env, Problem("1", "note this"), [*texts, "done"])
        assert rollout.score.error is None and rollout.score.reward == 1
        told = [m["content"] for m in rollout.messages if m["role"] == "tool"]
        assert told[0] == "a" and "Error" in told[1]
    with pytest.raises(ConfigError, match="cannot be asked for its tools"):
        Notes(server=(sys.executable, "-c", "raise SystemExit(1)")).tools()


class OpenEnvServer:
    """OpenEnv's protocol, as its 0.10.0 speaks it; tests/integration/test_adapters.py has the real one."""

    sessions, open = 8, 0
    stop: ClassVar = None  # what ends it

    def answer(self, kind, data):
        if kind == "reset":
            return {"observation": {"text": f"seed {data.get('seed')}", "metadata": {}}, "reward": None}
        if data.get("type") == "list_tools":
            described = {"name": "double", "description": "Twice.", "input_schema": {"type": "object"}}
            return {"observation": {"tools": [described]}, "reward": None, "done": False}
        if data.get("type") == "call_tool":
            if "number" not in data["arguments"]:
                return {
                    "observation": {"tool_name": "double", "error": {"message": "no number"}},
                    "done": False,
                }
            twice = {"data": 2 * data["arguments"]["number"]}
            return {"observation": {"tool_name": "double", "result": twice}, "reward": 0.25, "done": False}
        text = data["message"]
        if text == "bad":
            raise ValueError("not that")
        return {"observation": {"text": text.upper()}, "reward": len(text) / 10, "done": text == "end"}

    def __call__(self, socket):
        self.open += 1
        try:
            if self.open > self.sessions:
                refusal = {"message": "full", "code": "CAPACITY_REACHED"}
                return socket.send(json.dumps({"type": "error", "data": refusal}))
            while True:
                asked = json.loads(socket.recv())
                if "stop" in json.dumps(asked["data"]):
                    return self.stop()
                if "die" in json.dumps(asked["data"]):
                    return
                try:
                    made = {"type": "observation", "data": self.answer(asked["type"], asked["data"])}
                except ValueError as error:
                    made = {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
                socket.send(json.dumps(made))
        except ConnectionClosed:
            return
        finally:
            self.open -= 1


@pytest.fixture
def openenv():
    """The server, and its URL."""
    made = OpenEnvServer()
    with serve(made, "127.0.0.1", 0) as server:
        made.stop = lambda: server.socket.shutdown(socket.SHUT_RDWR)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield made, f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
    thread.join()


def test_an_openenv_server_of_texts_rewards_each_turn(tokenizer, openenv):
    env = OpenEnv(
        url=openenv[1], action="message", observation="text", question="Go.", max_turns=3, turn_rewards=True
    )
    assert env.validate() == [] and OpenEnv(url="localhost").validate()
    rollout = play(tokenizer, env, Problem("7", "x"), ["abc", "end"])
    assert [m["content"] for m in rollout.messages] == ["Go.\n\nseed 7", "abc", "ABC", "end"]
    assert rollout.score.parts.turns == (0.3, 0.3) and rollout.stop == "stop"


def test_an_openenv_server_that_says_nothing_is_asked_for_its_tools_for_a_while(monkeypatch):
    monkeypatch.setattr(openenv_module, "_CONNECT_SECONDS", 0.5)
    over = threading.Event()
    with serve(lambda socket: over.wait(60), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(ConfigError, match="offers no tools .*is gone"):
                OpenEnv(url=f"http://127.0.0.1:{server.socket.getsockname()[1]}").tools()
        finally:
            over.set()
            server.shutdown()
            thread.join()


def test_an_openenv_server_of_tools(tokenizer, openenv):
    env = OpenEnv(url=openenv[1], max_turns=4, turn_rewards=True)
    call = '<tool_call>{"name": "double", "arguments": ARGUMENTS}</tool_call>'
    calls = [call.replace("ARGUMENTS", arguments) for arguments in ('{"number": 4}', "{}")]
    rollout = play(tokenizer, env, Problem("7", "x"), [*calls, "8"])
    assert rollout.score.parts.turns == (0.25, 0.0, 0.0)
    told = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert told[0] == "8" and "no number" in told[1]


@pytest.mark.parametrize(
    ("said", "cause", "words"),
    [
        (["die"], "raised", "ended this episode's session"),
        (["stop"], "server", "is gone"),
        (['<tool_call>{"name": "double", "arguments": {"number": "stop"}}</tool_call>'], "server", "is gone"),
        (["bad"], "raised", "not that"),
        (["full"], "server", "max_concurrent_envs"),
        (["down"], "server", "does not answer"),
    ],
)
def test_what_an_openenv_server_fails_at_is_scored_and_a_lost_one_costs_the_sample(
    tokenizer, openenv, said, cause, words
):
    server, url = openenv
    env = OpenEnv(url=url, action="" if "tool_call" in said[0] else "message", max_turns=3)
    if said == ["full"]:
        server.sessions = 0
    if said == ["down"]:
        env = OpenEnv(url="http://127.0.0.1:9", action="message")
    rollout = play(tokenizer, env, Problem("7", "x"), said)
    assert rollout.score.cause == cause and words in rollout.score.error


FAILING_SERVER = """
import os
from mcp import MCPError
from mcp.server import MCPServer
server = MCPServer("failing")

@server.tool()
def note(text: str, number: float = 0.0) -> str:
    "Write a note down."
    if text == "refused":
        raise MCPError(-32602, "not these arguments")
    if text == "die":
        os._exit(1)
    return text

START
server.run()
"""


@dataclass(frozen=True)
class FailingNotes(MCPEnv):
    turn_seconds: float = 60.0
    max_memory_gib: float = 4.0

    def reward_episode(self, episode):
        return 0.5


def told_by_mcp(tokenizer, tmp_path, arguments):
    """What comes of calls with these arguments, as JSON: the score, and what the policy is told."""
    path = tmp_path / "server.py"
    path.write_text(FAILING_SERVER.replace("START", ""))
    env = FailingNotes(server=(sys.executable, str(path)), max_turns=9)
    call = '<tool_call>{"name": "note", "arguments": ARGUMENTS}</tool_call>'
    rollout = play(
        tokenizer, env, Problem("1", "note"), [*(call.replace("ARGUMENTS", a) for a in arguments), "done"]
    )
    after = rollout.messages[[m["role"] for m in rollout.messages].index("assistant") :]
    return rollout.score, [m["content"] for m in after if m["role"] != "assistant"]


def test_what_the_policy_does_to_its_mcp_server_is_told_and_scored(tokenizer, tmp_path):
    """Errors of the protocol, arguments that are no JSON, and the end of the server, which is its own."""
    calls = [
        '{"text": "refused"}',
        '{"text": 1}',
        '{"text": "x", "number": NaN}',
        '{"text": "\\ud800"}',
        '{"text": "a"}',
    ]
    score, told = told_by_mcp(tokenizer, tmp_path, [*calls, '{"text": "die"}', '{"text": "b"}'])
    assert (score.reward, score.error) == (0.5, None)
    assert all("Error" in words for words in told[:4]) and told[4] == "a"
    assert "not these arguments" in told[0] and "no JSON" in told[2] + told[3]
    assert "server is gone" in told[5] and "server is gone" in told[6]


def test_an_mcp_server_that_does_not_start_is_the_infrastructures(tokenizer, tmp_path):
    path = tmp_path / "server.py"
    path.write_text(
        FAILING_SERVER.replace(
            "START",
            f"if os.path.exists({str(tmp_path / 'once')!r}): raise SystemExit(1)\nopen({str(tmp_path / 'once')!r}, 'w')",
        )
    )
    said = ['<tool_call>{"name": "note", "arguments": {"text": "a"}}</tool_call>', "done"]
    rollout = play(tokenizer, FailingNotes(server=(sys.executable, str(path))), Problem("1", "note"), said)
    assert rollout.score.cause == "server" and "MCP server is gone" in rollout.score.error


@contextmanager
def shared_mcp_server(status, stateless):
    """Its URL. The call of its tool with "fail" is answered with this status, by what is before it."""
    server = MCPServer("shared")

    @server.tool()
    def note(text: str) -> str:
        return text

    app = server.streamable_http_app(stateless_http=stateless)

    async def behind_a_proxy(scope, receive, send):
        if scope["type"] != "http":
            return await app(scope, receive, send)
        body = b""
        while (part := await receive())["type"] == "http.request":
            body += part.get("body", b"")
            if not part.get("more_body"):
                break
        if b'"text":"fail"' in body:
            return await PlainTextResponse("bad gateway", status)(scope, receive, send)
        parts = iter([{"type": "http.request", "body": body}])

        async def again():
            return next(parts, None) or await receive()

        await app(scope, again, send)

    listener = socket.create_server(("127.0.0.1", 0))
    running = Server(uvicorn.Config(behind_a_proxy, log_level="warning"))
    thread = threading.Thread(target=running.run, args=([listener],))
    thread.start()
    try:
        yield f"{url_of(listener)}/mcp"
    finally:
        running.should_exit = running.force_exit = True
        thread.join(30)


@pytest.mark.parametrize(("status", "stateless"), [(404, False), (404, True), (502, False)])
def test_an_mcp_server_behind_a_proxy_that_fails_is_the_infrastructures(tokenizer, status, stateless):
    """The policy did nothing wrong, and is not told of it nor scored for it."""
    call = '<tool_call>{"name": "note", "arguments": {"text": "TEXT"}}</tool_call>'
    texts = [call.replace("TEXT", "a"), call.replace("TEXT", "fail"), "done"]
    with shared_mcp_server(status, stateless) as url:
        rollout = play(tokenizer, FailingNotes(server=(url,), max_turns=9), Problem("1", "note"), texts)
    assert rollout.score.cause == "server" and "MCP server is gone" in rollout.score.error
    assert [m["content"] for m in rollout.messages if m["role"] == "tool"] == ["a"]


PLAIN_SERVER = """
import anyio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
PAGES = {
    None: ([Tool(name="note", input_schema={"type": "object"}, output_schema=NUMBER)], "more"),
    "more": ([Tool(name="count", input_schema={"type": "object"})], "last"),
    "last": ([Tool(name="wipe", input_schema={"type": "object"})], None),
}

async def listed(context, params):
    tools, next_cursor = PAGES[params.cursor if params else None]
    return ListToolsResult(tools=tools, next_cursor=next_cursor)

async def called(context, params):
    content = [TextContent(type="text", text="done")]
    return CallToolResult(content=content, structured_content={"number": params.arguments["text"]})

async def main():
    server = Server("plain", on_list_tools=listed, on_call_tool=called)
    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())

anyio.run(main)
"""


def test_an_mcp_result_that_does_not_suit_its_tool_is_that_calls_answer(tokenizer, tmp_path):
    """The client finds it so. The connection goes on."""
    path = tmp_path / "server.py"
    path.write_text(PLAIN_SERVER)
    env = FailingNotes(server=(sys.executable, str(path)), max_turns=3)
    call = '<tool_call>{"name": "note", "arguments": {"text": TEXT}}</tool_call>'
    texts = [call.replace("TEXT", '"x"'), call.replace("TEXT", "1"), "done"]
    rollout = play(tokenizer, env, Problem("1", "note"), texts)
    assert (rollout.score.reward, rollout.score.error) == (0.5, None)
    told = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert "Invalid structured content" in told[0] and told[1] == "done"


def test_an_mcp_servers_tools_are_those_of_all_pages_of_its_list(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(PLAIN_SERVER)
    tools = FailingNotes(server=(sys.executable, str(path))).tools()
    assert [tool.name for tool in tools] == ["note", "count", "wipe"]


class NeMoGymServer(BaseHTTPRequestHandler):
    """A resources server: the routes and fields that nemo-gym 0.7 has."""

    protocol_version = "HTTP/1.1"
    responses: ClassVar[list] = []  # that were to be verified

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name, session = self.path.strip("/"), self.headers.get("cookie")
        self.responses.extend([body["response"]] if name == "verify" else [])
        if name == "seed_session":
            return self.answer(200, {}, f"session={body['answer']}")
        if name == "double" and "number" not in body:
            return self.answer(422, {"detail": "number is missing"})
        if name == "double" and body["number"] == 667:
            self.server.socket.close()  # nobody else is answered
        if name == "double" and body["number"] in (666, 667):
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        if name == "double":
            return self.answer(200, {"twice": 2 * body["number"], "session": session})
        said = [
            item["content"][0]["text"] for item in body["response"]["output"] if item["type"] == "message"
        ]
        kinds = [item["type"] for item in body["response"]["output"]]
        if said[-1:] == ["slow"]:
            time.sleep(1.5)
        reward = float(said[-1:] == [body["answer"]] and session == f"session={body['answer']}")
        if said[-1:] == ["mask"]:
            masked = {"mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "no judge"}
            return self.answer(200, {**body, "reward": 0.0, **masked})
        return self.answer(200, {**body, "reward": reward, "kinds": kinds})

    def do_GET(self):
        self.answer(404, {"detail": "Not Found"})

    def answer(self, status, body, cookie=""):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        if cookie:
            self.send_header("set-cookie", cookie)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def nemo_gym(tmp_path):
    """An environment with its server."""
    tool = {"type": "function", "name": "double", "description": "Twice.", "parameters": {"type": "object"}}
    asked = [{"role": "developer", "content": "Use the tool."}, {"role": "user", "content": "Twice N?"}]
    rows = [
        {
            "responses_create_params": {
                "input": [asked[0], {**asked[1], "content": f"Twice {i}?"}],
                "tools": [tool],
            }
        }
        | {"answer": str(2 * i)}
        for i in range(6)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(NeMoGymServer) as server:
        yield NeMoGym(url=f"http://127.0.0.1:{server.server_port}", path=str(path), num_eval=2)


def test_a_nemo_gym_server_runs_the_tools_and_verifies(tokenizer, nemo_gym):
    assert nemo_gym.validate() == [] and len(nemo_gym.eval_problems()) == 2
    problem = nemo_gym.generate(4)
    call = '<tool_call>{"name": "double", "arguments": ARGUMENTS}</tool_call>'
    calls = [call.replace("ARGUMENTS", arguments) for arguments in ("{}", '{"number": 4}')]
    rollout = play(tokenizer, nemo_gym, problem, [*calls, "8"])
    assert rollout.score.error is None and rollout.score.reward == 1
    assert [m["role"] for m in rollout.messages[:2]] == ["system", "user"]
    told = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert "number is missing" in told[0] and json.loads(told[1]) == {"twice": 8, "session": "session=8"}
    kinds = ["function_call", "function_call_output"] * 2 + ["message"]
    assert rollout.score.notes["verified"] == {"reward": 1.0, "kinds": kinds}


def with_params(env, **params):
    """The environment with rows that say more."""
    rows = [json.loads(line) for line in Path(env.path).read_text().splitlines()]
    for row in rows:
        row["responses_create_params"] |= params
    path = Path(env.path).with_name(f"{'_'.join(params)}.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return replace(env, path=str(path))


def test_a_row_of_nemo_gym_may_have_instructions(nemo_gym):
    """They and what its system says first are one message, as by NeMo Gym's converter."""
    env = with_params(nemo_gym, instructions="Be brief.")
    assert env.validate() == []
    assert [message["content"] for message in env.generate(4).messages] == [
        "Be brief.\n\nUse the tool.",
        "Twice 4?",
    ]
    items = [{"type": "function_call", "name": "double", "arguments": "{}", "call_id": "c"}]
    (problem,) = with_params(nemo_gym, input=items).validate()
    assert "an input of type 'function_call' is not offered here" in problem


@pytest.mark.parametrize("parallel", [True, False])
def test_of_calls_in_one_turn_nemo_gym_has_the_first_alone_where_a_row_asks_for_it(
    parallel, tokenizer, nemo_gym
):
    env = with_params(nemo_gym, parallel_tool_calls=parallel)
    call = '<tool_call>{"name": "double", "arguments": {"number": NUMBER}}</tool_call>'
    both = call.replace("NUMBER", "4") + call.replace("NUMBER", "5")
    NeMoGymServer.responses.clear()
    rollout = play(tokenizer, env, env.generate(4), [both, call.replace("NUMBER", "6"), "8"])
    told = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert [("twice" in text) for text in told] == [True, parallel, True]
    assert parallel or "only a turn's first call is run here" in told[1]
    (response,) = NeMoGymServer.responses
    kinds = [item["type"] for item in response["output"]]
    calls = ["function_call"] * (2 if parallel else 1) + ["function_call_output"] * (2 if parallel else 1)
    assert kinds == [*calls, "function_call", "function_call_output", "message"]
    assert response["parallel_tool_calls"] is parallel


class Cut(Writer):
    """Its answers have reached their most tokens."""

    async def sample(self, prompt, n, params):
        (whole,) = await super().sample(prompt, n, params)
        return [
            replace(whole, tokens=whole.tokens[:-1], logprobs=whole.logprobs[:-1], stop=StopReason.LENGTH)
        ]


def test_nemo_gyms_verifier_is_told_of_an_answer_that_was_cut(tokenizer, nemo_gym):
    NeMoGymServer.responses.clear()
    end, problem = ChatTemplate(tokenizer).end_id, nemo_gym.generate(4)
    playing.play(nemo_gym, tokenizer, Cut(tokenizer, end, ["eight is"], random.Random(0)), problem)
    play(tokenizer, nemo_gym, problem, ["8"])
    call = '<tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>'
    play(tokenizer, replace(nemo_gym, max_turns=1), problem, [call])  # no answer was cut
    ends = [(body["status"], body["incomplete_details"]) for body in NeMoGymServer.responses]
    assert ends == [
        ("incomplete", {"reason": "max_output_tokens"}),
        ("completed", None),
        ("completed", None),
    ]


def test_a_row_of_nemo_gym_ends_at_the_end_of_its_line_alone(nemo_gym, tmp_path):
    """Python's splitlines also ends one within a text."""
    row = {"responses_create_params": {"input": "one\u2028two\x85three"}}
    path = tmp_path / "texts.jsonl"
    path.write_text(2 * (json.dumps(row, ensure_ascii=False) + "\n"), encoding="utf-8")
    env = replace(nemo_gym, path=str(path), num_eval=1)
    assert env.validate() == [] and env.generate(0).messages[-1]["content"] == "one\u2028two\x85three"


def test_a_nemo_gym_server_may_take_as_long_to_verify_as_a_reward_may(tokenizer, nemo_gym):
    """Longer than a turn: else a policy would have its failures dropped by what takes long to run."""
    env = replace(nemo_gym, turn_seconds=0.5)
    score = play(tokenizer, env, env.generate(4), ["slow"]).score
    assert score.error is None and score.reward == 0.0


def test_a_sample_that_nemo_gym_masks_is_dropped(tokenizer, nemo_gym):
    """Its verifier says that the reward measures nothing: the infrastructure failed."""
    score = play(tokenizer, nemo_gym, nemo_gym.generate(4), ["mask"]).score
    assert score.cause == "server" and "judge_failed: no judge" in score.error


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ("", ["message"]),
        ("<think>8?</think>8", ["reasoning", "message"]),
        ("<think>8?</think>", ["reasoning"]),
        ('<think>8?</think><tool_call>{"name": "double", "arguments": {}}</tool_call>', ["reasoning"]),
    ],
)
def test_a_turn_is_to_nemo_gyms_verifier_what_its_own_model_server_makes_of_it(
    tokenizer, nemo_gym, said, kinds
):
    calls = ["function_call", "function_call_output", "message"] if "tool_call" in said else []
    rollout = play(tokenizer, nemo_gym, nemo_gym.generate(4), [said, "8"])
    assert rollout.score.notes["verified"]["kinds"] == [*kinds, *calls]


def test_a_session_that_the_policy_ended_is_told_and_scored(tokenizer, nemo_gym, openenv):
    """Its samples would be dropped, and it could void its failures."""
    call = '<tool_call>{"name": "double", "arguments": {"number": NUMBER}}</tool_call>'
    said = [call.replace("NUMBER", "666"), "8"]
    rollout = play(tokenizer, nemo_gym, nemo_gym.generate(4), said)
    told = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert "ended this episode's session" in told[0] and (rollout.score.reward, rollout.score.cause) == (
        1.0,
        "",
    )
    dies = [call.replace("NUMBER", '"die"'), call.replace("NUMBER", "3"), "6"]
    rollout = play(tokenizer, OpenEnv(url=openenv[1], max_turns=3), Problem("7", "x"), dies)
    told = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert len(told) == 2 and all("ended this episode's session" in text for text in told)
    assert (rollout.score.reward, rollout.score.cause) == (0.0, "")


def test_a_nemo_gym_server_that_is_gone_costs_the_sample(tokenizer, nemo_gym, tmp_path):
    said = ['<tool_call>{"name": "double", "arguments": {"number": 667}}</tool_call>', "8"]
    rollout = play(tokenizer, nemo_gym, nemo_gym.generate(4), said)
    assert rollout.score.cause == "server" and "is gone" in rollout.score.error
    (tmp_path / "rows.jsonl").rename(tmp_path / "other.jsonl")
    wrong = replace(nemo_gym, path=str(tmp_path / "none.jsonl"))
    assert (
        "cannot be read" in wrong.validate()[0] and "is no server" in replace(nemo_gym, url="x").validate()[0]
    )


VERIFIERS_ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset

def double(number: int) -> int:
    "Twice a number."
    return 2 * number

def right(completion, answer, **rest):
    return float(completion[-1]["content"] == answer)

def load_environment(rows: int = 8, kind: str = ""):
    data = {"question": [f"Twice {i}?" for i in range(rows)], "answer": [str(2 * i) for i in range(rows)]}
    if kind == "alike":  # but for what the environment has to itself
        data = {"question": ["Play."] * rows, "info": [{"seed": i} for i in range(rows)]}
        return vf.SingleTurnEnv(dataset=Dataset.from_dict(data), rubric=vf.Rubric(funcs=[lambda **rest: 1.0]))
    if kind == "group":
        first = vf.Rubric(funcs=[lambda completions, **rest: [1.0] * len(completions)])
        return vf.SingleTurnEnv(dataset=Dataset.from_dict(data), rubric=first)
    if kind:  # sets of their own
        test = Dataset.from_dict({"question": ["Twice 100?", "Twice 101?"], "answer": ["200", "202"]})
        train = Dataset.from_dict(data) if kind == "both" else None
        return vf.SingleTurnEnv(dataset=train, eval_dataset=test, rubric=vf.Rubric(funcs=[right]))
    return vf.ToolEnv(dataset=Dataset.from_dict(data), tools=[double], rubric=vf.Rubric(funcs=[right]), max_turns=4)
"""


@pytest.mark.slow
def test_a_verifiers_environment_trains_through_the_endpoint(tokenizer, tmp_path, monkeypatch):
    from rl.envs.adapters.verifiers import Verifiers

    (tmp_path / "doubling.py").write_text(VERIFIERS_ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    env = Verifiers(environment="doubling", options=(("rows", 12),), num_eval=4)
    assert env.validate() == [] and len(env.eval_problems()) == 4
    problem = env.train_problem(1)
    number = int(problem.answer) // 2
    call = f'<tool_call>{{"name": "double", "arguments": {{"number": {number}}}}}</tool_call>'
    rollout = play(tokenizer, env, problem, [call, problem.answer])
    assert rollout.score.error is None and rollout.score.reward == 1
    assert rollout.counts["turns"] == 2 and not rollout.forks
    alike = replace(env, options=(("kind", "alike"), ("rows", 12)))
    assert alike.validate() == [] and len({problem.key for problem in alike.eval_problems()}) == 4
    assert alike.train_problem(1).key not in {problem.key for problem in alike.eval_problems()}
    (line,) = replace(env, options=(("kind", "group"),)).validate()
    assert line.startswith("doubling scores the rollouts of a task together")
    both = replace(env, options=(("kind", "both"), ("rows", 3)))
    assert both.validate() == [] and [p.question for p in both.eval_problems()] == [
        "Twice 100?",
        "Twice 101?",
    ]
    assert {both.train_problem(seed).answer for seed in range(20)} == {"0", "2", "4"}
    for problem in (both.eval_problems()[1], both.train_problem(2)):
        rollout = play(tokenizer, both, problem, [problem.answer])
        assert rollout.score.error is None and rollout.score.reward == 1
    (line,) = replace(env, options=(("kind", "test"),)).validate()
    assert line.startswith("doubling has no dataset to train on")
