"""NeMo Gym's own examples, unmodified: its simple agent's rewards and our adapter's are equal."""

# holds: exact

import json
import random

import httpx
import pytest

from rl.envs.adapters.nemo_gym import NeMoGym
from rl.envs.chat.template import ChatTemplate
from tests import json_server
from tests.envs.chat import playing
from tests.envs.chat.templates import make_tokenizer
from tests.envs.chat.test_session import Writer
from tests.envs.nemo_gym_servers import IS_INSTALLED, serving
from tests.json_server import JSONHandler, completion

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_INSTALLED, reason="needs NeMo Gym, which `make environments` installs"),
]


def call(name, **arguments):
    return name, json.dumps(arguments)


# For each example its episodes: the reward, None where the server answers /verify with an error, and the turns.


def weather(row):
    sunny = call("get_weather", city="Warsaw")
    return [
        (1.0, [("", [sunny]), ("It is cold.", [])]),
        (1.0, [("Let me see.", [sunny, sunny]), ("It is cold.", [])]),
        (0.0, [("It is cold.", [])]),
        (0.0, [('<tool_call>{"name": "get_weather", "arguments": {"city": </tool_call>', []), ("Oh.", [])]),
        (1.0, [("", [call("get_weather", town="Warsaw")]), ("", [])]),
        (0.0, [("", [call("no_such_tool", city="Warsaw")]), ("I cannot.", [])]),
    ]


def synonyms(row):
    values = row["expected_synonym_values"]
    ask = call("get_synonym_value", synonym=row["expected_synonyms"][0])
    return [
        (1.0, [("", [ask]), ("", [call("extract_synonym_values", synonym_values=values)]), ("done", [])]),
        (0.0, [("", [call("extract_synonym_values", synonym_values=values[::-1])]), ("done", [])]),
        (0.0, [("", [call("extract_synonym_values", synonym_values=[])]), ("done", [])]),
        (None, [("", [call("extract_synonym_values", synonym_values="none")]), ("done", [])]),
        (0.0, [("", [ask]), ("done", [])]),
        (0.0, [(json.dumps(values), [])]),
    ]


def counter(row):
    missing = row["expected_count"] - row["initial_count"]
    one, rest = call("increment_counter", count=1), call("increment_counter", count=missing - 1)
    count = call("get_counter_value")
    return [
        (1.0, [("", [one]), ("", [rest]), ("", [count]), ("done", [])]),
        (1.0, [("Both at once.", [one, rest]), ("done", [])]),
        (0.0, [("", [one]), ("", [count]), ("done", [])]),
        (0.0, [("", [call("increment_counter", count="many")]), ("done", [])]),
        (0.0, [(str(row["expected_count"]), [])]),
    ]


def components(row):
    city = row["expected_call"]["arguments"]["city"]
    right = call("get_weather", city=city)
    return [
        (2.0, [("", [right]), ("", [])]),
        (2.0, [("", [right]), ("It is sunny.", [])]),
        (1.0, [("", [call("get_weather", city="Warsaw")]), ("", [])]),
        (0.0, [("", [call("get_weather", town=city)]), ("", [])]),
        (2.0, [("", [right, right]), ("", [])]),
        (1.0, [("", [call("no_such_tool")]), ("", [])]),
        (0.0, [(f"It is sunny in {city}.", [])]),
    ]


def choice(row):
    letter = row["expected_answer"]
    other = "A" if letter != "A" else "B"
    right, wrong = rf"\boxed{{{letter}}}", rf"\boxed{{{other}}}"
    return [
        (1.0, [(right, [])]),
        (1.0, [(f"<think>Not {wrong}?</think>It is {right}.", [])]),
        (0.0, [(f"<think>Not {right}?</think>It is {wrong}.", [])]),
        (0.0, [(f"<think>It is {right}.</think>", [])]),
        (0.0, [(f"{right} or {wrong}", [])]),
        (0.0, [("\\boxed{", [])]),
        (0.0, [("", [])]),
    ]


EXAMPLES = {
    "mcqa": choice,
    "example_single_tool_call": weather,
    "example_multi_step": synonyms,
    "example_session_state_mgmt": counter,
    "example_tool_call_multireward": components,
}


class Policy(JSONHandler):
    """An OpenAI endpoint that says the server's `turns`, one for each assistant message."""

    def answer(self, asked):
        turn = sum(message["role"] == "assistant" for message in asked["messages"])
        text, calls = self.server.turns[turn]
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        tool_calls = [
            {"id": f"call_{turn}_{i}", "type": "function", "function": function}
            for i, function in enumerate(functions)
        ]
        return completion({"content": text or None, "tool_calls": tool_calls})


@pytest.fixture
def policy():
    with json_server.serving(Policy) as server:
        yield server


def written(turn):
    """The turn as the policy writes it."""
    text, calls = turn
    bodies = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    return text + "".join(f"<tool_call>{body}</tool_call>" for body in bodies)


def by_ours(env, tokenizer, problem, turns):
    texts = [written(turn) for turn in turns]
    writer = Writer(tokenizer, ChatTemplate(tokenizer).end_id, texts, random.Random(0))
    score = playing.play_here(env, tokenizer, writer, problem)[0].score
    if score.cause == "raised" and "500" in score.error:
        return score.reward, None
    assert score.error is None
    return score.reward, score.notes["verified"]


def by_theirs(servers, policy, row, turns):
    """What NeMo Gym's simple agent makes of the row."""
    policy.turns = turns
    reply = httpx.post(f"{servers.agent_url}/run", json=row, timeout=60.0)
    if reply.status_code == 500:
        return 0.0, None
    answer = reply.raise_for_status().json()
    return answer["reward"], {k: v for k, v in answer.items() if k not in (*row, "response")}


@pytest.mark.parametrize("example", EXAMPLES)
def test_nemo_gyms_examples_score_as_by_its_own_agent(example, tmp_path, policy):
    tokenizer = make_tokenizer("qwen2_5", tmp_path / "tokenizer")
    policy_url = f"http://127.0.0.1:{policy.server_port}/v1"
    with serving(example, policy_url, tmp_path / "log") as servers:
        rows = [json.loads(line) for line in servers.rows.read_text().splitlines()]
        env = NeMoGym(url=servers.resources_url, path=str(servers.rows), num_eval=2, max_new_tokens=900)
        assert env.validate() == []
        problem = env.generate(3)
        row = rows[int(problem.id)]
        for reward, turns in EXAMPLES[example](row):
            ours = by_ours(env, tokenizer, problem, turns)
            assert ours == by_theirs(servers, policy, row, turns), turns
            assert ours[0] == reward or (reward is None and ours == (0.0, None)), turns
