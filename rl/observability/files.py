"""Files: what a run writes down in its directory, in one thread."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from rl.errors import RunError, one_line
from rl.observability.batches import forget_batches
from rl.observability.json_lines import JsonLines, read_records
from rl.observability.rollout_log import RolloutLog, Row, Trained, choose
from rl.observability.trace import TraceFile
from rl.observability.writer import Late, Writer
from rl.types import Group

T = TypeVar("T")
_MAX_BYTES = 2**28  # of what waits
_HASTE_SECONDS = 60.0


class Files:
    """metrics.jsonl, rollouts.jsonl with rollouts/, trace.json, progress.log.

    Metrics are never dropped: a resumed run counts on them. Rollouts, the trace and progress.log are for
    people: where the disk does not keep up they are dropped, and that is said. A disk that is full, or gone,
    is raised by the next `write_metrics`, `run` or `close`.
    """

    def __init__(self, run_dir: Path, num_rollouts: int, with_trace: bool, seconds: float):
        """seconds: how long what waits may take to be written."""
        self._run_dir = run_dir
        self._num_rollouts = num_rollouts
        self._seconds = seconds
        self._metrics = JsonLines(run_dir / "metrics.jsonl")
        self._rollouts = RolloutLog(run_dir)
        self._trace = TraceFile(run_dir) if with_trace else None
        self._writer = Writer(f"the directory {run_dir}", _MAX_BYTES)
        self._dropped: Counter[str] = Counter()
        self._lines: deque[str] = deque()  # both threads append

    def write_metrics(self, line: str) -> None:
        self._writer.put(lambda: self._metrics.append(line), len(line))

    def write_rollouts(self, step: int, split: str, groups: Sequence[Group], trained: Trained) -> None:
        rows = choose(groups, self._num_rollouts, trained)
        if rows:
            size = sum(row.size for row in rows)
            self._offer("rollouts.jsonl", lambda: self._append_rollouts(step, split, rows), size)

    def write_progress(self, line: str) -> None:
        def append() -> None:
            with (self._run_dir / "progress.log").open(
                "a", encoding="utf-8", errors="backslashreplace"
            ) as file:
                print(line, file=file)

        self._offer("progress.log", append, len(line))

    def write_trace(self, lines: str) -> None:
        trace = self._trace
        if trace is not None and lines:
            self._offer("trace.json", lambda: trace.write(lines), len(lines))

    async def run(self, job: Callable[[], T]) -> T:
        """The job's result, after all that was written before. Raises what went wrong with either."""
        try:
            return await self._writer.run(job, self._seconds)
        except Late:
            raise RunError(
                f"{self._run_dir} has not taken what was written within deadlines.checkpoint="
                f"{self._seconds:.0f} s; is its disk or server there? or raise --deadlines.checkpoint"
            ) from None

    def sync(self) -> None:
        """For `run`: onto the disk."""
        self._metrics.sync()
        self._rollouts.sync()

    async def rewind(self, step: int) -> list[dict[str, Any]]:
        """Forget what came after `step`. Returns the lines of metrics.jsonl that are left."""

        def forget() -> list[dict[str, Any]]:
            self._metrics.rewind(step)
            left = read_records(self._run_dir / "metrics.jsonl")
            self._rollouts.rewind(step, {line["step"] for line in left if "eval/accuracy" in line})
            forget_batches(self._run_dir, step)
            return left

        return await self.run(forget)

    async def close(self, in_haste: bool) -> None:
        """Raises what could not be written, and RunError where it takes too long.

        in_haste: the run has failed, perhaps because of this disk.
        """
        seconds = min(self._seconds, _HASTE_SECONDS) if in_haste else self._seconds
        num_lost = await self._writer.close(self._close, seconds)
        self._lines += [
            f"{name} lacks {number} steps and evaluations: {self._run_dir} did not keep up"
            for name, number in self._dropped.items()
        ]
        if num_lost:
            raise RunError(
                f"{self._run_dir} has not taken what was written within {seconds:.0f} s: the ends of "
                f"metrics.jsonl and rollouts.jsonl are missing; is its disk or server there?"
            )

    def take_lines(self) -> list[str]:
        """What there is to say, a line each."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def _offer(self, name: str, job: Callable[[], object], size: int) -> None:
        if self._writer.offer(job, size):
            return
        if not self._dropped[name]:
            self._lines.append(f"{self._run_dir} does not keep up: {name} loses what is not written yet")
        self._dropped[name] += 1

    def _append_rollouts(self, step: int, split: str, rows: Sequence[Row]) -> None:
        """In the thread. Only the disk may end a run: an environment's own objects may be no JSON."""
        try:
            self._rollouts.write(step, split, rows)
        except OSError:
            raise
        except Exception as error:
            self._lines.append(f"step {step}: {split} rollouts are not recorded: {one_line(error):.200}")

    def _close(self) -> None:
        with ExitStack() as stack:  # each, whatever the others raise
            for file in (self._metrics, self._rollouts, self._trace):
                if file is not None:
                    stack.callback(file.close)
