"""Paths that a user gives: whether they can be paths at all, and whether a directory can be made there."""

import os

_LONGEST_PATH, _LONGEST_NAME = 3900, 255  # bytes; logs and checkpoints add to the path


def why_no_path(path: str) -> str:
    """Why no file can have this name, with the remedy; empty where one can."""
    if "\0" in path:
        return "holds a NUL character, which no path does; leave it out"
    names = [os.fsencode(name) for name in path.split(os.sep)]
    if len(os.fsencode(path)) > _LONGEST_PATH or max(map(len, names)) > _LONGEST_NAME:
        return "is longer than a path may be; give a shorter one"
    return ""


def why_not_made(path: str) -> str:
    """Why a new directory cannot be made here, with the remedy; empty where it can, or is, empty."""
    if why := why_no_path(path):
        return why
    there = os.path.abspath(path)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        what = "a file" if os.path.exists(there) else "a link to nothing"
        return f"cannot be made: {there} is {what}; give another directory"
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        return f"cannot be made: {there} may not be written to; give another directory"
    if there == os.path.abspath(path) and os.listdir(there):
        return "exists and is not empty; give another directory"
    return ""
