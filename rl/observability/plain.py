"""Any value of a user's as JSON: what is none stands as its text, so that every record can be written."""

import math
from collections.abc import Mapping, Set
from typing import Any

_MAX_DEPTH = 64
_MAX_BITS = 10_000  # Python writes integers of up to 4300 digits


def plain(value: object, depth: int = _MAX_DEPTH) -> Any:
    """depth: of objects and lists within each other; what is deeper, or in a circle, is "..."."""
    match value:
        case None | bool() | str():
            return value
        case int() if value.bit_length() <= _MAX_BITS:
            return int(value)
        case float() if math.isfinite(value):
            return float(value)
        case Mapping() | list() | tuple() | Set() if depth == 0:
            return "..."
        case Mapping():
            return {_text(key): plain(item, depth - 1) for key, item in value.items()}
        case list() | tuple() | Set():
            return [plain(item, depth - 1) for item in value]
    if type(value).__module__ == "numpy":
        of_python = value.tolist()  # type: ignore[attr-defined]
        if type(of_python) is not type(value):  # longdouble has no type in Python
            return plain(of_python, depth)
    return _text(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # another's __str__
        return f"<{type(value).__name__}>"
