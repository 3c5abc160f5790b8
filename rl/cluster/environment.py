"""The environment of the controller's process, which its children inherit.

Called before torch or Monarch is imported.
"""

import os
import sys
import tempfile

from rl.host_tls import VARIABLES as TLS_VARIABLES

_DEFAULTS = {
    # Find a dead process within a second; Monarch's default is up to ten. It reads this as it is imported.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
}
# How OpenMP's threads wait for work; it reads this as torch is imported. By default they spin so long that
# two runs on one machine take five times as long as one. Threads that sleep at once make a step of SmolLM2 a
# tenth slower: many of its operations take no longer than waking a thread. GNU's OpenMP can spin for a few
# microseconds; without ACTIVE for fewer still, where a process has more threads than there are cores.
_GNU_OPENMP = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "1000"}
_OTHER_OPENMP = {"OMP_WAIT_POLICY": "PASSIVE"}
# All processes are on one host. By default Gloo and NCCL listen on the address of the host's name.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


# A step frees and takes the same blocks again and again. By default glibc gives large ones back to the
# kernel, and the page faults of new ones are a sixth of a step on a CPU. What one thread freed is there for
# every other. Blocks of over 32 MiB still go back: kept, they leave memory in pieces (after 20 steps of
# random shapes a trainer of SmolLM2 had taken 8.7 GiB in place of 6.1, and was no faster).
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_ARENA_MAX": "1",
}


def engine_environment(num_threads: int) -> dict[str, str]:
    """Of a process that trains. It is read as the process starts, or as it imports torch."""
    return _KEEP_MEMORY | {
        "OMP_NUM_THREADS": str(num_threads),
        # Micro-batches are of many lengths: blocks of fixed sizes would leave a GPU's memory in pieces.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def kernel_cache() -> dict[str, str]:
    """Where kernels that torch compiles stay for later runs: a run's own TMPDIR goes with it."""
    default = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    return {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", default)}


def prepare_environment() -> None:
    """What is set already stays as it is. Monarch reads where its certificates are as it is imported, too."""
    for ours, theirs in TLS_VARIABLES.items():
        if ours in os.environ:
            os.environ[theirs] = os.environ[ours]
    by_system = _GNU_OPENMP | _LOOPBACK if sys.platform == "linux" else _OTHER_OPENMP
    for name, value in (_DEFAULTS | by_system).items():
        os.environ.setdefault(name, value)
