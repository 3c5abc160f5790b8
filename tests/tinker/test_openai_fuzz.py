"""Any body to OpenAI's routes, streamed or not: an answer in OpenAI's form, never a 500."""

# holds: exact

import json

import httpx
import pytest

pytest.importorskip("tinker", reason="needs the extra `serve`")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.envs.chat.templates import make_tokenizer
from tests.tinker.fakes import KEYS, NAME, ScriptedBackend, serving
from tests.tinker.test_fuzz import _VALUE, at, changed, like, paths

pytestmark = pytest.mark.filterwarnings("ignore")
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}},
}
SAMPLING = {
    "model": NAME, "n": 2, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stop": ["a"],
    "stream_options": {"include_usage": True}, "logprobs": 1, "return_token_ids": True, "user": "me",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
}  # fmt: skip
BODIES = {
    "completions": SAMPLING | {"prompt": ["a", "b"]},
    "chat/completions": SAMPLING
    | {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "logprobs": True, "top_logprobs": 2, "tools": [TOOL], "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "response_format": {"type": "text"},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    tokenizer = make_tokenizer("qwen3", tmp_path_factory.mktemp("tokenizer"))
    backend = ScriptedBackend(tokenizer)
    backend.write('{"name": "f", "arguments": {}}')
    with serving(tmp_path_factory.mktemp("fuzz") / "server", backend, tokenizer=tokenizer) as (url, _):
        yield url


def ask(url, route, body):
    headers = {"Authorization": f"Bearer {KEYS[0]}", "Content-Type": "application/json"}
    return httpx.post(f"{url}/v1/{route}", content=json.dumps(body).encode(), headers=headers, timeout=30)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_the_bodies_are_good_as_they_are(url, route, stream):
    answer = ask(url, route, BODIES[route] | {"stream": stream})
    assert answer.status_code == 200 and "error" not in answer.text, answer.text


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_is_a_500(url, data):
    route = data.draw(st.sampled_from(sorted(BODIES)))
    body = BODIES[route] | {"stream": data.draw(st.booleans())}
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(sorted(paths(body), key=repr)))
        same_type = data.draw(st.booleans())
        body = changed(body, path, data.draw(like(at(body, path)) if same_type else _VALUE))
    answer = ask(url, route, body)
    assert answer.status_code < 500 and "server_error" not in answer.text, (route, body, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
