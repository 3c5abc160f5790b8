"""Environments that verifiers has, unmodified: what they score by themselves and through our adapter is equal."""

import asyncio
import random

import pytest

from rl.envs.chat.template import ChatTemplate
from tests.envs.chat import playing
from tests.envs.chat.templates import make_tokenizer
from tests.envs.chat.test_session import Writer
from tests.envs.conversations import Policy, write_words
from tests.json_server import serving

pytestmark = pytest.mark.slow  # they import verifiers

ANSWERS = [["{answer}"], ["<answer>{answer}</answer>"], ["It is <answer>{answer} or so</answer>"], ["<answer>no</answer>"]]  # fmt: skip
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
ENVIRONMENTS = {
    "chains": ('import verifiers as vf\ndef load_environment(): return vf.ReasoningGymEnv(gym="chain_sum", num_train_examples=8, num_eval_examples=2)\n', ANSWERS),
    "letters": ('import verifiers as vf\ndef load_environment(): return vf.ReasoningGymEnv(gym="letter_counting", num_train_examples=8, num_eval_examples=2)\n', ANSWERS),
    "calculator": (
        "from rl.envs.adapters.calculator_v0 import load_environment as load\ndef load_environment(): return load(8)\n",
        [
            ["{answer}"],
            [CALL, "{answer}"],
            [CALL, "5"],
            ["I add." + CALL + CALL.replace("add", "mul"), "{answer}"],
            [CALL.replace('"a"', '"c"'), "{answer}"],  # an argument that the tool has not
            [CALL.replace("2", '"two"'), "no"],
        ],
    ),
    "wordle": (
        'import verifiers as vf\n'
        'def right(parser, completion, answer): return float(parser.parse_answer(completion) == f"[{answer}]")\n'
        'def partly(completion): return sum(m["content"].count("G") for m in completion if m["role"] == "user")\n'
        'def load_environment():\n'
        '    parser = vf.XMLParser(fields=["guess"], answer_field="guess")\n'
        '    env = vf.TextArenaEnv(num_train_examples=8, num_eval_examples=2, parser=parser)\n'
        '    env.rubric = vf.Rubric(funcs=[right, partly], parser=parser)\n'
        '    return env\n',
        [
            ["<guess>[{answer}]</guess>"],
            ["<guess>[slate]</guess>", "<guess>[{answer}]</guess>"],
            ["<guess>[slate]</guess>", "<guess>[slate]</guess>", "no"],
            ["<guess>[cranes]</guess>", "no"],
        ],
    ),
}  # fmt: skip


@pytest.fixture
def server():
    with serving(Policy) as made:
        yield made


def by_itself(env, row, texts, server):
    """The reward of verifiers' own run of a row."""
    import verifiers as vf

    server.texts = texts
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

    code, conversations = ENVIRONMENTS[name]
    (tmp_path / f"{name}.py").write_text(code)
    write_words(tmp_path, ["crane", "slate"])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NO_KEY", "none")
    monkeypatch.syspath_prepend(str(tmp_path))
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    tokenizer = make_tokenizer("qwen2_5", tmp_path / "tokenizer")
    env = Verifiers(environment=name, num_eval=2)
    assert env.validate() == []
    problem = env.generate(3)
    made = vf.load_environment(name)  # a ReasoningGymEnv's rows have an index in place of their answer
    row = int(problem.id.split()[1])
    answer = made.rg_dataset[row]["answer"] if hasattr(made, "rg_dataset") else problem.answer
    ours, theirs = [], []
    for conversation in conversations:
        texts = [text.replace("{answer}", answer) for text in conversation]
        policy = Writer(tokenizer, ChatTemplate(tokenizer).end_id, texts + texts[-1:] * 9, random.Random(0))
        score = playing.play(env, tokenizer, policy, problem)[0].score
        assert score.error is None
        ours.append(score.reward)
        theirs.append(by_itself(made, row, texts, server))
    assert ours == theirs and max(ours) >= 1 and len(set(ours)) > 1
