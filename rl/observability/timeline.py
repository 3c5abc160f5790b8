"""Timeline: what every actor was asked to do and when, as the controller sees it; where a step's time went.

A lane is an actor ("trainer", "generator-0", ...). A span lasts from the call to its answer. The controller's
own share of the wall time is the time in which no call was under way.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

# What a step's wall time is divided into, by the verb of the call.
KINDS = {
    "sample": "generate",
    "score": "reward",
    "episodes": "episodes",
    "forward": "forward",
    "forward_backward": "train",
    "forward_backward_logprobs": "train",
    "optim_step": "train",
    "publish_weights": "sync",
    "load_weights": "sync",
    "save_checkpoint": "checkpoint",
    "finish_checkpoint": "checkpoint",
}
_OTHER = "other"


@dataclass(frozen=True, slots=True)
class Span:
    lane: str
    verb: str
    start: float
    end: float


class Timeline:
    """Records spans. `clock` gives seconds; a trace file, where one is asked for, opens in Perfetto."""

    def __init__(self, trace: Path | None = None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._window_start = clock()
        self._spans: list[Span] = []  # ended, and not yet behind the window
        self._open: dict[int, tuple[str, str, float]] = {}
        self._next_id = 0
        self._lanes: dict[str, int] = {}
        self._trace = _TraceFile(trace, clock()) if trace else None
        self.overhead_seconds = 0.0  # of all windows so far
        self.total_seconds = 0.0

    @contextmanager
    def span(self, lane: str, verb: str) -> Iterator[None]:
        number, self._next_id = self._next_id, self._next_id + 1
        self._lanes.setdefault(lane, len(self._lanes))
        self._open[number] = lane, verb, self._clock()
        try:
            yield
        finally:
            span = Span(*self._open.pop(number), self._clock())
            self._spans.append(span)
            if self._trace:
                self._trace.write(span, self._lanes[lane])

    def skip(self) -> None:
        """Forget the time since the last window: what lies between steps, such as the warm-up."""
        self._window_start = self._clock()
        self._spans.clear()

    def window(self) -> dict[str, float]:
        """Seconds since the last window, by kind of work and idle by actor; then a new window begins.

        Kinds overlap where actors work at the same time. `time/controller`: no call was under way.
        """
        start, end = self._window_start, self._clock()
        spans = self._spans + [Span(lane, verb, began, end) for lane, verb, began in self._open.values()]
        by_kind, by_lane = defaultdict(list), defaultdict(list)
        for span in spans:
            interval = max(span.start, start), span.end
            by_kind[KINDS.get(span.verb, _OTHER)].append(interval)
            by_lane[span.lane].append(interval)
        controller = (end - start) - covered(interval for those in by_lane.values() for interval in those)
        seconds = {f"time/{kind}": covered(those) for kind, those in sorted(by_kind.items())}
        seconds |= {f"idle/{lane}": (end - start) - covered(by_lane[lane]) for lane in self._lanes}
        self.overhead_seconds += controller
        self.total_seconds += end - start
        self._window_start = end
        self._spans.clear()
        return seconds | {"time/controller": controller, "time/step": end - start}

    def close(self) -> None:
        if self._trace:
            self._trace.close()


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class _TraceFile:
    """Chrome's trace format, which https://ui.perfetto.dev opens.

    Overlapping calls to one actor get rows of their own.
    """

    def __init__(self, path: Path, origin: float):
        self._file: TextIO = path.open("w")
        self._origin = origin
        self._rows: dict[str, list[float]] = defaultdict(list)  # lane -> when each of its rows is free again
        self._file.write("[\n")

    def write(self, span: Span, lane: int) -> None:
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

    def _event(self, **fields: object) -> None:
        self._file.write(json.dumps(fields) + ",\n")

    def close(self) -> None:
        self._file.write('{"name": "end", "ph": "M", "pid": 0}\n]\n')
        self._file.close()
