"""Bounds of settings, beside the fields: as annotations, which --help shows and `out_of_range` checks."""

import dataclasses
import math
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro
from annotated_types import Ge, Gt, Le, Lt

PositiveInt = Annotated[int, Ge(1), tyro.conf.arg(metavar="INT >= 1")]
NonNegativeInt = Annotated[int, Ge(0), tyro.conf.arg(metavar="INT >= 0")]
Seed = Annotated[int, Ge(0), Lt(2**63), tyro.conf.arg(metavar="0 <= INT < 2^63")]
PositiveFloat = Annotated[float, Gt(0), tyro.conf.arg(metavar="FLOAT > 0")]
NonNegativeFloat = Annotated[float, Ge(0), tyro.conf.arg(metavar="FLOAT >= 0")]
HalfShare = Annotated[float, Ge(0), Le(0.5), tyro.conf.arg(metavar="0 <= FLOAT <= 0.5")]
Share = Annotated[float, Ge(0), Le(1), tyro.conf.arg(metavar="0 <= FLOAT <= 1")]

_CHECKS = {
    Ge: (lambda value, bound: value >= bound.ge, lambda bound: f"at least {bound.ge}"),
    Gt: (lambda value, bound: value > bound.gt, lambda bound: f"over {bound.gt}"),
    Le: (lambda value, bound: value <= bound.le, lambda bound: f"at most {bound.le}"),
    Lt: (lambda value, bound: value < bound.lt, lambda bound: f"under {bound.lt}"),
}


def out_of_range(config: Any, prefix: str = "") -> list[str]:
    """One line for each number of the nested dataclasses that is outside its field's bounds, or no number."""
    found = []
    hints = get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found += out_of_range(value, f"{name}.")
            continue
        hint = hints[field.name]
        kind, *bounds = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if kind not in (int, float):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
            found.append(f"{name}={value!r} must be {'a number' if kind is float else 'a whole number'}")
            continue
        if math.isnan(value) or math.isinf(value):
            found.append(f"{name}={value} must be finite")
            continue
        limits = [bound for bound in bounds if type(bound) in _CHECKS]
        if not all(_CHECKS[type(bound)][0](value, bound) for bound in limits):
            words = " and ".join(_CHECKS[type(bound)][1](bound) for bound in limits)
            found.append(f"{name}={value} must be {words}")
    return found
