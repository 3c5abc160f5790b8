"""What rollouts leave behind: rollouts.jsonl for people, and the same ones with every token in rollouts/."""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl.paths import write_whole
from rl.types import Group, Rollout, Sample, Score, Segment

Trained = Callable[[Group], Sequence[Sample]]
"""A group -> those of its samples that were trained on."""


class RolloutLog:
    """rollouts.jsonl and rollouts/ of a run."""

    def __init__(self, run_dir: Path, num_kept: int):
        """num_kept: of a step or an evaluation, beside those that failed."""
        self._path = run_dir / "rollouts.jsonl"
        self._whole = run_dir / "rollouts"
        self._num_kept = num_kept
        self._file = self._path.open("a")

    def close(self) -> None:
        self._file.close()

    def write(self, step: int, split: str, groups: Sequence[Group], trained: Trained = lambda _: ()) -> None:
        """Appends to rollouts.jsonl; rollouts/SPLIT-STEP.jsonl.gz is written as a whole."""
        lines = []
        for group, rollout, score in self._kept(groups):
            record = {"step": step, "split": split} | rollout_record(group.index, rollout, score)
            print(json.dumps(record, default=str), file=self._file, flush=True)
            samples = trained(group)
            branches = [_branch(branch, samples) for branch in rollout.branches]
            whole = record | {
                "seconds": rollout.seconds,
                "counts": dict(rollout.counts),
                "branches": branches,
            }
            lines.append(json.dumps(whole, default=str) + "\n")
        if lines:
            content = gzip.compress("".join(lines).encode(), compresslevel=1, mtime=0)
            write_whole(self._whole / f"{split}-{step}.jsonl.gz", content, durable=False)

    def rewind(self, step: int) -> None:
        """Forget what was written after `step`."""
        self._file.close()
        keep_lines(self._path, step)
        for path in self._whole.glob("*-*.jsonl.gz"):
            if int(path.name.split(".")[0].rsplit("-", 1)[1]) > step:
                path.unlink()
        self._file = self._path.open("a")

    def _kept(self, groups: Sequence[Group]) -> list[tuple[Group, Rollout, Score]]:
        rows = [(g, *pair) for g in groups for pair in zip(g.rollouts, g.scores, strict=True)]
        return [row for i, row in enumerate(rows) if i < self._num_kept or row[2].error is not None]


def rollout_record(index: int, rollout: Rollout, score: Score) -> dict[str, Any]:
    """For JSON. index: the prompt's."""
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
        "notes": score.notes,
        "cause": score.cause,
    }
    return record | {name: value for name, value in of_chats.items() if value}


def _branch(segments: Sequence[Segment], trained: Sequence[Sample]) -> list[dict[str, Any]]:
    """Its segments; the sampled ones with logprobs in nats, and with advantages where it was trained on."""
    tokens = [token for segment in segments for token in segment.tokens]
    sample = next((s for s in trained if np.array_equal(s.tokens, tokens)), None)
    found, end = [], 0
    for segment in segments:
        begin, end = end, end + len(segment.tokens)
        told: dict[str, Any] = {"sampled": segment.sampled, "tokens": list(segment.tokens)}
        if segment.sampled:
            told["logprobs"] = list(segment.logprobs)
            told["advantages"] = None if sample is None else sample.advantages[begin:end].tolist()
        found.append(told)
    return found


def read_whole_rollouts(run_dir: Path, split: str, step: int) -> list[Mapping[str, Any]]:
    """What rollouts/ has of a step: as rollouts.jsonl, and `branches`, `seconds`, `counts`."""
    with gzip.open(run_dir / "rollouts" / f"{split}-{step}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def keep_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """Of a .jsonl file, those up to `step`; a line that a crash cut short goes too."""
    kept = [record for record in read_records(path) if record["step"] <= step]
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
    return kept


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole lines of metrics.jsonl or rollouts.jsonl."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
