"""The environment variables of programs that an environment starts: what they need to run, and no keys.

A list of what is kept, for nobody can list the names that keys have.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from rl.processes import LEASE

_KEPT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PWD"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"),
    *("TRANSFORMERS_OFFLINE", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    LEASE,  # by which a host finds what a run has left there
)
_KEPT_PREFIXES = ("LC_", "PYTHON", "OMP_", "XDG_")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def clean_variables(also: Sequence[str] = ()) -> dict[str, str]:
    """Of this process, without keys. also: names to keep beside the ordinary ones, where they are set."""
    return {name: value for name, value in os.environ.items() if name in also or _is_ordinary(name, value)}


@contextlib.contextmanager
def clean_environment(also: Sequence[str] = ()) -> Iterator[None]:
    """This process and what it starts have clean_variables alone, for libraries that start programs.

    What is set within it is forgotten after it.
    """
    before = dict(os.environ)
    kept = clean_variables(also)
    for name in before.keys() - kept.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def reach_directly(url: str) -> None:
    """This process, and what it starts, reaches the URL's host without a proxy, which has no way to it."""
    host = urlsplit(url).hostname or ""
    for name in ("no_proxy", "NO_PROXY"):  # some libraries read one, some the other
        hosts = [part for part in os.environ.get(name, "").split(",") if part]
        if host not in hosts:
            os.environ[name] = ",".join([*hosts, host])


def _is_ordinary(name: str, value: str) -> bool:
    if name.lower() in _PROXIES:
        return "@" not in value  # a proxy's address may have a password
    return name in _KEPT or name.startswith(_KEPT_PREFIXES)
