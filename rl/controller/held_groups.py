"""Groups that were finished and not trained on when a checkpoint was written: held/step-N.pkl of a run.

Who goes on from the checkpoint does not generate them again. They are a file beside the checkpoint and no
part of it: without the file their prompts are started again, as all others that had not ended.
"""

import dataclasses
import hashlib
import json
import logging
import os
import pickle
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle

from rl.config.codec import to_json
from rl.config.recipe_modules import files_of_recipe
from rl.config.run import RunConfig
from rl.controller.buffer import BufferState
from rl.envs.base import Env
from rl.paths import whole_file

_log = logging.getLogger(__name__)


def write_prompts(checkpoint: Path, state: BufferState, config: RunConfig) -> dict[str, Any]:
    """Plain data for a checkpoint that is about to be written. Removes files of those that are gone."""
    path = _path(checkpoint)
    for other in path.parent.glob("step-*.pkl"):
        its = checkpoint.with_name(other.stem)
        is_needed = its.exists() or its.with_name(f"{its.name}.partial").exists()
        if re.fullmatch(r"step-\d+", other.stem) and not is_needed:
            other.unlink()
    with whole_file(path) as file:
        hashed = _Hashed(file)
        # In small frames, so that other threads run in between. Metadata may have classes of the recipe's.
        cloudpickle.dump(state.held, hashed)
    prompts = {"next": state.next, "unfinished": state.unfinished}
    return prompts | {"held": hashed.checksum, "scored_by": scored_by(config)}


def read_prompts(config: RunConfig, prompts: Mapping[str, Any], is_own: bool) -> BufferState:
    """Of the checkpoint `config.resume`. prompts: what `write_prompts` gave. is_own: it is one of this run.

    A pickle of another may do anything, and its rewards may be another's. So may this run's own rewards be,
    where env or reward have changed: its groups are generated again then.
    """
    state = BufferState(prompts["next"], list(prompts["unfinished"]))
    path = _path(Path(config.resume))
    if not is_own or "held" not in prompts or not path.is_file():
        return state
    try:
        content = path.read_bytes()
        if _checksum(content) != prompts["held"]:
            raise ValueError("its content has changed")
        if scored_by(config) != prompts.get("scored_by"):
            raise ValueError("it was generated or scored under other settings, or other code of the env")
        held = pickle.loads(content)
        # A pickle of other code may lack fields, which only reading them shows.
        for score in (score for finished in held for score in finished.group.scores):
            dataclasses.replace(score)
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


def scored_by(config: RunConfig) -> str:
    """A fingerprint of what makes a group and its scores, beside the policy: the env with its code, the time
    and the judge that rewards have, and how samples are drawn."""
    judge = (config.judge.model, config.judge.max_tokens)
    sampling = (config.group_size, config.seed, config.dtype, config.trainer.max_tokens)
    settings = json.dumps(to_json((config.env, config.reward.limit_seconds, judge, sampling)))
    code = sorted({_checksum_of(file) for file in _files_of(config.env)})
    # The repr of what JSON does not know may have its address in this process.
    return _checksum(re.sub(r" at 0x[0-9a-f]+", "", "\n".join([settings, *code])).encode())


@cache
def _checksum_of(file: Path) -> str:
    """As it was when first asked."""
    return _checksum(file.read_bytes())


def note_code(config: RunConfig) -> None:
    """Called before anything is scored: what scores is the code as it is now, also where it changes later."""
    for file in _files_of(config.env):
        _checksum_of(file)


def _files_of(env: Env) -> set[Path]:
    """Where its classes are, and what a recipe imports from its own places."""
    kinds = (kind for part in (env, *env.made_of) for kind in type(part).__mro__)
    files = (getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds)
    return {Path(file) for file in files if file and os.path.isfile(file)} | files_of_recipe()


def _path(checkpoint: Path) -> Path:
    return checkpoint.parent.with_name("held") / f"{checkpoint.name}.pkl"


def _checksum(content: bytes) -> str:
    hashing = _new_hash()
    hashing.update(content)
    return hashing.hexdigest()


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)
