"""Names of checkpoints, and where they lie. What a client names never leaves the server's directory."""

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rl.tinker.backend import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_-]{0,127}")
EXTERNAL = "external_weights"
KINDS = {"weights": "training", "sampler_weights": "sampler", EXTERNAL: "external"}
"""The middle of a path -> what the SDK calls it."""


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """tinker://{model_id}/{kind}/{name}"""

    model_id: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    @classmethod
    def make(cls, model_id: str, kind: str, name: str) -> "CheckpointPath":
        """Raises UserError for a name that is not one."""
        if kind not in KINDS:
            raise UserError(f"checkpoints of kind {kind!r} are not offered here; use one of {list(KINDS)}")
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{name[:80]!r} is no checkpoint's name; use letters, digits, '.', '_' and '-', at most 128"
            )
        if not _MODEL.fullmatch(model_id):
            raise UserError(f"{model_id[:80]!r} is not a model's id")
        return cls(model_id, kind, name)

    @classmethod
    def parse(cls, text: str) -> "CheckpointPath":
        """Raises UserError."""
        parts = text.removeprefix("tinker://").split("/")
        if not text.startswith("tinker://") or len(parts) != 3:
            raise UserError(f"{text[:80]!r} is not tinker://MODEL/weights/NAME or .../sampler_weights/NAME")
        return cls.make(*parts)

    def parent(self, root: Path) -> Path:
        """Of the directories of its saves."""
        return root / "checkpoints" / directory_name(self.model_id) / self.kind


def directory_name(id: str) -> str:
    """An id that this server made, as a directory's name."""
    return id.replace(":", "-")


@contextmanager
def new_directory(parent: Path, name: str) -> Iterator[Path]:
    """Where to save weights: no other save ever has this path. Nothing stays of a save that fails.

    Generators keep adapters by their directory.
    """
    directory = parent / f"{name}.{secrets.token_hex(8)}"
    try:
        yield directory
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
