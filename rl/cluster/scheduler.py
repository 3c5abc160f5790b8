"""What is alike for schedulers: the command of each host, and a call of their own programs."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl.errors import RunError

_SUBMIT_SECONDS = 60.0


def train_command(python: str, recipe: str, arguments: Sequence[str], run_dir: Path) -> list[str]:
    """What runs on each host: it begins, or goes on."""
    words = [python, "-m", "rl", "train", recipe, *arguments]
    return [*words, "--run_dir", str(run_dir), "--resume", "latest"]


def call(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """What it prints. environment: None: this process's. Raises RunError."""
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_SUBMIT_SECONDS, env=environment
        )  # fmt: skip
    except FileNotFoundError:
        raise RunError(f"{command[0]} is not here; submit {command[-1]} where it is") from None
    except (OSError, subprocess.SubprocessError) as error:
        cause = "; ".join((getattr(error, "stderr", "") or str(error)).strip().splitlines())
        raise RunError(f"{command[0]} failed: {cause}; what it was given is {command[-1]}") from error
    return done.stdout.strip()
