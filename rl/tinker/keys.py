"""API keys: who may use the server, and which tenant they are."""

import hashlib
import hmac
import logging
import os
import re
import secrets
from pathlib import Path

from rl.errors import ConfigError

PREFIX = "tml-"  # the SDK sends no others
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_log = logging.getLogger(__name__)


class Keys:
    """The keys of a file: `KEY` or `NAME KEY` on a line; lines that begin with # are comments.

    NAME is a tenant, which may have several keys. A key without a name is a tenant of its own, called by a
    hash of the key. The file is read again when it changes; where it is bad then, the keys before it stay.
    """

    def __init__(self, path: Path):
        """The file is made with one new key, for its owner alone to read, where there is none.

        Raises ConfigError where it is bad, or others may read it.
        """
        self._path = path
        _make(path)
        self._stamp = self._stamp_now()
        self._tenants = _read(path)

    def tenant_of(self, key: str) -> str | None:
        """None where it is nobody's. Takes as long for any key."""
        self._read_again()
        sent, tenant = key.encode("utf-8", "surrogateescape"), None
        for known, owner in self._tenants.items():
            if hmac.compare_digest(sent, known.encode()):
                tenant = owner
        return tenant

    def _read_again(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tenants = _read(self._path)
        except ConfigError as error:
            _log.warning("%s; the keys before it stay", error)

    def _stamp_now(self) -> tuple[int, ...] | None:
        """What changes with the file; None while it is not there."""
        try:
            now = self._path.stat()
        except OSError:
            return None
        return now.st_ino, now.st_mode, now.st_size, now.st_mtime_ns


def _make(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigError(
            f"the API keys {path} cannot be made ({error}); give another api_key_file"
        ) from error
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{PREFIX}{secrets.token_urlsafe(32)}\n")


def _read(path: Path) -> dict[str, str]:
    """Key -> tenant. Raises ConfigError, which names no key."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
        mode = path.stat().st_mode & 0o777
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the API keys {path} cannot be read ({error}); give another api_key_file"
        ) from error
    if mode & 0o077:
        raise ConfigError(f"{path} may be read by others (mode {mode:o}); chmod 600 {path}")
    tenants: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        *name, key = line.split()
        where = f"line {number} of the API keys {path}"
        if not key.startswith(PREFIX):
            raise ConfigError(f"{where} has no key: keys begin with {PREFIX}; write KEY, or NAME KEY")
        if len(name) > 1 or any(n.startswith(PREFIX) or not _NAME.fullmatch(n) for n in name):
            raise ConfigError(
                f"{where} has more than a name and a key; write KEY, or NAME KEY with a name of up to 64 "
                f"letters, digits, '.', '_', '@' and '-'"
            )
        if key in tenants:
            raise ConfigError(f"{where} has the same key as a line before it; remove one of them")
        tenants[key] = name[0] if name else hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    if not tenants:
        raise ConfigError(f"{path} has no API key; write one a line, which begins with {PREFIX}")
    return tenants
