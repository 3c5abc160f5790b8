"""Files with one JSON object a line, each of a step: metrics.jsonl and rollouts.jsonl."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl.paths import whole_file


class JsonLines:
    """A line is in the file when `append` returns, and on the disk after `sync`. For one thread."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("a")

    def append(self, line: str) -> None:
        """line: JSON with a `step`."""
        print(line, file=self._file, flush=True)

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def rewind(self, step: int, stays: Callable[[Mapping[str, Any]], bool] = lambda record: True) -> None:
        """Forget lines after `step`, lines that do not stay, and lines that a crash cut short."""
        self._file.close()
        with whole_file(self._path) as kept:
            for record in _records(self._path):
                if record["step"] <= step and stays(record):
                    kept.write(f"{json.dumps(record)}\n".encode())
        self._file = self._path.open("a")

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole lines of metrics.jsonl or rollouts.jsonl."""
    return list(_records(path))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue
