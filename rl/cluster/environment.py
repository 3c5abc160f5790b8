"""The environment of the controller's process, which its children inherit.

Called before torch or Monarch is imported.
"""

import os

_DEFAULTS = {
    # Find a dead process within a second; Monarch's default is up to ten. It reads this as it is imported.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    # OpenMP's threads would spin while they wait, and starve other processes: two runs on one machine took
    # five times as long as one. It reads this as torch is imported.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def engine_environment(num_threads: int) -> dict[str, str]:
    """Of a process that trains. torch reads it as it is imported."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        # Micro-batches are of many lengths: blocks of fixed sizes would leave a GPU's memory in pieces.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def prepare_environment() -> None:
    """What is set already stays as it is."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
