"""A calculator's task as one writes it for verifiers' v1 API: the user says what an expression is worth."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["CalculatorEnv", "CalculatorTaskset"]

_EXPRESSION = re.compile(r"(\d{1,4})([+*])(\d{1,4})")


class CalculatorData(vf.TaskData):
    answer: str


class CalculatorTask(vf.Task[CalculatorData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task: CalculatorData, trace: vf.Trace) -> float:
        """Whether the last answer is the result."""
        answers = [message.content for message in trace.branches[-1].messages if message.role == "assistant"]
        return float(answers[-1] == task.answer)


class CalculatorConfig(vf.TasksetConfig):
    rows: int = 2000


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    def load(self) -> Iterator[CalculatorTask]:
        rng = random.Random(0)
        for _ in range(self.config.rows):
            question = f"{rng.randrange(100)}{rng.choice('+*')}{rng.randrange(100)}"
            yield CalculatorTask(CalculatorData(prompt=question, answer=value(question)), self.config.task)


class CalculatorEnvConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()


class CalculatorEnv(vf.Env[CalculatorEnvConfig]):
    """An expression as the first answer gets its value as the user's next words."""

    async def run(self, task: CalculatorTask, agents: vf.Agents) -> None:
        async with agents.solver.interaction(task) as talk:
            turn = await talk.turn()
            if not turn.terminated and (number := value(turn.last_reply or "")):
                await talk.turn(number)


def value(text: str) -> str:
    """Of an expression of two numbers; empty for any other text."""
    match = _EXPRESSION.fullmatch(text)
    if match is None:
        return ""
    a, b = int(match[1]), int(match[3])
    return str(a + b if match[2] == "+" else a * b)
