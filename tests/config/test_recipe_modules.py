"""What a recipe imports from its own directory: it reaches other processes, and each recipe gets its own."""

import importlib
import os
import pickle
import sys
from importlib.machinery import PathFinder
from itertools import permutations
from pathlib import Path

import cloudpickle
import pytest

from rl.cluster.spawn import _prepare_process
from rl.config import recipe_modules
from rl.config.codec import write_config
from rl.config.recipe_modules import files_of_recipe, import_recipe, modules_of, split_name
from rl.config.recipes import load_recipe, source_of
from rl.envs.verifier import Verifier
from rl.errors import ConfigError
from rl.processes import PARENT
from rl.types import Problem, Rollout, StopReason

RECIPE = """
from dataclasses import dataclass
from rl.config import RunConfig
from rl.envs.base import Env
from rl.models.sources import TinyQwen3
from rl.types import Problem
{imports}

@dataclass(frozen=True)
class Mine(Env):
    def generate(self, seed):
        return Problem(str(seed), str(seed), "")
    def reward(self, problem, response, stop):
{reward}

def mine() -> RunConfig:
    return RunConfig(model=TinyQwen3("0123456789"), env=Mine(num_eval=3))
"""
PACKAGE = {
    "package/__init__.py": "",
    "package/deep/__init__.py": "",
    "package/deep/numbers.py": "from .more import MORE\n\ndef number():\n    return 4.0 + MORE\n",
    "package/deep/more.py": "MORE = VALUE - 4.0\n",
    "spaces/numbers.py": "def number():\n    return VALUE\n",
    "alone.py": "class Alone:\n    value = VALUE\n\ndef number():\n    return Alone().value\n",
}
WAYS = {
    "a package's function": "from package.deep.numbers import number",
    "a package's name": "import package.deep.numbers\nnumber = lambda _=0: package.deep.numbers.number()",
    "a sub-module's name": "from package.deep import numbers\nnumber = lambda _=0: numbers.number()",
    "a package without an __init__": "from spaces.numbers import number",
    "a module": "from alone import number",
}


@pytest.fixture(autouse=True)
def no_recipe():
    """Each test begins and ends without an active recipe."""
    recipe_modules.deactivate_all()
    yield
    recipe_modules.deactivate_all()


def write(directory, value, imports="", reward="return number()"):
    """A recipe and the modules beside it; the reward is `value`."""
    for name, text in PACKAGE.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text.replace("VALUE", str(value)))
    body = "\n".join(" " * 8 + line for line in reward.splitlines())
    (directory / "recipe.py").write_text(RECIPE.format(imports=imports, reward=body))
    return str(directory / "recipe.py")


def lazy(ways):
    """A reward function that imports in each of the ways when it is called."""
    return "\n".join(f"{WAYS[way]}\nrewards.append(number())" for way in ways)


THINGS = (
    "from package.deep.numbers import number as thing",
    "import package.deep.numbers as thing",
    "from package.deep import numbers as thing",
    "from spaces.numbers import number as thing",
    "from alone import Alone as thing",
)
FROM_ABOVE = (
    "import os, sys\nsys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))\n"
)


def score(config):
    """The reward that the reward function's process gives."""
    verifier = Verifier(config.env, 20.0)
    try:
        (score,) = verifier.score([Rollout(Problem("0", "0", ""), (), "", StopReason.STOP, None)])
        return score.reward if score.error is None else score
    finally:
        verifier.close()


def test_what_recipes_import_reaches_processes_that_have_the_path(tmp_path):
    """Each recipe's own, though all of these have modules of the same names."""
    recipes = {
        float(value): write(tmp_path / str(value), float(value), imports)
        for value, imports in enumerate(WAYS.values(), 5)
    }
    configs = {value: load_recipe(recipe)[1] for value, recipe in recipes.items()}
    for value, config in configs.items():
        with modules_of(recipes[value]):
            assert score(config) == value


@pytest.mark.parametrize("directory", ["", "sub"])
def test_a_process_has_each_thing_of_a_recipe_once(tmp_path, directory):
    """What the recipe imported at its head is what its reward function imports when it is called: a class of
    which a process had two would fail isinstance()."""
    head = FROM_ABOVE + "".join(f"{line}_{i}\n" for i, line in enumerate(THINGS))
    reward = "same = []\n" + "".join(
        f"{line}\nsame.append(thing is thing_{i})\n" for i, line in enumerate(THINGS)
    )
    recipe = Path(write(tmp_path, 1.0, head, reward + f"return float(same == [True] * {len(THINGS)})"))
    (tmp_path / directory).mkdir(exist_ok=True)
    recipe = recipe.rename(tmp_path / directory / "recipe.py")
    _, config = load_recipe(str(recipe))
    assert config.env.reward(None, None, None) == 1.0
    assert score(config) == 1.0


def test_a_file_beside_the_recipe_is_not_what_libraries_import(tmp_path):
    """cProfile means the standard library's `profile`; only the recipe's own code means the file."""
    find = "importlib.machinery.PathFinder.find_spec('profile').origin"
    head = f"import importlib.machinery\nAT_THE_HEAD = {find}"
    recipe = Path(write(tmp_path, 1.0, head, "import cProfile\ncProfile.Profile\nreturn 1.0"))
    recipe.write_text(
        recipe.read_text().replace(
            "    return RunConfig", f"    global LATER; LATER = {find}\n    return RunConfig"
        )
    )
    (tmp_path / "profile.py").write_text("")
    _, config = load_recipe(str(recipe))
    module = sys.modules["recipe_recipe"]
    assert module.AT_THE_HEAD == module.LATER == str(tmp_path / "profile.py")
    assert PathFinder.find_spec("profile").origin != str(tmp_path / "profile.py")
    assert score(config) == 1.0


def test_a_module_that_the_path_does_not_lead_to_goes_by_value(tmp_path, monkeypatch):
    """Another of its name comes first in the processes of the run."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "alone.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    _, config = load_recipe(write(tmp_path, 3.0, WAYS["a module"]))
    assert score(config) == 3.0


@pytest.mark.parametrize("order", permutations("abc"))
def test_what_a_recipe_puts_on_the_path_is_its_own(tmp_path, order):
    before = list(sys.path)
    envs, recipes = {}, {}
    for name in "abc":
        recipe = Path(
            write(
                tmp_path / name,
                float(ord(name)),
                FROM_ABOVE + "from alone import number as first",
                f"rewards = [first()]\n{lazy(WAYS)}\nreturn rewards",
            )
        )
        (tmp_path / name / "sub").mkdir()
        recipes[name] = str(recipe.rename(tmp_path / name / "sub" / "recipe.py"))
        envs[name] = load_recipe(recipes[name])[1].env
    for name in (*order, *order):
        with modules_of(recipes[name]):
            assert envs[name].reward(None, None, None) == [float(ord(name))] * (1 + len(WAYS))
            assert sys.path == [*before, str(tmp_path / name), str(tmp_path / name / "sub")]


def test_what_a_reward_function_imports_when_it_is_called_is_there(tmp_path):
    """Also under a path with a colon, which PYTHONPATH cannot hold."""
    reward = f"rewards = []\n{lazy(WAYS)}\nreturn float(rewards == [7.0] * {len(WAYS)})"
    name, config = load_recipe(write(tmp_path / "a:b", 7.0, reward=reward) + ":mine")
    assert name == "mine"
    assert score(config) == 1.0


def test_a_process_of_a_run_finds_modules_where_the_controller_does(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.processes.end_with_parent", lambda: None)
    monkeypatch.setenv(PARENT, str(os.getppid()))
    monkeypatch.setattr("os.setsid", lambda: None)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    ours = ["of this process", *sys.path]
    monkeypatch.setattr(sys, "path", ours)
    _prepare_process(str(tmp_path / "log"), False, ["of:the recipe", ours[1]])()
    assert sys.path[:3] == ["of:the recipe", ours[1], "of this process"]
    assert set(sys.path) == {"of:the recipe", *ours}


@pytest.mark.parametrize("order", permutations("abc"))
def test_each_recipe_has_its_own_modules_in_whatever_order_they_are_used(tmp_path, order):
    reward = f"rewards = []\n{lazy(WAYS)}\nreturn rewards"
    recipes = {name: write(tmp_path / name, float(ord(name)), WAYS["a module"], reward) for name in "abc"}
    envs = {name: load_recipe(recipe)[1].env for name, recipe in recipes.items()}
    for name in (*order, *order):
        with modules_of(source_of(recipes[name]) + ":mine"):
            assert envs[name].reward(None, None, None) == [float(ord(name))] * len(WAYS)
            assert type(envs[name]) is importlib.import_module("recipe_recipe").Mine


def test_packages_that_are_imported_already_are_not_the_recipes(tmp_path, monkeypatch):
    """A recipe beside the project's own package does not take it along."""
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, 1.0)
    (tmp_path / "earlier.py").write_text("")
    earlier = importlib.import_module("earlier")
    load_recipe(write(tmp_path, 1.0, "import earlier, alone"))
    files = {file.name for file in files_of_recipe()}
    assert files == {"recipe.py", "alone.py"}
    load_recipe(write(tmp_path / "second", 1.0))
    assert sys.modules.pop("earlier") is earlier and "alone" not in sys.modules


def test_the_users_own_path_stays_as_it_was(tmp_path, monkeypatch):
    first, second = write(tmp_path / "a", 1.0), write(tmp_path / "b", 2.0)
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    before = list(sys.path)
    load_recipe(first)
    assert sys.path == before
    load_recipe(second)
    assert sys.path == [*before, str(tmp_path / "b")]
    with modules_of(source_of(first)):
        assert sys.path == before
    assert sys.path == [*before, str(tmp_path / "b")]


def test_a_files_name_may_have_dots(tmp_path):
    file = tmp_path / "my.second.recipe.py"
    file.write_text(Path(write(tmp_path, 1.0, WAYS["a module"])).read_text())
    name, config = load_recipe(str(file))
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run", source_of(str(file)), config)
    assert load_recipe(str(tmp_path / "run"))[1].env.reward(None, None, None) == 1.0
    load_recipe(write(tmp_path / "other", 2.0))
    env = cloudpickle.loads(cloudpickle.dumps(config.env))
    assert name == "mine" and env.reward(None, None, None) == 1.0
    assert not [name for name in sys.modules if name.split(".")[-1] == "second"]


def test_a_file_that_was_written_anew_is_read_anew(tmp_path, monkeypatch):
    """Also within the second in which Python has kept its bytecode, and as long as before."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for lr in ("1e-3", "1e-4"):
        file.write_text(f"lr = {lr}\n")
        os.utime(file, (1e9, 1e9))
        assert import_recipe(str(file)).lr == float(lr)


@pytest.mark.parametrize("name", ["mine.pyi", "mine.pyc"])
def test_a_file_that_is_no_python_file_is_refused(tmp_path, name):
    (tmp_path / name).write_text("x = 1\n")
    with pytest.raises(ConfigError, match=f"{name} is no Python file; give path/to/file.py:function"):
        load_recipe(str(tmp_path / name))


def test_a_recipes_name_is_its_path_and_its_function():
    for directory in ("/a", "/a:b", "/a.py:b", "/a b.py"):
        for file in ("r.py", "r.py:x.py", ".py"):
            assert split_name(f"{directory}/{file}:f") == (f"{directory}/{file}", "f")
            assert split_name(f"{directory}/{file}") == (f"{directory}/{file}", "")


@pytest.mark.parametrize("beside", ["", "import alone"])
def test_what_a_run_has_written_is_read_with_the_recipes_own_modules(tmp_path, beside):
    """Held groups and recorded batches may have classes of the recipe's file, and of modules beside it that
    only a function of it imports."""
    recipe = write(
        tmp_path / "a", 1.0, beside, "from alone import Alone\nreturn {'own': Mine(), 'beside': Alone()}"
    )
    _, config = load_recipe(recipe)
    write_config(tmp_path, source_of(recipe), config)
    written = cloudpickle.dumps(config.env.reward(None, None, None))
    load_recipe(write(tmp_path / "b", 2.0, WAYS["a module"]))
    recipe_modules.deactivate_all()
    recipe_modules._directories.clear()  # as in another process
    _, config = load_recipe(str(tmp_path / "config.json"))
    read = pickle.loads(written)
    assert type(read["beside"]) is type(config.env.reward(None, None, None)["beside"])
    assert read["beside"].value == 1.0 and type(read["own"]).__name__ == "Mine"
