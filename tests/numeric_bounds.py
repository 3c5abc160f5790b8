"""Every numeric bound of the tests, and what holds it on any machine: `python -m tests.numeric_bounds` writes the table.

A bound is: a comparison by <, <=, > or >= with a float literal, with a name of such literals (of the module, or of a
test's parameters), with something called a limit, or with a clock; a call of approx, allclose, isclose or assert_close;
a call of assert_close_as; a `timeout=`. Whole numbers count things, and no processor changes them; a comparison with a
random draw bounds nothing.

What holds a bound is said by `# holds: KIND, WHY`: on a line of its statement, on the line above, or once at the head of
a file for all of its bounds that say nothing else. WHY may be left out where the kind says enough. Calls of
assert_close_as and clocks need no comment. tests/test_numeric_bounds.py fails where a bound has none.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "numeric_bounds.md"
KINDS = {
    "exact": "float64, integers, or fp32 numbers so few and small that their rounding is at most a twentieth of the bound",
    "reference": "the bound is computed in the same run, from a reference's own error",
    "meaning": "a property of the task, far from what rounding moves",
    "clock": "seconds of the wall clock, which a slow machine can exceed",
}
_APPROXIMATE = {"approx", "allclose", "isclose", "assert_close", "assert_allclose"}
_BY_REFERENCE = {"assert_close_as"}
_CLOCKS = {"monotonic", "perf_counter", "time"}
_HOLDS = re.compile(r"# holds: (\w+)(?:[,;:] (.*))?")
_DRAWS = {"random", "uniform", "normal"}


@dataclass(frozen=True)
class Bound:
    path: str
    place: str  # the function it is in
    line: int
    text: str
    kind: str | None
    why: str


@functools.cache
def bounds() -> list[Bound]:
    """Of every file in tests, in order."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return [b for path in paths if path != Path(__file__) for b in bounds_of(path.read_text(), path)]


def bounds_of(source: str, path: Path) -> Iterator[Bound]:
    tree, lines = ast.parse(source), source.splitlines()
    at_head = next((m for line in lines if (m := _HOLDS.match(line))), None)
    names = _module_literals(tree)
    for node, statement, function in _walk(tree):
        kind = _kind(node, names | (_parameter_literals(function) if function else set()))
        if kind is None:
            continue
        first = statement.lineno - 1
        above = lines[first - 1 : first] if lines[first - 1].lstrip().startswith("#") else []
        near = [*lines[first : _last_line(statement)], *above]
        comment = next((m for line in near if (m := _HOLDS.search(line))), None)
        # A clock or a reference is one whatever the file's other bounds are.
        reason = comment or (None if kind != "literal" else at_head)
        if reason is not None:
            named, why = reason[1], reason[2] or ""
        else:
            named, why = (None if kind == "literal" else kind), ""
        yield Bound(
            str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name,
            function.name if function else "",
            node.lineno,
            ast.unparse(node),
            named,
            why,
        )


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _kind(node: ast.AST, names: set[str]) -> str | None:
    """clock, reference, literal; None for what is no bound."""
    if isinstance(node, ast.Call):
        called = _name(node)
        if called in _BY_REFERENCE:
            return "reference"
        if any(k.arg == "timeout" and _has_number(k.value) for k in node.keywords):
            return "clock"
        return "literal" if called in _APPROXIMATE else None
    ordered = isinstance(node, ast.Compare) and any(
        isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops
    )
    if not ordered:
        return None
    parts = list(ast.walk(node))
    called = {_name(part) for part in parts if isinstance(part, ast.Call)}
    if called & _DRAWS:
        return None
    if called & _CLOCKS:
        return "clock"
    identifiers = {p.id for p in parts if isinstance(p, ast.Name)} | {
        p.attr for p in parts if isinstance(p, ast.Attribute)
    }
    has_float = any(isinstance(p, ast.Constant) and isinstance(p.value, float) for p in parts)
    return "literal" if has_float or identifiers & names or "limit" in identifiers else None


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.stmt, ast.FunctionDef | None]]:
    """Each node with its innermost statement and its outermost function."""

    def visit(
        node: ast.AST, statement: ast.stmt | None, function: ast.FunctionDef | None
    ) -> Iterator[tuple[ast.AST, ast.stmt, ast.FunctionDef | None]]:
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = function or node
        if statement is not None:
            yield node, statement, function
        for child in ast.iter_child_nodes(node):
            yield from visit(child, statement, function)

    return visit(tree, None, None)


def _last_line(statement: ast.stmt) -> int:
    """Of a loop or a function: the one before its body."""
    body = getattr(statement, "body", None)
    return body[0].lineno - 1 if body else statement.end_lineno


def _has_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _has_float(node: ast.AST) -> bool:
    return any(isinstance(p, ast.Constant) and isinstance(p.value, float) for p in ast.walk(node))


def _module_literals(tree: ast.Module) -> set[str]:
    """Names of numbers such as `LIMIT = 1e-5`."""
    assigned = [s for s in tree.body if isinstance(s, ast.Assign) and isinstance(s.value, ast.Constant)]
    return {t.id for s in assigned if _has_float(s.value) for t in s.targets if isinstance(t, ast.Name)}


def _parameter_literals(function: ast.FunctionDef) -> set[str]:
    """Names of a test's parameters that have floats among their values."""
    names = set()
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize"):
            named, values = decorator.args[:2]
            if _has_float(values) and isinstance(named, ast.Constant):
                names |= {name.strip() for name in named.value.split(",")}
    return names


def table() -> str:
    listed = bounds()
    lines = [
        "# What holds the tests' numeric bounds",
        "",
        "Made by `python -m tests.numeric_bounds`, whose head says what a bound is and how its reason is written.",
        "",
        "| kind | bounds | what holds them |",
        "|---|---|---|",
        *(f"| {kind} | {sum(b.kind == kind for b in listed)} | {why} |" for kind, why in KINDS.items()),
        "",
        "| file | in | bound | kind | why |",
        "|---|---|---|---|---|",
    ]
    for b in listed:
        text = b.text if len(b.text) <= 100 else b.text[:97] + "..."
        escaped = text.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {b.path.removeprefix('tests/')} | {b.place} | `{escaped}` | {b.kind} | {b.why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table())
