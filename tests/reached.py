"""Which tests reach which statement of the package, so that a mutant is judged by those alone.

A file whose statements each note that they ran takes the place of the file; pytest, with `Notes` as a plugin, writes
down after each test which did.
"""

import ast
import atexit
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

Place = tuple[str, int]  # file, first line of a statement
Position = tuple[int, int]  # line, column in bytes
reached: set[Place] = set()  # by the test that runs
FOLDER = "RL_REACHED_FOLDER"  # names where processes that a test starts leave theirs
_NAME = "_reached_by_tests"


def _leave() -> None:
    part = Path(os.environ[FOLDER], f"{os.getpid()}.part")
    part.write_text(json.dumps(sorted(reached)))
    part.rename(part.with_suffix(".json"))


if FOLDER in os.environ:
    atexit.register(_leave)


def noting(path: str, source: str) -> str:
    """The file's source, in which each statement notes first that it runs."""
    tree = ast.parse(source)
    for node, field in list(_blocks(tree)):
        block = getattr(node, field)
        first = _texts_and_future(block) if isinstance(node, _WITH_TEXT) else 0
        noted = [line for statement in block[first:] for line in _with_note(path, statement)]
        setattr(node, field, [*block[:first], *noted])
    first = _texts_and_future(tree.body)
    tree.body.insert(first, ast.parse(f"from tests.reached import reached as {_NAME}").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def statements(tree: ast.Module) -> list[tuple[Position, Position]]:
    """Where each begins and ends."""
    return [
        ((statement.lineno, statement.col_offset), (statement.end_lineno, statement.end_col_offset))
        for node, field in _blocks(tree)
        for statement in getattr(node, field)
    ]


class Notes:
    """A plugin of pytest, which writes file -> line -> tests that reach it, those of fast files first."""

    def __init__(self, out: Path):
        self._out, self._processes = out, out.parent / "processes"
        self._processes.mkdir(exist_ok=True)
        os.environ[FOLDER] = str(self._processes)
        self._tests: dict[str, set[Place]] = {}
        self._seconds: dict[str, float] = {}
        self._shared: dict[str, set[Place]] = defaultdict(set)  # by a fixture that tests of this file share

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        reached.clear()
        began = time.monotonic()
        result = yield
        self._seconds[item.nodeid] = time.monotonic() - began
        self._tests[item.nodeid] = set(reached)
        for file in self._processes.glob("*.json"):
            self._tests[item.nodeid] |= set(map(tuple, json.loads(file.read_text())))
            file.unlink()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        before = set(reached)
        reached.clear()
        try:
            return (yield)
        finally:
            self._shared["" if fixturedef.scope == "session" else _file(request.node.nodeid)] |= reached
            reached.update(before)

    def pytest_sessionfinish(self):
        tests: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        of_file: dict[str, list[float]] = defaultdict(list)
        for test, seconds in self._seconds.items():
            of_file[_file(test)].append(seconds)
        mean = {file: sum(seconds) / len(seconds) for file, seconds in of_file.items()}
        for test in sorted(self._tests, key=lambda test: (mean[_file(test)], self._seconds[test])):
            places = self._tests[test]
            for file, line in sorted(places | self._shared[_file(test)] | self._shared[""]):
                tests[file][line].append(test)
        self._out.write_text(json.dumps(tests))


class Only:
    """A plugin of pytest: the tests with these ids, in this order, without the others of their files."""

    def __init__(self, ids: Sequence[str]):
        self._places = {id: place for place, id in enumerate(ids)}

    def pytest_collection_modifyitems(self, items):
        chosen = (item for item in items if item.nodeid in self._places)
        items[:] = sorted(chosen, key=lambda item: self._places[item.nodeid])


_WITH_TEXT = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _blocks(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """(node, field) of each list of statements."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(getattr(node, field, None), list):
                yield node, field


def _with_note(path: str, statement: ast.stmt) -> list[ast.stmt]:
    """A text stays without one: a field's docstring has to follow the field."""
    if _is_text(statement):
        return [statement]
    return [ast.parse(f"{_NAME}.add({(path, statement.lineno)!r})").body[0], statement]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _texts_and_future(block: list[ast.stmt]) -> int:
    """How many statements stand first whatever else does: a docstring, and what comes from __future__."""
    first = 0
    for statement in block:
        is_docstring = not first and _is_text(statement)
        if not is_docstring and not (
            isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        ):
            break
        first += 1
    return first


def _file(test: str) -> str:
    return test.partition("::")[0]
