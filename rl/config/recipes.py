"""Finds recipes: functions that return a RunConfig, in the package `configs` or in a file of the user's."""

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from rl.config.codec import config_file, from_json, read_config
from rl.config.names import FOREIGN_NAMES, MOVED, SPLIT
from rl.config.recipe_modules import call_in_recipe, import_recipe, split_name
from rl.config.run import RunConfig
from rl.errors import ConfigError, one_line
from rl.fields import kind, parts_of, postpone_refusals, short
from rl.observability.silence import break_silence


def load_recipe(name: str) -> tuple[str, RunConfig]:
    """name: a recipe in configs/; path/to/file.py:function, without the function where there is one; or the
    directory of an earlier run, or its config.json.

    Returns its short name and its config, whose values may be out of bounds: `check_fields` reports them all.
    """
    with postpone_refusals() as refused:
        recipe, config = _load(name)
    in_config = {id(part) for part in parts_of(config)}
    unseen = [line for part, lines in refused if id(part) not in in_config for line in lines]
    if unseen:  # of a part that a function of the user's holds, and nothing else would check
        raise ConfigError("\n".join(unseen))
    return recipe, config


def _load(name: str) -> tuple[str, RunConfig]:
    _configs()  # which a file's recipes may import
    if _is_config(name):
        return _from_config(name)
    if ".py" in name:
        return _from_file(name)
    recipes = _recipes()
    if name.startswith("-"):
        raise ConfigError(
            f"{name!r} is no recipe; write rl train RECIPE {name} ..., with RECIPE one of "
            f"{', '.join(recipes)}, or path/to/file.py:function"
        )
    if name not in recipes and (os.path.isdir(name) or (os.sep in name and not os.path.exists(name))):
        raise ConfigError(
            f"unknown recipe {short(repr(name))}: it is no run either, for it has no config.json; give the "
            f"directory of a run, path/to/file.py:function, or one of {', '.join(recipes)}"
        )
    if name not in recipes:
        close = difflib.get_close_matches(name, recipes, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"unknown recipe {short(repr(name))}; {hint}recipes: {', '.join(recipes)}, or "
            f"path/to/file.py:function"
        )
    return name, recipes[name]()


def source_of(name: str, recipe: str = "") -> str:
    """What config.json notes, from which `load_recipe` finds the same recipe from anywhere.

    recipe: its short name. Without it a file need not be told the function.
    """
    return read_config(name)[0] if _is_config(name) else from_anywhere(name, recipe)


def from_anywhere(name: str, recipe: str = "") -> str:
    """A recipe's name, or the absolute path of its file with its function, or of the run whose settings are
    taken."""
    if _is_config(name):
        return os.path.abspath(os.path.expanduser(name))
    if ".py" not in name:
        return name
    path, function = split_name(name)
    return ":".join(filter(None, (path, function or recipe)))


def _is_config(name: str) -> bool:
    """Whether it is a config.json, or the directory of a run. A recipe's name stays the recipe's."""
    if name.endswith(".json"):
        return True
    return os.path.isdir(name) and config_file(name).is_file() and (os.sep in name or name not in _recipes())


def recipe_names() -> dict[str, str]:
    """Each recipe in configs/ with the first line of its docstring."""
    return {name: (inspect.getdoc(function) or "").split("\n")[0] for name, function in _recipes().items()}


def _recipes() -> dict[str, Callable[[], RunConfig]]:
    package = _configs()
    names = [info.name for info in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return {name: function for module in modules for name, function in _functions(module).items()}


def _configs() -> ModuleType:
    """The package of recipes: `rl.configs` where the project is installed, else the folder beside rl/."""
    name = "rl.configs"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        path = Path(__file__).parents[2] / "configs"
        spec = importlib.util.spec_from_file_location(name, path / "__init__.py")
        assert spec is not None and spec.loader is not None  # it is a file
        package = importlib.util.module_from_spec(spec)
        sys.modules[name] = package
        spec.loader.exec_module(package)
        return package


def _functions(module: ModuleType) -> dict[str, Callable[[], RunConfig]]:
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and not inspect.signature(function).parameters
    }


def _from_config(name: str) -> tuple[str, RunConfig]:
    """An earlier run's settings; it gets a directory of its own."""
    recipe, data = read_config(name)
    if ".py" in recipe:  # where its classes are
        path, _ = split_name(recipe)
        if not Path(path).is_file():
            raise ConfigError(f"{name} was written for {recipe}, which is gone; give a recipe")
        _run_user_code(path, lambda: import_recipe(path))
    where = str(config_file(name))
    try:
        config = from_json(data, where)
    except ConfigError as problem:  # as of a lambda, which its recipe alone can make
        try:
            made = _load(recipe)[1]
        except ConfigError:
            raise problem from None
        config = from_json(data, where, made)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{name} is not the config.json of a run; give a recipe")
    return Path(recipe).name.rpartition(":")[2], dataclasses.replace(config, run_dir="")


def _from_file(name: str) -> tuple[str, RunConfig]:
    path, function = split_name(name)
    if not os.path.isfile(path):
        problem = "is no file" if os.path.exists(path) else "does not exist"
        raise ConfigError(f"recipe file {path} {problem}; give path/to/file.py:function")
    module = _run_user_code(path, lambda: import_recipe(path))
    functions = {n: f for n, f in _functions(module).items() if n == function or _may_be_a_recipe(f)}
    if not function and len(functions) == 1:
        (function,) = functions
    if function not in functions:
        remedy = f"use {path}:NAME with NAME one of {', '.join(functions)}"
        if not functions:
            remedy = "define a function without parameters that returns a RunConfig"
        has = "several recipes" if functions else "no recipe"
        if function:
            has = f"no recipe function {function!r}"
        raise ConfigError(f"{path} has {has}; {remedy}")
    config = _run_user_code(path, lambda: call_in_recipe(path, functions[function]))
    if inspect.iscoroutine(config):
        config.close()  # or Python warns that nobody awaited it
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{name} returned {kind(config)}; a recipe returns a RunConfig")
    return function, config


def _may_be_a_recipe(function: Callable[[], Any]) -> bool:
    """By what it says that it returns: a RunConfig, also as a subclass, an option or under another name."""
    try:
        returned = get_type_hints(function).get("return", RunConfig)
    except Exception:  # a name that only type checkers import, or words that are no type
        text = str(function.__annotations__.get("return", "RunConfig"))
        returned = RunConfig if text.rpartition(".")[2] == "RunConfig" else None
    kinds = get_args(returned) if get_origin(returned) in (Union, UnionType, Annotated) else (returned,)
    return any(isinstance(kind, type) and issubclass(kind, RunConfig) for kind in kinds)


def _run_user_code(path: str, code: Callable[[], Any]) -> Any:
    """Raises ConfigError with the file's own line, not our stack, where the recipe is at fault."""
    try:
        with break_silence(f"loading the recipe {Path(path).name}"):
            return code()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == path]
        line = (error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None) or "?"
        cause = one_line(error)
        if isinstance(error, ModuleNotFoundError) and error.name in MOVED:
            cause = f"the module {error.name} is {MOVED[error.name]} now"
        for old, new in SPLIT.items():
            if isinstance(error, TypeError) and f"keyword argument '{old.rpartition('.')[2]}'" in cause:
                cause += f" ({old} is {' and '.join(new)} now)"
        unknown = re.search(r"Config\.__init__\(\) got an unexpected keyword argument '(\w+)'", cause)
        if isinstance(error, TypeError) and unknown and unknown[1] in FOREIGN_NAMES:
            cause += f" (it is {FOREIGN_NAMES[unknown[1]]} here)"
        raise ConfigError(f"{path} line {line}: {cause}; fix the recipe") from error
