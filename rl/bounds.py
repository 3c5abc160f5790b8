"""Bounds of settings, as annotations beside the fields: --help shows them, `fields.check_fields` checks."""

from dataclasses import dataclass
from typing import Annotated

import tyro
from annotated_types import Ge, Gt, Le, Lt

MOST = 2**31 - 1
"""Of a whole number that counts something."""


@dataclass(frozen=True)
class ZeroOrOver:
    """Marks a number that is 0, which turns something off, or over a bound."""

    bound: float


PositiveInt = Annotated[int, Ge(1), Le(MOST), tyro.conf.arg(metavar="INT >= 1")]
NonNegativeInt = Annotated[int, Ge(0), Le(MOST), tyro.conf.arg(metavar="INT >= 0")]
Threads = Annotated[int, Ge(0), Le(1024), tyro.conf.arg(metavar="0 <= INT <= 1024")]
Seed = Annotated[int, Ge(0), Lt(2**63), tyro.conf.arg(metavar="0 <= INT < 2^63")]
PositiveFloat = Annotated[float, Gt(0), tyro.conf.arg(metavar="FLOAT > 0")]
AtLeastOne = Annotated[float, Ge(1), tyro.conf.arg(metavar="FLOAT >= 1")]
NonNegativeFloat = Annotated[float, Ge(0), tyro.conf.arg(metavar="FLOAT >= 0")]
HalfShare = Annotated[float, Ge(0), Le(0.5), tyro.conf.arg(metavar="0 <= FLOAT <= 0.5")]
Share = Annotated[float, Ge(0), Le(1), tyro.conf.arg(metavar="0 <= FLOAT <= 1")]
ZeroOrOverOne = Annotated[float, ZeroOrOver(1), tyro.conf.arg(metavar="0 or FLOAT > 1")]
Port = Annotated[int, Ge(0), Le(65535), tyro.conf.arg(metavar="0 <= INT <= 65535")]
CacheGib = Annotated[float, Ge(0), Le(2**20), tyro.conf.arg(metavar="0 <= FLOAT <= 1048576")]
PositiveCacheGib = Annotated[float, Gt(0), Le(2**20), tyro.conf.arg(metavar="0 < FLOAT <= 1048576")]
Problems = Annotated[int, Ge(1), Le(100_000), tyro.conf.arg(metavar="1 <= INT <= 100000")]


class IsPath:
    """Marks a string as a path, in which `~` is the user's home directory."""


FilePath = Annotated[str, IsPath()]
