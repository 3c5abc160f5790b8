"""Demonstrations of conversations."""

from dataclasses import dataclass

from rl.envs.calculator import ALPHABET, Calculator
from rl.envs.chat.demonstration import chat_sample
from rl.models.sources import TinyQwen3
from rl.models.tokenizer import HFTokenizer

ASKED = []


@dataclass(frozen=True)
class Counting(Calculator):
    def tools(self):
        ASKED.append(self.max_digits)
        return super().tools()


def test_tools_are_described_once_for_a_task_however_many_its_demonstrations(tmp_path):
    """A description takes longer than the rest of a demonstration, and an MCP server's takes its start."""
    tokenizer = HFTokenizer(TinyQwen3(ALPHABET).materialize(tmp_path))
    for digits in (1, 2):
        env = Counting(max_digits=digits, num_eval=4)
        for seed in range(5):
            assert len(chat_sample(env, env.train_problem(seed), seed, tokenizer).tokens) > 3
    assert ASKED == [1, 2]
