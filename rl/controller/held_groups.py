"""Groups that were finished and not trained on when a checkpoint was written: held/step-N.pkl of a run.

Who goes on from the checkpoint does not generate them again. They are a file beside the checkpoint and no
part of it: without the file their prompts are started again, as all others that had not ended.
"""

import dataclasses
import hashlib
import logging
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle

from rl.controller.buffer import BufferState
from rl.paths import whole_file

_log = logging.getLogger(__name__)


def write_prompts(checkpoint: Path, state: BufferState, scored_by: str) -> dict[str, Any]:
    """Plain data for a checkpoint that is about to be written."""
    remove_orphans(checkpoint.parent)
    with whole_file(_path(checkpoint)) as file:
        hashed = _Hashed(file)
        # In small frames, so that other threads run in between. Metadata may have classes of the recipe's.
        cloudpickle.dump(state.held, hashed)
    prompts = {"next": state.next, "unfinished": state.unfinished}
    return prompts | {"held": hashed.checksum, "scored_by": scored_by}


def remove_orphans(checkpoints: Path) -> None:
    """The files of a run's checkpoints that are gone."""
    for prompts_file in checkpoints.with_name("held").glob("step-*.pkl"):
        owner = checkpoints / prompts_file.stem
        # First by the name that it has until it is complete: it may get its own in between.
        is_needed = owner.with_name(f"{owner.name}.partial").exists() or owner.exists()
        if re.fullmatch(r"step-\d+", prompts_file.stem) and not is_needed:
            prompts_file.unlink()


def read_prompts(own_checkpoint: str, prompts: Mapping[str, Any], scored_by: str) -> BufferState:
    """prompts: what `write_prompts` gave for the checkpoint. own_checkpoint: empty where it is another run's.

    A pickle of another may do anything, and its rewards may be another's. So may this run's own rewards be,
    where env or reward have changed: its groups are generated again then.
    """
    state = BufferState(prompts["next"], list(prompts["unfinished"]))
    if not own_checkpoint or "held" not in prompts:
        return state
    path = _path(Path(own_checkpoint))
    if not path.is_file():
        return state
    try:
        content = path.read_bytes()
        if _checksum(content) != prompts["held"]:
            raise ValueError("its content has changed")
        if scored_by != prompts.get("scored_by"):
            raise ValueError("it was generated or scored under other settings, or other code of the env")
        held = pickle.loads(content)
        # A pickle of other code may lack fields, which only reading them shows.
        for group in (finished.group for finished in held):
            for part in (*group.scores, *group.rollouts):
                dataclasses.replace(part)
        state.held.extend(held)
    except Exception as error:  # a pickle of other code may raise anything
        _log.warning("%s cannot be used (%s); what it has is generated again", path, error)
    return state


class _Hashed:
    """A file that is written to, and the checksum of what was."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._hash = _new_hash()

    def write(self, content: bytes) -> int:
        self._hash.update(content)
        return self._file.write(content)

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest()


def _path(checkpoint: Path) -> Path:
    return checkpoint.parent.with_name("held") / f"{checkpoint.name}.pkl"


def _checksum(content: bytes) -> str:
    hashing = _new_hash()
    hashing.update(content)
    return hashing.hexdigest()


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)
