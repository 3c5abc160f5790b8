"""Numbers in what a policy wrote."""

import re
from decimal import Decimal

# A hyphen behind a digit, a letter or a bracket is no sign: pages 10-12. Commas part thousands: 1,2 are two.
NUMBER = re.compile(
    r"(?:(?<![\w.)])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)"
)


def last_number(text: str) -> str | None:
    """As `Decimal` takes it: without commas, and with a hyphen as its sign."""
    numbers = NUMBER.findall(text)
    return plain(numbers[-1]) if numbers else None


def plain(number: str) -> str:
    return number.replace(",", "").replace("\u2212", "-")


def value(number: str) -> Decimal:
    """Exact, whatever its length: 7.0 is 7, and 2**53 + 1 is not 2**53."""
    return Decimal(plain(number))
