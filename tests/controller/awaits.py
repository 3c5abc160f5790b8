"""Where the controller waits: every await of its code, by the syntax tree; and which of them a task is in."""

import ast
import asyncio
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import AsyncGeneratorType, FrameType

import rl

ROOT = Path(rl.__file__).parent
_PREFIX = f"{ROOT}/"


@dataclass(frozen=True, order=True)
class Await:
    """An await, an `async with` or an `async for`. `code`: its first line, which tells it from others."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}"


@cache
def awaits(file: str) -> tuple[Await, ...]:
    """Those of a file that run in the controller: not those of actors, which run in processes of their own."""
    source = (ROOT / file).read_text()
    lines = source.splitlines()
    tree = ast.parse(source)
    elsewhere = {id(node) for actor in ast.walk(tree) if _is_actor(actor) for node in ast.walk(actor)}
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Await | ast.AsyncWith | ast.AsyncFor) and id(node) not in elsewhere
    ]
    return tuple(sorted({Await(file, node.lineno, lines[node.lineno - 1].strip()) for node in nodes}))


def _is_actor(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        isinstance(base, ast.Name) and base.id in ("Actor", "EngineActor", "Controller")
        for base in node.bases
    )


def waiting(loop: asyncio.AbstractEventLoop) -> set[Await]:
    """Where the loop's tasks are, all the way down."""
    places = set()
    for task in asyncio.all_tasks(loop):
        for frame in _frames(task.get_coro()):
            name = frame.f_code.co_filename
            if name.startswith(_PREFIX):
                places.update(_await_of(name, frame.f_code.co_firstlineno, frame.f_lineno or 0))
    return places


@cache
def _await_of(path: str, first: int, line: int) -> list[Await]:
    """The last one that begins at or before the line, within the function whose first line that is."""
    before = [place for place in awaits(path.removeprefix(_PREFIX)) if first <= place.line <= line]
    return before[-1:]


def _frames(coroutine: object) -> Iterator[FrameType]:
    while coroutine is not None:
        for kind in ("cr", "ag", "gi"):
            if (frame := getattr(coroutine, f"{kind}_frame", None)) is not None:
                yield frame
        inner = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
        if inner is None and not hasattr(coroutine, "cr_frame"):  # the next value of an async generator
            generators = [o for o in gc.get_referents(coroutine) if isinstance(o, AsyncGeneratorType)]
            inner = generators[0] if generators else None
            if isinstance(coroutine, AsyncGeneratorType):
                inner = None
        coroutine = inner
