"""A fingerprint of what makes a run's groups and their scores. Groups of another are generated again."""

import hashlib
import json
import os
import re
import sys
from pathlib import Path

from rl.config.codec import to_json
from rl.config.recipe_modules import files_of_recipe
from rl.config.run import RunConfig
from rl.envs.base import Env


def fingerprint(config: RunConfig, dtype: str = "float32") -> str:
    """Of the env with its code, the time and the judge that rewards have, and how samples are drawn.

    Of the code as it is now, also where it changes later. dtype: what the Plan settled config.dtype to.
    """
    judge = (config.judge.model, config.judge.max_tokens)
    sampling = (config.group_size, config.seed, dtype, config.max_seq_len)
    settings = json.dumps(to_json((config.env, config.reward.limit_seconds, judge, sampling)))
    code = sorted({_checksum(file.read_bytes()) for file in _files_of(config.env)})
    # The repr of what JSON does not know may have its address in this process.
    return _checksum(re.sub(r" at 0x[0-9a-f]+", "", "\n".join([settings, *code])).encode())


def _files_of(env: Env) -> set[Path]:
    """Where its classes are, and what a recipe imports from its own places."""
    kinds = (kind for part in (env, *env.made_of) for kind in type(part).__mro__)
    files = (getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds)
    return {Path(file) for file in files if file and os.path.isfile(file)} | files_of_recipe()


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
