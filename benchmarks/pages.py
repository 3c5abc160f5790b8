"""Pages of figures in docs/: how a benchmark writes one, and which of them its code no longer makes.

A page says by which command, on which machine, with which versions and at which commit it was measured, and carries
a hash of the code that made it. `python -m benchmarks.pages` lists the pages whose code has changed since;
`python -m benchmarks.pages NAME COMMIT` prints the hash of a page's code at a commit.

Text elsewhere quotes a figure by a comment behind it, which tests/test_pages.py compares:
`11.8<!--rl_step; ours, synchronous; s/step-->`, that is PAGE; ROW; COLUMN, or the ratio of two figures of a page,
`PAGE; ROW; COLUMN over ROW; COLUMN`.
"""

import ast
import builtins
import datetime
import functools
import hashlib
import importlib.metadata
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "algorithms_benchmark": ("benchmarks/algorithms.py", "configs/algorithms.py"),
    "asynchrony": ("benchmarks/asynchrony.py", "configs/smollm2.py"),
    "attention": ("benchmarks/attention.py",),
    "busy_generators": ("benchmarks/busy_generators.py",),
    "chaos": ("tests/chaos/chaos.py",),
    "controller_scale": ("benchmarks/controller_scale.py",),
    "engine_benchmark": ("benchmarks/engine.py",),
    "episodes": ("benchmarks/episodes.py", "benchmarks/episodes_env.py"),
    "generator": ("benchmarks/generator.py",),
    "host_weights": ("benchmarks/host_weights.py",),
    "weight_delta": ("benchmarks/weight_delta.py", "configs/smollm2.py"),
    "prefix_trees": ("benchmarks/prefix_trees.py",),
    "prefix_trees_recipe": ("benchmarks/prefix_trees_recipe.py",),
    "rl_step": ("benchmarks/rl_step.py", "benchmarks/trl_step.py"),
    "simulation": ("benchmarks/simulation/__main__.py", "configs/smollm2.py", "configs/quickstart.py"),
    "soak": ("benchmarks/soak.py", "configs/quickstart.py"),
    "tinker_database": ("benchmarks/tinker_database.py",),
    "tinker_load": ("benchmarks/tinker_load.py",),
    "tinker_server": ("benchmarks/tinker_server.py",),
    "turns": ("benchmarks/turns.py", "configs/smollm2.py"),
    "tinker_servers": ("benchmarks/tinker_servers.py", "benchmarks/tinker_client.py"),
    "to_accuracy": ("benchmarks/to_accuracy.py", "benchmarks/trl_step.py"),
    "watch_cost": ("benchmarks/watch_cost.py", "configs/quickstart.py"),
}
"""Page -> the files that measure it. What these take from benchmarks/ and configs/ counts too."""
_COUNTED = ("benchmarks", "configs")
_REPORT = "benchmarks.pages"  # says how a figure is written down, not what it is
_STAMP = re.compile(r"<!-- code (\w+) -->")
_MARKER = re.compile(r"([-+\d.,]*\d)<!--(.+?)-->")

Rows = list[list[str]]


# ---- writing a page


def write_page(
    name: str, title: str, command: str, *blocks: str | Rows, packages: Sequence[str] = ()
) -> None:
    """docs/NAME.md: what each block says, a text or a table. packages: whose versions matter beside torch's."""
    head = [
        f"# {title}",
        f"Made by `{command}`.",
        f"{provenance(packages)}.\n<!-- code {code_hash(name)} -->",
    ]
    body = [block if isinstance(block, str) else table(block) for block in blocks]
    path = ROOT / "docs" / f"{name}.md"
    path.write_text("\n\n".join([*head, *body]).rstrip() + "\n")
    print(path.read_text())


def table(rows: Rows) -> str:
    """rows: the first is the header."""
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, the least and the most."""
    middle, least, most = (f"{of(values):.{digits}f}" for of in (statistics.median, min, max))
    return f"{middle} ({least} to {most})" if len(values) > 1 else middle


def provenance(packages: Sequence[str]) -> str:
    """Machine, versions and commit, in words."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", *packages)]
    python = ".".join(map(str, sys.version_info[:3]))
    today = datetime.datetime.now(datetime.UTC).strftime("%d %B %Y").lstrip("0")
    return f"Measured on {machine()}; Python {python}, {', '.join(versions)}; commit {_commit()}, {today}"


@functools.cache
def machine() -> str:
    """Asked once, before the first measurement where the benchmark calls it then: the load is that of others."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)  # of the last core
    flags = facts.get("flags", "").split()
    fast = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    kind = f"{facts.get('model name', 'a CPU')} (family {facts.get('cpu family')}, model {facts.get('model')}"
    cores, gib = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    return f"{cores} cores of {', '.join([kind, *fast])}), {gib:.0f} GiB, load {os.getloadavg()[0]:.1f} at the start"


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "rl", *_COUNTED)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + " with changes" * bool(changed)


# ---- the code that made it


def changed_pages() -> list[str]:
    """Pages that the present code did not make: it is not that of their commit, or of their stamp."""
    made = [name for name in PAGES if (ROOT / "docs" / f"{name}.md").exists()]
    return [name for name in made if not stamp(name) == code_hash(name) == code_hash(name, _of_commit(name))]


def _of_commit(name: str) -> Callable[[str], str | None]:
    commit = re.search(r"commit ([0-9a-f]{7,})", (ROOT / "docs" / f"{name}.md").read_text())
    return at_commit(commit[1]) if commit else lambda path: None


def stamp(name: str) -> str | None:
    match = _STAMP.search((ROOT / "docs" / f"{name}.md").read_text())
    return match[1] if match else None


def code_hash(name: str, read: Callable[[str], str | None] | None = None) -> str:
    """Of what computes the page's figures: no docstring, no text, no name of its own, no order of definitions.

    Names of fields, attributes and keyword arguments count: they say which setting has a value.

    read: path in the repository -> source, or None where there is no such file.
    """
    read = read or _read
    parts: set[str] = set()
    seen: set[tuple[str, str]] = set()
    todo = [(path, "") for path in PAGES[name]]
    while todo:
        path, definition = todo.pop()
        source = read(path)
        if (path, definition) in seen or source is None:
            continue
        seen.add((path, definition))
        module = _Module(ast.parse(source))
        for statement in module.statements(definition):
            parts.add(module.normal_form(statement))
            todo += module.uses(statement)
            todo += [(path, other) for other in module.siblings(statement) if definition]
    return hashlib.blake2b("\n".join(sorted(parts)).encode(), digest_size=6).hexdigest()


def _read(path: str) -> str | None:
    file = ROOT / path
    return file.read_text() if file.exists() else None


def at_commit(commit: str) -> Callable[[str], str | None]:
    def read(path: str) -> str | None:
        done = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True)
        return None if done.returncode else done.stdout

    return read


_KEPT = {(ast.Attribute, "attr"), (ast.keyword, "arg")}


class _Module:
    """A file's top-level statements, and what they take from other files."""

    def __init__(self, tree: ast.Module):
        self._body = [
            s for s in tree.body if not isinstance(s, ast.Import | ast.ImportFrom) and not _is_text(s)
        ]
        self._own: dict[str, tuple[str, str]] = {}  # name -> where a file that counts defines it: path, name
        self._foreign = set(dir(builtins))  # names of libraries
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._foreign |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                self._take_from(node)

    def _take_from(self, node: ast.ImportFrom) -> None:
        module = (node.module or "").replace("rl.configs", "configs")
        top = module.split(".")[0]
        for alias in node.names:
            name, whole = alias.asname or alias.name, f"{module}.{alias.name}"
            if top in _COUNTED and _REPORT not in (module, whole):
                is_module = (ROOT / (whole.replace(".", "/") + ".py")).exists()
                path = (whole if is_module else module).replace(".", "/") + ".py"
                self._own[name] = (path, "" if is_module else alias.name)
            elif top not in (*_COUNTED, "rl", "tests"):
                self._foreign.add(name)

    def statements(self, definition: str) -> list[ast.stmt]:
        """Those that define the name; without one, all."""
        return [s for s in self._body if not definition or definition in _defined(s)]

    def uses(self, statement: ast.stmt) -> list[tuple[str, str]]:
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        return [self._own[name] for name in sorted(names & self._own.keys())]

    def siblings(self, statement: ast.stmt) -> Iterator[str]:
        """Other definitions of the same file."""
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        yield from (name for s in self._body for name in _defined(s) & names)

    def normal_form(self, statement: ast.stmt) -> str:
        numbers: dict[str, int] = {}

        def name(text: str) -> str:
            return text if text in self._foreign else f"${numbers.setdefault(text, len(numbers))}"

        def form(node: Any) -> Any:
            if isinstance(node, list):
                return [form(item) for item in node if not _is_text(item)]
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                return "text" if re.search(r"\s", node.value) else repr(node.value)
            if not isinstance(node, ast.AST):
                return repr(node)
            parts: list[Any] = [type(node).__name__]
            for field, value in ast.iter_fields(node):
                if field in (
                    "ctx",
                    "annotation",
                    "returns",
                    "type_comment",
                    "type_params",
                    "format_spec",
                    "kind",
                ):
                    continue
                if (type(node), field) in _KEPT:
                    parts.append(value)
                elif isinstance(value, str) and not isinstance(node, ast.Constant):
                    parts.append(name(value))
                else:
                    parts.append(form(value))
            return parts

        return repr(form(statement))


def _is_text(node: Any) -> bool:
    """A docstring, or a text on its own."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


# ---- figures that text quotes


def quotes(text: str) -> Iterator[tuple[str, str]]:
    """(number as written, what it quotes) of each marker."""
    yield from ((match[1], match[2]) for match in _MARKER.finditer(text))


def quoted(reference: str) -> float:
    """PAGE; ROW; COLUMN, or the ratio of two of them. Raises KeyError where there is no such figure."""
    page, _, rest = reference.partition("; ")
    values = []
    for part in rest.split(" over "):
        row, _, column = part.partition("; ")
        values.append(figures(page)[row, column])
    return values[0] / values[1] if len(values) == 2 else values[0]


@functools.cache
def figures(page: str) -> dict[tuple[str, str], float]:
    """(row, column) -> the first number of the cell, where that is one row's alone.

    A row is named by its first cell, or by as many as tell it from others, with ", " between.
    """
    cells: dict[tuple[str, str], float] = {}
    ambiguous: set[tuple[str, str]] = set()
    lines = (ROOT / "docs" / f"{page}.md").read_text().splitlines()
    header: list[str] = []
    for line in lines:
        if not line.startswith("|"):
            header = []
            continue
        row = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not header:
            header = row
            continue
        for count in range(1, len(row)):
            name = ", ".join(row[:count])
            for column, cell in zip(header[count:], row[count:], strict=False):
                if (name, column) in cells:
                    ambiguous.add((name, column))
                if match := re.search(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", cell):
                    cells[name, column] = float(match[0].replace(",", ""))
    return {key: value for key, value in cells.items() if key not in ambiguous}


def agrees(written: str, value: float) -> bool:
    """Whether the number is the value, rounded to the digits that it has."""
    number = written.rstrip(",.").replace(",", "")
    _, _, decimals = number.partition(".")
    return abs(float(number) - value) <= 0.5 * 10.0 ** -len(decimals) * (1 + 1e-9)


def main() -> None:
    if len(sys.argv) == 3:
        print(code_hash(sys.argv[1], at_commit(sys.argv[2])))
    else:
        print("\n".join(changed_pages()) or "every page was made by the present code")


if __name__ == "__main__":
    main()
