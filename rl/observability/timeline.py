"""Timeline: what every actor was asked to do and when, as the controller sees it; where a step's time went.

A lane is an actor ("trainer", "generator-0", ...). A span lasts from the call to its answer. The controller's
own share of the wall time is the time in which no call was under way.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rl.observability.trace import Span, Trace

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
    "suspend": "switch",
    "resume": "switch",
    "save_checkpoint": "checkpoint",
    "finish_checkpoint": "checkpoint",
}
_OTHER = "other"
_START = "start"  # of processes


@dataclass
class _Open:
    """Under way. counts_from: its begin, but for pauses since."""

    lane: str
    verb: str
    began: float
    counts_from: float = field(init=False)

    def __post_init__(self) -> None:
        self.counts_from = self.began

    def until(self, end: float) -> Span:
        return Span(self.lane, self.verb, self.counts_from, end)


class Timeline:
    """Records spans. `clock` gives seconds; `trace`: its lines, where one is asked for.

    hosts: lane -> the hosts that its actor is on, where a run has several.
    """

    def __init__(
        self,
        with_trace: bool = False,
        clock: Callable[[], float] = time.monotonic,
        hosts: Mapping[str, Collection[int]] | None = None,
    ):
        self._clock = clock
        self._hosts = dict(hosts or {})
        self._window_start = clock()
        self._spans: list[Span] = []  # ended, and not yet behind the window
        self._open: dict[int, _Open] = {}
        self._starting: dict[int, _Open] = {}
        self._starts: list[Span] = []  # ended, and not yet behind the window
        self._next_id = 0
        self._lanes: dict[str, int] = {}
        self.trace = Trace(clock()) if with_trace else None
        self.overhead_seconds = 0.0  # of all windows so far
        self.total_seconds = 0.0

    @contextmanager
    def span(self, lane: str, verb: str) -> Iterator[None]:
        number, self._next_id = self._next_id, self._next_id + 1
        self._lanes.setdefault(lane, len(self._lanes))
        self._open[number] = _Open(lane, verb, self._clock())
        try:
            yield
        finally:
            span, end = self._open.pop(number), self._clock()
            self._spans.append(span.until(end))
            if self.trace:
                self.trace.add(Span(lane, verb, span.began, end), self._lanes[lane])

    @contextmanager
    def starting(self, lane: str) -> Iterator[None]:
        """While an actor's processes start. The actor itself is idle."""
        number, self._next_id = self._next_id, self._next_id + 1
        self._starting[number] = _Open(lane, _START, self._clock())
        try:
            yield
        finally:
            self._starts.append(self._starting.pop(number).until(self._clock()))

    def move(self, lane: str, hosts: Collection[int]) -> None:
        """The lane's actor is on these hosts from now on."""
        self._hosts[lane] = hosts

    def now(self) -> float:
        """Seconds, of the clock that spans are measured by."""
        return self._clock()

    def waits(self) -> list[str]:
        """What is waited for now, the longest wait first: each actor with its verb, calls and seconds."""
        begins: dict[tuple[str, str], list[float]] = defaultdict(list)
        for span in [*self._starting.values(), *self._open.values()]:
            begins[span.lane, span.verb].append(span.began)
        now = self._clock()
        return [
            f"{lane} to {verb} ({f'{len(times)} calls, ' if len(times) > 1 else ''}{now - min(times):.0f} s)"
            for (lane, verb), times in sorted(begins.items(), key=lambda item: min(item[1]))
        ]

    def skip(self, since: float = -math.inf) -> None:
        """Forget the time since then: what lies between steps, such as an evaluation, or the warm-up."""
        since, now = max(since, self._window_start), self._clock()
        gap = now - since
        self._window_start += gap

        def before(spans: Sequence[Span]) -> list[Span]:
            """As if the pause had been in front of the window."""
            kept = (span for span in spans if span.start < since)
            return [Span(s.lane, s.verb, s.start + gap, min(s.end, since) + gap) for s in kept]

        self._spans, self._starts = before(self._spans), before(self._starts)
        for span in [*self._open.values(), *self._starting.values()]:
            span.counts_from = span.counts_from + gap if span.counts_from < since else now

    def window(self) -> dict[str, float]:
        """Seconds since the last window, by kind of work and idle by actor and host; then a new one begins.

        Kinds overlap where actors work at the same time. `time/start`: processes started, in a step in which
        some did. `time/controller`: no call was under way, and no process started.
        """
        start, end = self._window_start, self._clock()
        spans = self._spans + [span.until(end) for span in self._open.values()]
        starts = self._starts + [span.until(end) for span in self._starting.values()]
        by_kind, by_lane = defaultdict(list), defaultdict(list)
        for span in starts:
            by_kind[_START].append((max(span.start, start), span.end))
        for span in spans:
            interval = max(span.start, start), span.end
            by_kind[KINDS.get(span.verb, _OTHER)].append(interval)
            by_lane[span.lane].append(interval)
        controller = (end - start) - covered(
            interval for intervals in by_kind.values() for interval in intervals
        )
        seconds = {f"time/{kind}": covered(intervals) for kind, intervals in sorted(by_kind.items())}
        seconds |= {f"idle/{lane}": (end - start) - covered(by_lane[lane]) for lane in self._lanes}
        by_host = defaultdict[int, list[tuple[float, float]]](list)
        for lane in self._lanes:
            for host in self._hosts.get(lane, ()):
                by_host[host] += by_lane[lane]
        seconds |= {f"idle/host-{n}": (end - start) - covered(by_host[n]) for n in sorted(by_host)}
        self.overhead_seconds += controller
        self.total_seconds += end - start
        self._window_start = end
        self._spans.clear()
        self._starts.clear()
        return seconds | {"time/controller": controller, "time/step": end - start}


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
