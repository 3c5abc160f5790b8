"""The types of a dataclass's fields, as far as they can be found."""

import sys
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints


def type_hints(kind: type) -> dict[str, Any]:
    """With bounds.

    A subclass that annotates a field again as a plain int or float keeps the bounds.
    """
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for name in vars(base).get("__annotations__", {}):
            hint, before = _own_hint(base, name), hints.get(name)
            keeps = get_origin(before) is Annotated and get_args(before)[0] is hint
            hints[name] = before if keeps else hint
    return hints


def _own_hint(kind: type, name: str) -> Any:
    """Any where it names a type that cannot be found, as one that only type checkers import."""
    one = SimpleNamespace(__annotations__={name: vars(kind)["__annotations__"][name]})
    module = sys.modules.get(kind.__module__)
    try:
        return get_type_hints(
            one, dict(vars(module)) if module else {}, dict(vars(kind)), include_extras=True
        )[name]
    except (NameError, TypeError):
        return Any
