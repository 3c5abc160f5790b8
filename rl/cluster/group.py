"""Which group of hosts this process is started in: by torchrun, srun or a Kubernetes Job, or in none."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from rl.errors import ConfigError

PATIENCE = "RL_HOSTS_SECONDS"
"""The variable with the seconds for which hosts wait for each other."""
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Group:
    """Processes that a launcher started together, one on each host. address, port: of the first's store."""

    rank: int
    size: int
    address: str
    port: int
    has_store: bool = False
    """The launcher keeps one there."""
    name: str = "0"
    """Tells it from others that meet at the same address."""
    patience: float = _PATIENCE_SECONDS
    """Seconds for which hosts wait for each other."""


def group_of(environment: Mapping[str, str]) -> Group | None:
    """None where this process was started alone. Raises ConfigError."""
    patience = float(_number(environment, PATIENCE, int(_PATIENCE_SECONDS)))
    if _number(environment, "WORLD_SIZE", 1) > 1:
        if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
            raise ConfigError(
                "rl is one process on each host, and starts the others itself; write torchrun "
                "--nproc-per-node 1"
            )
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in names if name not in environment]:
            raise ConfigError(
                f"WORLD_SIZE is set and {', '.join(missing)} not; set all of {', '.join(names)}"
            )
        has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        rank, size, port = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Group(rank, size, environment["MASTER_ADDR"], port, has_store, attempt, patience)
    # A batch script has SLURM_PROCID, too, and is one process, whatever its allocation is for.
    # In a shell that salloc gives SLURM_NTASKS is the allocation's; SLURM_STEP_NUM_TASKS, 1, is its step's.
    num_tasks = _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1))
    # `srun --pty` has a shell, in which one process is started by hand. What that shell starts by another
    # srun has its variable too, and no terminal.
    is_shell = "SLURM_PTY_PORT" in environment and _has_terminal()
    if num_tasks > 1 and "SLURM_STEP_ID" in environment and not is_shell:
        if environment.get("SLURM_STEP_NUM_NODES", "") not in ("", str(num_tasks)):
            raise ConfigError(
                "rl is one process on each host, and starts the others itself; write srun --ntasks "
                "N --ntasks-per-node 1 for N hosts"
            )
        address = environment.get("MASTER_ADDR") or _first_node(environment)
        job, step = (_number(environment, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        port = _number(environment, "MASTER_PORT", 20_000 + (job + 997 * step) % 10_000)
        rank, name = _number(environment, "SLURM_PROCID"), f"{job}.{step}"
        return Group(rank, num_tasks, address, port, name=name, patience=patience)
    return None


def _has_terminal() -> bool:
    """Whatever its input is, as in the background."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """default: where it is not set, or empty. Raises ConfigError where it is no number."""
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is no number; set it as torchrun or Slurm does, or unset it")
    return int(text)


def _first_node(environment: Mapping[str, str]) -> str:
    """The address of the step's first node, as Slurm reaches it."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    try:
        names = _output("scontrol", "show", "hostnames", nodes).split()
        match = re.search(r"NodeAddr=(\S+)", _output("scontrol", "show", "node", names[0], "-o"))
        if match is not None:
            return match[1]
        why = "scontrol names none"
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        why = str(error)
    raise ConfigError(
        f"the first of Slurm's nodes {nodes!r} has no address ({why}); set MASTER_ADDR to its IP"
    )


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
