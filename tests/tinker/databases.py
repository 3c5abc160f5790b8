"""Which database the servers of a test have."""

import contextlib
from pathlib import Path

from tests.tinker import postgres

_kind = ["sqlite"]


@contextlib.contextmanager
def of_kind(kind: str):
    """Until it ends, `url_of` is of this kind: sqlite, or postgres."""
    _kind.append(kind)
    try:
        yield
    finally:
        _kind.pop()
        if kind == "postgres":
            postgres.shared().drop_all()


def url_of(root: Path) -> str:
    """The database of the server in this directory: the same for the same directory."""
    if _kind[-1] == "postgres":
        return postgres.shared().url(root)
    return f"sqlite:///{root}/server.db?check_same_thread=false"
