"""Environments that verifiers has, unmodified: what they score by themselves and through our adapter is equal."""

import asyncio
import random

import pytest

from rl.envs.chat.template import ChatTemplate
from tests.envs.chat import playing
from tests.envs.chat.templates import make_tokenizer
from tests.envs.chat.test_session import Writer
from tests.json_server import JSONHandler, completion, serving

pytestmark = pytest.mark.slow  # they import verifiers

ENVIRONMENTS = {
    "chains": 'import verifiers as vf\ndef load_environment(): return vf.ReasoningGymEnv(gym="chain_sum", num_train_examples=8, num_eval_examples=2)\n',
    "letters": 'import verifiers as vf\ndef load_environment(): return vf.ReasoningGymEnv(gym="letter_counting", num_train_examples=8, num_eval_examples=2)\n',
    "calculator": "from rl.envs.adapters.calculator_v0 import load_environment as load\ndef load_environment(): return load(8)\n",
}  # fmt: skip


class Policy(JSONHandler):
    """An OpenAI endpoint that says what the server's `text` is."""

    def answer(self, asked):
        return completion({"content": self.server.text})


@pytest.fixture
def server():
    with serving(Policy) as made:
        yield made


def by_itself(env, row, text, server):
    """The reward of verifiers' own run of a row."""
    import verifiers as vf

    server.text = text
    client = vf.ClientConfig(
        client_type="openai_chat_completions",
        api_base_url=f"http://127.0.0.1:{server.server_port}",
        api_key_var="NO_KEY",
    )
    ran = asyncio.run(env.run_rollout(vf.RolloutInput(**env.get_dataset()[row]), client, "m", {}))
    assert not ran.get("error")
    return ran["reward"]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_verifiers_environments_score_as_by_themselves(name, tmp_path, monkeypatch, server):
    import verifiers as vf

    from rl.envs.adapters.verifiers import Verifiers

    (tmp_path / f"{name}.py").write_text(ENVIRONMENTS[name])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NO_KEY", "none")
    monkeypatch.syspath_prepend(str(tmp_path))
    tokenizer = make_tokenizer("qwen2_5", tmp_path / "tokenizer")
    env = Verifiers(environment=name, num_eval=2)
    assert env.validate() == []
    problem = env.generate(3)
    made = vf.load_environment(name)  # a ReasoningGymEnv's rows have an index in place of their answer
    row = int(problem.id.split()[1])
    answer = made.rg_dataset[row]["answer"] if hasattr(made, "rg_dataset") else problem.answer
    texts = [
        answer,
        f"<answer>{answer}</answer>",
        f"It is <answer>{answer} or so</answer>",
        "<answer>no</answer>",
    ]
    ours, theirs = [], []
    for text in texts:
        policy = Writer(tokenizer, ChatTemplate(tokenizer).end_id, [text], random.Random(0))
        score = playing.play(env, tokenizer, policy, problem)[0].score
        assert score.error is None
        ours.append(score.reward)
        theirs.append(by_itself(made, row, text, server))
    assert ours == theirs and max(ours) >= 1 and len(set(ours)) > 1
