"""API keys: who may use the server, and which tenant they are."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from rl.errors import ConfigError

PREFIX = "tml-"  # the SDK sends no others


def read_keys(path: Path) -> list[str]:
    """One a line; lines that begin with # are comments.

    Made with one new key, for its owner alone to read, where the file is not there. Raises ConfigError where
    it holds none, or others may read it.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(
            f"the API keys {path} cannot be made ({error}); give another api_key_file"
        ) from error
    else:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{PREFIX}{secrets.token_urlsafe(32)}\n")
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
        mode = path.stat().st_mode & 0o777
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the API keys {path} cannot be read ({error}); give another api_key_file"
        ) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or not all(key.startswith(PREFIX) for key in keys):
        raise ConfigError(f"{path} has to hold API keys, one a line, which begin with {PREFIX}")
    if mode & 0o077:
        raise ConfigError(f"{path} may be read by others (mode {mode:o}); chmod 600 {path}")
    return keys


def tenant_of(key: str, keys: Sequence[str]) -> str | None:
    """A name for whose key this is, from which the key does not follow; None where it is nobody's.

    Takes as long for any key.
    """
    given = key.encode("utf-8", "surrogateescape")
    found = [hmac.compare_digest(given, known.encode()) for known in keys]
    return hashlib.blake2b(given, digest_size=8).hexdigest() if any(found) else None
