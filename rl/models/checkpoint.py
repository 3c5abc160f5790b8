"""Checkpoints, through torch.distributed.checkpoint.

They are written in the background, are complete or not there, and can be read under any layout.
"""

import errno
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from rl.errors import RunError, one_line
from rl.models.adapters import Adapters
from rl.models.agreement import agreed, fail_together
from rl.models.checkpoint_dir import (
    VERSION,
    begin,
    check_content,
    checksum_files,
    complete,
    read_record,
    tensor_names,
    write_checksums,
)
from rl.models.checkpoint_metadata import CheckpointReader
from rl.models.learner import Learner
from rl.models.platform import new_group

_FULL_MIB = 16
_PATIENCE = 4  # with a rank that writes for too long: it may come to its end later


class _Writer(FileSystemWriter):
    """Leaves the checksums of what this rank has written beside it."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        write_checksums(Path(self.path), names, str(dist.get_rank()))
        return written


class Checkpoints:
    """Writes one checkpoint at a time. Every rank calls every method, in the same order."""

    def __init__(
        self,
        device: torch.device,
        timeout_seconds: float,
        adapters: Adapters,
        learners: Callable[[], Mapping[str, Learner]],
    ) -> None:
        """timeout_seconds: longest that writing one may take. learners: by their names in a checkpoint."""
        self._device = device
        self._adapters = adapters
        self._learners = learners
        self._timeout = timeout_seconds
        # The writing thread's collectives must not meet those of the training thread, nor those of whoever
        # waits for it: where it is late, the writer's are still under way, and go on.
        self._group = new_group(_PATIENCE * timeout_seconds, backend="gloo")
        self._waiters = new_group(_PATIENCE * timeout_seconds, backend="gloo")
        self._writing: Future[None] | None = None
        self._directory = Path()  # of the last checkpoint

    def save(self, path: Path, state: Mapping[str, Any], keep_last: int) -> None:
        """Copy all to the host and return; a thread writes it.

        state: plain data of the caller's own, kept beside it. The directory gets its name only when it is
        complete; then all but the `keep_last` newest of its kind are removed (0 keeps all). Raises RunError
        where the previous checkpoint failed.
        """
        self.wait()
        self._directory = path.parent
        checksums = checksum_files(dist.get_world_size())
        learns = {"adapters": self._adapters.record(), "frozen": self._adapters.frozen}
        record = {"version": VERSION, "state": state, "checksums": checksums, **learns}
        partial = path.with_name(path.name + ".partial")
        with agreed(self._reason, self._group):
            if dist.get_rank() == 0:
                begin(partial, record)
        tensors = self._tensors() | rng_state(self._device)
        writer = _Writer(partial)
        saving = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
        written = cast(Future[Any], saving)  # else only with a stager of one's own
        finished: Future[None] = Future()
        self._writing = finished
        written.add_done_callback(lambda done: self._finish(done, partial, path, keep_last, finished))

    @staticmethod
    def _finish(
        written: Future[Any], partial: Path, path: Path, keep_last: int, finished: Future[None]
    ) -> None:
        """In the writing thread. Rank 0's part is over once every rank's files and the metadata exist."""
        try:
            written.result()
            if dist.get_rank() == 0:
                complete(partial, path, keep_last)
            finished.set_result(None)
        except BaseException as error:  # handed to whoever waits
            finished.set_exception(error)

    def wait(self) -> None:
        """Until the last checkpoint has its name. Raises RunError where it could not be written."""
        if self._writing is None:
            return
        writing = self._writing
        wait([writing], self._timeout)
        # Where one rank still writes, none starts another, and all come back to this one.
        fail_together(None if writing.done() else self._late(), self._waiters)
        self._writing = None
        failure = writing.exception()
        fail_together(None if failure is None else self._reason(_cause(failure)), self._waiters)

    def _late(self) -> RunError:
        return RunError(
            f"a checkpoint could not be written in {self._timeout:g} s; raise deadlines.checkpoint, or use a "
            f"faster disk; the one before it is still there"
        )

    def _reason(self, failure: BaseException) -> RunError:
        words = _words(failure, self._directory)
        return RunError(f"a checkpoint could not be written: {words}; the one before it is still there")

    def load(self, path: Path) -> dict[str, Any]:
        """Load what any layout saved, adapters included; returns the caller's `state`.

        The random state is restored where as many processes saved it. Raises RunError where there is no
        complete checkpoint.
        """
        self.wait()  # it may be the one that is being written, and the group is the writer's
        with agreed(group=self._group):
            check_content(path, dist.get_rank(), dist.get_world_size())
        record = read_record(path)
        self._adapters.match(record["adapters"], record.get("frozen"), path)
        random = saved_rng_state(path, self._device)
        self._read(path, self._tensors() | random)
        set_rng_state(random, self._device)
        for learner in self._learners().values():
            learner.clear()
        return record["state"]

    def _tensors(self) -> dict[str, Any]:
        return {name: learner.state() for name, learner in self._learners().items()}

    def _read(self, path: Path, tensors: dict[str, Any]) -> None:
        """In place."""
        try:
            dcp.load(tensors, storage_reader=CheckpointReader(path), process_group=self._group)
        except CheckpointException as error:
            raise RunError(
                f"{path} does not fit this model ({_cause(error)}); load it with the model, and the version "
                f"of rl, that it was saved from"
            ) from error


def _cause(error: BaseException) -> BaseException:
    """What went wrong on the first rank where something did."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _words(failure: BaseException, directory: Path) -> str:
    """torch's writer has many words for a full disk."""
    existing = next(parent for parent in [directory, *directory.absolute().parents] if parent.exists())
    free = shutil.disk_usage(existing).free >> 20
    if getattr(failure, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or free < _FULL_MIB:
        return f"the disk of {directory} is full ({free} MiB free); make room"
    return one_line(failure)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's random state, under keys of its own."""
    rank = dist.get_rank()
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return states


def saved_rng_state(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """What to load a checkpoint's random state into; empty where another number of processes saved it."""
    random = rng_state(device)
    saved = {name for name in tensor_names(path) if name.startswith("rng.")}
    kinds = [name.rsplit(".", 1)[-1] for name in random]
    expected = {f"rng.{rank}.{kind}" for rank in range(dist.get_world_size()) for kind in kinds}
    return random if saved == expected else {}


def set_rng_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    for name, state in states.items():
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
