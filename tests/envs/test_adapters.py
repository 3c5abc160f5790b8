"""Other libraries' environments, unmodified, with a policy that says given texts."""

import random
import sys
from dataclasses import dataclass

import pytest

from rl.envs.adapters.mcp import MCPEnv
from rl.envs.adapters.trl import TRLTask
from rl.envs.chat.template import ChatTemplate
from rl.errors import ConfigError
from rl.types import Problem
from tests.envs.chat import playing
from tests.envs.chat.templates import make_tokenizer
from tests.envs.chat.test_session import Writer


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
    again = play(tokenizer, env, env.train_problem(3), [f"I guess [{i}]" for i in range(1, 21)])
    assert again.messages == rollout.messages and again.score == rollout.score


@pytest.mark.slow
def test_skyrl_gym(tokenizer, tmp_path):
    from rl.envs.adapters.skyrl_gym import SkyRLGym
    from rl.envs.question_file import QuestionFile

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"question": "2 + {i}?", "answer": "{2 + i}"}}\n' for i in range(9)))
    env = SkyRLGym(
        questions=QuestionFile(path=str(path), match="exact", num_eval=4), turn_seconds=60.0, max_turns=3
    )
    assert env.validate() == []
    problem = env.eval_problems()[2]
    rollout = play(tokenizer, env, problem, ["#### 5", "#### 4", "#### 4"])
    assert rollout.score.error is None and rollout.counts["turns"] >= 2
    assert rollout.score.parts.turns[0] < 1 and sum(rollout.score.parts.turns) >= 1


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


VERIFIERS_ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset

def double(number: int) -> int:
    "Twice a number."
    return 2 * number

def right(completion, answer, **rest):
    return float(completion[-1]["content"] == answer)

def load_environment(rows: int = 8):
    data = {"question": [f"Twice {i}?" for i in range(rows)], "answer": [str(2 * i) for i in range(rows)]}
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
