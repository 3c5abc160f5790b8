"""Recorder: everything a run leaves behind in its directory, and what one sees while it runs."""

import asyncio
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rl.observability.batches import write_batch
from rl.observability.curve import draw_curve
from rl.observability.files import Files
from rl.observability.rollout_log import MAX_FAILED, Trained
from rl.observability.sinks import Sinks
from rl.observability.timeline import Timeline
from rl.observability.warning_log import WarningLog
from rl.observability.watches import CollapseWatch, LossWatch, ParityWatch, Watch
from rl.types import Group
from rl.waiting import Deadlines

T = TypeVar("T")

_SILENCE_SECONDS = 10.0
_MOST_WAITS = 4


class Recorder:
    """metrics.jsonl, rollouts.jsonl, curve.png, the progress line; and what else tracks the run (sinks).

    Use with `async with`. Step 0 is the policy before RL. Each line of metrics.jsonl is one step, or one
    evaluation. Threads write (writer.py): `step` and `evaluation` return at once, `flush` waits for files.
    """

    def __init__(
        self,
        run_dir: Path,
        num_steps: int,
        timeline: Timeline,
        sinks: Sinks,
        watches: Sequence[Callable[[], Watch]] = (),
        out: TextIO | None = None,
        num_rollouts: int = 4,
        write_seconds: float = Deadlines().checkpoint,
    ):
        """watches: made anew where steps happen again.

        num_rollouts: how many of a step or an evaluation are recorded, beside those that failed.
        write_seconds: how long files may take (deadlines.checkpoint).
        """
        self.run_dir = run_dir
        self._num_steps = num_steps
        self._out = out or sys.stdout
        self._sinks = sinks
        self._files = Files(run_dir, num_rollouts, timeline.trace is not None, write_seconds)
        self._warning_log = WarningLog(self._files.write_progress, self._begin_line)
        self._last_kept = self._last_shown = timeline.now()
        self._said_no_signal = False
        self._make_watches: Sequence[Callable[[], Watch]] = (CollapseWatch, ParityWatch, *watches)
        self._watches: tuple[Watch, ...] = tuple(make() for make in self._make_watches)
        self._warmup_watch = LossWatch("warmup.lr")
        self._unshown = ""  # the newest line of the warm-up, where it was not printed
        self._timeline = timeline
        self._step_seconds: list[float] = []
        self.rewards: dict[int, float] = {}  # step -> mean reward
        self.accuracies: dict[int, tuple[float, float]] = {}  # step -> held-out accuracy, standard error

    async def __aenter__(self) -> "Recorder":
        self._warning_log.attach()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Files first, then sinks, interrupted or not; each has a deadline, and what is lost is said."""
        if self._out.isatty():
            print(file=self._out)
        self._warning_log.detach()
        self._write_trace()
        failure: BaseException | None = None
        try:
            await self._files.close(in_haste=kind is not None)
        except (Exception, asyncio.CancelledError) as raised:
            failure = raised
        self._say(self._files.take_lines())
        self._say(await self._sinks.close(failed=kind is not None or failure is not None))
        if failure is not None and (kind is None or isinstance(failure, asyncio.CancelledError)):
            raise failure
        if failure is not None:
            self._say([str(failure)])

    async def write(self, job: Callable[[], T]) -> T:
        """The job's result, off the loop, after all that was recorded before.

        Raises what went wrong with that or with the job, and RunError where it takes too long.
        """
        return await self._files.run(job)

    async def keep_batch(self, step: int, batch: Any, entropy_coef: float, keep_last: int) -> None:
        """For `rl replay`; see batches.py. Returns once it is written."""
        await self.write(lambda: write_batch(self.run_dir, step, batch, entropy_coef, keep_last))

    async def flush(self) -> None:
        """Until metrics.jsonl and rollouts.jsonl are on the disk."""
        await self._files.run(self._files.sync)

    async def rewind(self, step: int) -> None:
        """Forget what was recorded after `step`, as it happens again; and a line that a crash cut short."""
        self._sinks.rewind(step)
        self._watches = tuple(make() for make in self._make_watches)
        kept = await self._files.rewind(step)
        self.rewards = {r["step"]: r["reward/mean"] for r in kept if r.get("reward/mean") is not None}
        self.accuracies = {
            r["step"]: (r["eval/accuracy"], r["eval/standard_error"]) for r in kept if "eval/accuracy" in r
        }
        self._timeline.skip()

    def begin_steps(self) -> None:
        """What was before is no step's time."""
        self._timeline.skip()

    async def break_silence(self) -> None:
        """Until the first step is done: after ten seconds without a line, one that says what is waited for.

        Also in progress.log, with the time of day. A step's own lines tell how it goes from there on.
        """
        began = self._timeline.now()
        while not self._step_seconds:
            quiet = self._timeline.now() - self._last_shown
            if quiet >= _SILENCE_SECONDS:
                text = self._unshown or self._waits()
                self._unshown = ""
                self._line(f"{self._timeline.now() - began:.0f} s: {text}", keep=not self._out.isatty())
                self._files.write_progress(f"{time.strftime('%F %T')} {text}")
            await asyncio.sleep(min(_SILENCE_SECONDS, max(_SILENCE_SECONDS - quiet, 0.1)))

    def _waits(self) -> str:
        waits = self._timeline.waits()
        more = f" and {len(waits) - _MOST_WAITS} more" if len(waits) > _MOST_WAITS else ""
        return f"waiting for {', '.join(waits[:_MOST_WAITS]) or 'the controller'}{more}"

    def now(self) -> float:
        """Seconds, as steps are measured."""
        return self._timeline.now()

    def warmup(self, step: int, num_steps: int, loss: float) -> None:
        if step == 1:  # the first, or again after an engine's death
            self._warmup_watch = LossWatch("warmup.lr")
        self._tell(step, {"warmup/loss": loss})
        is_due = step in (1, num_steps) or self._timeline.now() - self._last_kept >= _SILENCE_SECONDS
        self._unshown = f"warm-up {step}/{num_steps}  loss {loss:.3f}"
        if is_due or self._out.isatty():
            self._line(self._unshown, keep=step == num_steps or not self._out.isatty())
            self._unshown = ""
        if message := self._warmup_watch.observe({"loss": loss}):
            self._line(f"warm-up {step}: {message}", keep=True)

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group],
        trained: Trained = lambda _: (),
    ) -> None:
        times = self._timeline.window()
        now, seconds = self._timeline.now(), times["time/step"]
        self._step_seconds.append(seconds)
        if "reward/mean" in metrics:
            self.rewards[step] = metrics["reward/mean"]
        self._record(step, {**metrics, **times})
        self.rollouts(step, "train", groups, trained)
        recent = self._step_seconds[-20:]
        eta = (self._num_steps - step) * sum(recent) / len(recent)
        accuracy = self._accuracy()
        if groups:
            shown = f"reward {metrics['reward/mean']:.3f}{accuracy}  gap {metrics['logprob_diff/mean']:.1e}"
        else:
            shown = f"loss {metrics['loss']:.4f}{accuracy}"
        self._line(
            f"step {step}/{self._num_steps}  {shown}  {seconds:.2f} s/step  ETA "
            f"{int(eta // 60)}:{int(eta % 60):02d}",
            keep=step in (1, self._num_steps) or step % 10 == 0 or now - self._last_kept > _SILENCE_SECONDS,
        )
        if metrics.get("advantages/nonzero") == 0 and not self._said_no_signal:
            self._said_no_signal = True
            self._line(
                f"step {step}: no rollout had an advantage, so no reward taught anything; "
                f"is the task too hard, or too easy?",
                keep=True,
            )
        for watch in self._watches:
            if message := watch.observe(metrics):
                self._line(f"step {step}: {message}", keep=True)

    def _accuracy(self) -> str:
        """The newest, with the step that it is of."""
        if not self.accuracies:
            return ""
        step, (accuracy, _) = list(self.accuracies.items())[-1]
        return f"  held-out {accuracy:.3f} (step {step})"

    def evaluation(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group],
        waited_since: float | None = -math.inf,
    ) -> None:
        """waited_since: when, of `now`, training began to wait for it: the time since is no step's. None: it
        went on.

        Its metrics are written last: a run that goes on does not repeat an evaluation that has them.
        """
        self.accuracies[step] = metrics["eval/accuracy"], metrics["eval/standard_error"]
        self.rollouts(step, "eval", groups)
        self._record(step, metrics)
        tasks = {name: value for name, value in metrics.items() if name.startswith("eval/accuracy/")}
        of_each = ", ".join(
            f"{name.removeprefix('eval/accuracy/')} {value:.3f}" for name, value in tasks.items()
        )
        reward = metrics.get("eval/reward", metrics["eval/accuracy"])
        self._line(
            f"step {step}: held-out accuracy {metrics['eval/accuracy']:.3f} on {len(groups)} problems"
            + f" ({of_each})" * bool(tasks)
            + f", reward {reward:.3f}" * (reward != metrics["eval/accuracy"]),
            keep=True,
        )
        if waited_since is not None:
            self._timeline.skip(waited_since)

    def draw_curve(self, title: str) -> Path:
        """curve.png, see curve.py."""
        return draw_curve(self.run_dir / "curve.png", title, self.rewards, self.accuracies)

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        # JSON has neither NaN nor infinity: what could not be measured is null.
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._files.write_metrics(json.dumps({"step": step} | finite))
        self._tell(step, metrics)

    def _tell(self, step: int, metrics: Mapping[str, float]) -> None:
        self._say(self._sinks.log(step, metrics))

    def rollouts(
        self, step: int, split: str, groups: Sequence[Group], trained: Trained = lambda _: ()
    ) -> None:
        self._files.write_rollouts(step, split, groups, trained)
        self._write_trace()
        self._say(self._files.take_lines())
        failed = [score.error for group in groups for score in group.scores if score.error is not None]
        if failed:
            recorded = "all" if len(failed) <= MAX_FAILED else f"{MAX_FAILED}, of each cause in turn"
            self._line(
                f"step {step}: {len(failed)} rewards failed, the first: {failed[0]} "
                f"({recorded}: rollouts.jsonl)",
                keep=True,
            )

    def _write_trace(self) -> None:
        if self._timeline.trace is not None:
            self._files.write_trace(self._timeline.trace.take())

    def say(self, text: str) -> None:
        """A line that stays."""
        self._line(text, keep=True)

    def _say(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.say(line)

    def _line(self, text: str, keep: bool) -> None:
        """On a terminal the next line overwrites one that is not kept; elsewhere only kept ones appear."""
        if keep:
            self._last_kept = self._timeline.now()
        if not (keep or self._out.isatty()):
            return
        self._last_shown = self._timeline.now()
        self._begin_line()
        if not keep:  # a line that wraps is not overwritten
            text = text[: shutil.get_terminal_size().columns - 1]
        print(text, end="\n" if keep else "", file=self._out, flush=True)

    def _begin_line(self) -> None:
        """In the place of a line that is not kept."""
        if self._out.isatty():
            print("\r\x1b[2K", end="", file=self._out, flush=True)
