"""Random weights, drawn once into the directory of a model that has none; every engine loads them there."""

import json
import uuid
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl.errors import RunError
from rl.models import hf
from rl.models.build import ENGINES
from rl.paths import sync

_DRAWN = "drawn"
"""What the file says of where its weights come from."""


def draw_once(kind: str, model_dir: Path, seed: int) -> None:
    """The weights that an engine of this kind draws from the seed, unless the directory has just those.

    Any process may do it at any time: all of them write the same. Raises RunError where the disk is full.
    """
    path = model_dir / hf.WEIGHTS
    drawn = json.dumps({"engine": kind, "seed": seed, "config": hf.read_config(model_dir)}, sort_keys=True)
    if _drawn_from(path) == drawn:
        return
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    tensors = {name: tensor.clone() for name, tensor in ENGINES[kind].draw(model_dir, seed).items()}
    try:
        save_file(tensors, partial, metadata={"format": "pt", _DRAWN: drawn})
        partial.chmod(0o644)  # safetensors writes 0600
        sync(partial)
        partial.replace(path)
        sync(model_dir)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written ({error}); make room on its disk") from error


def _drawn_from(path: Path) -> str | None:
    """None where there is no such file, or one that cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get(_DRAWN)
    except (OSError, SafetensorError):
        return None
