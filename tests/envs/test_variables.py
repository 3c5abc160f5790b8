"""No key of this process reaches a program that an environment starts, by whatever way it starts it."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rl.envs.adapters.mcp import MCPEnv
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.episode import EpisodeRunner
from rl.envs.chat.testing import play
from rl.envs.variables import clean_environment, clean_variables
from rl.processes import LEASE
from rl.types import Problem
from tests.envs.chat.templates import make_tokenizer

KEYS = {
    "WANDB_API_KEY": "k3y",
    "HF_TOKEN": "k3y",
    "AWS_SECRET_ACCESS_KEY": "k3y",
    "OPENAI_API_KEY": "k3y",
    "JUDGE_API_KEY": "k3y",
    "DATABASE_URL": "postgres://me:k3y@host/x",
    "https_proxy": "http://me:k3y@proxy",
    "MY_PASSPHRASE": "k3y",
}
SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
VERIFIERS_0_4 = Path(sys.prefix, "verifiers-0.4")


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@dataclass(frozen=True)
class Shows(AgentEnv):
    command: tuple[str, ...] = (sys.executable, "-c", SHOW)

    def generate(self, seed):
        return Problem("1", "?")


def variables_of(env):
    runner = EpisodeRunner(env, (), Problem("1", "?"), 0)
    runner.act("http://policy", "episode-key")
    return json.loads(runner.episode.state["output"])


def test_an_agents_program_gets_its_episodes_key_and_no_other():
    seen = variables_of(Shows())
    assert "k3y" not in json.dumps({name: value for name, value in seen.items() if name in KEYS})
    assert (seen["OPENAI_API_KEY"], seen["OPENAI_BASE_URL"]) == ("episode-key", "http://policy")
    assert seen["PATH"] == os.environ["PATH"] and "k3y" not in json.dumps(seen)
    assert variables_of(Shows(variables=("HF_TOKEN",)))["HF_TOKEN"] == "k3y"


MCP_SERVER = """
import json, os
from mcp.server import MCPServer
server = MCPServer("shows")

@server.tool()
def show() -> str:
    "The variables."
    return json.dumps(dict(os.environ))

server.run()
"""


@dataclass(frozen=True)
class ShowsTools(MCPEnv):
    def generate(self, seed):
        return Problem("1", "?")


@pytest.mark.parametrize("named", [(), ("HF_TOKEN",)])
def test_an_mcp_servers_program_gets_what_programs_need_and_what_is_named(named, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    path = tmp_path / "server.py"
    path.write_text(MCP_SERVER)
    env = ShowsTools(server=(sys.executable, str(path)), variables=named)
    (tool,) = env.tools()
    episode = EpisodeRunner(env, (tool,), Problem("1", "?"), 0).episode
    seen = json.loads(asyncio.run(tool.run({}, episode)))
    assert seen["PYTHONHASHSEED"] == "7" and {name for name in KEYS if name in seen} == {*named}
    servers = [child for child in psutil.Process().children() if str(path) in child.cmdline()]
    for server in servers:  # in a run it ends with the episode's process
        server.kill()
        server.wait()
    assert servers


IMPORTS_MCP_FIRST = """
import sys

stderr, sys.stderr = sys.stderr, open(sys.argv[2], "w")
import mcp

sys.stderr.close()
sys.stderr = stderr
from tests.envs.test_variables import ShowsTools

print(len(ShowsTools(server=(sys.executable, sys.argv[1])).tools()))
"""


def test_an_mcp_servers_program_starts_whatever_stderr_was_when_mcp_was_imported(tmp_path):
    """mcp's own default for the program's stderr is sys.stderr of that moment, which may be closed since."""
    path = tmp_path / "server.py"
    path.write_text(MCP_SERVER)
    command = [sys.executable, "-c", IMPORTS_MCP_FIRST, str(path), str(tmp_path / "stderr")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr[-1000:]


def test_a_program_keeps_the_lease_by_which_its_host_finds_what_a_run_left(monkeypatch):
    monkeypatch.setenv(LEASE, "of-a-run")
    assert clean_variables()[LEASE] == "of-a-run"


def test_what_is_kept_is_listed_and_what_is_changed_comes_back(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    before = dict(os.environ)
    assert not KEYS.keys() & clean_variables().keys() and clean_variables()["http_proxy"]
    with clean_environment(("HF_TOKEN",)):
        shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True).stdout
        assert {name for name in KEYS if name in json.loads(shown)} == {"HF_TOKEN"}
        os.environ["NEW"] = "x"
    assert dict(os.environ) == before


TASKSET = """
import verifiers.v1 as vf

__all__ = ["Showing"]

class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def shows(self, trace, runtime) -> float:
        shown = await runtime.run(["env"], {})
        return 0.5 if "k3y" in shown.stdout else 0.25 if "EPISODE_API_KEY" in shown.stdout else 1.0

class Showing(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for i in range(4):
            yield Task(vf.TaskData(prompt=f"Say {i}."), self.config.task)
"""
PLAY = """
import sys
from pathlib import Path
from rl.envs.adapters.verifiers_v1 import VerifiersV1
from rl.errors import ConfigError
from tests.envs.chat.templates import make_tokenizer
from tests.envs.test_adapters import play

tokenizer = make_tokenizer("qwen2_5", Path(sys.argv[1]))
unset = VerifiersV1(environment="showing", num_eval=2)
print(unset.validate())
try:
    unset.prepare()
except ConfigError as error:
    print("refused:", error)
env = VerifiersV1(environment="showing", num_eval=2, runtime="subprocess")
print(env.validate())
score = play(tokenizer, env, env.generate(1), ["1"]).score
print(score.reward, score.error)
"""


ENVIRONMENT_V0 = """
import json, os, subprocess, sys
import verifiers as vf
from datasets import Dataset

def shows(completion):
    shown = subprocess.run(["env"], capture_output=True, text=True).stdout
    kept = sorted(name for name in KEYS if name in os.environ)
    return 0.5 if "MY_PASSPHRASE" in shown or kept != json.loads(os.environ["LC_EXPECTED"]) else 1.0

def load_environment():
    rows = Dataset.from_list([{"question": f"Say {i}.", "answer": str(i)} for i in range(4)])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[shows]))
""".replace("KEYS", repr(sorted(KEYS)))


@pytest.mark.slow  # it imports verifiers
@pytest.mark.parametrize("named", [(), ("HF_TOKEN",)])
def test_verifiers_v0_runs_what_it_runs_without_keys(named, tmp_path, monkeypatch):
    pytest.importorskip("verifiers", reason="needs make environments")
    from rl.envs.adapters.verifiers import Verifiers

    name = f"showing_{len(named)}"
    (tmp_path / f"{name}.py").write_text(ENVIRONMENT_V0)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LC_EXPECTED", json.dumps([*named]))
    env = Verifiers(environment=name, num_eval=2, variables=named)
    assert env.validate() == []
    tokenizer = make_tokenizer("qwen2_5", tmp_path / "tokenizer")
    score = play(env, tokenizer, ["1"], env.generate(1)).score
    assert (score.reward, score.error) == (1.0, None)


@pytest.mark.slow  # a Python of its own, which imports another version of verifiers
def test_verifiers_runs_programs_where_it_is_told_to_and_without_keys(tmp_path):
    (tmp_path / "showing.py").write_text(TASKSET)
    path = os.pathsep.join([str(VERIFIERS_0_4), str(tmp_path), os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-c", PLAY, str(tmp_path / "tokenizer")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    refused, prepared, accepted, score = done.stdout.splitlines()[-4:]
    assert "env.runtime is empty" in refused and prepared.startswith("refused: env.runtime is empty")
    assert accepted == "[]" and score == "1.0 None", done.stderr[-2000:]
