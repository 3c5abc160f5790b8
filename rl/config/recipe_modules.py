"""The modules of a recipe file: itself, and the modules and packages that it imports from its own places.

Its places are its directory and what it puts on `sys.path` itself. Python has one table of modules for the
whole process, so one directory's modules are in it at a time. The recipe's places come first on the path
while its own code runs, as a script's do, and last at any other time: a library's `import profile` does not
mean a file `profile.py` beside the recipe. The processes of a run get the path (`cluster/spawn.py`). They get
by value only what they cannot import from it: with both they would have two of each class.
"""

import copyreg
import functools
import importlib
import importlib.util
import io
import os
import pickle
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TypeVar

import cloudpickle

from rl.errors import ConfigError

T = TypeVar("T")

_RECIPE = "recipe_"  # before a file's name, the name of its module; the rest may have dots
_NAME = re.compile(r"(.+\.py)(?::([^/]*))?")
_LIBRARIES = {os.path.abspath(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")}


def split_name(name: str) -> tuple[str, str]:
    """path/to/file.py:function as the absolute path and the function, which may be empty."""
    match = _NAME.fullmatch(name)
    path, function = match.groups() if match else (name, "")
    return os.path.abspath(os.path.expanduser(path)), function or ""


def names_left_behind(value: object) -> list[str]:
    """Names of the recipe's modules that other processes would have to import, and cannot.

    value: what is sent to them. Raises what pickling raises.
    """
    names: list[str] = []
    by_value = {name for name in cloudpickle.list_registry_pickle_by_value() if name in sys.modules}

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            if module in by_value:
                names.append(f"{name} of {Path(sys.modules[module].__file__ or module).name}")
            return super().find_class(module, name)

    Reader(io.BytesIO(cloudpickle.dumps(value))).load()
    return names


def _cached(function: Callable[..., T], parameters: dict) -> Callable[..., T]:
    return functools.lru_cache(**parameters)(function)


def _send_cached(function: "functools._lru_cache_wrapper") -> str | tuple:
    """How a function with a cache is pickled: one of a module that goes by value, as that value."""
    if function.__module__.partition(".")[0] not in {
        name.partition(".")[0] for name in cloudpickle.list_registry_pickle_by_value()
    }:
        return function.__qualname__
    return _cached, (function.__wrapped__, function.cache_parameters())


copyreg.pickle(functools._lru_cache_wrapper, _send_cached)


class _Directory:
    """The modules of one recipe's directory, in Python's table of modules or set aside."""

    def __init__(self, path: str):
        self._places = [path]
        self._imported_elsewhere = {name.partition(".")[0] for name in sys.modules}
        self._set_aside: dict[str, ModuleType] = {}
        self._appended: list[str] = []  # to sys.path; the user may have put a place there, too
        self._by_value: list[ModuleType] = []
        self.files: set[Path] = set()  # of all that the recipe imported from its places as it was executed

    def activate(self) -> None:
        sys.modules.update(self._set_aside)
        self._set_aside = {}
        self._append_places()
        self._register()
        importlib.invalidate_caches()  # files may have been written since

    def deactivate(self) -> None:
        self._unregister()
        self._set_aside = self._modules()
        for name in self._set_aside:
            del sys.modules[name]
        self._remove_places()

    @contextmanager
    def places_first(self) -> Iterator[None]:
        """While the recipe's own code runs. What it puts on the path becomes a place of its own."""
        self._remove_places()
        saved = list(sys.path)
        sys.path[:] = [*self._places, *saved]
        before = Counter(sys.path)
        try:
            yield
        finally:
            added = Counter(sys.path) - before
            places = [os.path.abspath(p) for p in sys.path if p in added or p in self._places]
            self._places = list(dict.fromkeys([*places, *self._places]))
            sys.path[:] = saved
            self._append_places()
            self._register()

    def note_files(self) -> None:
        files = (getattr(module, "__file__", None) for module in self._modules().values())
        self.files = {Path(file) for file in files if file}

    def _append_places(self) -> None:
        self._remove_places()
        self._appended = [place for place in self._places if place not in sys.path]
        sys.path.extend(self._appended)

    def _remove_places(self) -> None:
        for place in self._appended:
            if place in sys.path:
                last = len(sys.path) - 1 - sys.path[::-1].index(place)
                del sys.path[last]
        self._appended = []

    def _register(self) -> None:
        """By value goes what a process with this path cannot import, with the sub-modules of its packages."""
        self._unregister()
        self._by_value = [sys.modules[name] for name in self._tops() if not _is_importable(name)]
        for module in self._by_value:
            cloudpickle.register_pickle_by_value(module)

    def _unregister(self) -> None:
        for module in self._by_value:
            if module.__name__ in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(module)
        self._by_value = []

    def _modules(self) -> dict[str, ModuleType]:
        """All from its places, with their sub-modules."""
        tops = self._tops()
        return {n: m for n, m in list(sys.modules.items()) if n in tops or n.partition(".")[0] in tops}

    def _tops(self) -> set[str]:
        """Names of its modules and packages, without their sub-modules."""
        places = {place for place in self._places if not _is_library(place)}
        modules = dict(sys.modules)
        tops = (name for name in modules if "." not in name or name.startswith(_RECIPE))
        own = [name for name in tops if name not in self._imported_elsewhere]
        return {n for n in own if any(os.path.dirname(path) in places for path in _paths(modules[n]))}


def _is_library(place: str) -> bool:
    """Its modules are the same for all recipes, and some can be imported only once in a process."""
    return place in _LIBRARIES or os.path.basename(place) in ("site-packages", "dist-packages")


def _is_importable(name: str) -> bool:
    """Whether the path leads to this very module, and to no other of its name."""
    if name.startswith(_RECIPE):
        return False
    specs = (finder.find_spec(name, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    spec: ModuleSpec | None = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location else spec.submodule_search_locations
    paths = {_module_path(place) for place in places or () if place}
    return bool(paths.intersection(_paths(sys.modules[name])))


def _paths(module: ModuleType) -> list[str]:
    places = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or ())]
    return [_module_path(place) for place in places if place]


def _module_path(file: str) -> str:
    """A module's file, or its package's directory."""
    return _normal(file if os.path.isabs(file) else os.path.abspath(file))


@functools.cache  # asked of every module that is imported, again and again
def _normal(file: str) -> str:
    path = os.path.normpath(file)
    return os.path.dirname(path) if os.path.basename(path).startswith("__init__.") else path


_directories: dict[str, _Directory] = {}  # global, as sys.modules is
_active: list[_Directory] = []  # at most one


class _FromSource(SourceFileLoader):
    """Without kept bytecode. Python takes that for the file's also where the file was written anew in the
    same second, and is as long as before."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_recipe(path: str) -> ModuleType:
    """Execute a recipe's file, which may import others beside it. From now on its directory is the active
    one. Raises ConfigError where the file is no Python file, and what the file itself raises."""
    if not path.endswith(".py"):
        raise ConfigError(f"{path} is no Python file; give path/to/file.py:function")
    loader = _FromSource(f"{_RECIPE}{Path(path).stem}", path)
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None  # it has a loader
    directory = _activate(os.path.dirname(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with directory.places_first():
        loader.exec_module(module)
    directory.note_files()
    return module


def call_in_recipe(path: str, function: Callable[[], T]) -> T:
    """Call a function of a recipe's file, which `import_recipe` has executed."""
    with _activate(os.path.dirname(path)).places_first():
        return function()


def files_of_recipe() -> set[Path]:
    """Of the active recipe: its file, and those of the modules that it imports from its places."""
    return {file for directory in _active for file in directory.files if file.is_file()}


@contextmanager
def modules_of(recipe: str) -> Iterator[None]:
    """Within it `import` finds the modules of this recipe, whose file is loaded. A recipe of configs/ has
    none of its own."""
    path, _ = split_name(recipe)
    directory = _directories.get(os.path.dirname(path))
    if directory is None or not path.endswith(".py"):
        yield
        return
    before = next(iter(_active), None)
    _make_active(directory)
    try:
        yield
    finally:
        if before is not None:
            _make_active(before)


def deactivate_all() -> None:
    for directory in _active:
        directory.deactivate()
    _active.clear()


def _activate(path: str) -> _Directory:
    if path not in _directories:
        deactivate_all()  # or another's modules would pass for imported elsewhere
        _directories[path] = _Directory(path)
    _make_active(_directories[path])
    return _directories[path]


def _make_active(directory: _Directory) -> None:
    for active in _active:
        if active is not directory:
            active.deactivate()
    _active[:] = [directory]
    directory.activate()
