"""Models and data by their id on the Hugging Face Hub, through huggingface_hub.

What huggingface_hub reads from the environment holds here: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT.
"""

import os
import re
from functools import lru_cache

from rl.errors import ConfigError, message_of

_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_DATA = "hf://datasets/"
# A revision has no slash, but for those that the Hub makes.
_DATA_FILE = re.compile(r"([^/]+/[^/@]+(?:@(?:refs/(?:convert|pr)/[^/]+|(?!refs/)[^/]+))?)/(.+)")
_REACH_SECONDS = 4.0
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt")
_MODEL_FILES = (*_SMALL_FILES, "*.safetensors")


def model_directory(path: str) -> str:
    """A directory as it is; for `owner/name` or `owner/name@revision`, which is none, the Hub's files.

    Raises ConfigError where there is neither.
    """
    return path if hub_id(path) is None else _snapshot(path)


def hub_id(path: str) -> str | None:
    """The model's id on the Hub, without its revision; None for a directory."""
    if os.path.exists(path) or not _ID.fullmatch(path):
        return None
    return path.partition("@")[0]


def small_directory(path: str) -> str:
    """The same, but of the Hub's files all but the weights. Those of an earlier download are there."""
    return path if hub_id(path) is None else _snapshot(path, _SMALL_FILES)


def config_directory(path: str) -> str:
    """The same, but of the Hub's files config.json alone."""
    return path if hub_id(path) is None else _snapshot(path, ("config.json",))


def data_file(path: str) -> str:
    """A file as it is; for `hf://datasets/owner/name/file`, or .../name@revision/file, the Hub's."""
    if not path.startswith(_DATA):
        return path
    match = _DATA_FILE.fullmatch(path.removeprefix(_DATA))
    if match is None:
        raise ConfigError(f"{path} names no file; give {_DATA}owner/name/file.jsonl")
    return _download(*match.groups())


@lru_cache
def _is_out_of_reach() -> bool:
    """Whether the Hub does not answer: then what is here already has to do. Its client would try for 20 s."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    try:
        httpx.head(constants.ENDPOINT, timeout=_REACH_SECONDS)
    except httpx.HTTPError:
        return True
    return False


@lru_cache
def _snapshot(name: str, files: tuple[str, ...] = _MODEL_FILES) -> str:
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        return snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(files),
            local_files_only=_is_out_of_reach(),
        )
    except Exception as error:  # of the network, of access, of the cache
        problem = f"{name!r} is no directory here, and could not be fetched from the Hub"
        remedy = "give a model directory (rl fetch smollm2 makes one), or an id with HF_TOKEN and a network"
        raise ConfigError(f"{problem} ({_short(error)}); {remedy}") from error


@lru_cache
def _download(name: str, file: str) -> str:
    from huggingface_hub import hf_hub_download

    repository, _, revision = name.partition("@")
    try:
        return hf_hub_download(
            repository,
            file,
            repo_type="dataset",
            revision=revision or None,
            local_files_only=_is_out_of_reach(),
        )
    except Exception as error:
        raise ConfigError(
            f"{_DATA}{name}/{file} could not be fetched ({_short(error)}); check its name, HF_TOKEN and the "
            f"network"
        ) from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {message_of(error):.160}"
