"""Environments of other libraries, unmodified: each trains two steps with real processes.

What differs between them is the environment's, so that one trains SmolLM2, and the others a tiny model that ends
about half of its turns.
"""

# holds: meaning, tokens that were not sampled move logprobs by nats

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from rl.observability.json_lines import read_records
from tests.integration.runs import read_metrics, rl
from tests.json_server import JSONHandler, completion, serving
from tests.ports import free_port

pytestmark = pytest.mark.slow

RECIPE = """
import string
from dataclasses import dataclass, replace

from configs.smollm2 import smollm2
from rl.config import GeneratorConfig, RewardConfig, TrainerConfig, WarmupConfig
from rl.loss.entropy import EntropyBonus
from rl.models.sources import ModelDir, TinyQwen3
from rl.types import Problem

SMALL = dict(max_new_tokens=64, num_eval=2, max_turns=3, turn_seconds=60.0)
SMOLLM2 = ModelDir("models/smollm2-135m-instruct")


def recipe(env, model=TinyQwen3(alphabet=string.printable, max_length=2048)):
    return replace(
        smollm2(), env=env, model=model, dtype="float32", steps=2, prompts_per_step=2, group_size=4, minibatches=1,
        warmup=WarmupConfig(), resampling_rounds=0, eval_every=2, entropy=EntropyBonus(), trainer=TrainerConfig(micro_batch_tokens=1024), max_seq_len=1024,
        reward=RewardConfig(limit_seconds=60.0), generator=GeneratorConfig(kv_cache_gib=0.5, max_num_seqs=16),
    )
"""

ENVIRONMENTS = {
    "TextArena": """
from rl.envs.adapters.textarena import TextArena
def train(): return recipe(TextArena(options=(("max_turns", 2),), **SMALL), SMOLLM2)
""",
    "SkyRL-Gym": """
from rl.envs.adapters.skyrl_gym import SkyRLGym
from rl.envs.question_file import QuestionFile
def train():
    questions = QuestionFile(path=HERE + "/rows.jsonl", match="exact")
    return recipe(SkyRLGym(questions=questions, **SMALL))
""",
    "MCP": """
from rl.envs.adapters.mcp import MCPEnv
@dataclass(frozen=True)
class Notes(MCPEnv):
    max_memory_gib: float = 4.0
    def generate(self, seed): return Problem(str(seed), f"Note {seed % 1000} with the tool.")
    def reward_episode(self, episode): return float(len(episode.response) % 2)
def train():
    import sys
    return recipe(Notes(server=(sys.executable, HERE + "/server.py"), **SMALL))
""",
    "OpenEnv": """
from rl.envs.adapters.openenv import OpenEnv
def train():
    env = OpenEnv(url="http://127.0.0.1:PORT", action="message", observation="echoed_message",
                  question="Say something long.", **SMALL)
    return recipe(env)
""",
    "a judge": """
from rl.configs.judge import OneSentence
from rl.envs.judge import Judge
def train():
    return recipe(OneSentence(judge=Judge(base_url="http://127.0.0.1:PORT/v1", model="judge"), **SMALL))
""",
    "a judge of the run's own": """
from rl.config import JudgeConfig
from rl.envs.chat.env import ChatEnv
from rl.envs.judge import Judge
@dataclass(frozen=True)
class Judged(ChatEnv):
    judge: Judge = Judge(seconds=200.0)  # its vLLM has the cores of two workers' tests beside it
    def generate(self, seed): return Problem(str(seed), f"Name {seed % 1000} colours.")
    def reward_episode(self, episode):
        # SmolLM2 replies in this form, asked for 1 or 2, only where vLLM holds it to the schema.
        preference = self.judge.prefers_first("Name colours.", episode.response[:100], "Red and blue.")
        episode.notes["judge"] = preference
        return preference
def train():
    judge = JudgeConfig(model=SMOLLM2, max_tokens=512, kv_cache_gib=0.25)
    return replace(recipe(Judged(**SMALL)), judge=judge, reward=RewardConfig(limit_seconds=240.0))
""",
    "verifiers v0": """
from rl.envs.adapters.verifiers import Verifiers
def train(): return recipe(Verifiers(environment="doubling", options=(("rows", 12),), **SMALL))
""",
    "verifiers v1": """
from rl.envs.adapters.verifiers_v1 import VerifiersV1
def train(): return recipe(VerifiersV1(environment="doubling_v1", options=(("taskset.rows", 12),), runtime="subprocess", **SMALL))
""",
}
ENVIRONMENTS["an agent in a virtual environment of its own"] = """
from rl.envs.chat.agent import AgentEnv
@dataclass(frozen=True)
class Asking(AgentEnv):
    def generate(self, seed): return Problem(str(seed), f"Name {seed % 1000} colours.")
    def reward_episode(self, episode): return float(len(episode.state["output"]) % 2)
def train(): return recipe(Asking(command=(HERE + "/agent/bin/python", HERE + "/agent.py"), **SMALL))
"""

ANSWERING = ("TextArena", "OpenEnv", "an agent in a virtual environment of its own")
"""Those that say something to a turn without a call, which ends the others' episodes."""

DOUBLING_V0 = """
import verifiers as vf
from datasets import Dataset

def double(number: int) -> int:
    "Twice a number."
    return 2 * number

def even(completion, **rest):
    return float(len(str(completion[-1]["content"])) % 2 == 0)

def load_environment(rows: int):
    data = {"question": [f"Twice {i}?" for i in range(rows)], "answer": [str(2 * i) for i in range(rows)]}
    return vf.ToolEnv(dataset=Dataset.from_dict(data), tools=[double], rubric=vf.Rubric(funcs=[even]), max_turns=3)
"""

DOUBLING_V1 = """
import verifiers.v1 as vf

__all__ = ["Doubling"]

class Tools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "maths"

    @vf.tool
    async def double(self, number: int) -> int:
        "Twice a number."
        return 2 * number

class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def even(self, trace) -> float:
        return float(len(str(trace.branches[-1].messages[-1].content)) % 2 == 0)

    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]

class Config(vf.TasksetConfig):
    rows: int = 4

class Doubling(vf.Taskset[Task, Config]):
    def load(self):
        for i in range(self.config.rows):
            yield Task(vf.TaskData(prompt=f"Twice {i}?"), self.config.task)

if __name__ == "__main__":
    Tools.run()
"""

MCP_SERVER = """
from mcp.server import MCPServer
server = MCPServer("notes")

@server.tool()
def note(text: str) -> str:
    "Write a note down."
    return f"noted {text}"

server.run()
"""

AGENT = """
import json, openai, sys
problem, client = json.load(sys.stdin), openai.OpenAI()
messages = [{"role": "user", "content": problem["question"]}]
for more in ("Others?", None):
    message = client.chat.completions.create(model="any", messages=messages).choices[0].message
    messages += [message.to_dict(), {"role": "user", "content": more}]
print(message.content)
"""

VERIFIERS_04 = Path(sys.prefix) / "verifiers-0.4"
OPENENV = Path(sys.prefix) / "openenv" / "bin" / "python"


@pytest.fixture
def openenv_port(tmp_path):
    """Of the server that `openenv init` writes, as it is but for the number of its sessions."""
    made = subprocess.run(
        [OPENENV, "-m", "openenv.cli", "init", "echoes"], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    app = tmp_path / "echoes" / "server" / "app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=32"))
    port = free_port()
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            [OPENENV, "-m", "uvicorn", "server.app:app", "--port", str(port)],
            cwd=app.parents[1], stdout=log, stderr=log,
        )  # fmt: skip
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            break
        except OSError:
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            time.sleep(0.1)
    yield port
    process.kill()
    process.wait()


class _Judge(JSONHandler):
    """Grades by the length of the answer."""

    def answer(self, asked):
        grade = json.dumps({"grade": len(asked["messages"][-1]["content"]) % 11})
        return completion({"content": grade})


@pytest.fixture
def judge_port():
    with serving(_Judge) as server:
        yield server.server_port


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_it_trains_two_steps(name, tmp_path, monkeypatch, request):
    server = {"OpenEnv": "openenv_port", "a judge": "judge_port"}.get(name)
    port = request.getfixturevalue(server) if server else ""
    if name.startswith("an agent"):
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "agent"], check=True)
        subprocess.run([tmp_path / "agent/bin/python", "-m", "pip", "install", "-q", "openai"], check=True)
    paths = [str(tmp_path), *([str(VERIFIERS_04)] if name.endswith("v1") else [])]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))
    (tmp_path / "doubling.py").write_text(DOUBLING_V0)
    (tmp_path / "doubling_v1.py").write_text(DOUBLING_V1)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "server.py").write_text(MCP_SERVER)
    rows = "".join(f'{{"question": "2 + {i}?", "answer": "{2 + i}"}}\n' for i in range(9))
    (tmp_path / "rows.jsonl").write_text(rows)
    source = f"HERE = {str(tmp_path)!r}\n{RECIPE}{ENVIRONMENTS[name].replace('PORT', str(port))}"
    (tmp_path / "recipe.py").write_text(source)
    done = rl("train", f"{tmp_path}/recipe.py:train", "--run_dir", tmp_path / "run", timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    steps = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["reward/errors"] == 0
        assert step["logprob_diff/max"] < 1e-4  # what was trained on is what was sampled
    if name in ANSWERING:
        assert max(step["episode/turns"] for step in steps) > 1
    rollouts = read_records(tmp_path / "run" / "rollouts.jsonl")
    assert all({"assistant"} <= {m["role"] for m in rollout["messages"]} for rollout in rollouts)
