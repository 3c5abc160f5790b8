"""TLS between hosts, where RL_TLS_CERT, RL_TLS_KEY and RL_TLS_CA name a certificate, its key, and who signs.

Both ends show a certificate, so that only who has one may connect. It holds for `rl worker` and for Monarch's
processes. Collectives (gloo, NCCL) and HTTP are not covered: docs/hosts.md.
"""

import os
import ssl
from pathlib import Path

from rl.errors import ConfigError

VARIABLES = {
    "RL_TLS_CERT": "HYPERACTOR_TLS_CERT",
    "RL_TLS_KEY": "HYPERACTOR_TLS_KEY",
    "RL_TLS_CA": "HYPERACTOR_TLS_CA",
}
"""Each variable -> what Monarch calls it, and reads as it is imported."""


def is_on() -> bool:
    """Raises ConfigError where some of the variables are missing, or name no file that can be read."""
    paths = {name: os.environ.get(name, "") for name in VARIABLES}
    if not any(paths.values()):
        return False
    for name, path in paths.items():
        if not path:
            raise ConfigError(f"{name} is not set, and another of {', '.join(VARIABLES)} is; set all or none")
        if not (Path(path).is_file() and os.access(path, os.R_OK)):
            raise ConfigError(f"{name}={path} is no file that can be read; name one in PEM's format")
    return True


def server_context() -> ssl.SSLContext | None:
    """None: connections are plain."""
    return _context(ssl.PROTOCOL_TLS_SERVER)


def client_context() -> ssl.SSLContext | None:
    """None: connections are plain. The host's certificate has to be for the address that it is reached by."""
    return _context(ssl.PROTOCOL_TLS_CLIENT)


def transport(place: str) -> str:
    """Monarch's address of host:port."""
    return f"{'tls' if is_on() else 'tcp'}://{place}"


def _no_passphrase() -> str:
    """OpenSSL would ask for one at the terminal, of each connection."""
    raise ConfigError(
        "RL_TLS_KEY is encrypted; name one without a passphrase: openssl pkey -in KEY -out PLAIN_KEY"
    )


def _context(protocol: int) -> ssl.SSLContext | None:
    if not is_on():
        return None
    cert, key, authority = (os.environ[name] for name in VARIABLES)
    context = ssl.SSLContext(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except OSError as error:
        names = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES)
        raise ConfigError(f"{names}: not a certificate, its key and an authority's ({error})") from error
    return context
