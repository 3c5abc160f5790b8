"""Where tests compute, and how near results must be there. Imported by conftest.py before torch is used.

Engines over four processes use four GPUs where there are as many, and CPU processes elsewhere: a GPU is not shared by the
ranks of one role. Whole runs and generators use the GPUs that there are, one or more, shared between roles; a run whose
role has more processes than there are GPUs is skipped, and says so.
"""

import os

import pytest
import torch

NUM_GPUS = torch.cuda.device_count()
MASK = os.environ.get("CUDA_VISIBLE_DEVICES")  # as the tests were started with

# What is compared: (on CPUs, on GPUs). On one H200: 0.043 in bf16, 1e-6 in fp32.
_LIMITS = {
    "generator against trainer": (
        1e-3,
        0.2,
    ),  # nats, the mean and the worst token of a run in its default dtype
    "generator in fp32": (1e-4, 1e-4),  # nats, the worst token
}


def limit(name: str) -> float:
    return _LIMITS[name][NUM_GPUS > 0]


def hide_too_few() -> None:
    """From this process, and from those of engines that it starts."""
    if NUM_GPUS < 4:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def with_all() -> dict[str, str]:
    """The environment of a process that may use every GPU."""
    environment = dict(os.environ)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment | ({"CUDA_VISIBLE_DEVICES": MASK} if MASK is not None else {})


def needs(num_procs: int) -> pytest.MarkDecorator:
    """Of one role."""
    too_few = 0 < NUM_GPUS < num_procs
    return pytest.mark.skipif(too_few, reason=f"a role of {num_procs} processes on {NUM_GPUS} GPUs")
