"""Values of a tool call: what JSON and UTF-8 can carry."""

import math
from typing import Any

_MAX_DEPTH = 64
_MAX_BITS = 10_000  # Python writes integers of up to 4300 digits


def json_value(value: object, depth: int = _MAX_DEPTH) -> Any:
    """The value, with tuples as lists. depth: how deep lists and objects may be in each other.

    Raises ValueError for what JSON and UTF-8 cannot carry.
    """
    match value:
        case None | bool():
            return value
        case int() if value.bit_length() <= _MAX_BITS:
            return value
        case float() if math.isfinite(value):
            return value
        case str():
            value.encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair
            return value
        case list() | tuple() | dict() if depth == 0:
            raise ValueError(f"its arguments are nested over {_MAX_DEPTH} deep")
        case list() | tuple():
            return [json_value(item, depth - 1) for item in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {json_value(key): json_value(item, depth - 1) for key, item in value.items()}
        case dict():
            raise ValueError("the keys of an object have to be strings")
        case int():
            raise ValueError("an integer is too large")
        case float():
            raise ValueError("NaN and Infinity are no JSON numbers")
    raise ValueError(f"a value of type {type(value).__name__} is not JSON")
