"""What of the code could be wrong without a test that fails: `make mutants`, which writes docs/mutants.md.

A mutant is the code with one small mistake, as `<=` in the place of `<`. The tests of its module run on it, by
`[tool.mutants]` of pyproject.toml, those that reach its statement, or all where only an import does; where none
fails, it has survived. A sample of all mutants is drawn with the commit's hash as seed, in random order: `--minutes`
ends with fewer of them. Mutants that change nothing are listed, with the reason, in tests/equivalent_mutants.txt.
"""

import argparse
import ast
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from tests import reached

ROOT = Path(__file__).parent.parent
PAGE, EQUIVALENT = ROOT / "docs/mutants.md", ROOT / "tests/equivalent_mutants.txt"
SECONDS = 120.0  # for a mutant, beside twice what its tests take; one that takes longer is killed by them
_WHOLE_SECONDS = 900.0  # for all tests of a module, on the code as it is
_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "sorted": "list", "any": "all", "all": "any"}


@dataclass(frozen=True, order=True)
class Mutant:
    path: str
    line: int
    start: int  # bytes of the file that `after` stands for
    end: int
    kind: str
    before: str
    after: str
    statement: int  # the first line of the innermost one that holds it; 0: it runs at import
    text: str  # of its first line
    number: int = 1  # of those that are alike on the line

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind} | {_short(self.before)} -> {_short(self.after)}"

    @property
    def name(self) -> str:
        """With the line's text in place of its number, which moves."""
        kind = self.kind if self.number == 1 else f"{self.kind} {self.number}"
        return f"{self.path} {kind} | {_short(self.before)} -> {_short(self.after)} | {_short(self.text)}"

    def of(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def _short(text: str) -> str:
    return " ".join(text.split())[:100]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    made, tree = [], ast.parse(source)
    statements, bodies, whole = reached.statements(tree), list(_bodies(tree)), ast.dump(tree)
    for node, kind, after in _changes(tree):
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[node.end_lineno - 1] + node.end_col_offset
        place = (node.lineno, node.col_offset)
        in_function = any(first <= place < last for first, last in bodies)
        statement = max(first[0] for first, last in statements if first <= place < last) if in_function else 0
        text = source[lines[node.lineno - 1] : lines[node.lineno]].decode()
        before = source[start:end].decode()
        mutant = Mutant(path, node.lineno, start, end, kind, before, after, statement, text)
        try:
            changed = ast.dump(ast.parse(mutant.of(source))) != whole
        except SyntaxError:  # a statement that has to stand there
            continue
        if changed:
            made.append(mutant)
    alike: Counter[tuple[object, ...]] = Counter()
    numbered = []
    for mutant in sorted(set(made)):
        key = mutant.line, mutant.kind, mutant.before, mutant.after
        alike[key] += 1
        numbered.append(replace(mutant, number=alike[key]))
    return numbered


def _bodies(tree: ast.AST) -> Iterator[tuple[reached.Position, reached.Position]]:
    """Where the code of each function begins and ends."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = node.body[0], node.body[-1]
            yield (first.lineno, first.col_offset), (last.end_lineno or 0, last.end_col_offset or 0)


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """(node, kind of the mistake, what stands in its place)."""
    for node in _code(tree):
        match node:
            case ast.Compare(left, [op], [right]) if type(op) in _COMPARISONS:
                yield node, "comparison", _in_brackets(ast.Compare(left, [_COMPARISONS[type(op)]()], [right]))
            case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
                yield node, "arithmetic", _in_brackets(ast.BinOp(left, _ARITHMETIC[type(op)](), right))
            case ast.BoolOp(op, values):
                other = ast.Or() if isinstance(op, ast.And) else ast.And()
                yield node, "and/or", _in_brackets(ast.BoolOp(other, values))
            case ast.UnaryOp(ast.Not(), operand):
                yield node, "not", _in_brackets(operand)
            case ast.Constant(bool(value)):
                yield node, "constant", str(not value)
            case ast.Constant(int(value) | float(value)):
                yield node, "constant", str(value + 1)
            case ast.Return(value) if value is not None and not _is_none_or_false(value):
                yield node, "return", "return None"
            case ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
                yield node, "deleted", "pass"
            case ast.Expr(ast.Call() | ast.Await() as value) if not _is_log(value):
                yield node, "deleted", "pass"
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test, "condition", "True"
            yield node.test, "condition", "False"
        if isinstance(node, ast.Call):
            yield from _calls(node)


def _calls(node: ast.Call) -> Iterator[tuple[ast.AST, str, str]]:
    if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        args = node.args if node.func.id != "sorted" else node.args[:1]
        keywords = node.keywords if node.func.id != "sorted" else []
        yield node, "call", ast.unparse(ast.Call(ast.Name(_CALLS[node.func.id]), args, keywords))
    in_any_order = isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
    if (
        len(node.args) == 2
        and not in_any_order
        and not any(isinstance(arg, ast.Starred) for arg in node.args)
    ):
        yield node, "swapped", ast.unparse(ast.Call(node.func, node.args[::-1], node.keywords))
    for i, keyword in enumerate(node.keywords):
        if keyword.arg not in (None, "strict"):
            rest = node.keywords[:i] + node.keywords[i + 1 :]
            yield node, f"without {keyword.arg}", ast.unparse(ast.Call(node.func, node.args, rest))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """What runs: no annotations, no decorators, no texts, nothing for type checkers."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # zip's is an assertion
        return
    yield node
    if isinstance(node, ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _in_brackets(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _is_none_or_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def _is_log(node: ast.expr) -> bool:
    return "_log." in ast.unparse(node) or "print(" in ast.unparse(node)


def modules() -> dict[str, list[str]]:
    """File of the package -> its tests. Raises ValueError where a name matches no file."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutants"]
    by_file: dict[str, list[str]] = {}
    for pattern, tests in table.items():
        files = sorted(ROOT.glob(f"{pattern}/*.py" if (ROOT / pattern).is_dir() else pattern))
        missing = [test for test in tests if not (ROOT / test).exists()]
        if not files or missing:
            raise ValueError(f"[tool.mutants] {pattern!r} = {tests}: there is no {missing or pattern}")
        by_file |= {str(file.relative_to(ROOT)): tests for file in files}
    return by_file


def equivalent() -> dict[str, str]:
    """Mutant's name -> why nothing can tell it from the code."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    named = [line.rpartition(" # ") for line in lines if line and not line.startswith("#")]
    return {name: reason for name, _, reason in named}


class Copies:
    """Directories that each hold the repository's files; one mutant at a time in each."""

    def __init__(self, base: Path, number: int):
        self._free: SimpleQueue[Path] = SimpleQueue()
        self._took: dict[tuple[str, ...], float] = {}  # seconds of a module's tests on the code as it is
        files = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        for i in range(number):
            copy = base / str(i)
            for file in filter(None, files.split("\0")):
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, copy / file)
            self._free.put(copy)

    def tests_by_statement(
        self, tests: Sequence[str], files: Collection[str]
    ) -> dict[str, dict[str, list[str]]]:
        """File -> first line of a statement -> the tests that reach it. Raises RuntimeError where a test fails."""
        out = "reached.json"
        noting = {file: reached.noting(file, (ROOT / file).read_text()).encode() for file in files}
        with self._copy(noting) as copy:
            began = time.monotonic()
            fail = _fail(copy, tests, _WHOLE_SECONDS, reached.Notes(copy / out))
            self._took[tuple(tests)] = time.monotonic() - began
            if fail:
                output = (copy / "output").read_text()[-3000:]
                raise RuntimeError(f"{' '.join(tests)} fail on the code as it is:\n{output}")
            return json.loads((copy / out).read_text())

    def tests_fail(self, mutant: Mutant, tests: Sequence[str], ids: Sequence[str]) -> bool:
        """ids: of the tests that may fail, all of them where it is empty."""
        source = (ROOT / mutant.path).read_bytes()
        seconds = SECONDS + 2 * self._took.get(tuple(tests), 0.0)
        if ids:
            tests = sorted({test.partition("::")[0] for test in ids})
        with self._copy({mutant.path: mutant.of(source)}) as copy:
            return _fail(copy, tests, seconds, *[reached.Only(ids)] * bool(ids))

    @contextmanager
    def _copy(self, changed: Mapping[str, bytes]) -> Iterator[Path]:
        """One of the copies, in which these files are changed. changed: path -> source."""
        copy = self._free.get()
        try:
            for path, source in changed.items():
                (copy / path).write_bytes(source)
            yield copy
        finally:
            for path in changed:
                (copy / path).write_bytes((ROOT / path).read_bytes())
            self._free.put(copy)


def _fail(copy: Path, tests: Sequence[str], seconds: float, *plugins: object) -> bool:
    """In a fork, which has torch and pytest already; the package is read there, from the copy."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            most = round(seconds)  # of its processor: an endless loop ends without its parent, too
            resource.setrlimit(resource.RLIMIT_CPU, (most, most))
            for number in (1, 2):
                os.dup2(os.open(copy / "output", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
            os.chdir(copy)
            sys.path[:] = [str(copy), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
            os.environ["PYTHONPATH"] = str(copy)
            for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "rl")]:
                if name != reached.__name__:
                    del sys.modules[name]
            import pytest

            options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
            code = int(pytest.main([*options, *tests], plugins))
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) != 0
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def page(survived: Sequence[Mutant], drawn: Sequence[Mutant], same: Sequence[Mutant], commit: str) -> str:
    of_each, lost = Counter(m.path for m in drawn), Counter(m.path for m in survived)
    rows = [
        f"| {path} | {num} | {num - lost[path]} | {1 - lost[path] / num:.0%} |"
        for path, num in of_each.items()
    ]
    reasons = equivalent()
    lines = [
        "# Mutants that no test notices",
        "",
        f"Made by `make mutants` at {commit[:12]}: {len(drawn)} mutants drawn of all that tests/mutants.py makes; its head says how.",
        f"**{1 - len(survived) / max(1, len(drawn)):.0%}** were noticed; {len(same)} more were drawn that change nothing. "
        "The modules are those of `[tool.mutants]` in pyproject.toml: neither `rl/cluster` nor an engine is among them.",
        "",
        "| module | mutants | noticed | share |",
        "|---|---|---|---|",
        *rows,
        "",
        "## Survivors",
        "",
        "```",
        *map(str, survived),
        "```",
        "",
        "## Nothing can tell them from the code",
        "",
        *(f"- `{mutant.name}`: {reasons[mutant.name]}" for mutant in same),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=600)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="end after so many; 0: once all are judged"
    )
    parser.add_argument("--module", default="", help="only files whose path has this")
    parser.add_argument("--write", action="store_true", help="write docs/mutants.md")
    options = parser.parse_args()
    by_file = modules()
    every = [mutant for file in by_file for mutant in mutants_of(file, (ROOT / file).read_bytes())]
    names = Counter(mutant.name for mutant in every)
    if stale := [name for name in equivalent() if names[name] != 1]:
        raise ValueError(f"{EQUIVALENT.name} names what is no mutant any more, or several: {stale}")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    every = [mutant for mutant in every if options.module in mutant.path]
    chosen = random.Random(commit).sample(every, min(options.sample, len(every)))
    same = [mutant for mutant in chosen if mutant.name in equivalent()]
    drawn = [mutant for mutant in chosen if mutant.name not in equivalent()]
    # What all tests need, once; the package itself is read by each fork, from its own copy.
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with (
        tempfile.TemporaryDirectory(prefix="rl-mutants-") as base,
        ThreadPoolExecutor(options.processes) as pool,
    ):
        copies = Copies(Path(base), options.processes)
        sets = sorted({tuple(by_file[mutant.path]) for mutant in drawn})
        of_set = dict(
            zip(sets, pool.map(partial(copies.tests_by_statement, files=list(by_file)), sets), strict=True)
        )
        deadline = time.monotonic() + (60 * options.minutes or math.inf)

        def is_noticed(mutant: Mutant) -> bool | None:
            """None where there is no time left for it."""
            if time.monotonic() > deadline:
                return None
            tests = by_file[mutant.path]
            lines = of_set[tuple(tests)].get(mutant.path, {})
            return copies.tests_fail(mutant, tests, lines.get(str(mutant.statement), ()))

        judged, survived = [], []
        for mutant, verdict in zip(drawn, pool.map(is_noticed, drawn), strict=True):
            if verdict is not None:
                judged.append(mutant)
            if verdict is False:
                survived.append(mutant)
                print(f"survived, number {len(judged)}: {mutant}", flush=True)
    share = 1 - len(survived) / max(1, len(judged))
    print(
        f"{len(judged) - len(survived)} of {len(judged)} mutants noticed ({share:.0%}), {len(every)} in all"
    )
    if options.write:
        PAGE.write_text(page(sorted(survived), sorted(judged), sorted(same), commit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
