"""Checkpoints by torch.distributed.checkpoint: written in the background, complete or not there, readable by any layout."""

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from rl.errors import RunError
from rl.models.checkpoint_dir import RECORD, prune, rename
from rl.models.platform import fail_together, new_group


class Checkpoints:
    """Writes one checkpoint at a time. Every rank calls every method, in the same order."""

    def __init__(self, timeout_seconds: float) -> None:
        """timeout_seconds: longest that writing one may take."""
        self._timeout = timeout_seconds
        # The writing thread's collectives must not meet those of the training thread.
        self._group = new_group(timeout_seconds, backend="gloo")
        self._writing: Future[None] | None = None

    def save(self, path: Path, tensors: dict[str, Any], record: Mapping[str, Any], keep_last: int) -> None:
        """Copy `tensors` to the host and return; a thread writes them. `record`: plain data beside them.

        The directory gets its name only when it is complete; then all but the `keep_last` newest of its kind are removed
        (0 keeps all). Raises RunError where the previous checkpoint failed.
        """
        self.wait()
        partial = path.with_name(path.name + ".partial")
        failure = None
        try:
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                (partial / RECORD).write_text(json.dumps(record))
        except OSError as error:
            failure = error
        self._agree(failure)
        written = dcp.async_save(tensors, storage_writer=FileSystemWriter(partial), process_group=self._group)
        self._writing = finished = Future()
        written.add_done_callback(lambda done: self._finish(done, partial, path, keep_last, finished))

    @staticmethod
    def _finish(written: Future[Any], partial: Path, path: Path, keep_last: int, finished: Future[None]) -> None:
        """In the writing thread. Rank 0's part is over once every rank's files and the metadata exist."""
        try:
            written.result()
            if dist.get_rank() == 0:
                rename(partial, path)
                prune(path, keep_last)
            finished.set_result(None)
        except BaseException as error:  # handed to whoever waits
            finished.set_exception(error)

    def wait(self) -> None:
        """Until the last checkpoint has its name. Raises RunError where it could not be written."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        failure = None
        try:
            writing.result(self._timeout)
        except TimeoutError as error:
            self._writing, failure = writing, error  # it may still write: no other may start
        except (Exception, CheckpointException) as error:
            failure = _cause(error)
        self._agree(failure)

    def _agree(self, failure: BaseException | None) -> None:
        reason = failure and RunError(f"a checkpoint could not be written: {failure!r}; the one before it is still there")
        fail_together(reason, self._group)

    def load(self, path: Path, tensors: dict[str, Any]) -> None:
        """Read into `tensors` in place, whatever layout they were saved under."""
        self.wait()
        try:
            dcp.load(tensors, checkpoint_id=str(path), process_group=self._group)
        except CheckpointException as error:
            raise RunError(f"{path} does not fit this model ({_cause(error)}); load it with the model it was saved from") from error


def _cause(error: BaseException) -> BaseException:
    """What went wrong on the first rank where something did."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's random state, under keys of its own."""
    rank = dist.get_rank()
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    for name, state in states.items():
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
