"""The base model of a database: its adapters fit every other of its shapes, and mean nothing there."""

import hashlib
import json
from pathlib import Path

from rl.errors import ConfigError
from rl.models.hf import read_config, weight_files
from rl.tinker.database import Database, base_model

_PLACES = 32  # of each file of weights, evenly spread
_PLACE_BYTES = 1024


def fingerprint(model_dir: Path) -> str:
    """Of what the model is, not of where it lies: its config.json, and samples of its weights.

    All bytes of the weights would take minutes. Two fine-tunes of one model differ almost everywhere.
    """
    digest = hashlib.sha256(json.dumps(read_config(model_dir), sort_keys=True).encode())
    for path in weight_files(model_dir):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(_PLACES):
                file.seek(size * i // _PLACES)
                digest.update(file.read(_PLACE_BYTES))
    return digest.hexdigest()


def check_base_model(database: Database, model_dir: Path) -> None:
    """A database without a base model belongs to this one from here on. Raises ConfigError for another's."""
    present = fingerprint(model_dir)
    rows = database.find(base_model)
    if not rows:
        database.insert(base_model, fingerprint=present)
    elif rows[0].fingerprint != present:
        raise ConfigError(
            f"the models and checkpoints of this directory were trained on another base model than "
            f"{model_dir}: give another --directory (and --database, if you gave one), or serve that model"
        )
