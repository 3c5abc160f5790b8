"""The README's Python runs."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

from rl.config import RewardConfig, RunConfig
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.testing import play
from rl.types import Problem, StopReason
from tests.envs.chat.templates import make_tokenizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_recipe_is_a_recipe_and_the_reward_rewards():
    names: dict = {"__name__": "readme"}
    for block in BLOCKS:
        exec(block, names)
    assert isinstance(names["arithmetic"](), RunConfig)
    assert isinstance(names["double"](), RunConfig)
    env = names["Double"](largest=5)
    problem = env.generate(3)
    assert env.reward(problem, f"It is {problem.answer}", StopReason.STOP) == 1
    assert env.reward(problem, "It is x", StopReason.STOP) == 0


def test_the_shop_and_the_docs_game_are_played(tmp_path):
    tokenizer = make_tokenizer("qwen2_5", tmp_path)
    names: dict = {"__name__": "readme"}
    for block in BLOCKS:
        exec(block, names)
    env = names["Shop"]()
    assert isinstance(names["shop"](), RunConfig) and len(env.eval_problems()) == 256
    problem = env.generate(5)
    fruit = next(fruit for fruit in problem.metadata["prices"] if fruit in problem.question)
    call = f'<tool_call>{{"name": "price", "arguments": {{"fruit": "{fruit}"}}}}</tool_call>'
    played = play(env, tokenizer, [call, problem.answer], problem)
    assert played.score.reward == 1 and "The price of one fruit." in played.text
    demonstrated = docs_block("prices = problem.metadata")["chat_demonstration"]
    for problem in map(env.generate, range(9)):  # what is taught is right
        call, result, answer = demonstrated(env, problem, 0)
        (function,) = (call["function"] for call in call["tool_calls"])
        fruit = function["arguments"]["fruit"]
        assert fruit in problem.question and result["content"] == str(problem.metadata["prices"][fruit])
        assert answer["content"] == problem.answer
    docs = (Path(__file__).parent.parent / "docs" / "environments.md").read_text()
    exec(
        next(
            block for block in re.findall(r"```python\n(.*?)```", docs, re.DOTALL) if "GuessNumber" in block
        ),
        names,
    )
    game = names["GuessNumber"]()
    problem = game.train_problem(1)
    number = int(problem.answer)
    played = play(game, tokenizer, [str(number - 1), str(number + 1), str(number)], problem)
    assert [m["content"] for m in played.rollout.messages[2::2]] == ["Higher.", "Lower."]
    assert played.score.reward == 1


DOCS = (Path(__file__).parent.parent / "docs" / "environments.md").read_text()


def docs_block(word: str) -> dict:
    block = next(b for b in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL) if word in b)
    names: dict = {"__name__": "docs", "Problem": Problem}
    exec(block, names)
    return names


def test_the_docs_agent_is_played(tmp_path, monkeypatch, capsys):
    names = docs_block("class ShopAgent")
    assert isinstance(names["shop_agent"](), RunConfig) and len(names["ShopAgent"]().eval_problems()) == 64
    problem = names["Problem"]("1", "What do 3 pieces of pear cost?", "21", {"prices": {"pear": 7}})
    call = '<tool_call>{"name": "price", "arguments": {"fruit": "pear"}}</tool_call>'
    wrong = call.replace("pear", "apple")
    tokenizer = make_tokenizer("qwen2_5", tmp_path)
    played = play(names["ShopAgent"](), tokenizer, [call, wrong, "21"], problem)
    assert played.score.reward == 1
    results = [m["content"] for m in played.rollout.messages if m["role"] == "tool"]
    assert results == ["7", "Error: KeyError('apple')"]
    monkeypatch.setitem(sys.modules, "shop_agent", SimpleNamespace(**names))
    monkeypatch.setattr("rl.models.tokenizer.HFTokenizer", lambda path: tokenizer)
    docs_block("play(ShopAgent()")
    text, score = capsys.readouterr().out.split("Score(")
    assert "What do 3 pieces of pear cost?" in text and "reward=1.0" in score


def test_the_docs_tiny_task_is_checked():
    from rl.config.env_rules import check_env

    config = docs_block("class Reverse")["reverse"]()
    assert isinstance(config, RunConfig) and check_env(config) == []


def test_the_docs_lookup_is_played(tmp_path):
    from rl.config.env_rules import check_env

    names = docs_block("class Lookup")
    config = names["lookup"]()
    assert isinstance(config, RunConfig) and check_env(config) == []
    problem = config.env.generate(1)
    call = f"[get(key='{problem.question}')]"
    played = play(config.env, config.model.tokenizer(), [call, problem.answer], problem)
    assert played.score.turn_components == ({"called": 0.3}, {"right": 0.7})
    played = play(config.env, config.model.tokenizer(), [problem.answer], problem)
    assert played.score.turn_components == ({"called": 0},)


def test_the_docs_limits_are_the_defaults():
    text = (ROOT / "docs/environments.md").read_text()
    (limits,) = re.findall(r"^Limits, all settings.*\n.*$", text, re.MULTILINE)
    named = {name: float(value) for name, value in re.findall(r"`([a-z_.]+)` \(([\d.]+)", limits)}
    chat = {name: value for name, value in named.items() if "." not in name}
    assert chat == {name: getattr(ChatEnv, name) for name in chat} and len(chat) == 6
    assert named["reward.limit_seconds"] == RewardConfig().limit_seconds


def test_the_docs_judge_is_a_recipe():
    from rl.config.env_rules import check_env
    from rl.config.judge_rules import check_judge

    config = docs_block("class Sentences")["sentences"]()
    assert isinstance(config, RunConfig) and check_env(config) == []
    assert not [line for line in check_judge(config) if "path/to/model" not in line]


def test_the_docs_parts_of_algorithms_are_there():
    docs = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", docs, re.DOTALL)
    exec(block, {})
