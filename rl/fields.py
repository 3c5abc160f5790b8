"""The fields of nested dataclasses against their annotations: types, bounds and paths."""

import contextlib
import contextvars
import dataclasses
import inspect
import math
import operator
import os
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from rl.bounds import MOST, IsPath, ZeroOrOver
from rl.errors import ConfigError
from rl.paths import why_no_path
from rl.type_hints import type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "True or False",
    type(None): "None",
}
_CHECKS = {
    Ge: (lambda value, bound: value >= bound.ge, lambda bound: f"at least {bound.ge}"),
    Gt: (lambda value, bound: value > bound.gt, lambda bound: f"over {bound.gt}"),
    Le: (lambda value, bound: value <= bound.le, lambda bound: f"at most {bound.le}"),
    Lt: (lambda value, bound: value < bound.lt, lambda bound: f"under {bound.lt}"),
    ZeroOrOver: (
        lambda value, mark: value == 0 or value > mark.bound,
        lambda mark: f"over {mark.bound}, or 0 for none",
    ),
}
_POSTPONED: contextvars.ContextVar[list[tuple[Any, list[str]]] | None] = contextvars.ContextVar(
    "_POSTPONED", default=None
)


def check_fields(config: T, prefix: str = "") -> tuple[T, list[str]]:
    """One line for each field of a wrong type or out of its bounds; and the config with its default there.

    So that what else is wrong can be found at the same time. Raises ConfigError, with all the lines, where
    such a field has no default.
    """
    wrong: dict[str, str] = {}
    hopeless: list[str] = []
    config = _checked(config, prefix, wrong, hopeless)
    if hopeless:
        raise ConfigError("\n".join(wrong.values()))
    return config, list(wrong.values())


def refuse(part: Any) -> None:
    """The `__post_init__` of a part of the config: impossible values are refused when it is built.

    Raises ConfigError with one line for each field of a wrong type or out of its bounds, and for each pair
    of fields that exclude each other (`conflicts`). Runs again in `dataclasses.replace`, not in unpickling.
    """
    prefix = f"{type(part).__name__}."
    whole, problems = check_fields(part, prefix)
    problems += conflicts(whole, prefix)
    if not problems:
        return
    postponed = _POSTPONED.get()
    if postponed is None:
        raise ConfigError("\n".join(problems))
    postponed.append((part, problems))


def conflicts(part: Any, prefix: str) -> list[str]:
    """One line for each pair of a part's fields that exclude each other: its method `conflicts`, if any."""
    return list(part.conflicts(prefix)) if is_instance(part) and hasattr(part, "conflicts") else []


def unread(part: Any, prefix: str) -> list[str]:
    """One line for each field that was changed and that the part does not read: its method `unread`, if any.

    These keep a run from starting. They are not refused before, since fields may be changed one by one.
    """
    return list(part.unread(prefix)) if is_instance(part) and hasattr(part, "unread") else []


@contextlib.contextmanager
def postpone_refusals() -> Iterator[list[tuple[Any, list[str]]]]:
    """Within it `refuse` notes each refused part with its problems in the yielded list, and does not raise.

    But ConfigError is raised where a wrong field has no default. For whoever builds a config from many
    values, and then reports the problems of all parts together.
    """
    postponed: list[tuple[Any, list[str]]] = []
    token = _POSTPONED.set(postponed)
    try:
        yield postponed
    finally:
        _POSTPONED.reset(token)


def parts_of(config: Any) -> Iterator[Any]:
    """The dataclass and all that are nested in its fields, those of tuples among them."""
    if is_instance(config):
        yield config
        for field in dataclasses.fields(config):
            yield from parts_of(getattr(config, field.name))
    elif type(config) is tuple:
        for item in config:
            yield from parts_of(item)


def settable(config: Any) -> list["dataclasses.Field[Any]"]:
    """The fields that the class's `__init__` takes; the others follow from them."""
    return [field for field in dataclasses.fields(config) if field.init]


def is_instance(value: Any) -> bool:
    """Whether it is a dataclass's instance, and not the class."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _checked(config: Any, prefix: str, wrong: dict[str, str], hopeless: list[str]) -> Any:
    hints, changes = type_hints(type(config)), {}
    for field in settable(config):
        name, value, hint = prefix + field.name, getattr(config, field.name), hints.get(field.name, Any)
        problem = _problem(name, value, hint)
        if problem:
            wrong[name] = problem
            if field.default is not dataclasses.MISSING:
                changes[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                changes[field.name] = field.default_factory()
            else:
                hopeless.append(name)
        elif (inner := _checked_value(value, name, wrong, hopeless)) is not value:
            changes[field.name] = inner
    if not changes or hopeless:
        return config
    with postpone_refusals():  # conflicts are reported beside the fields, not in their place
        return dataclasses.replace(config, **changes)


def _checked_value(value: Any, name: str, wrong: dict[str, str], hopeless: list[str]) -> Any:
    """A field's value, with its defaults where a dataclass in it is wrong; itself where none is."""
    if is_instance(value):
        return _checked(value, f"{name}.", wrong, hopeless)
    if type(value) is not tuple:
        return value
    items = tuple(_checked_value(item, f"{name}[{i}]", wrong, hopeless) for i, item in enumerate(value))
    return value if all(map(operator.is_, items, value)) else items


def _problem(name: str, value: Any, hint: Any) -> str | None:
    if not fits(value, hint):
        of_class = isinstance(value, type) and issubclass(value, _classes(hint))
        remedy = f"; write {value.__name__}(...)" if of_class else ""
        return f"{name}={shown(value)} must be {describe_type(hint)}{remedy}"
    if get_origin(hint) in (Union, types.UnionType):  # of which one part fits
        return _problem(name, value, next(kind for kind in get_args(hint) if fits(value, kind)))
    numbers = value if isinstance(value, tuple) else (value,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        return f"{name}={value} must be finite"
    for number, (item, of_item) in enumerate(_items(value, hint)):
        if why := _problem(f"{name}[{number}]", item, of_item):
            return why
    marks = getattr(hint, "__metadata__", ())
    if any(isinstance(mark, IsPath) for mark in marks) and (why := why_no_path(value)):
        return f"{name}={shown(value)} {why}"
    bounds = [bound for bound in marks if type(bound) in _CHECKS]
    broken = [bound for bound in bounds if not _CHECKS[type(bound)][0](value, bound)]
    if not broken:
        return None
    named = broken if Le(MOST) in bounds else bounds  # MOST is worth words only where it is passed
    return f"{name}={shown(value)} must be {' and '.join(_CHECKS[type(b)][1](b) for b in named)}"


def _items(value: Any, hint: Any) -> list[tuple[Any, Any]]:
    """A tuple's items, with the hint of each."""
    kinds = get_args(hint)
    if not isinstance(value, tuple) or get_origin(hint) is not tuple or not kinds:
        return []
    of_each = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else kinds
    return list(zip(value, of_each, strict=False))


def _classes(hint: Any) -> tuple[type, ...]:
    """The classes that a hint names."""
    if get_origin(hint) in (Annotated, Union, types.UnionType):
        return tuple(kind for part in get_args(hint) for kind in _classes(part))
    return (hint,) if isinstance(hint, type) else ()


def _is_path(hint: Any) -> bool:
    """A FilePath, or one or None."""
    return isinstance(hint, IsPath) or any(map(_is_path, get_args(hint)))


def expand_paths(config: T) -> T:
    """With the home directory for `~` in each field that is a FilePath, at any depth."""
    hints, changes = type_hints(type(config)), {}
    for field in settable(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) or isinstance(value, tuple):
            new: Any = _expanded(value)
        elif _is_path(hints.get(field.name)):
            new = os.path.expanduser(value) if isinstance(value, str) else value
        else:
            continue
        if new is not value and new != value:
            changes[field.name] = new
    return dataclasses.replace(config, **changes) if changes else config


def _expanded(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_expanded, value))
    return expand_paths(value) if is_instance(value) else value


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; true of types that cannot be checked."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return fits(value, parts[0])
    if origin is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(parts) == 2 and parts[1] is ...:
            return all(fits(item, parts[0]) for item in value)
        return len(value) == len(parts) and all(map(fits, value, parts))
    if origin in (list, set, frozenset, dict):
        return isinstance(value, origin)
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    if hint is None:
        return value is None
    if hint is Any or getattr(hint, "_is_protocol", False):
        return True
    return not isinstance(hint, type) or isinstance(value, hint)


def shown(value: Any) -> str:
    """A value in a message: short, and on one line."""
    if isinstance(value, type) or inspect.isroutine(value):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__name__}"
    if is_instance(value):
        changed = any(getattr(value, f.name) != f.default for f in dataclasses.fields(value))
        return f"{type(value).__name__}({'...' if changed else ''})"
    return short(repr(value))


def short(text: str) -> str:
    """Text in a message: at most 60 characters, and on one line."""
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:60]}..."


def kind(value: Any) -> str:
    """Of what type a value is, in words: None, a str, an int."""
    return "None" if value is None else _a(type(value).__name__)


def _a(word: str) -> str:
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word}"


def describe_type(hint: Any) -> str:
    """What a value of this type is, in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe_type(parts[0])
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe_type, parts))
    if origin is tuple:
        several = "each " if len(parts) > 1 and parts[1] is not ... else ""
        number = f"{len(parts)} values" if several else "values"
        return f"a tuple of {number}, {several or 'each '}{describe_type(parts[0])}"
    if hint in _WORDS:
        return _WORDS[hint]
    return _a(hint.__name__) if isinstance(hint, type) else "something else"
