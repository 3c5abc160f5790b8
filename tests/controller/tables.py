"""Environments whose reward reads a file. Their processes import this module, which therefore imports little."""

from dataclasses import dataclass
from pathlib import Path

from rl.envs.calculator import Calculator
from rl.envs.chat.agent import AgentEnv
from rl.envs.sort_letters import SortLetters


@dataclass(frozen=True)
class Graded(SortLetters):
    table: str = ""

    def reward(self, problem, response, stop):
        return float(response == Path(self.table).read_text())


@dataclass(frozen=True)
class Computing(Calculator):
    table: str = ""

    def reward_episode(self, episode):
        return float(episode.response == Path(self.table).read_text())


@dataclass(frozen=True)
class Asking(AgentEnv):
    max_new_tokens: int = 8
    num_eval: int = 2
    table: str = ""
    max_memory_gib: float = 4.0

    def generate(self, seed):
        return Calculator().generate(seed)

    def agent(self, episode, base_url, api_key):
        import openai

        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        asked = [{"role": "user", "content": episode.problem.question}]
        client.chat.completions.create(model="any", messages=asked)

    def reward_episode(self, episode):
        return float(episode.response == Path(self.table).read_text())
