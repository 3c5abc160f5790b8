"""The README's Python runs."""

import re
from pathlib import Path

from rl.controller.config import RunConfig
from rl.types import StopReason

README = (Path(__file__).parent.parent / "README.md").read_text()
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
