"""What a recipe imports from its own directory: it reaches other processes, and each recipe gets its own."""

import importlib
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import cloudpickle
import pytest

from rl.cluster.spawn import _prepare_process
from rl.controller.config_json import write_config
from rl.controller.recipe_modules import modules_of, split_name
from rl.controller.recipes import load_recipe, source_of
from rl.envs.verifier import Verifier
from rl.types import Problem, Rollout, StopReason

RECIPE = """
from dataclasses import dataclass
from rl.controller.config import RunConfig
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


def test_what_recipes_import_reaches_processes_that_cannot_import_it(tmp_path):
    """Each recipe's own, though all of these have modules of the same names."""
    envs = {}
    for value, (way, imports) in enumerate(WAYS.items(), 5):
        _, config = load_recipe(write(tmp_path / way, float(value), imports))
        envs[way] = config.env
    code = (
        "import sys, pickle\n"
        "envs = pickle.load(sys.stdin.buffer)\n"
        "print(*(env.reward(None, None, None) for env in envs.values()))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=cloudpickle.dumps(envs), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert [float(word) for word in done.stdout.split()] == [5.0, 6.0, 7.0, 8.0, 9.0]


def test_what_a_reward_function_imports_when_it_is_called_is_there(tmp_path):
    """Also under a path with a colon, which PYTHONPATH cannot hold."""
    reward = f"rewards = []\n{lazy(WAYS)}\nreturn float(rewards == [7.0] * {len(WAYS)})"
    name, config = load_recipe(write(tmp_path / "a:b", 7.0, reward=reward) + ":mine")
    assert name == "mine"
    verifier = Verifier(config.env, 20.0)
    try:
        rollout = Rollout(Problem("0", "0", ""), (), "", StopReason.STOP, None)
        (score,) = verifier.score([rollout])
        assert score.reward == 1.0, score
    finally:
        verifier.close()


def test_a_process_of_a_run_finds_modules_where_the_controller_does(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.processes.end_with_parent", lambda: None)
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
    assert {"alone"} <= cloudpickle.list_registry_pickle_by_value()
    assert "earlier" not in cloudpickle.list_registry_pickle_by_value()
    load_recipe(write(tmp_path / "second", 1.0))
    assert sys.modules.pop("earlier") is earlier


def test_the_users_own_path_stays_as_it_was(tmp_path, monkeypatch):
    first, second = write(tmp_path / "a", 1.0), write(tmp_path / "b", 2.0)
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    before = list(sys.path)
    load_recipe(first)
    load_recipe(second)
    with modules_of(source_of(first)):
        assert sys.path[0] == str(tmp_path / "a") and sys.path[1:] == before
    assert sys.path == [str(tmp_path / "b"), *before]


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


def test_a_recipes_name_is_its_path_and_its_function():
    for directory in ("/a", "/a:b", "/a.py:b", "/a b.py"):
        for file in ("r.py", "r.py:x.py", ".py"):
            assert split_name(f"{directory}/{file}:f") == (f"{directory}/{file}", "f")
            assert split_name(f"{directory}/{file}") == (f"{directory}/{file}", "")
