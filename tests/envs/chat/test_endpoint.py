"""Agents through OpenAI's official client: what they make the policy sample is what is learned from."""

import ast
import asyncio
import contextlib
import importlib.util
import json
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming

from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.endpoint import AgentEndpoint
from rl.envs.chat.episode import Episode
from rl.envs.chat.requests import ACCEPTED, NEUTRAL, Refused, read_request
from rl.envs.chat.session import ChatSession
from rl.envs.chat.template import ChatTemplate
from rl.types import Problem, SamplingParams, StopReason
from tests.envs.chat import playing
from tests.envs.chat.templates import make_tokenizer
from tests.envs.chat.test_session import Writer

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}


@dataclass(frozen=True)
class Agent(AgentEnv):
    max_memory_gib: float = 4.0
    turn_seconds: float = 20.0
    max_turns: int = 3

    def generate(self, seed):
        return Problem(str(seed), "look around")

    def start(self, episode):
        episode.state["started"] = True

    def agent(self, episode, base_url, api_key):
        assert episode.state["started"]
        if episode.problem.question == "fails":
            raise ValueError("no agent")
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": episode.problem.question}]
        for _ in range(4 if episode.problem.question == "too many" else 2):
            reply = client.chat.completions.create(model="any", messages=messages, tools=[TOOL]).choices[0]
            messages.append(reply.message.to_dict())
            for call in reply.message.tool_calls if reply.finish_reason == "tool_calls" else []:
                seen = f"{json.loads(call.function.arguments)['at']} is here"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})
        episode.state["reason"] = reply.finish_reason

    def reward_episode(self, episode):
        return float(episode.state["reason"] == "stop" and episode.response == "found")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer("qwen2_5", tmp_path_factory.mktemp("tokenizer"))


def test_a_door_that_is_closed_serves_nobody(tokenizer):
    async def main():
        door = AgentEndpoint(tokenizer)
        url, _ = await door.enter(SimpleNamespace())
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}/models")).status_code == 200
        await door.close()
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{url}/models")

    asyncio.run(main())


def play(tokenizer, env, question, texts):
    writer = Writer(tokenizer, ChatTemplate(tokenizer).end_id, texts, random.Random(0))
    (rollout,) = playing.play(env, tokenizer, writer, Problem("7", question), max_tokens=4000)
    return rollout, writer


def test_an_agent_of_the_official_client_is_trained_on_what_it_made_the_policy_sample(tokenizer):
    rollout, writer = play(tokenizer, Agent(), "look around", [CALL, "found"])
    assert rollout.score.error is None and rollout.score.reward == 1
    sampled = [segment.tokens.tolist() for segment in rollout.segments if segment.sampled]
    assert sampled == [made for _, _, made in writer.asked] and not rollout.forks
    assert writer.asked[1][0][: len(writer.asked[0][0]) + len(sampled[0])] == [
        *writer.asked[0][0],
        *sampled[0],
    ]
    assert rollout.counts == {"turns": 2, "tool_calls": 1}
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]


@dataclass(frozen=True)
class Reader(Agent):
    """Without tools; it reads the thoughts, as verifiers' parsers do."""

    def agent(self, episode, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        messages, read = [{"role": "user", "content": episode.problem.question}], []
        for _ in range(2):
            answer = client.chat.completions.create(model="any", messages=messages).choices[0].message
            read.append(answer.content)
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": "Go on."},
            ]
        episode.notes["read"] = read

    def reward_episode(self, episode):
        return 1.0


def test_an_agent_without_tools_gets_what_was_written_and_its_conversation_goes_on(tokenizer):
    texts = ["<think>I look.</think><guess>3</guess>", "<think>Again.</think> 4"]
    rollout, writer = play(tokenizer, Reader(), "look around", texts)
    assert rollout.score.error is None and rollout.score.notes["read"] == texts
    sampled = [segment.tokens.tolist() for segment in rollout.segments if segment.sampled]
    assert sampled == [made for _, _, made in writer.asked] and not rollout.forks
    said = [message["content"] for message in rollout.messages if message["role"] == "assistant"]
    assert said == ["<guess>3</guess>", "4"]  # to rewards and records all turns are without their thoughts


def test_an_agent_that_fails_or_goes_on_too_long_costs_its_own_sample(tokenizer):
    rollout, _ = play(tokenizer, Agent(), "fails", [])
    assert rollout.score.cause == "start" and "no agent" in rollout.score.error
    rollout, _ = play(tokenizer, Agent(), "too many", [CALL] * 4)
    assert rollout.score.cause == "raised" and "env.max_turns" in rollout.score.error


def test_an_agent_whose_first_request_is_too_long_is_dropped_whatever_it_makes_of_that(tokenizer):
    @dataclass(frozen=True)
    class Forgiving(Agent):
        def agent(self, episode, base_url, api_key):
            try:
                super().agent(episode, base_url, api_key)
            except openai.BadRequestError as error:
                assert "maximum context length" in str(error)  # by which libraries know it

        def reward_episode(self, episode):
            return 1.0

    for env in (Agent(), Forgiving()):
        rollout, _ = play(tokenizer, env, "x" * 30_000, [])
        assert rollout.score.cause == "too_long" and rollout.versions is None


def test_an_agent_that_gives_up_as_its_turns_are_used_up_is_rewarded_for_what_it_has(tokenizer):
    @dataclass(frozen=True)
    class Counting(Agent):
        def reward_episode(self, episode):
            return {"turns": float(len(episode.answers)), "cut": float(episode.stop == StopReason.LENGTH)}

    rollout, _ = play(tokenizer, Counting(), "too many", [CALL] * 4)
    assert rollout.score.error is None and rollout.stop == StopReason.LENGTH
    assert rollout.score.components == {"turns": 3.0, "cut": 1.0}
    rollout, _ = play(tokenizer, Counting(max_turns=2), "look around", [CALL, "found"])
    assert rollout.stop == StopReason.STOP  # it used all of them, and asked for no more


def test_an_agent_may_be_a_program_of_its_own(tokenizer, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(
        "import json, openai, sys\n"
        "problem = json.load(sys.stdin)\n"
        "asked = [{'role': 'user', 'content': problem['question']}]\n"
        "print(openai.OpenAI().chat.completions.create(model='m', messages=asked).choices[0].message.content)\n"
    )

    @dataclass(frozen=True)
    class Program(Agent):
        def agent(self, episode, base_url, api_key):
            return AgentEnv.agent(self, episode, base_url, api_key)

        def reward_episode(self, episode):
            return float(episode.state["output"] == "four\n")

    rollout, _ = play(tokenizer, Program(command=(sys.executable, str(path))), "2 + 2", ["four"])
    assert rollout.score.error is None and rollout.score.reward == 1
    path.write_text("raise SystemExit('broken')")
    rollout, _ = play(tokenizer, Program(command=(sys.executable, str(path))), "2 + 2", ["four"])
    assert "ended with code 1: broken" in rollout.score.error


def test_what_a_program_starts_finds_no_answer_and_what_it_left_is_there_as_it_fails(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(
        "import json, subprocess, sys\n"
        "assert json.load(sys.stdin)['answer'] == '4'\n"
        "found = subprocess.run(['cat', '/proc/self/fd/0'], capture_output=True).stdout\n"
        "sys.stdout.buffer.write(b'\\xff' + found + b'left')\n"
        "sys.exit(len(sys.argv) - 1)\n"
    )
    for words in ((), ("fail",)):
        env = Agent(command=(sys.executable, str(path), *words))
        episode = Episode(Problem("1", "2 + 2", "4"), random.Random(0), [])
        with pytest.raises(RuntimeError, match="ended with code 1") if words else contextlib.nullcontext():
            AgentEnv.agent(env, episode, "http://localhost", "key")
        assert episode.state["output"] == "\ufffdleft"


def test_an_agents_program_is_done_as_it_ends_whatever_it_leaves_behind(tokenizer, tmp_path, monkeypatch):
    """A daemon keeps its output open. The program's path may begin with ~."""
    path = tmp_path / "agent"
    path.write_text("#!/bin/sh\nsleep 600 &\necho done\n")
    path.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))

    @dataclass(frozen=True)
    class Program(AgentEnv):
        command: tuple[str, ...] = ("~/agent",)
        episode_seconds: float = 20.0

        def reward_episode(self, episode):
            return float(episode.state["output"] == "done\n")

    rollout, _ = play(tokenizer, Program(), "2 + 2", [])
    assert (rollout.score.error, rollout.score.reward) == (None, 1)


def talk(tokenizer, texts, say, delay=0.0):
    """say(client, session, url, key) with an async client of OpenAI's."""
    template = ChatTemplate(tokenizer)
    writer = Writer(tokenizer, template.end_id, texts, random.Random(0))

    class Slow:
        async def sample(self, *request):
            made = await writer.sample(*request)
            await asyncio.sleep(delay)
            return made

    async def walk():
        door = AgentEndpoint(tokenizer)
        session = ChatSession(template, Slow(), SamplingParams(300), range(8), 4000)
        url, key = await door.enter(session)
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            try:
                await say(client, session, url, key)
            finally:
                await door.leave(key)
                await door.close()

    asyncio.run(walk())


ASKED = [{"role": "user", "content": "hello"}]


def fields_of_clients():
    """Every field of OpenAI's and of vLLM's request models; vLLM's are read from its source, which is slow to import."""
    names = set(CompletionCreateParamsStreaming.__annotations__)
    (place,) = importlib.util.find_spec("vllm").submodule_search_locations
    source = (Path(place) / "entrypoints/openai/chat_completion/protocol.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "ChatCompletionRequest":
            fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]
            names |= {name for name in fields if not name.startswith("_")}
    return sorted(
        names
        | {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "best_of", "an_unknown_one"}
    )


def test_every_field_of_openais_and_vllms_requests_is_read_or_refused_by_its_name():
    body = {"messages": ASKED}
    names = fields_of_clients()
    assert len(names) > 80 and {"tool_choice", "structured_outputs", "bad_words"} <= set(names)
    for name in set(names) - ACCEPTED:
        for value in ("x", 7, -2.5, ["x"], {"type": "json_object"}):
            with pytest.raises(Refused, match=f"^{name}=.* is not offered here: .*") as refused:
                read_request(json.dumps(body | {name: value}).encode())
            assert refused.value.status == 400
        assert read_request(json.dumps(body | {name: None}).encode()).messages == ASKED
    for name, values in NEUTRAL.items():
        for value in values:
            assert read_request(json.dumps(body | {name: value}).encode()).messages == ASKED
    assert set(NEUTRAL) <= set(names) and not set(NEUTRAL) & ACCEPTED
    assert set(ACCEPTED) == {
        "messages", "model", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream", "stream_options",
        "logprobs", "return_token_ids", "user", "metadata", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    }  # fmt: skip


IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": "ten"}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater"),
        ({"max_completion_tokens": True}, "max_completion_tokens: "),
        ({"stream": "yes"}, "stream: "),
        ({"tools": [TOOL], "tool_choice": "none"}, "leave the tools out"),
        ({"tool_choice": "required"}, "the policy chooses"),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools"),
        ({"tools": "look"}, "tools"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "image_url.*the policy reads text"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "the role 'critic'"),
        ({"messages": [{"role": "assistant", "audio": {"id": "1"}}]}, "audio"),
        ({"messages": [{"role": "assistant", "tool_calls": "look"}]}, "tool_calls is a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}]}, "tool_calls"),
        ({"temperature": 0}, "temperature=0 .*another policy"),
        ({"ignore_eos": 0}, "ignore_eos"),
        ({"seed": 1}, "the run's own seeds"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
            "the policy chooses",
        ),
        ({"tools": [TOOL | {"type": "custom"}]}, "only tools of type function are offered"),
    ],
)
def test_a_request_is_refused_by_the_field_with_the_remedy(tokenizer, fields, words):
    async def say(client, session, url, key):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as plain:
            answer = await plain.post(f"{url}/chat/completions", json={"messages": ASKED} | fields)
        assert answer.status_code == 400 and re.search(words, answer.json()["error"]["message"])
        assert not session.turns

    talk(tokenizer, ["a"], say)


def test_a_developers_message_is_the_systems_and_half_a_surrogate_pair_is_a_question_mark(tokenizer):
    async def say(client, session, url, key):
        data = b'{"tool_choice": "none", "messages": [{"role": "developer", "content": "be \\ud800"}]}'
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as plain:
            answer = await plain.post(f"{url}/chat/completions", content=data)
        assert answer.status_code == 200
        assert "<|im_start|>system\nbe ?<|im_end|>" in tokenizer.decode_with_special(session.turns[0].tokens)

    talk(tokenizer, ["a"], say)


def test_bad_requests_and_keys_are_refused(tokenizer):
    async def say(client, session, url, key):
        async with httpx.AsyncClient() as plain:
            for body in (
                b"",
                b"[]",
                b"{}",
                b'{"messages": []}',
                b'{"messages": [{"content": "x"}]}',
                b"[" * 10**5,
            ):
                found = await plain.post(
                    f"{url}/chat/completions", content=body, headers={"Authorization": f"Bearer {key}"}
                )
                assert found.status_code == 400, body
            assert (await plain.post(f"{url}/chat/completions", json={"messages": ASKED})).status_code == 401
        with pytest.raises(openai.BadRequestError, match="leaves no room") as refused:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x" * 5000}]
            )
        assert refused.value.code == "context_length_exceeded"

    talk(tokenizer, ["a"], say)


def test_streams_lengths_and_token_ids(tokenizer):
    async def say(client, session, url, key):
        stream = await client.chat.completions.create(model="m", messages=ASKED, stream=True)
        assert "".join([chunk.choices[0].delta.content async for chunk in stream]) == "one"
        more = {"extra_body": {"return_token_ids": True}, "logprobs": True, "max_tokens": 9}
        made = await client.chat.completions.create(model="m", messages=ASKED, **more)
        turn = session.turns[1]
        assert made.choices[0].token_ids == turn.completion.tokens.tolist()
        assert made.prompt_token_ids == turn.tokens[: -len(turn.completion.tokens)]
        assert len(made.choices[0].logprobs.content) == len(turn.completion.tokens)

    talk(tokenizer, ["one", "two"], say)


async def first_of(client, num_asked):
    """Ask so many times at once, as some agents do: what is answered first. The other requests are cancelled."""
    asked = [
        asyncio.create_task(client.chat.completions.create(model="m", messages=ASKED))
        for _ in range(num_asked)
    ]
    done, others = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    return [task.result() for task in done]


def test_of_equal_requests_at_the_same_time_the_answers_that_nobody_waited_for_are_not_learned_from(
    tokenizer,
):
    """As an agent asks that takes the first of three."""
    release, num_asked = asyncio.Event(), 0

    class Slow(Writer):
        async def sample(self, prompt, n, params):
            nonlocal num_asked
            num_asked += 1
            if num_asked < 3:
                await release.wait()
            return await super().sample(prompt, n, params)

    async def main():
        template = ChatTemplate(tokenizer)
        writer = Slow(tokenizer, template.end_id, ["one", "two", "three"], random.Random(0))
        session = ChatSession(template, writer, SamplingParams(64), range(8), 4000)
        door = AgentEndpoint(tokenizer)
        url, key = await door.enter(session)
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            replies = await first_of(client, 3)
        await door.leave(key)
        release.set()
        await asyncio.sleep(0.1)
        await door.close()
        assert len(replies) == 1 and [turn.text for turn in session.turns] == ["one"]

    asyncio.run(main())


def test_a_retry_gets_the_same_answer_and_one_that_nobody_got_is_not_learned_from(tokenizer):
    async def say(client, session, url, key):
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(headers=headers, timeout=0.2) as hasty:
            with pytest.raises(httpx.ReadTimeout):
                await hasty.post(f"{url}/chat/completions", json={"messages": ASKED})
        again = await client.chat.completions.create(
            model="m", messages=ASKED, extra_headers={"x-stainless-retry-count": "1"}
        )
        assert again.choices[0].message.content == "one" and len(session.turns) == 1
        async with httpx.AsyncClient(headers=headers, timeout=0.2) as hasty:
            with pytest.raises(httpx.ReadTimeout):
                await hasty.post(
                    f"{url}/chat/completions", json={"messages": [{"role": "user", "content": "b"}]}
                )
        await asyncio.sleep(0.8)
        assert len(session.turns) == 2
        session.left = lambda: [turn.text for turn in session.turns]

    sessions = []

    async def noted(client, session, url, key):
        sessions.append(session)
        await say(client, session, url, key)

    talk(tokenizer, ["one", "lost"], noted, delay=0.5)
    assert [turn.text for turn in sessions[0].turns] == ["one"]


def test_a_conversation_goes_on_after_the_turn_that_was_received(tokenizer):
    """Also where another sample of its request, which nobody got, says the same later."""
    sessions = []

    class Uneven(Writer):
        async def sample(self, prompt, n, params):
            seconds = {0: 0.1, 1: 0.4}.get(len(self.asked), 0.0)
            made = await super().sample(prompt, n, params)
            await asyncio.sleep(seconds)
            return made

    async def main():
        template = ChatTemplate(tokenizer)
        writer = Uneven(tokenizer, template.end_id, ["yes", "yes", "done"], random.Random(0))
        session = ChatSession(template, writer, SamplingParams(64), range(8), 4000)
        sessions.append(session)
        door = AgentEndpoint(tokenizer)
        url, key = await door.enter(session)
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            (reply,) = await first_of(client, 2)
            await asyncio.sleep(0.6)  # the other sample has ended too
            message = reply.choices[0].message.model_dump(exclude_none=True)
            after = [*ASKED, message, {"role": "user", "content": "And now?"}]
            await client.chat.completions.create(model="m", messages=after)
        await door.leave(key)
        await door.close()

    asyncio.run(main())
    (session,) = sessions
    first, second = session.turns
    assert second.before is first and [turn.text for turn in session.turns] == ["yes", "done"]
    assert session.turn_order == () and len(session.branches) == 1


def test_an_agent_reaches_the_policy_without_the_machines_proxy(tokenizer, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    agent = Agent(turn_seconds=60.0)
    agent.prepare()
    rollout, _ = play(tokenizer, agent, "look around", [CALL, "found"])
    assert rollout.score.error is None and rollout.score.reward == 1


def test_what_is_not_offered_says_what_is(tokenizer):
    async def say(client, session, url, key):
        with pytest.raises(
            openai.NotFoundError, match="/v1/responses is not offered: .* at /v1/chat/completions"
        ):
            await client.responses.create(model="m", input="hello")

    talk(tokenizer, [], say)


AS_WITHOUT = {
    "temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "n": 1, "frequency_penalty": 0,
    "presence_penalty": 0, "repetition_penalty": 1, "length_penalty": 1, "min_tokens": 0, "top_logprobs": 0,
    "ignore_eos": False,
    "parallel_tool_calls": True, "use_beam_search": False, "echo": False, "skip_special_tokens": True,
    "add_generation_prompt": True, "continue_final_message": False,
}  # fmt: skip


@pytest.mark.parametrize("fields", [AS_WITHOUT, AS_WITHOUT | {"top_k": 0}])
def test_a_client_may_write_down_how_the_policy_is_sampled_anyway(fields):
    assert read_request(json.dumps({"messages": ASKED} | fields).encode()).messages == ASKED


def test_an_answer_is_no_longer_than_its_request_and_the_run_allow(tokenizer):
    asked = [
        ({}, 300),
        ({"max_tokens": 9}, 9),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 900}, 300),
    ]
    template = ChatTemplate(tokenizer)
    writer = Writer(tokenizer, template.end_id, ["one"] * len(asked), random.Random(0))

    async def main():
        door = AgentEndpoint(tokenizer)
        session = ChatSession(template, writer, SamplingParams(300), range(8), 4000)
        url, key = await door.enter(session)
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            for fields, _ in asked:
                await client.chat.completions.create(model="m", messages=ASKED, **fields)
        await door.leave(key)
        await door.close()

    asyncio.run(main())
    assert [params.max_new_tokens for _, params, _ in writer.asked] == [longest for _, longest in asked]


def test_a_call_in_a_stream_has_what_clients_put_it_together_by(tokenizer):
    async def say(client, session, url, key):
        stream = await client.chat.completions.create(model="m", messages=ASKED, tools=[TOOL], stream=True)
        choices = [choice async for chunk in stream for choice in chunk.choices]
        calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert {choice.index for choice in choices} == {0} and choices[-1].finish_reason == "tool_calls"
        assert {call.index for call in calls} == {0} and calls[0].function.name == "look"
        arguments = "".join(call.function.arguments or "" for call in calls)
        assert json.loads(arguments) == {"at": "x"}

    talk(tokenizer, [CALL], say)


def test_a_client_is_told_by_a_code_that_its_turns_are_used_up(tokenizer):
    async def say(client, session, url, key):
        for _ in range(8):
            await client.chat.completions.create(model="m", messages=ASKED)
        with pytest.raises(openai.BadRequestError, match=r"env\.max_turns") as refused:
            await client.chat.completions.create(model="m", messages=ASKED)
        assert refused.value.code == "turns_used_up"

    talk(tokenizer, ["a"] * 8, say)


def test_a_conversation_that_the_template_does_not_take_is_refused_in_its_words(tmp_path):
    async def say(client, session, url, key):
        asked = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        with pytest.raises(openai.BadRequestError, match="template fails: .*roles must alternate"):
            await client.chat.completions.create(model="m", messages=asked)
        assert not session.turns

    talk(make_tokenizer("gemma3", tmp_path), [], say)


def test_all_sessions_have_one_server_which_says_nothing_and_a_key_each(tokenizer, capsys):
    async def main():
        door = AgentEndpoint(tokenizer)
        (url, key), (again, other) = [await door.enter(SimpleNamespace()) for _ in range(2)]
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}/models")).status_code == 200
        await door.close()
        assert url == again and key != other

    asyncio.run(main())
    assert capsys.readouterr() == ("", "")
