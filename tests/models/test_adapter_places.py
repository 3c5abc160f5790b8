"""Requests for adapters of directories, of which a generator holds only some: each gets its place in the end."""

# holds: exact, steps of a stand-in for vLLM

import subprocess
import sys

import pytest

SCRIPT = """
import random
import sys
from itertools import count
from unittest.mock import MagicMock

MODULES = ("vllm", "vllm.config", "vllm.config.lora", "vllm.outputs", "vllm.sampling_params", "vllm.lora.request")
OURS = ("cpu_lora", "sleep", "vllm_arguments", "weights")
sys.modules |= {name: MagicMock() for name in (*MODULES, *(f"rl.models.generator.{name}" for name in OURS))}

from rl.models.generator import vllm_engine
from rl.models.generator.adapter_slots import AdapterSlots
from rl.models.generator.commands import Admit
from rl.types import SamplingParams


class Engine:
    '''Each request takes as many steps as it asks for tokens.'''

    def __init__(self):
        self.left = {}

    def add_request(self, number, prompt, params, lora_request=None):
        self.left[number] = params.max_new_tokens

    def step(self):
        self.left = {number: left - 1 for number, left in self.left.items()}
        ended = [number for number, left in self.left.items() if not left]
        for number in ended:
            del self.left[number]
        return [MagicMock(finished=True, request_id=number) for number in ended]


places, per_adapter = map(int, sys.argv[1:])
vllm_engine._vllm_params = lambda params: params
engine = object.__new__(vllm_engine.VLLM)
engine._engine, engine._adapters = Engine(), AdapterSlots(lambda _: None, lambda _: None, places)
engine._max_model_len, engine._running, engine._waiting, engine._versions = 9999, {}, [], {None: 0}
engine._finish = lambda output: (engine._running.pop(output.request_id).command.id, None)
numbers, adapter_of, draw = count(), {}, random.Random(0)


def admit(adapter):
    command = Admit(next(numbers), (1,), SamplingParams(draw.randint(7, 97), adapter=f"/{adapter}"))
    adapter_of[command.id] = adapter
    return command


commands = [admit(adapter) for adapter in range(places) for _ in range(per_adapter)]
late, first_of_late = ("late", "later"), {}
for step in range(2000):
    commands += [admit(adapter) for adapter in late] if step == 50 else []
    ended = engine.tick(commands).answers
    first_of_late |= {adapter_of[number]: step for number in ended if adapter_of[number] in late}
    if len(first_of_late) == len(late):
        break
    commands = [admit(adapter_of[number]) for number in ended]
print(*first_of_late, step)
"""


@pytest.mark.parametrize(("places", "per_adapter"), [(2, 4), (8, 8)])
def test_adapters_that_are_sampled_with_all_the_time_leave_a_place_for_others(places, per_adapter):
    command = [sys.executable, "-c", SCRIPT, str(places), str(per_adapter)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *came, steps = done.stdout.split()
    assert {*came} == {"late", "later"}
    assert int(steps) < 50 + 4 * 97  # the longest of those before, and of each other
