"""A generator by turns, with a stand-in for vLLM: what it leaves behind, and what a load that fails leaves awake."""

# holds: exact

import subprocess
import sys

import pytest

BEGINNING = """
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

MODULES = ("vllm", "vllm.config", "vllm.config.lora", "vllm.outputs", "vllm.sampling_params", "vllm.lora.request")
OURS = ("cpu_lora", "vllm_arguments", "weights")
sys.modules |= {name: MagicMock() for name in (*MODULES, *(f"rl.models.generator.{name}" for name in OURS))}
sys.modules["vllm.lora.request"].LoRARequest = lambda name, number, path, **_: SimpleNamespace(lora_int_id=number)

import torch
from rl.errors import WeightsUnreachable
from rl.models.generator import vllm_engine
from rl.models.generator.adapter_slots import AdapterSlots
from rl.models.generator.commands import Load, Suspend
from rl.types import LoRA
from rl.weight_sync.manifest import Manifest

torch.accelerator.is_available = lambda: True


class Engine:
    '''Sleeps and wakes as vLLM's executor does.'''

    def __init__(self):
        self.asleep, self.fails = set(), False
        self.output_processor = SimpleNamespace(request_states={})

    def sleep(self, level):
        if "weights" not in self.asleep:
            self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags):
        self.asleep -= {*tags}

    def collective_rpc(self, what, **_):
        if what == "update_weights" and self.fails:
            raise WeightsUnreachable("the weights could not be fetched: their host is gone")

    def abort_request(self, numbers):
        pass

    def reset_prefix_cache(self, **_):
        pass


engine = object.__new__(vllm_engine.VLLM)
vllm, held = Engine(), set()
slots = AdapterSlots(lambda request: held.add(request.lora_int_id), held.discard, 1)
engine._engine, engine._adapters, engine._is_suspended = vllm, slots, False
engine._running, engine._waiting, engine._versions = {}, [], {}
written = []


def write(number):
    written.append(number)
    return Path(f"/{number}")


engine._load_adapter = lambda manifest, name, lora: slots.publish(name, write)
"""
ADAPTERS = """
for step in range(1, 6):
    for command in (Suspend(1), Load(2, Manifest(0, ())), Load(3, Manifest(step, (), ("policy", LoRA(rank=8))))):
        (answer,) = engine.tick([command]).answers.values()
        assert answer is None, answer
print(len(written), len({*written}), len(held))
"""
AWAKE = """
asleep = []
for command, fails in ((Suspend(1), 0), (Load(2, Manifest(1, ())), 1), (Suspend(3), 0), (Load(4, Manifest(1, ())), 0)):
    vllm.fails = fails
    (answer,) = engine.tick([command]).answers.values()
    assert isinstance(answer, WeightsUnreachable) == fails
    asleep.append(len(vllm.asleep))
print(*asleep)
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [(ADAPTERS, "5 1 1"), (AWAKE, "2 1 2 0")],
    ids=["an adapter is written where it was before", "weights that a failed load woke sleep again"],
)
def test_by_turns(program, expected):
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected
