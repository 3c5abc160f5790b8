"""The types of a dataclass's fields, as far as they can be found."""

import sys
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

_complete: WeakKeyDictionary[type, Mapping[str, Any]] = WeakKeyDictionary()
"""Of classes all of whose types were found: those of a module that is being executed may be found later."""


def type_hints(kind: type) -> Mapping[str, Any]:
    """With bounds.

    A subclass that annotates a field again as a plain int or float keeps the bounds.
    """
    if kind in _complete:
        return _complete[kind]
    hints: dict[str, Any] = {}
    is_complete = True
    for base in reversed(kind.__mro__):
        for name in vars(base).get("__annotations__", {}):
            try:
                hint = _own_hint(base, name)
            except (NameError, TypeError):  # as one that only type checkers import
                hint, is_complete = Any, False
            before = hints.get(name)
            keeps = get_origin(before) is Annotated and get_args(before)[0] is hint
            hints[name] = before if keeps else hint
    if is_complete:
        _complete[kind] = MappingProxyType(hints)
    return MappingProxyType(hints)


def _own_hint(kind: type, name: str) -> Any:
    one = SimpleNamespace(__annotations__={name: vars(kind)["__annotations__"][name]})
    module = sys.modules.get(kind.__module__)
    scope = dict(vars(module)) if module else {}
    return get_type_hints(one, scope, dict(vars(kind)), include_extras=True)[name]
