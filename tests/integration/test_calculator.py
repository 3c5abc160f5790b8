"""Two turns with a tool: whole runs as a user starts them. That the tiny model learns them: test_learning.py."""

# holds: meaning, tokens that were not sampled move logprobs by nats

import json
import os

import pytest

from tests.integration.calculator import TWO_STEPS, check_episodes
from tests.integration.runs import read_metrics, rl

# Root's `make test` has these episodes in tests/hosts/test_two_hosts.py.
slow_for_root = pytest.mark.slow if os.getuid() == 0 else lambda test: test


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a short run, started where files have the names of modules that its processes import."""
    directory, away = tmp_path_factory.mktemp("calculator") / "run", tmp_path_factory.mktemp("away")
    for name in ("queue", "random", "datasets", "tokenizers"):
        (away / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')")
    done = rl("train", *TWO_STEPS, "--run_dir", directory, directory=away)
    assert done.returncode == 0, done.stderr
    return directory


@slow_for_root
def test_two_steps_of_episodes_in_real_processes(trained):
    """Real vLLM, torchtitan and Monarch, episodes in their own processes."""
    check_episodes(trained)


@pytest.mark.slow
def test_eval_measures_a_checkpoint_as_its_run_did(trained, tmp_path):
    asked = ("--env.num_eval", 8, "--samples", 2, "--run_dir", tmp_path / "eval")
    done = rl("eval", trained / "checkpoints" / "step-2", "calculator", *asked)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "eval" / "eval.json").read_text())["calculator"]
    accuracies = [line["eval/accuracy"] for line in read_metrics(trained) if "eval/accuracy" in line]
    assert found["eval/accuracy"] == accuracies[-1]  # of the checkpoint's weights
    assert 0 <= found["pass@1"] <= found["pass@2"] <= 1


AGENT = """
from dataclasses import dataclass, replace
from configs.calculator import calculator
from rl.envs.calculator import Calculator
from rl.envs.chat.agent import AgentEnv


@dataclass(frozen=True)
class Asking(AgentEnv):
    max_new_tokens: int = 20
    num_eval: int = 8
    max_memory_gib: float = 4.0

    def generate(self, seed):
        return Calculator().generate(seed)

    def agent(self, episode, base_url, api_key):
        import openai

        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": episode.problem.question}]
        message = client.chat.completions.create(model="any", messages=messages).choices[0].message
        messages += [message.to_dict(), {"role": "user", "content": "7"}]
        client.chat.completions.create(model="any", messages=messages)

    def reward_episode(self, episode):
        return float(len(episode.response) % 2)

    def chat_demonstration(self, problem, seed):
        return [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def asking():
    return replace(calculator(), env=Asking(), reward=replace(calculator().reward, limit_seconds=20.0))
"""


@pytest.mark.slow
def test_two_steps_of_an_agent_on_openais_client(tmp_path):
    path, directory = tmp_path / "mine.py", tmp_path / "run"
    path.write_text(AGENT)
    done = rl(
        "train",
        f"{path}:asking",
        "--steps",
        2,
        "--warmup.steps",
        20,
        "--prompts_per_step",
        4,
        "--run_dir",
        directory,
    )
    assert done.returncode == 0, done.stderr
    steps = [line for line in read_metrics(directory) if "loss" in line]
    assert all(line["logprob_diff/max"] < 1e-4 and line["reward/errors"] == 0 for line in steps)
    assert all(1 <= line["episode/turns"] <= 2 for line in steps)
