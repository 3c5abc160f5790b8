"""OpenAI's routes over raw HTTP and by OpenAI's own client: messages, several prompts, streams, tools, JSON, refusals."""

# holds: exact

import json
import time

import httpx
import pytest

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.tinker.openai_chat import ChatMessage, _plain
from tests.envs.chat.templates import make_tokenizer
from tests.tinker.fakes import KEYS, NAME, ScriptedBackend, serving

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = "Grüße 漢字 👍🏽 and more than one slice of tokens; the end."
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "$defs": {"City": {"type": "string"}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer("qwen3", tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def server(tmp_path_factory, tokenizer):
    backend = ScriptedBackend(tokenizer)
    with serving(tmp_path_factory.mktemp("openai") / "server", backend, tokenizer=tokenizer) as (url, _):
        yield url, backend


@pytest.fixture
def url(server):
    return server[0]


@pytest.fixture
def backend(server):
    server[1].delay = 0.0
    server[1].write(TEXT)
    server[1].asked.clear()
    return server[1]


def post(url, path="chat/completions", status=200, key=KEYS[0], **body):
    if path == "chat/completions":
        body.setdefault("messages", [{"role": "user", "content": "Hi"}])
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    content = json.dumps({"model": NAME, **body})
    answer = httpx.post(f"{url}/v1/{path}", content=content, headers=headers, timeout=30)
    assert answer.status_code == status, answer.text
    return answer


def events(answer):
    assert answer.headers["content-type"].startswith("text/event-stream")
    *records, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(record) for record in records]


def joined(chunks, index=0):
    """(message, finish reason, logprobs) of a stream's choice."""
    message, reason, logprobs = {"content": ""}, None, []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert reason is None, "nothing follows a finish reason"
            reason = choice["finish_reason"]
            logprobs += (choice["logprobs"] or {"content": []})["content"]
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    calls = [{k: v for k, v in call.items() if k != "index"} for call in value]
                    message.setdefault("tool_calls", []).extend(calls)
                elif name == "role":
                    message["role"] = value
                else:
                    message[name] = message.get(name, "") + value
    return message, reason, logprobs


def without_ids(message):
    calls = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", ())]
    return {**message, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize(
    ("stop", "content"),
    [("<|im_start|>", "Hello there"), ("there<|im_start|>us", "Hello "), ("start|>user\n", "Hello there")],
)
def test_a_stop_string_may_have_special_tokens_which_no_answer_shows(url, backend, stop, content):
    backend.write("Hello there<|im_start|>user\nAnd more")
    whole = post(url, stop=stop).json()["choices"][0]
    assert whole["message"]["content"] == content and whole["finish_reason"] == "stop"
    message, reason, _ = joined(events(post(url, stop=stop, stream=True)))
    assert message["content"] == whole["message"]["content"] and reason == "stop"


def test_content_may_be_parts(url, backend):
    plain = post(url, messages=[{"role": "user", "content": "Hello there"}], return_token_ids=True).json()
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    split = post(url, messages=[{"role": "user", "content": parts}], return_token_ids=True).json()
    assert plain["prompt_token_ids"] == split["prompt_token_ids"]
    assert split["choices"][0]["message"] == {"role": "assistant", "content": TEXT}
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    error = post(url, messages=[{"role": "user", "content": image}], status=400).json()["error"]
    assert error["message"] == "content of type 'image_url' is not offered here; send text"


def test_several_prompts_are_one_answer(url, backend, tokenizer):
    texts = ["One", "Number two"]
    tokens = [tokenizer.encode(text) for text in texts]
    for prompt in (texts, tokens):
        answer = post(url, "completions", prompt=prompt, n=2, max_tokens=6, return_token_ids=True).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [
            tokens[0], tokens[0], tokens[1], tokens[1],
        ]  # fmt: skip
        assert {choice["text"] for choice in answer["choices"]} == {"Grüß"}
        assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
        assert answer["usage"]["completion_tokens"] == 24
        chunks = events(post(url, "completions", prompt=prompt, n=2, max_tokens=6, stream=True))
        for index in range(4):
            own = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert "".join(own) == "Grüß"
    too_many = post(url, "completions", prompt=["x"] * 200, n=2, status=400).json()["error"]["message"]
    assert too_many == "n=2 of 200 prompts; 1 to 256 answers are offered"


@pytest.mark.parametrize(
    "settings", [{}, {"max_tokens": 17}, {"stop": ["slice of"]}, {"stop": []}, {"stop": "字 👍", "n": 3}]
)
def test_a_streamed_chat_is_the_whole_one(url, backend, settings):
    settings = {"logprobs": True, "top_logprobs": 1, **settings}
    whole = post(url, **settings).json()
    chunks = events(post(url, stream=True, stream_options={"include_usage": True}, **settings))
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert {(c["id"], c["object"], c["model"], c["usage"]) for c in chunks} == {
        (last["id"], "chat.completion.chunk", NAME, None)
    }
    for index, choice in enumerate(whole["choices"]):
        message, reason, logprobs = joined(chunks, index)
        assert message == choice["message"] and reason == choice["finish_reason"]
        assert logprobs == choice["logprobs"]["content"]
        assert "slice of" not in message["content"] or not settings.get("stop")
    contents = [c["delta"].get("content") for chunk in chunks for c in chunk["choices"] if c["index"] == 0]
    assert len(list(filter(None, contents))) > 1 or len("".join(filter(None, contents))) < 10
    assert not any("\ufffd" in content for content in contents[:-1] if content)


def test_a_stream_is_sampled_in_slices_with_seeds_of_their_own(url, backend):
    events(post(url, stream=True, seed=5, max_tokens=40))
    assert [params.max_new_tokens for params in backend.asked] == [16, 16, 8]
    seeds = [params.seed for params in backend.asked]
    assert seeds[0] == 5 and len(set(seeds)) == 3
    first = seeds
    backend.asked.clear()
    events(post(url, stream=True, seed=5, max_tokens=40))
    assert [params.seed for params in backend.asked] == first


def test_a_stream_comes_while_it_is_sampled_and_ends_with_its_client(url, backend):
    backend.write("word " * 400)
    backend.delay = 0.02
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "stream": True, "n": 2}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        first = next(answer.iter_lines())
        assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["content"].startswith("word")
        assert len(backend.asked) < 20, "of more than a hundred slices"
    counts = [0]

    def is_over():
        time.sleep(0.2)  # ten slices
        counts.append(len(backend.asked))
        return counts[-1] == counts[-2]

    wait_until(is_over)
    assert counts[-1] < 45, "of two streams of 25 slices"


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_nobody_waits_for_is_not_sampled(url, backend, stream):
    backend.delay = 30.0
    cancelled = backend.num_cancelled
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    body = {"model": NAME, "prompt": ["a", "b"], "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=0.3)
    wait_until(lambda: backend.num_cancelled == cancelled + 2)


TURNS = {
    "a call": (f"Let me look.\n{CALL}", "tool_calls"),
    "two calls": (f"{CALL}\n{CALL.replace('Bern', 'Rom')}", "tool_calls"),
    "after reasoning": (f"<think>\nIt has {CALL[:11]} in it\n</think>\n\nLook:\n{CALL}", "tool_calls"),
    "no call": ("It is <to be> sunny.", "stop"),
    "reasoning": ("<think>\nHm.\n</think>\n\nSunny.", "stop"),
    "malformed": ("Look: <tool_call>{nonsense</tool_call>", "stop"),
}


@pytest.mark.parametrize("name", TURNS)
def test_tools_are_called_streamed_or_not(url, backend, name):
    text, reason = TURNS[name]
    backend.write(text)
    whole = post(url, tools=[WEATHER], logprobs=True).json()["choices"][0]
    assert whole["finish_reason"] == reason
    message = whole["message"]
    cities = [json.loads(call["function"]["arguments"])["city"] for call in message.get("tool_calls", ())]
    assert cities == [city for city in ("Bern", "Rom") if city in text]
    assert len({call["id"] for call in message.get("tool_calls", ())}) == len(cities)
    chunks = events(post(url, tools=[WEATHER], logprobs=True, stream=True))
    streamed, streamed_reason, logprobs = joined(chunks)
    assert without_ids(streamed) == without_ids(message) and streamed_reason == reason
    assert logprobs == whole["logprobs"]["content"]
    assert "tool_call" not in "".join(
        chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if name != "malformed"
    )
    plain = post(url, tools=[WEATHER], tool_choice="none").json()["choices"][0]
    assert plain["message"]["content"] == text and plain["finish_reason"] == "stop"
    cut_off = post(url, tools=[WEATHER], max_tokens=12).json()["choices"][0]
    assert cut_off["finish_reason"] == "length" and "tool_calls" not in cut_off["message"]
    streamed, reason, _ = joined(events(post(url, tools=[WEATHER], max_tokens=12, stream=True)))
    assert reason == "length" and "tool_calls" not in streamed


def test_one_call_where_more_are_not_wanted(url, backend):
    backend.write(TURNS["two calls"][0])
    for stream in (False, True):
        answer = post(url, tools=[WEATHER], parallel_tool_calls=False, stream=stream)
        message = joined(events(answer))[0] if stream else answer.json()["choices"][0]["message"]
        assert len(message["tool_calls"]) == 1


def test_the_model_sees_its_tools_and_what_they_answered(url, backend, tokenizer):
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]},
        {"role": "tool", "tool_call_id": "c0", "content": "sunny"},
    ]  # fmt: skip
    answer = post(url, messages=messages, tools=[WEATHER], return_token_ids=True).json()
    prompt = tokenizer.decode_with_special(answer["prompt_token_ids"])
    for part in ('"name": "weather"', '"city": "Bern"', "<tool_response>\nsunny"):
        assert part in prompt
    assert "weather" not in tokenizer.decode(
        post(url, tools=[WEATHER], tool_choice="none", return_token_ids=True).json()["prompt_token_ids"]
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"]
)
def test_a_tool_that_has_to_be_called_is_held_to_its_schema(url, backend, choice, stream):
    backend.write('{"name": "weather", "arguments": {"city": "Bern"}}')
    answer = post(url, tools=[WEATHER, TIME], tool_choice=choice, stream=stream)
    made = joined(events(answer)) if stream else None
    if not stream:
        whole = answer.json()["choices"][0]
        made = whole["message"], whole["finish_reason"]
    (call,) = made[0]["tool_calls"]
    assert (
        call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'} and made[1] == "tool_calls"
    )
    (params,) = backend.asked
    schema = json.loads(params.json_schema)
    assert schema["$defs"] == {"City": {"type": "string"}}
    options = schema.get("anyOf", [schema])
    assert [option["properties"]["name"]["const"] for option in options] == (
        ["weather", "time"] if choice == "required" else ["weather"]
    )
    assert options[0]["properties"]["arguments"]["properties"] == {"city": {"$ref": "#/$defs/City"}}


def test_json_is_what_the_generator_is_held_to(url, backend):
    backend.write('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for response_format, expected in [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}, schema),
    ]:
        backend.asked.clear()
        content = post(url, response_format=response_format).json()["choices"][0]["message"]["content"]
        assert content == '{"a": 1}'
        streamed = joined(events(post(url, response_format=response_format, stream=True)))[0]["content"]
        assert streamed == content
        assert [json.loads(params.json_schema) for params in backend.asked] == [expected] * 2
    answer = post(url, "completions", prompt="a", response_format={"type": "json_object"}).json()
    assert answer["choices"][0]["text"] == content and json.loads(backend.asked[-1].json_schema) == {
        "type": "object"
    }
    assert post(url, response_format={"type": "text"}) and backend.asked[-1].json_schema == ""


REFUSED = [
    ({"response_format": {"type": "grammar"}}, "response_format of type 'grammar' is not offered"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema has to be"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}},
        "response_format.json_schema.schema is no JSON schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 40_000]}}}},
        "at most 32768 are offered",
    ),
    ({"response_format": {"type": "json_object"}, "tools": [WEATHER]}, "response_format is not offered with tools"),
    ({"tool_choice": "required"}, "tool_choice is 'required' without tools"),
    ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice='sometimes'; use none, auto"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice names 'other', which is none of the tools",
    ),
    ({"functions": []}, "functions is not offered here; leave it out"),
    ({"frequency_penalty": 0.5}, "frequency_penalty is not offered here"),
    ({"stream_options": {"foo": 1}}, "stream_options.foo is not offered here; leave it out"),
    ({"top_logprobs": 2}, "top_logprobs=2 has no effect without logprobs=true; set it"),
    ({"temperature": -1}, "temperature=-1.0; it has to be 0 to 100"),
    ({"max_tokens": 0}, "max_tokens=0; it has to be at least 1"),
    ({"n": 0}, "n=0 of 1 prompts"),
    ({"stop": [""]}, "an empty stop string"),
    ({"model": "other"}, "no base model 'other'"),
    ({"messages": [{"content": "Hi"}]}, "role"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "match"), REFUSED)
def test_what_is_not_offered_is_refused_by_name(url, backend, body, match, stream):
    """With OpenAI's status and body, also where a stream was asked for."""
    error = post(url, **body, stream=stream, status=400).json()["error"]
    assert match in error["message"] and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert not backend.asked


def test_errors_have_openais_form(url, backend):
    too_long = post(url, "completions", prompt=[5] * 5000, status=400).json()["error"]
    assert too_long["code"] == "context_length_exceeded" and "5000 tokens" in too_long["message"]
    assert post(url, key="tml-wrong", status=401).json()["error"]["code"] == "invalid_api_key"
    gone = post(url, model="tinker://x:train:0/weights/one", status=404).json()["error"]
    assert gone["code"] == "not_found" and "no checkpoint" in gone["message"]
    half = post(url, "completions", prompt=["a", "\ud800"], status=400).json()["error"]
    assert half["message"] == "the prompt has half of a surrogate pair, which is no character; leave it out"
    assert post(url, "nothing", status=404).json()["error"]["type"] == "invalid_request_error"


def test_what_clients_always_send_is_no_reason_to_refuse(url, backend):
    neutral = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me", "temperature": None,
        "stop": None, "tools": None, "tool_choice": None, "seed": None, "response_format": None,
        "functions": None, "stream_options": None, "store": False,
    }  # fmt: skip
    assert post(url, **neutral).json()["choices"][0]["message"]["content"] == TEXT


def test_an_error_in_a_stream_is_its_last_event(url, backend, monkeypatch):
    from rl.errors import RunError

    sample = backend.sample

    async def fails_later(adapter, prompt, n, params, max_deaths):
        if len(backend.asked) == 2:
            raise RunError("the generator is gone")
        return await sample(adapter, prompt, n, params)

    monkeypatch.setattr(backend, "sample", fails_later)
    lines = [line for line in post(url, stream=True).text.split("\n\n") if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"] == {
        "message": "the generator is gone", "type": "server_error", "param": None, "code": None,
    }  # fmt: skip
    backend.asked.clear()
    monkeypatch.setattr(backend, "asked", [None, None])
    assert post(url, status=500).json()["error"]["message"] == "the generator is gone"


# ---- OpenAI's own client


@pytest.fixture
def openai(url):
    module = pytest.importorskip("openai")
    return module.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0)


HELLO = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def test_openais_client_streams(openai, backend):
    chunks = list(
        openai.chat.completions.create(
            model=NAME, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage.completion_tokens > 16 and chunks[-2].choices[0].finish_reason == "stop"
    with openai.chat.completions.stream(model=NAME, messages=HELLO) as stream:
        assert stream.get_final_completion().choices[0].message.content == TEXT
    text = openai.completions.create(model=NAME, prompt=["a", "b"], stream=True, max_tokens=20)
    assert {chunk.choices[0].index for chunk in text} == {0, 1}


def test_openais_client_calls_tools(openai, backend):
    backend.write(f"Let me look.\n{CALL}")
    created = openai.chat.completions.create(model=NAME, messages=HELLO, tools=[WEATHER])
    (call,) = created.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
    with openai.chat.completions.stream(model=NAME, messages=HELLO, tools=[WEATHER]) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.content == "Let me look."
    assert final.message.tool_calls[0].function.arguments == call.function.arguments


def test_openais_client_asks_for_json(openai, backend):
    import pydantic

    class Point(pydantic.BaseModel):
        x: int
        y: int

    backend.write('{"x": 1, "y": 2}')
    parsed = openai.chat.completions.parse(model=NAME, messages=HELLO, response_format=Point)
    assert parsed.choices[0].message.parsed == Point(x=1, y=2)
    assert json.loads(backend.asked[-1].json_schema)["properties"].keys() == {"x", "y"}


def test_openais_client_reads_errors(openai, backend):
    import openai as module

    with pytest.raises(module.BadRequestError, match="functions is not offered here"):
        openai.chat.completions.create(model=NAME, messages=HELLO, functions=[{"name": "f"}])
    with pytest.raises(module.NotFoundError):
        openai.completions.create(model="tinker://x:train:0/weights/one", prompt="a")


def test_a_developers_message_is_the_systems():
    """Chat templates know no other name for it, and would leave it out."""
    asked = [ChatMessage(role=role, content="x") for role in ("developer", "system", "user")]
    assert [_plain(message)["role"] for message in asked] == ["system", "system", "user"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_where_the_context_does_however_much_was_asked_for(url, backend, stream):
    backend.write("word " * 400)
    answer = post(
        url, "completions", prompt=[5] * 4090, max_tokens=100_000, stream=stream,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = events(answer) if stream else [answer.json()]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == "length" and chunks[-1]["usage"]["completion_tokens"] == 6
    assert answer.headers.get("x-accel-buffering") == ("no" if stream else None)


def test_a_setting_that_is_not_offered_is_taken_where_it_changes_nothing_and_the_newer_limit_counts(
    url, backend
):
    for name, neutral, other in (
        ("repetition_penalty", 1.0, 1.1), ("min_p", 0.0, 0.1), ("best_of", 1, 2), ("echo", False, True),
    ):  # fmt: skip
        post(url, "completions", prompt="a", **{name: neutral})
        error = post(url, "completions", prompt="a", status=400, **{name: other}).json()["error"]
        assert error["message"] == f"{name} is not offered here; leave it out"
    older, newer = {"max_tokens": 3}, {"max_completion_tokens": 5}
    for asked, limit in ((older, 3), (newer, 5), (older | newer, 5)):
        post(url, **asked)
        assert backend.asked[-1].max_new_tokens == limit
