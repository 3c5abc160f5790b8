"""Finds recipes: functions that return a RunConfig, in the package `configs` or in a file of the user's."""

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

import configs
from rl.controller.config import RunConfig
from rl.errors import ConfigError


def load_recipe(name: str) -> tuple[str, RunConfig]:
    """name: a recipe in configs/, or path/to/file.py:function. Returns its short name and its config."""
    if ".py" in name:
        return _from_file(name)
    recipes = _recipes()
    if name not in recipes:
        close = difflib.get_close_matches(name, recipes, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"unknown recipe {name!r}; {hint}recipes: {', '.join(recipes)}, or path/to/file.py:function"
        )
    return name, recipes[name]()


def recipe_names() -> dict[str, str]:
    """Each recipe in configs/ with the first line of its docstring."""
    return {name: (inspect.getdoc(function) or "").split("\n")[0] for name, function in _recipes().items()}


def _recipes() -> dict[str, Callable[[], RunConfig]]:
    modules = [
        importlib.import_module(f"configs.{info.name}") for info in pkgutil.iter_modules(configs.__path__)
    ]
    return {name: function for module in modules for name, function in _functions(module).items()}


def _functions(module: ModuleType) -> dict[str, Callable[[], RunConfig]]:
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and not inspect.signature(function).parameters
    }


def _from_file(name: str) -> tuple[str, RunConfig]:
    path, _, function = name.partition(":")
    if not Path(path).is_file():
        raise ConfigError(f"recipe file {path} does not exist; give path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(f"recipe_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # The actors' processes cannot import the file: its classes and functions travel by value.
    cloudpickle.register_pickle_by_value(module)
    _run_user_code(path, lambda: spec.loader.exec_module(module))
    functions = {
        n: f
        for n, f in _functions(module).items()
        if f.__annotations__.get("return", RunConfig) in (RunConfig, "RunConfig")
    }
    if function not in functions:
        raise ConfigError(
            f"{path} has no recipe function {function!r}; use {path}:NAME with NAME one of "
            f"{', '.join(functions) or '(none)'}"
        )
    config = _run_user_code(path, functions[function])
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{name} returned a {type(config).__name__}; a recipe returns a RunConfig")
    return function, config


def _run_user_code(path: str, code: Callable[[], Any]) -> Any:
    """Raises ConfigError with the file's own line, not our stack, where the recipe is at fault."""
    try:
        return code()
    except ConfigError:
        raise
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename) == Path(path)
        ]
        line = error.lineno if isinstance(error, SyntaxError) else (lines or ["?"])[-1]
        raise ConfigError(f"{path} line {line}: {type(error).__name__}: {error}; fix the recipe") from error
