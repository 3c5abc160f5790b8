"""trace.json: every call to a process, in Chrome's trace format, which https://ui.perfetto.dev opens."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Span:
    lane: str
    verb: str
    start: float
    end: float


class Trace:
    """Lines of spans that have ended. Overlapping calls to one actor get rows of their own."""

    def __init__(self, origin: float):
        """origin: the clock's seconds at which the trace begins."""
        self._origin = origin
        self._rows: dict[str, list[float]] = defaultdict(list)  # lane -> when each of its rows is free again
        self._lines: list[str] = []

    def add(self, span: Span, lane: int) -> None:
        rows = self._rows[span.lane]
        row = next((i for i, free in enumerate(rows) if free <= span.start), len(rows))
        if row == len(rows):
            rows.append(0.0)
            self._event(name="process_name", ph="M", pid=lane, args={"name": span.lane})
        rows[row] = span.end
        microseconds = (span.start - self._origin) * 1e6
        self._event(
            name=span.verb, ph="X", pid=lane, tid=row, ts=microseconds, dur=(span.end - span.start) * 1e6
        )

    def take(self) -> str:
        """The lines since the last time."""
        lines, self._lines = self._lines, []
        return "".join(lines)

    def _event(self, **fields: object) -> None:
        self._lines.append(json.dumps(fields) + ",\n")


class TraceFile:
    """trace.json; trace-2.json and so on where the run was started before. For one thread."""

    def __init__(self, run_dir: Path):
        number, path = 1, run_dir / "trace.json"
        while path.exists():
            number += 1
            path = run_dir / f"trace-{number}.json"
        self._file = path.open("x")
        self._file.write("[\n")

    def write(self, lines: str) -> None:
        self._file.write(lines)

    def close(self) -> None:
        self._file.write('{"name": "end", "ph": "M", "pid": 0}\n]\n')
        self._file.close()
