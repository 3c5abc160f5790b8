"""What a command needs of the shell that starts it: a working directory, three descriptors, address space."""

import os
import resource
import sys

from rl.errors import ConfigError

_LEAST_GIB = 32
"""Of address space: torch and vLLM map tens of GiB, which take no memory until they are used."""


def open_standard_streams() -> None:
    """Give a closed standard input, output or error to nowhere, or the next file would take its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(descriptor)


def check_surroundings(starts_processes: bool) -> None:
    """Raises ConfigError where the working directory is gone, address space is short, or docstrings are cut.

    starts_processes: whether the command will load torch and vLLM in processes of its own.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory is gone; cd to one that exists") from None
    if sys.flags.optimize > 1:
        raise ConfigError(
            "PYTHONOPTIMIZE=2 (-OO) leaves out docstrings, by which settings and tools are described; use 1"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if starts_processes and limit != resource.RLIM_INFINITY and limit < _LEAST_GIB * 2**30:
        raise ConfigError(
            f"address space is limited to {limit / 2**30:.1f} GiB, and a process maps more; run: "
            f"ulimit -v unlimited (a container or Slurm limits memory itself)"
        )
