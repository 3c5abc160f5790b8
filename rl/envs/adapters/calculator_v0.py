"""The calculator's task (rl/envs/calculator.py) as one writes it for verifiers' v0 API."""

import random

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """a plus b."""
    return a + b


def mul(a: int, b: int) -> int:
    """a times b."""
    return a * b


def right(completion: list, answer: str, **rest: object) -> float:
    """Whether the last message is the answer."""
    return float(completion[-1].get("content") == answer)


def load_environment(rows: int = 2000) -> vf.Environment:
    rng = random.Random(0)
    asked = []
    for _ in range(rows):
        a, b, function = rng.randrange(100), rng.randrange(100), rng.choice((add, mul))
        question = f"{a}{'+' if function is add else '*'}{b}"
        asked.append({"question": question, "answer": str(function(a, b))})
    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(dataset=Dataset.from_list(asked), tools=[add, mul], rubric=rubric, max_turns=2)
