"""The modules of a recipe file: itself, and the modules and packages of its directory that it imports.

Python has one table of modules for the whole process, so one directory's modules are in it at a time. The
processes of a run get them by value. What is imported only there is on their path (`cluster/spawn.py`).
"""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import cloudpickle

from rl.errors import ConfigError

_RECIPE = "recipe_"  # before a file's name, the name of its module; the rest may have dots
_NAME = re.compile(r"(.+\.py)(?::([^/]*))?")


def split_name(name: str) -> tuple[str, str]:
    """path/to/file.py:function as the absolute path and the function, which may be empty."""
    match = _NAME.fullmatch(name)
    path, function = match.groups() if match else (name, "")
    return os.path.abspath(os.path.expanduser(path)), function or ""


class _Directory:
    """The modules of one recipe's directory, in Python's table of modules or set aside."""

    def __init__(self, path: str):
        self._path = path
        self._imported_elsewhere = {name.partition(".")[0] for name in sys.modules}
        self._set_aside: dict[str, ModuleType] = {}
        self._is_active = False

    def activate(self) -> None:
        """Its own modules come before all others, as a script's do."""
        sys.modules.update(self._set_aside)
        self._set_aside = {}
        if not self._is_active:
            sys.path.insert(0, self._path)
        self._is_active = True
        importlib.invalidate_caches()  # files may have been written since

    def deactivate(self) -> None:
        tops = self._tops()
        self._set_aside = {n: m for n, m in sys.modules.items() if n in tops or n.partition(".")[0] in tops}
        for name in self._set_aside:
            del sys.modules[name]
        if self._is_active and self._path in sys.path:
            sys.path.remove(self._path)  # the first, which is its own: the user may have put it there, too
        self._is_active = False

    def pickle_by_value(self) -> None:
        """All that is imported from here so far, with the sub-modules of its packages."""
        for name in self._tops():
            cloudpickle.register_pickle_by_value(sys.modules[name])

    def _tops(self) -> set[str]:
        """Names of its modules and packages, without their sub-modules."""
        return {name for name, module in list(sys.modules.items()) if self._is_top(name, module)}

    def _is_top(self, name: str, module: ModuleType) -> bool:
        """Whether this is a module of the directory, and no package that was imported before the recipe."""
        if name in self._imported_elsewhere or ("." in name and not name.startswith(_RECIPE)):
            return False
        places = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or ())]
        return any(os.path.dirname(_module_path(place)) == self._path for place in places if place)


def _module_path(file: str) -> str:
    """A module's file, or its package's directory."""
    path = os.path.abspath(file)
    return os.path.dirname(path) if os.path.basename(path).startswith("__init__.") else path


_directories: dict[str, _Directory] = {}  # global, as sys.modules is
_active: list[_Directory] = []  # at most one


def import_recipe(path: str) -> ModuleType:
    """Execute a recipe's file, which may import others beside it. From now on its directory is the active
    one. Raises ConfigError where the file is no Python file, and what the file itself raises."""
    spec = importlib.util.spec_from_file_location(f"{_RECIPE}{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file; give path/to/file.py:function")
    directory = _activate(os.path.dirname(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    directory.pickle_by_value()
    return module


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
    directory.pickle_by_value()  # with what a check has imported since
    try:
        yield
    finally:
        if before is not None:
            _make_active(before)


def _activate(path: str) -> _Directory:
    if path not in _directories:
        for active in _active:  # or its modules would pass for imported elsewhere
            active.deactivate()
        _active.clear()
        _directories[path] = _Directory(path)
    _make_active(_directories[path])
    return _directories[path]


def _make_active(directory: _Directory) -> None:
    for active in _active:
        if active is not directory:
            active.deactivate()
    _active[:] = [directory]
    directory.activate()
