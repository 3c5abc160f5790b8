"""Which small mistakes are made, none that nothing could tell from the code by its kind; by which tests they are judged."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from tests import reached
from tests.mutants import ROOT, mutants_of

SOURCE = b"""\
if TYPE_CHECKING:
    import x
for a, b in zip(x, y, strict=True):
    print(a)
def f(a: int = 3) -> bool:
    if a < 2:
        return False
    return g(a)
"""


def test_mistakes_are_those_that_somebody_could_make():
    assert {f"{m.line} {m.kind} | {m.before} -> {m.after}" for m in mutants_of("a.py", SOURCE)} == {
        "3 swapped | zip(x, y, strict=True) -> zip(y, x, strict=True)",
        "5 constant | 3 -> 4",
        "6 comparison | a < 2 -> (a <= 2)",
        "6 condition | a < 2 -> True",
        "6 condition | a < 2 -> False",
        "6 constant | 2 -> 3",
        "7 constant | False -> True",
        "8 return | return g(a) -> return None",
    }


def test_the_same_mistake_in_another_line_has_another_name():
    """That nothing can tell one of them from the code says nothing of the other."""
    names = [m.name for m in mutants_of("a.py", b"a = 0\nb = 0\n")]
    assert names == ["a.py constant | 0 -> 1 | a = 0", "a.py constant | 0 -> 1 | b = 0"]


CODE = '''\
"""What it is."""
from __future__ import annotations

LIMIT = 3

def size(of):
    """Its size."""
    if of:
        return len(of)
    elif of is None:
        return -1
    return 0
'''
TESTS = """\
import os, subprocess, sys
from pathlib import Path
import pytest
from code_of_tests import size

@pytest.fixture(scope="module")
def none(): return size(None)

def test_full(): assert size("ab") == 2
def test_none(none): assert none == -1
def test_beside():  # a process that still writes down what it reached
    Path(os.environ["RL_REACHED_FOLDER"], "7.part").write_text("[")
def test_process(): subprocess.run([sys.executable, "-c", "import code_of_tests; code_of_tests.size('')"], check=True)
"""


def test_a_mutant_is_judged_by_the_tests_that_reach_its_statement(tmp_path: Path):
    (tmp_path / "code_of_tests.py").write_text(reached.noting("code.py", CODE))
    (tmp_path / "test_code.py").write_text(TESTS)
    run = f"import pytest; from tests.reached import Notes; from pathlib import Path; pytest.main(['-q', '-p', 'no:cacheprovider'], [Notes(Path({str(tmp_path)!r}, 'out'))])"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    tests = {
        line: [name.partition("::")[2] for name in names]
        for line, names in json.loads((tmp_path / "out").read_text())["code.py"].items()
    }
    everyone = [
        "test_full",
        "test_none",
        "test_beside",
        "test_process",
    ]  # the first fixture's lines are all tests'
    assert "4 passed" in done.stdout
    assert tests["9"] == ["test_full"] and tests["12"] == ["test_process"]
    assert tests["8"] == tests["10"] == tests["11"]  # in the order of their seconds
    assert sorted(tests["8"]) == sorted(everyone) and tests["8"][-1] == "test_process"
    assert tests["4"] == ["test_process"]  # it is the one that imports the code


def test_the_statement_of_a_mutant_is_the_innermost():
    lines = {f"{m.line} {m.kind} {m.before}": m.statement for m in mutants_of("code.py", CODE.encode())}
    assert lines["8 condition of"] == 8 and lines["9 return return len(of)"] == 9
    assert lines["10 comparison of is None"] == 10
    assert lines["4 constant 3"] == 0  # runs at import, which only one of the tests that use it brings about


def test_a_fields_docstring_still_follows_the_field():
    source = 'class A:\n    """What it is."""\n    x: int = 0\n    """What x is."""\n    y: int = 1\n'
    body = ast.parse(reached.noting("code.py", source)).body[-1].body
    texts = [i for i, statement in enumerate(body) if ast.unparse(statement) == "'What x is.'"]
    assert len(body) == 6 and [ast.unparse(body[i - 1]) for i in texts] == ["x: int = 0"]


def test_two_alike_on_a_line_have_each_a_name():
    """One that is listed as equivalent must not excuse the other."""
    made = mutants_of("a.py", b"def f(x):\n    return x[1], x[1]\n")
    names = [mutant.name for mutant in made if mutant.kind == "constant"]
    assert len(names) == len(set(names)) == 2 and "constant 2 | 1 -> 2" in names[1]
