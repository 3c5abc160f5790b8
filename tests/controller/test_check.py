"""`rl check`: each recipe of configs/, and broken ones, of which it says what is wrong and what to do."""

import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl.config.recipes import load_recipe, recipe_names
from rl.config.rehearsal import rehearse
from rl.envs.base import Env
from tests.config import test_bad_table
from tests.config.test_bad_table import Outcome, Place, what_is_there, without_network_or_new_files

_HEADER = """
import asyncio
import functools
import random
import string
import sys
import time
import typing
from dataclasses import dataclass, replace
from configs.quickstart import quickstart
from rl.config import RewardConfig, RunConfig, WarmupConfig
from rl.envs.base import Env
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.tools import tool
from rl.models.sources import TinyQwen3
from rl.types import Problem, Rewards
"""
_GENERATE = """
    def generate(self, seed):
        return Problem(str(seed), f"{seed % 1000}", "7")
"""
_REWARD = """
    def reward(self, problem, response, stop):
        return 0.5
"""
_SCORE = """
    def reward_episode(self, episode):
        return 0.5
"""
_SCORE_TWICE = _GENERATE + _SCORE


@dataclass(frozen=True)
class Broken:
    members: str
    words: tuple[str, ...]
    base: str = "Env"
    before: str = ""  # the class
    changes: str = ""  # of the config


def broken(members: str, *words: str, **more: str) -> Broken:
    return Broken(members, words, **more)


BEFORE_PROCESSES = {
    "a field without a type": broken(f"    num_eval = 2\n{_GENERATE}{_REWARD}", "E sets num_eval without a type", "write num_eval: int = 2"),
    "reward with two parameters": broken(f"{_GENERATE}\n    def reward(self, problem, response): return 1.0\n", "E.reward (mine.py line", "cannot be called with (problem, response, stop)", "write def reward(self, problem, response, stop)"),
    "reward without self": broken(f"{_GENERATE}\n    def reward(problem, response, stop): return 1.0\n", "E.reward", "write def reward(self,"),
    "an async reward": broken(f"{_GENERATE}\n    async def reward(self, problem, response, stop): return 1.0\n", "E.reward", "is async, which nothing awaits"),
    "a reward that yields": broken(f"{_GENERATE}\n    def reward(self, problem, response, stop): yield 1.0\n", "yields, so that it returns nothing; use return"),
    "a reward that is a number": broken(f"{_GENERATE}\n    reward = 1.0\n", "E.reward is 1.0, which cannot be called"),
    "step without an episode": broken(f"{_SCORE_TWICE}\n    def step(self): return None\n", "E.step", "cannot be called with (episode)", base="ChatEnv"),
    "another problem each time": broken(f"    def generate(self, seed): return Problem(str(seed), str(random.random()), '7')\n{_REWARD}", "makes another problem each time from one seed", "random.Random(seed)"),
    "messages without a role": broken(f"    def generate(self, seed): return Problem(str(seed), messages=({{'content': str(seed)}},))\n{_REWARD}", "a message is an object with a role", "{'role': 'user', 'content': '...'}"),
    "messages without chat": broken(f"    def generate(self, seed): return Problem(str(seed), messages=({{'role': 'user', 'content': str(seed)}},))\n{_REWARD}", "have messages, which need env.chat=True; set it"),
    "half of a character": broken(f"    def generate(self, seed): return Problem(str(seed), f'{{seed}}\\ud800')\n{_REWARD}", "half of a character (a lone surrogate"),
    "a set in metadata": broken(f"    def generate(self, seed): return Problem(str(seed), str(seed), metadata={{'a': {{'b', 'c'}}}})\n{_REWARD}", "a set, whose order differs between processes; use a sorted list"),
    "a name that stays behind": broken(f"{_GENERATE}\n    def reward(self, problem, response, stop): return float(Number(1))\n", "uses Number of mine.py, which other processes cannot import; move it into a module beside", before="Number = typing.NewType('Number', int)\n"),
    "a tool without a docstring": broken(f"{_SCORE_TWICE}\n    @tool\n    def look(self, word: str) -> str: return word\n", "the tool look has no docstring", base="ChatEnv"),
    "a tool without a type": broken(f"{_SCORE_TWICE}\n    @tool\n    def look(self, word) -> str:\n        'Look.'\n        return word\n", "the tool look has no type hint for word", base="ChatEnv"),
    "a tool of positions": broken(f"{_SCORE_TWICE}\n    @tool\n    def look(self, word: str, /) -> str:\n        'Look.'\n        return word\n", "the tool look takes word: str, which cannot be called by name", base="ChatEnv"),
    "a tool of any number": broken(f"{_SCORE_TWICE}\n    @tool\n    def look(self, *words: str) -> str:\n        'Look.'\n        return words[0]\n", "the tool look takes *words", base="ChatEnv"),
    "no agent": broken(_SCORE_TWICE, "E has no agent(self, episode, base_url, api_key), and no command", base="AgentEnv"),
    "an agent's program that is none": broken(f"    command: tuple[str, ...] = ('agent/python', 'x')\n{_SCORE_TWICE}", "env.command begins with 'agent/python', which is no program here", base="AgentEnv"),
    "an agent with one parameter": broken(f"{_SCORE_TWICE}\n    def agent(self, episode): pass\n", "E.agent", "write def agent(self, episode, base_url, api_key)", base="AgentEnv"),
}  # fmt: skip
"""Found without a process."""

IN_PROCESSES = {
    "another problem in another process": broken(f"    def generate(self, seed): return Problem(str(seed), str(hash(str(seed))), '7')\n{_REWARD}", "makes another problem in another process", "sort what comes from a set"),
    "no reward returned": broken(f"{_GENERATE}\n    def reward(self, problem, response, stop): pass\n", "the reward function returned None; return a number"),
    "a reward that is a string": broken(f"{_GENERATE}\n    def reward(self, problem, response, stop): return 'good'\n", "the reward function returned 'good'; return a number"),
    "a reward that always raises": broken(f"{_GENERATE}\n    def reward(self, problem, response, stop): return {{}}['x']\n", "fails where the policy says '7': KeyError: 'x' (mine.py line"),
    "a reward that hangs": broken(f"{_GENERATE}\n    def reward(self, problem, response, stop): time.sleep(60)\n", "took over 0.1 s (reward.limit_seconds)", changes="reward=RewardConfig(limit_seconds=0.1)"),
    "rewards of turns that nothing reads": broken(f"{_GENERATE}\n    def reward(self, problem, response, stop): return Rewards(turns=(1.0,))\n", "rewards each turn, or token, which advantages GroupMean does not read"),
    "rewards for too many turns": broken(f"{_GENERATE}\n    def reward(self, problem, response, stop): return Rewards(turns=(1.0, 2.0))\n", "gave 2 rewards for 1 turns"),
    "prepare that raises": broken(f"{_GENERATE}{_REWARD}\n    def prepare(self): raise OSError('no server')\n", "prepare() of the environment failed: OSError: no server"),
    "a step that returns a number": broken(f"{_SCORE_TWICE}\n    def step(self, episode): return 3\n", "step() returned 3; return a string, a list of messages, or None", base="ChatEnv"),
    "an agent that fails": broken(f"    command: tuple[str, ...] = (sys.executable, 'nowhere.py')\n{_SCORE_TWICE}", "the agent ended with code 2", "nowhere.py", base="AgentEnv"),
}  # fmt: skip


def write(place: Place, case: Broken) -> str:
    body = (
        f"{_HEADER}\n{case.before}\n@dataclass(frozen=True)\nclass E({case.base}):\n"
        f"{case.members}\n\n"
        f"def f() -> RunConfig:\n"
        f"    return replace(quickstart(), model=TinyQwen3(alphabet=string.printable), warmup=WarmupConfig(), "
        f"env=E(num_eval=2, max_new_tokens=8), {case.changes})\n"
    )
    return str(place.write("mine.py", body))


def outcome(arguments: list[str]) -> Outcome:
    return test_bad_table.outcome(arguments)


@pytest.fixture(scope="module")
def quiet():
    with without_network_or_new_files():
        yield


@pytest.mark.parametrize("name", [*BEFORE_PROCESSES, *IN_PROCESSES])
def test_a_broken_recipe_is_told_what_is_wrong(name, quiet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = {**BEFORE_PROCESSES, **IN_PROCESSES}[name]
    path = write(Place(tmp_path, tmp_path), case)
    before = what_is_there(tmp_path)
    got = outcome(["check", path])
    text = "\n".join(got.lines)
    assert got.code == 2 and got.out == "" and len(got.lines) == 1, text
    for words in case.words:
        assert words in text
    assert "Traceback" not in text
    assert what_is_there(tmp_path) == before


def test_a_sound_recipe_with_a_cache_is_shown_at_work(quiet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cached = "@functools.cache\ndef grade(text):\n    return grade('7') / 2 if text == 'x' else 1.0\n"
    case = broken(
        f"{_GENERATE}\n    def reward(self, problem, response, stop): return grade(response)\n", before=cached
    )
    got = outcome(["check", write(Place(tmp_path, tmp_path), case)])
    assert (got.code, got.lines) == (0, [])
    assert "f: E, 2 held-out problems" in got.out
    assert "to '7': reward 1" in got.out and "to 'x': reward 0.5" in got.out
    assert "f is sound; start it with: rl train" in got.out


def test_a_reward_that_raises_at_one_answer_is_a_note(quiet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = broken(f"{_GENERATE}\n    def reward(self, problem, response, stop): return float(response)\n")
    got = outcome(["check", write(Place(tmp_path, tmp_path), case)])
    assert got.code == 0
    assert "to 'x': fails: ValueError: could not convert string to float" in got.out


def test_tools_are_called_and_agents_answered(quiet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    look = "\n    @tool\n    def look(self, word: str, count: int) -> str:\n        'Look.'\n        return word * count\n"
    case = broken(f"{_SCORE_TWICE}{look}", base="ChatEnv")
    got = outcome(["check", write(Place(tmp_path, tmp_path), case)])
    assert (got.code, got.lines) == (0, [])
    assert "to '[look(word='x',count=1)]' then '7': reward 0.5" in got.out.replace('"', "'")


def test_a_run_is_checked_the_same_way(quiet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(Place(tmp_path, tmp_path), IN_PROCESSES["no reward returned"])
    got = outcome(["train", path])
    assert got.code == 2 and "returned None; return a number" in got.lines[0]
    assert not (tmp_path / "runs").exists()


_GSM8K = "hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet could not be fetched"
_MISSING = {
    **dict.fromkeys(("llama_3_1_8b_lora", "qwen3_0_6b", "qwen3_1_7b", "qwen3_30b_a3b_lora"), _GSM8K),
    "verifiers_v1": "verifiers 0.4 is missing; see docs/environments.md for how to install it",
}
_IN_A_MOMENT = ("quickstart", "calculator", "code", "distillation")
"""Of each kind of environment one; the others import a library, or have the same environment."""


@pytest.mark.parametrize(
    "name",
    [name if name in _IN_A_MOMENT else pytest.param(name, marks=pytest.mark.slow) for name in recipe_names()],
)
def test_each_recipe_is_sound(name, quiet):
    """But for what no machine without a network has: GSM8K, and a second version of verifiers."""
    got = outcome(["check", name])
    if name in _MISSING:
        assert got.code == 2 and len(got.lines) == 1 and _MISSING[name] in got.lines[0], got
    else:
        assert got.code == 0 and f"\n{name} is sound" in got.out, got


@pytest.mark.slow  # each in a process of its own
@pytest.mark.parametrize("name", [*recipe_names(), *BEFORE_PROCESSES, *IN_PROCESSES])
def test_a_check_takes_five_seconds(name, quiet, tmp_path):
    """Of a processor, without a model. A library of the environment's is loaded in three processes beside."""
    cases = BEFORE_PROCESSES | IN_PROCESSES
    recipe = write(Place(tmp_path, tmp_path), cases[name]) if name in cases else name
    limit = 5 + 3 * seconds_of(["-c", _LOADS[name]], tmp_path) if name in _LOADS else 5
    seconds = seconds_of(["-m", "rl.cli", "check", recipe], tmp_path)
    assert seconds < limit  # holds: clock, five were asked for


_LOADS = {
    "smollm2": "import reasoning_gym",
    "verifiers_v0": "from rl.envs.adapters.calculator_v0 import load_environment as load; load()",
}
"""What of a recipe's environment is no code of this project."""


def seconds_of(arguments: list[str], directory: Path) -> float:
    """Of a processor, its own and of what it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))}
    subprocess.run([sys.executable, *arguments], cwd=directory, env=paths, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_prompts_are_looked_at_also_where_this_machine_lacks_something(quiet):
    """And what is taught: on a laptop without the GPU that the recipe needs, as the cluster would refuse them."""
    lacks = ["--trainer.compile", "True", "--dtype", "bfloat16"]
    assert "this machine cannot run it" in outcome(["check", "quickstart", *lacks]).out
    got = outcome(
        ["check", "quickstart", *lacks, "--max_seq_len", "12", "--trainer.micro_batch_tokens", "64"]
    )
    assert got.code == 2 and "and a sequence has 12" in got.lines[0], got


def test_rehearsing_is_a_function_of_config_and_tokenizer():
    _, config = load_recipe("quickstart")
    rehearsal = rehearse(config, config.model.tokenizer())
    assert rehearsal.problems == [] and len(rehearsal.notes) == 3
    assert isinstance(config.env, Env)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--placement by_turns --max_offpolicy_steps 1", "placement=by_turns"),
        ("--trainer.micro_batch_tokens 8", "micro_batch_tokens=8"),
    ],
)
def test_settings_that_no_machine_can_run_are_refused(quiet, flags, words):
    got = outcome(["check", "quickstart", *flags.split()])
    assert got.code == 2 and words in got.lines[0] and got.out == "", got


def test_what_this_machine_lacks_is_only_named(quiet):
    got = outcome(["check", "quickstart", "--trainer.compile", "True"])
    assert got.code == 0, got
    assert "this machine cannot run it: trainer.compile=True needs a GPU" in got.out
    assert got.out.endswith("quickstart is sound\n")


def test_a_recipe_that_goes_on_is_checked_as_it_would_go_on(quiet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert outcome(["check", "quickstart", "--resume", "latest", "--run_dir", "mine"]).code == 0
    got = outcome(["check", "quickstart", "--resume", "latest"])
    assert got.code == 2 and got.lines == [
        "rl: error: resume='latest': a run of quickstart in runs/ has no complete checkpoint; leave it out"
    ]


_SPEAKS = """
    def start(self, episode): return "Be quick."
    def demonstration(self, problem, seed): return "7"
    def preference(self, problem, seed): return "7", "x"
"""
_SAYS_IT = """
    def chat_demonstration(self, problem, seed):
        return [{"role": "user", "content": "Be quick."}, {"role": "assistant", "content": "7"}]
"""


@pytest.mark.parametrize(
    ("more", "changes", "flags", "is_refused"),
    [
        ("", "", (), False),
        ("", "", ("--warmup.steps", "2"), True),
        (_SAYS_IT, "", ("--warmup.steps", "2"), False),
        (_SAYS_IT, "data='preferences', loss=DPO()", (), True),
    ],
)
def test_what_is_taught_stands_behind_the_words_with_which_an_episode_begins(
    more, changes, flags, is_refused, quiet, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    members = f"{_SCORE_TWICE}{_SPEAKS}{more}"
    case = broken(members, base="ChatEnv", before="from rl.loss.dpo import DPO\n", changes=changes)
    got = outcome(["check", write(Place(tmp_path, tmp_path), case), *flags])
    words = "its episodes begin with more than what it teaches stands behind"
    assert (got.code == 2 and words in got.lines[0]) if is_refused else got.code == 0, got
