"""The end of the log that an error names: it is said with the error, for the directory may be far away."""

import re
from pathlib import Path

_BYTES, _LINES = 8192, 8
_NAMED = re.compile(r"\blogs/([\w.*-]*)")
_RANKS = r"(-\d+)?"  # for the * of an error: a mesh of one has NAME.log, a larger one NAME-RANK.log


def log_tail(run_dir: Path, error: str) -> str:
    """Empty where it names none, or none has a line. Of several, the log that was written to last."""
    if (named := _NAMED.search(error)) is None:
        return ""
    pattern = re.escape(named[1]).replace(r"\*", _RANKS) if named[1] else r".*\.log"
    logs = run_dir / "logs"
    paths = [path for path in logs.glob("*") if re.fullmatch(pattern, path.name) and path.is_file()]
    paths.sort(key=lambda path: path.stat().st_mtime)
    for path in reversed(paths):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _BYTES))
            lines = file.read(_BYTES).decode(errors="replace").splitlines()
        if end := [line for line in lines if line.strip()][-_LINES:]:
            return f"the end of {path}:\n" + "".join(f"  {line}\n" for line in end)
    return ""
