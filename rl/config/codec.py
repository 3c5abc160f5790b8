"""config.json of a run: every setting, with the class of each part, so that the run can be started again."""

import dataclasses
import enum
import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl.cluster.jobs import FILES
from rl.config.names import MOVED, with_new_names
from rl.config.run import RunConfig
from rl.errors import ConfigError, check_version, one_line
from rl.fields import settable
from rl.paths import LOCK, write_whole

_NAME = "config.json"
_VERSION = 1
_TYPE_FIELD = ".type"  # the key of a field called type, where the key `type` is the class's
_SETS: dict[str, type] = {"set": set, "frozenset": frozenset}


def write_config(run_dir: Path, recipe: str, config: RunConfig) -> None:
    """recipe: what `load_recipe` was given."""
    text = json.dumps({"recipe": recipe, "version": _VERSION, **to_json(config)}, indent=1)
    write_whole(run_dir / _NAME, text.encode())


_BEFORE_A_JOB = (*FILES, "plan.json")


def why_no_run(directory: Path) -> str:
    """Why a directory with files is not one that a run was started in, with the remedy; empty if it is.

    A run that was killed as it started has left at most its lock and half a config.json. Who submitted it to
    a scheduler has written what is submitted, and the scheduler a log.
    """
    names = {path.name for path in directory.iterdir() if not path.name.startswith(_BEFORE_A_JOB)}
    if names <= {LOCK, f"{_NAME}.partial"}:
        return ""
    if _NAME not in names:
        return "exists and is not empty; give another directory"
    try:
        data = _contents(directory / _NAME)
    except ValueError as error:
        remedy = f"mend {directory / _NAME}, or give another directory"
        return f"has a {_NAME} that is not a run's ({error}); {remedy}"
    return "" if "type" in data else f"has a {_NAME} that no run wrote; give another directory"


def config_file(name: str) -> Path:
    """name: a run's config.json, or the directory of the run."""
    return Path(name) / _NAME if Path(name).is_dir() else Path(name)


def read_config(path: str) -> tuple[str, Mapping[str, Any]]:
    """The recipe that a config.json was written for, and the contents. `path`: the file or its directory.

    Raises ConfigError with the file, the line and the remedy.
    """
    file = config_file(path)
    try:
        data = _contents(file)
    except ValueError as error:
        raise ConfigError(
            f"{file} is not the config.json of a run ({error}); mend it, or give a recipe"
        ) from error
    settings = {name: value for name, value in data.items() if name not in ("recipe", "version")}
    return data["recipe"], with_new_names(settings)


def _contents(file: Path) -> dict[str, Any]:
    """Raises ValueError, which says what is wrong and in which line; ConfigError of an unknown version."""
    try:
        data = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line}: the byte {error.object[error.start]:#04x} is no UTF-8") from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(data, dict) or not isinstance(data.get("recipe"), str):
        raise ValueError("it names no recipe")
    check_version(file, data.get("version", _VERSION), _VERSION)  # the first ones had none
    return data


def to_json(value: Any) -> Any:
    """Nested dataclasses as plain data, each with its class; what JSON does not know as its repr."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            _TYPE_FIELD if f.name == "type" else f.name: to_json(getattr(value, f.name))
            for f in settable(value)
        }
        return {"type": _name(type(value))} | fields
    if type(value) is dict:  # its keys may be anything
        return {"dict": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if inspect.isroutine(value) and (owner := _owner(value)) is not None:
        return {"method": value.__name__, "of": to_json(owner)}
    if hasattr(value, "__qualname__") and (inspect.isroutine(value) or isinstance(value, type)):
        return {"python": _name(value)} if not _is_wrapped(value) else {"repr": repr(value)}
    if isinstance(value, enum.Enum):
        return {"enum": _name(type(value)), "name": value.name}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named": _name(type(value)), "values": [to_json(item) for item in value]}
    if isinstance(value, list):
        return {"list": [to_json(item) for item in value]}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if type(value) in _SETS.values():  # the order of a set differs from process to process
        return {type(value).__name__: sorted((to_json(item) for item in value), key=json.dumps)}
    if isinstance(value, os.PathLike):
        return {"path": os.fspath(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"repr": repr(value)}


def from_json(data: Any, where: str = "config.json", fallback: Any = None) -> Any:
    """What `to_json` was given. Raises ConfigError where that is not possible, or not in this version.

    fallback: what the recipe has in its place, where that is known: a lambda can be read from nowhere else.
    """
    if isinstance(data, list):
        return tuple(_items(data, where, fallback))
    if not isinstance(data, dict):
        return data
    try:
        return _from_dict(data, where, fallback)
    except ConfigError:
        is_of_python = bool(data.keys() & {"python", "method", "repr"})
        if is_of_python and without_addresses(data) == without_addresses(to_json(fallback)):
            return fallback
        raise


def _items(data: list[Any], where: str, fallback: Any) -> list[Any]:
    if not isinstance(fallback, list | tuple) or len(fallback) != len(data):
        fallback = [None] * len(data)
    return [from_json(item, where, other) for item, other in zip(data, fallback, strict=True)]


def without_addresses(data: Any) -> Any:
    """What to_json returned, as another process would have it: an object of which it knows only the repr is
    elsewhere there."""
    if isinstance(data, list):
        return [without_addresses(item) for item in data]
    if not isinstance(data, dict):
        return data
    if data.keys() == {"repr"}:
        return {"repr": re.sub(r"0x[0-9a-f]+", "", data["repr"])}
    return {name: without_addresses(item) for name, item in data.items()}


def _from_dict(data: dict[str, Any], where: str, fallback: Any) -> Any:
    match data:
        case {"type": str(name), **fields}:
            kind = _find(name, where)
            if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
                raise ConfigError(f"{where} names {name!r}, which is no dataclass; give a recipe")
            known = {field.name: field.init for field in dataclasses.fields(kind)}
            if _TYPE_FIELD in fields:
                fields["type"] = fields.pop(_TYPE_FIELD)
            if unknown := sorted(fields.keys() - known.keys()):
                raise ConfigError(
                    f"{where} has the setting {unknown[0]} of {name}, which this version does not; "
                    f"remove it there, or give a recipe"
                )
            same = fallback if type(fallback) is kind else None
            values = {
                f: from_json(value, where, getattr(same, f, None)) for f, value in fields.items() if known[f]
            }
            return _made_again(lambda: kind(**values), name, where)
        case {"dict": list(items)}:
            made = fallback if isinstance(fallback, dict) else {}
            keys = [from_json(key, where) for key, _ in items]
            return {
                key: from_json(item, where, made.get(key)) for key, (_, item) in zip(keys, items, strict=True)
            }
        case {"list": list(items)}:
            return _items(items, where, fallback)
        case {"set": list(items)} | {"frozenset": list(items)}:
            return _SETS[next(iter(data))](from_json(item, where) for item in items)
        case {"method": str(name), "of": owner}:
            return _attribute(from_json(owner, where), name, where)
        case {"python": str(name)}:
            return _find(name, where)
        case {"path": str(path)}:
            return Path(path)
        case {"enum": str(kind), "name": str(name)}:
            try:
                return _find(kind, where)[name]
            except KeyError as error:
                raise ConfigError(
                    f"{where} names {name!r} of {kind}, which is not there; give a recipe"
                ) from error
        case {"named": str(kind), "values": list(items)}:
            parts = _items(items, where, fallback)
            return _made_again(lambda: _find(kind, where)(*parts), kind, where)
    raise ConfigError(f"{where} holds {data!s:.60}, which cannot be read back; give a recipe")


def _made_again(make: Callable[[], Any], name: str, where: str) -> Any:
    """The class may be the user's own, and raise whatever it does."""
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where}: {name} cannot be made again ({one_line(error)}); give a recipe"
        ) from error


def _owner(routine: Any) -> Any:
    """What a method is bound to; None for a function."""
    owner = getattr(routine, "__self__", None)
    return None if inspect.ismodule(owner) else owner


def _attribute(owner: Any, name: str, where: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise ConfigError(
            f"{where} names a method {name!r} that is not there ({error}); give a recipe"
        ) from error


def _name(thing: Any) -> str:
    """module:name of a class or a function. A method of a class in C, as str.lower, only knows its class."""
    named = thing if getattr(thing, "__module__", None) else getattr(thing, "__objclass__", type(thing))
    return f"{named.__module__}:{thing.__qualname__}"


def _is_wrapped(value: Any) -> bool:
    """Whether its name is another's: functools.wraps gives a function the name of the one that it calls."""
    try:
        return _find(_name(value), "") is not value
    except ConfigError:
        return False


def _find(name: str, where: str) -> Any:
    module, _, path = name.partition(":")
    try:
        value: Any = importlib.import_module(MOVED.get(module, module))
        for part in path.split("."):
            value = getattr(value, part)
        return value
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"{where} names {name!r}, which is not there ({error}); give a recipe") from error
