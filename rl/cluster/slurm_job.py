"""SlurmJob: `rl train` on nodes of Slurm's, by a batch script."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rl.bounds import NonNegativeInt, PositiveInt
from rl.cluster.scheduler import call, train_command
from rl.errors import TERMINATED, TOLD, ConfigError

_BEFORE_SETUP = """trap 'echo "slurm.setup: $BASH_COMMAND failed" >&2; exit 1' ERR"""
_AFTER_SETUP = "trap - ERR"
_OF_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")


@dataclass(frozen=True)
class SlurmJob:
    """An allocation of Slurm's, with a process of `rl train` on each node."""

    nodes: PositiveInt = 1
    """Hosts of the run."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs of each; 0 asks for none."""
    cpus_per_node: NonNegativeInt = 0
    """Cores of each; 0 takes whole nodes."""
    partition: str = ""
    account: str = ""
    time: str = ""
    """The longest it may run, as 12:00:00; empty: the partition's."""
    signal_seconds: PositiveInt = 120
    """So long before its end the run is told to save a checkpoint; then the job is queued again."""
    setup: tuple[str, ...] = ()
    """Lines of the script that come before, as "module load cuda"."""
    options: tuple[str, ...] = ()
    """More options of sbatch, without their dashes, as qos=high. Whole nodes are asked for with mem=0, for
    which another one stands; `mem=` leaves it out."""

    file: ClassVar[str] = "slurm.sh"
    logs: ClassVar[str] = "slurm-"
    shares_files: ClassVar[bool] = True

    def run_dir(self, asked: str, name: str) -> Path:
        """asked: --run_dir, or empty. name: of a new run."""
        return Path(asked or f"runs/{name}").resolve()

    def place(self, run_dir: Path) -> Path:
        """The directory of what is submitted."""
        return run_dir

    def command(self, recipe: str, arguments: Sequence[str], run_dir: Path) -> list[str]:
        """What runs on each node."""
        return train_command(sys.executable, recipe, arguments, run_dir)

    def text(self, run_dir: Path, command: Sequence[str]) -> str:
        """The script. command: what runs on each node. Raises ConfigError."""
        if (seconds := seconds_of(self.time)) is not None and seconds <= self.signal_seconds:
            raise ConfigError(
                f"slurm.time={self.time} is not over slurm.signal_seconds={self.signal_seconds}, so that the "
                f"run would be told to end as it starts, again and again; raise it"
            )
        options = {
            "job-name": f"rl-{run_dir.name}",
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": self.gpus_per_node or "",
            "cpus-per-task": self.cpus_per_node or "",
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
            "signal": f"TERM@{self.signal_seconds}",
            "output": f"{run_dir}/slurm-".replace("%", "%%") + "%j.log",
            "open-mode": "append",
        }
        lines = [
            f"#SBATCH --{option}={shlex.quote(str(value))}" for option, value in options.items() if value
        ]
        lines.append("#SBATCH --requeue")
        if not self.cpus_per_node:
            lines.append("#SBATCH --exclusive")
            if not any(option.split("=")[0] in _OF_MEMORY for option in self.options):
                lines.append("#SBATCH --mem=0")  # all of it; else there may be a default for each core
        lines += [f"#SBATCH --{option}" for option in self.options if option != "mem="]
        cores = f" --cpus-per-task={self.cpus_per_node}" if self.cpus_per_node else ""
        return "\n".join(
            [
                "#!/bin/bash" + " -l" * bool(self.setup),  # in which `module` is
                *lines,
                "",
                f"cd {shlex.quote(str(Path.cwd()))}",
                *([_BEFORE_SETUP, *self.setup, _AFTER_SETUP] if self.setup else []),
                "# Told to end, the run saves a checkpoint; it goes on from there when its turn comes again.",
                "# Its file says so: srun's code may be another, as 253 where any process was out of memory.",
                f'export {TOLD}={shlex.quote(str(run_dir))}/slurm-"$SLURM_JOB_ID".told',
                f'rm -f "${TOLD}"',
                f"srun --export=ALL --mpi=none --cpu-bind=none --kill-on-bad-exit=0 --wait=0{cores} "
                f"{shlex.join(command)}",
                "code=$?",
                f'if [ "$code" -eq {TERMINATED} ] || [ -e "${TOLD}" ]; then',
                '  scontrol requeue "$SLURM_JOB_ID"',
                "fi",
                'exit "$code"',
                "",
            ]
        )

    def submit(self, file: Path) -> str:
        """What Slurm answers. Raises RunError."""
        return call("sbatch", str(file), environment=_outside_of_jobs(os.environ))


def _outside_of_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what a job of Slurm's has, in which this is submitted: the new one's srun would follow it."""
    inside = "SLURM_JOB_ID" in environment
    return {
        name: value
        for name, value in environment.items()
        if not (inside and name.startswith("SLURM_") and name not in _OF_THE_CLUSTER)
    }


def seconds_of(text: str) -> int | None:
    """Of Slurm's times: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. None for 0, which is no limit, and for another
    text, which Slurm judges."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)  # minutes come first
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds or None
