"""Times as Slurm writes them."""

import re


def seconds_of(text: str) -> int | None:
    """Of Slurm's times: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. None for another text, which Slurm judges."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)  # minutes come first
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds
