"""Files encrypted with age (https://age-encryption.org), for download by their recipients alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.errors import one_line
from rl.tinker.backend import UserError

_MAX_RECIPIENTS = 10


def check_recipients(recipients: Sequence[str]) -> None:
    """Of age, which files are encrypted to. Raises UserError."""
    if len(recipients) > _MAX_RECIPIENTS:
        raise UserError(f"{len(recipients)} recipients; at most {_MAX_RECIPIENTS} are offered")
    _read(recipients)


def encrypt(directory: Path, recipients: Sequence[str]) -> None:
    """Each of its files becomes FILE.age."""
    import pyrage

    readers = _read(recipients)
    for path in list(directory.iterdir()):
        pyrage.encrypt_file(str(path), f"{path}.age", readers)
        path.unlink()


def _read(recipients: Sequence[str]) -> list[Any]:
    if not recipients:
        return []
    try:
        import pyrage
    except ImportError as error:
        raise UserError("encryption with age needs pyrage, which this server does not have") from error
    read = []
    for text in recipients:
        kind = pyrage.ssh.Recipient if text.startswith("ssh-") else pyrage.x25519.Recipient
        try:
            read.append(kind.from_str(text))
        except pyrage.RecipientError as error:
            raise UserError(f"{text[:80]!r} is no recipient of age: {one_line(error):.200}") from error
    return read
