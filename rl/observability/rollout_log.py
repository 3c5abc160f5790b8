"""What rollouts leave behind: rollouts.jsonl for people, and the same ones with every token in rollouts/."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl.observability.json_lines import JsonLines
from rl.observability.plain import plain
from rl.paths import whole_file
from rl.sequences import joined
from rl.types import Group, Rollout, Sample, Score, Segment

Trained = Callable[[Group], Sequence[Sample]]
"""A group -> those of its samples that were trained on."""

MAX_FAILED = 32
"""Rollouts whose reward failed: how many of a step or an evaluation are recorded."""

_NAME = re.compile(r"(?P<split>train|eval)-(?P<step>[0-9]+)\.jsonl\.gz")
_NUM_AT_ONCE = 1024  # numbers: as text they take 1 ms, in which no other thread runs
_TOKEN_BYTES = 100  # in memory: its numbers as Python's objects


@dataclass(frozen=True, slots=True)
class Row:
    """A rollout to be recorded."""

    index: int  # the prompt's
    rollout: Rollout
    score: Score
    samples: Sequence[Sample]  # of its own, those that were trained on

    @property
    def size(self) -> int:
        """Bytes, roughly."""
        num_tokens = sum(len(s.tokens) for branch in self.rollout.branches for s in branch)
        return num_tokens * _TOKEN_BYTES + len(self.rollout.response)


def choose(groups: Sequence[Group], num_kept: int, trained: Trained = lambda _: ()) -> list[Row]:
    """The first `num_kept` rollouts, and up to MAX_FAILED more that failed: of each cause in turn."""
    scored = [(g, number, score) for g in groups for number, score in enumerate(g.scores)]
    num_before: Counter[str] = Counter()  # of the same cause
    turns = []
    for i, (_, _, score) in enumerate(scored[num_kept:], num_kept):
        if score.error is not None:
            turns.append((num_before[score.cause], i))
            num_before[score.cause] += 1
    chosen = [*range(min(num_kept, len(scored))), *sorted(i for _, i in sorted(turns)[:MAX_FAILED])]
    rows = []
    for group, number, score in (scored[i] for i in chosen):
        samples = [sample for sample in trained(group) if sample.id == group.sample_id(number)]
        rows.append(Row(group.index, group.rollouts[number], score, samples))
    return rows


class RolloutLog:
    """rollouts.jsonl and rollouts/ of a run. For one thread."""

    def __init__(self, run_dir: Path):
        self._lines = JsonLines(run_dir / "rollouts.jsonl")
        self._whole = run_dir / "rollouts"

    def close(self) -> None:
        self._lines.close()

    def sync(self) -> None:
        self._lines.sync()

    def write(self, step: int, split: str, rows: Sequence[Row]) -> None:
        """Appends to rollouts.jsonl; rollouts/SPLIT-STEP.jsonl.gz is written as a whole."""
        if not rows:
            return
        with (
            whole_file(self._whole / f"{split}-{step}.jsonl.gz", durable=False) as file,
            gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as whole,
        ):
            for row in rows:
                record = {"step": step, "split": split} | rollout_record(row.index, row.rollout, row.score)
                self._lines.append(json.dumps(record))
                for piece in _whole_line(record, row):
                    whole.write(piece.encode())

    def rewind(self, step: int, evaluated: Collection[int]) -> None:
        """Forget what was written after `step`, and evaluations but those of the steps `evaluated`.

        One that failed left rollouts and no metrics: it happens again.
        """

        def stays(step_of_it: int, split: str) -> bool:
            return step_of_it <= step and (split != "eval" or step_of_it in evaluated)

        self._lines.rewind(step, lambda record: stays(record["step"], record["split"]))
        for path in self._whole.glob("*.jsonl.gz"):
            match = _NAME.fullmatch(path.name)  # another's file stays
            if match and not stays(int(match["step"]), match["split"]):
                path.unlink()


def rollout_record(index: int, rollout: Rollout, score: Score) -> dict[str, Any]:
    """JSON, whatever an environment put into its notes and messages. index: the prompt's."""
    versions = rollout.versions
    record = {
        "prompt": index,
        "problem": rollout.problem.id,
        "question": rollout.problem.question,
        "answer": rollout.problem.answer,
        "response": rollout.response,
        "stop": rollout.stop,
        "reward": score.reward,
        "correct": score.correct,
        "error": score.error,
        "policy_version": versions and [versions.oldest, versions.newest],
    }
    of_chats = {
        "messages": rollout.messages,
        "components": score.components,
        "turn_rewards": score.turn_components or score.parts.turns,
        "notes": score.notes,
        "cause": score.cause,
    }
    return plain(record | {name: value for name, value in of_chats.items() if value})


def _whole_line(record: Mapping[str, Any], row: Row) -> Iterator[str]:
    """As json.dumps would write it with all tokens, in pieces: other threads run between two of them."""
    rollout = row.rollout
    start = {**record, "seconds": rollout.seconds, "counts": plain(rollout.counts)}
    if rollout.turn_order:
        start["turn_order"] = rollout.turn_order
    yield json.dumps(start)[:-1] + ', "branches": '
    yield from _pieces([_branch(branch, row.samples) for branch in rollout.branches])
    yield "}\n"


def _pieces(value: Any) -> Iterator[str]:
    """The JSON of dicts, of lists of lists or dicts, and of lists of numbers."""
    if isinstance(value, dict):
        for i, (name, item) in enumerate(value.items()):
            yield f"{', ' if i else '{'}{json.dumps(name)}: "
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], list | dict):
        for i, item in enumerate(value):
            yield ", " if i else "["
            yield from _pieces(item)
        yield "]"
    elif isinstance(value, list) and value:
        for i in range(0, len(value), _NUM_AT_ONCE):
            yield (", " if i else "[") + json.dumps(value[i : i + _NUM_AT_ONCE])[1:-1]
        yield "]"
    else:
        yield json.dumps(value)


def _branch(segments: Sequence[Segment], trained: Sequence[Sample]) -> list[dict[str, Any]]:
    """Its segments; the sampled ones with logprobs in nats, and with advantages where it was trained on."""
    tokens = joined([segment.tokens for segment in segments])
    sample = next((s for s in trained if np.array_equal(s.tokens, tokens)), None)
    records, end = [], 0
    for segment in segments:
        begin, end = end, end + len(segment.tokens)
        record: dict[str, Any] = {"sampled": segment.sampled, "tokens": segment.tokens.tolist()}
        if segment.sampled:
            record["logprobs"] = segment.logprobs.tolist()
            record["advantages"] = None if sample is None else sample.advantages[begin:end].tolist()
        records.append(record)
    return records


def read_whole_rollouts(run_dir: Path, split: str, step: int) -> list[Mapping[str, Any]]:
    """What rollouts/ has of a step: as rollouts.jsonl, and `branches`, `seconds`, `counts`."""
    with gzip.open(run_dir / "rollouts" / f"{split}-{step}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]
