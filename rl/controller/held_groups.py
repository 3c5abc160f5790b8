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
from typing import Any

import cloudpickle

from rl.controller.buffer import BufferState
from rl.paths import write_whole

_log = logging.getLogger(__name__)


def write_prompts(checkpoint: Path, state: BufferState) -> dict[str, Any]:
    """Plain data for a checkpoint that is about to be written. Removes files of those that are gone."""
    path = _path(checkpoint)
    for other in path.parent.glob("step-*.pkl"):
        its = checkpoint.with_name(other.stem)
        is_needed = its.exists() or its.with_name(f"{its.name}.partial").exists()
        if re.fullmatch(r"step-\d+", other.stem) and not is_needed:
            other.unlink()
    content = cloudpickle.dumps(state.held)  # a problem's metadata may have classes of the recipe's
    write_whole(path, content)
    return {"next": state.next, "unfinished": state.unfinished, "held": _checksum(content)}


def read_prompts(checkpoint: str, prompts: Mapping[str, Any], is_own: bool) -> BufferState:
    """prompts: what `write_prompts` gave. is_own: it is a checkpoint of this run.

    A pickle of another may do anything, and its rewards may be another's.
    """
    state = BufferState(prompts["next"], list(prompts["unfinished"]))
    path = _path(Path(checkpoint))
    if not is_own or "held" not in prompts or not path.is_file():
        return state
    try:
        content = path.read_bytes()
        if _checksum(content) != prompts["held"]:
            raise ValueError("its content has changed")
        held = pickle.loads(content)
        # A pickle of other code may lack fields, which only reading them shows.
        for score in (score for finished in held for score in finished.group.scores):
            dataclasses.replace(score)
        state.held.extend(held)
    except Exception as error:  # a pickle of other code may raise anything
        _log.warning("%s cannot be used (%s); what it has is generated again", path, error)
    return state


def _path(checkpoint: Path) -> Path:
    return checkpoint.parent.with_name("held") / f"{checkpoint.name}.pkl"


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
