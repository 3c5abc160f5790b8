"""config.json: what a run was, and that a run can be started from it."""

import dataclasses
import enum
import functools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.quickstart import quickstart
from rl.config import ReferenceConfig, TrainerConfig
from rl.config.codec import from_json, to_json, write_config
from rl.config.env_rules import check_env
from rl.config.flags import override, settings_of
from rl.config.names import with_new_names
from rl.config.recipes import load_recipe, recipe_names, source_of
from rl.envs.calculator import Calculator
from rl.errors import ConfigError
from rl.loss.kl import KL
from rl.models.sources import ModelDir

MINE = """
from dataclasses import dataclass
from pathlib import Path
from rl.config import RunConfig
from rl.envs.base import Env
from rl.models.sources import TinyQwen3
from rl.types import Problem
from beside import ANSWER

@dataclass(frozen=True)
class Mine(Env):
    where: Path = Path("/somewhere")
    def generate(self, seed):
        return Problem(str(seed), str(seed), ANSWER)
    def reward(self, problem, response, stop):
        return 1.0

def squared(logprobs, inputs): ...

def mine() -> RunConfig:
    return RunConfig(model=TinyQwen3("0123456789"), env=Mine(num_eval=3), loss=squared, steps=7)
"""


@pytest.mark.parametrize("name", list(recipe_names()))
def test_every_recipe_can_be_read_back(name, tmp_path):
    _, config = load_recipe(name)
    config = replace(config, kl=KL(coef=0.1), reference=ReferenceConfig(model=ModelDir("x")))
    write_config(tmp_path, name, config)
    assert load_recipe(str(tmp_path)) == (name, config)
    assert load_recipe(str(tmp_path / "config.json")) == (name, config)


MADE_IN_PYTHON = """
import functools
from dataclasses import dataclass, field
from rl.config import RunConfig
from rl.envs.base import Env
from rl.models.sources import TinyQwen3
from rl.types import Problem

@dataclass(frozen=True)
class Mine(Env):
    answers: tuple = ()
    most: int = 5
    def generate(self, seed):
        return Problem(str(seed), str(seed), str(self.answers[0](seed)))
    def reward(self, problem, response, stop):
        return 1.0

def _named(): ...

def mine() -> RunConfig:
    answers = (lambda seed: seed + 1, functools.partial(max, 7), {"a": [lambda: 3]}, _named)
    return RunConfig(model=TinyQwen3("0123456789"), env=Mine(num_eval=3, answers=answers), steps=7)
"""


def test_what_a_recipe_alone_can_make_is_taken_from_it_and_all_else_from_the_run(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MADE_IN_PYTHON)
    _, config = load_recipe(str(path))
    changed = replace(config, steps=9, env=replace(config.env, most=6, num_eval=2))
    write_config(tmp_path / "run", f"{path}:mine", changed)
    name, again = load_recipe(str(tmp_path / "run"))
    assert (name, again.steps, again.env.most, again.env.num_eval) == ("mine", 9, 6, 2)
    assert again.env.generate(3).answer == "4" and again.env.answers[1](2) == 7
    assert again.env.answers[2]["a"][0]() == 3
    path.write_text(MADE_IN_PYTHON.replace("_named", "_renamed"))  # another function is no stand-in
    with pytest.raises(ConfigError, match="names .*_named'?, which is not there"):
        load_recipe(str(tmp_path / "run"))
    path.write_text(MADE_IN_PYTHON.replace("def mine()", "def other()"))
    with pytest.raises(ConfigError, match="names .*lambda.*, which is not there .*; give a recipe"):
        load_recipe(str(tmp_path / "run"))


WRAPPED = """
import functools
from rl.config import RunConfig
from rl.envs.sort_letters import SortLetters
from rl.models.sources import TinyQwen3

def plain(logprobs, inputs):
    return 1

def scaled(loss, factor):
    @functools.wraps(loss)
    def wrapper(logprobs, inputs):
        return factor * loss(logprobs, inputs)
    return wrapper

def mine() -> RunConfig:
    return RunConfig(model=TinyQwen3("0123456789"), env=SortLetters(), loss=LOSS)
"""


def test_a_function_that_has_anothers_name_is_not_read_back_as_that_one(tmp_path):
    """functools.wraps gives it: the run would go on with another loss, and nobody would be told."""
    path = tmp_path / "wrapped.py"
    path.write_text(WRAPPED.replace("LOSS", "scaled(plain, 2)"))
    _, config = load_recipe(str(path))
    assert config.loss(0, 0) == 2
    write_config(tmp_path / "run", f"{path}:mine", config)
    assert load_recipe(str(tmp_path / "run"))[1].loss(0, 0) == 2
    path.write_text(WRAPPED.replace("LOSS", "plain"))
    with pytest.raises(ConfigError, match="plain at .*, which cannot be read back; give a recipe"):
        load_recipe(str(tmp_path / "run"))


def test_a_recipe_of_ones_own_with_a_class_a_function_and_a_module_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text('ANSWER = "42"\n')
    (tmp_path / "mine.py").write_text(MINE)
    name, config = load_recipe(str(tmp_path / "mine.py"))  # its only recipe
    assert name == "mine" and config.env.generate(0).answer == "42"
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_config(run_dir, f"{tmp_path}/mine.py:mine", replace(config, run_dir="runs/first"))
    again, read = load_recipe(str(run_dir))
    assert again == "mine" and read.run_dir == "" and read.steps == 7
    assert read.env.where == Path("/somewhere") and read.env.generate(0).answer == "42"
    assert read.loss.__name__ == "squared"
    (tmp_path / "mine.py").unlink()
    with pytest.raises(ConfigError, match="which is gone; give a recipe"):
        load_recipe(str(run_dir))


def test_what_cannot_be_read_back_is_named():
    data = to_json(TrainerConfig())
    assert from_json(data) == TrainerConfig()
    with pytest.raises(ConfigError, match=r"has the setting lrr of rl.plan.sections:TrainerConfig"):
        from_json(data | {"lrr": 1})
    assert (
        from_json(data | {"type": "rl.controller.config:TrainerConfig"}) == TrainerConfig()
    )  # of earlier runs
    for old, new in (("shared", "side_by_side"), ("separate", "alone"), ("auto", "auto")):
        assert from_json(with_new_names(to_json(quickstart()) | {"placement": old})).placement == new
    with pytest.raises(ConfigError, match="names 'rl.nowhere:X', which is not there"):
        from_json({"type": "rl.nowhere:X"})
    with pytest.raises(ConfigError, match="cannot be read back"):
        from_json(to_json(object()))
    assert json.dumps(to_json(dataclasses.make_dataclass("D", ["a", "b"])((Path("x"), 1.5), {1, 2})))


@dataclass(frozen=True)
class Fussy:
    """Whose making fails, as where its data are gone."""

    path: str = ""
    level: int = 1

    def __post_init__(self):
        if self.path:
            raise FileNotFoundError(2, "No such file", self.path)
        if self.level > 3:
            raise ArithmeticError("level is 1 to 3")


@dataclass(frozen=True)
class Holder:
    part: Fussy = Fussy()


class Point(NamedTuple):
    x: int
    y: int


def test_what_a_class_of_the_users_raises_is_told_in_one_line():
    for change, words in (({"path": "/gone"}, "No such file"), ({"level": 4}, "level is 1 to 3")):
        with pytest.raises(ConfigError, match=f"Fussy cannot be made again .*{words}.*; give a recipe"):
            from_json(to_json(Fussy()) | change)
        ((name, value),) = change.items()
        _, problems = settings_of(Holder(), [f"--part.{name}", str(value)])
        assert len(problems) == 1 and problems[0].startswith(f"--part.{name} {value}: Fussy refuses it (")
        assert words in problems[0] and problems[0].endswith("; give another value")
    with pytest.raises(ConfigError, match=r"Point cannot be made again \(.*\); give a recipe"):
        from_json({**to_json(Point(1, 2)), "values": [1, 2, 3]})


@dataclass(frozen=True)
class Odd:
    """Fields whose names are also keys of the file."""

    type: object = None
    type_: object = None
    type__: object = None
    dict: object = None
    python: object = None
    path: object = None
    of: object = None
    recipe: object = None

    def method(self):
        return self.type

    @classmethod
    def of_the_class(cls):
        return cls


class Level(enum.Enum):
    LOW = "low"
    HIGH = 2


class Word(enum.StrEnum):
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


class Pair(NamedTuple):
    left: object
    right: object = None


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4),
    st.sampled_from([Path("a/b"), Path("/"), math.sqrt, replace, Odd, Odd.method, Odd.of_the_class, len, str.lower, dict.get, int.__add__]),
    st.sampled_from([*Level, *Word, *Number]),
)  # fmt: skip
KEYS = st.one_of(st.sampled_from(["type", "dict", "list", "set", "frozenset", "python", "path", "repr", "method", "of", "enum", "named", "name", "values"]), st.text(max_size=3), st.integers())  # fmt: skip


def deeper(inner):
    return st.one_of(
        st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(Odd)]), inner, max_size=3).map(
            lambda fields: Odd(**fields)
        ),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.lists(inner, max_size=3),
        st.sets(KEYS, max_size=3),
        st.frozensets(st.one_of(KEYS, st.frozensets(KEYS, max_size=2)), max_size=3),
        st.dictionaries(st.one_of(KEYS, st.tuples(KEYS, KEYS)), inner, max_size=3),
    )


VALUES = st.recursive(LEAVES, deeper, max_leaves=8)


def through_a_file(value):
    return from_json(json.loads(json.dumps(to_json(value))))


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_what_is_written_is_read_back(value):
    again = through_a_file(value)
    assert again == value and type(again) is type(value)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_a_method_comes_back_with_what_it_is_bound_to(value):
    again = through_a_file(Odd(type=value).method)
    assert again.__func__ is Odd.method and again() == value


@pytest.mark.parametrize("kind", [set, frozenset])
def test_equal_sets_are_written_equally(kind):
    """Their order depends on what was put in first, and on the hashes of texts, which each process draws."""
    forward, backward = kind([0, 8, 16]), kind([16, 8, 0])
    assert repr(forward) != repr(backward)
    assert json.dumps(to_json({"a": (forward,)})) == json.dumps(to_json({"a": (backward,)}))


def test_a_descriptor_without_a_name_is_no_error_when_it_is_written():
    with pytest.raises(ConfigError, match="cannot be read back"):
        from_json(to_json(functools.cached_property(len)))


def test_files_of_earlier_versions_are_read():
    assert from_json([1, [2]]) == (1, (2,))  # they had lists as tuples

    @dataclass(frozen=True)
    class Underscored:
        type_: int = 0
        type__: int = 0

    name = f"{__name__}:Underscored"
    globals()["Underscored"] = Underscored
    try:
        assert from_json({"type": name, "type_": 1, "type__": 2}) == Underscored(1, 2)
    finally:
        del globals()["Underscored"]
    assert from_json({"type": f"{__name__}:Odd", "path": {"path": "a"}}) == Odd(path=Path("a"))
    assert from_json(to_json("ab".upper))() == "AB"
    with pytest.raises(ConfigError, match="names a method 'gone' that is not there"):
        from_json({"method": "gone", "of": "text"})


EARLIER = sorted((Path(__file__).parent / "earlier").glob("*.json"))
"""What the version of 24 November 2026 (788fbef) wrote for recipes."""


def _leaves(data, prefix=""):
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@pytest.mark.parametrize("file", EARLIER, ids=lambda file: file.stem)
def test_each_setting_of_an_earlier_run_is_what_it_was(file):
    before = dict(_leaves(json.loads(file.read_text())))
    name, config = load_recipe(str(file))
    now = dict(_leaves(to_json(config)))
    assert name == before.pop("recipe") == file.stem
    length = before.pop("trainer.max_tokens")
    assert length == now["max_seq_len"] == now["trainer.micro_batch_tokens"]
    assert before.pop("placement") == now["placement"] == "auto"
    assert before.pop("run_dir") == now["run_dir"] == ""
    for setting, value in before.items():
        kept = value.replace("rl.controller.config:", "rl.config.run:") if setting.endswith("type") else value
        assert now[setting] == kept or (
            setting.endswith("type") and now[setting].endswith(value.split(":")[1])
        )


def test_a_length_of_an_earlier_version_is_the_sequences_and_the_micro_batchs(tmp_path):
    """trainer.max_tokens was both."""
    (tmp_path / "run").mkdir()
    data = {"recipe": "quickstart", **to_json(quickstart())}
    del data["max_seq_len"], data["trainer"]["micro_batch_tokens"]
    data["trainer"]["max_tokens"] = 640
    (tmp_path / "run" / "config.json").write_text(json.dumps(data))
    _, config = load_recipe(str(tmp_path / "run"))
    assert (config.max_seq_len, config.trainer.micro_batch_tokens) == (640, 640)
    file = tmp_path / "mine.py"
    file.write_text(
        "from rl.config import TrainerConfig\ndef mine():\n    return TrainerConfig(max_tokens=9)\n"
    )
    with pytest.raises(
        ConfigError, match="line 3: .*max_tokens is max_seq_len and trainer.micro_batch_tokens now"
    ):
        load_recipe(str(file))
    file.write_text(
        "from rl.config import TrainerConfig\ndef mine():\n    return TrainerConfig(learning_rate=9)\n"
    )
    with pytest.raises(
        ConfigError, match=r"line 3: .*'learning_rate' \(it is trainer.lr here\); fix the recipe"
    ):
        load_recipe(str(file))
    file.write_text("from rl.controller.config import RunConfig\ndef mine():\n    return 1\n")
    with pytest.raises(ConfigError, match="line 1: the module rl.controller.config is rl.config now; fix"):
        load_recipe(str(file))


def test_the_old_flag_is_answered_with_both():
    _, (line,) = override(quickstart(), ["--trainer.max_tokens", "9"], prog="rl train")
    assert line == (
        "--trainer.max_tokens is two settings now; set --max_seq_len and --trainer.micro_batch_tokens"
    )


OWN_FIELDS = """
from dataclasses import dataclass, field, replace
from rl.configs.quickstart import quickstart
from rl.config import RunConfig
from rl.envs.sort_letters import SortLetters
from rl.loss.clip import Clip

@dataclass(frozen=True)
class Mine(SortLetters):
    placement: str = "shared"
    length: int = 3
    twice: int = field(init=False, default=0)
    def __post_init__(self):
        object.__setattr__(self, "twice", 2 * self.length)

@dataclass
class Weighted:
    names: list[str] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    def __call__(self, logprobs, inputs):
        raise NotImplementedError

def mine() -> RunConfig:
    return replace(quickstart(), env=Mine(length=5), loss=Weighted())
"""


def test_fields_of_ones_own_come_back_and_are_set_as_they_are(tmp_path):
    """One that has a run's setting's name, one that follows from another, lists and dictionaries."""
    (tmp_path / "mine.py").write_text(OWN_FIELDS)
    name, config = load_recipe(str(tmp_path / "mine.py"))
    source = source_of(str(tmp_path / "mine.py"), name)
    write_config(tmp_path, source, config)
    again, copy = load_recipe(str(tmp_path))
    assert (again, name, source) == ("mine", "mine", f"{tmp_path}/mine.py:mine")
    assert (copy.env.placement, copy.env.twice) == ("shared", 10) and vars(copy.loss) == vars(config.loss)
    flags = ["--env.length", "7", "--loss.names", "a", "b", "--loss.weights", "a", "1.5"]
    changed, problems = override(copy, [*flags, "--env.twice", "3"], "rl")
    assert len(problems) == 1 and problems[0].startswith("unknown setting --env.twice")
    assert changed.env.twice == 14
    assert (changed.loss.names, changed.loss.weights) == (["a", "b"], {"a": 1.5})


@dataclass(frozen=True)
class WithInitVar(Calculator):
    level: dataclasses.InitVar[int] = 1

    def __post_init__(self, level):
        object.__setattr__(self, "num_eval", level)


def test_a_value_that_is_no_field_is_refused():
    """config.json would not have it, and a flag of its section would take its default again."""
    (line,) = check_env(replace(quickstart(), env=WithInitVar(level=3)))
    assert line == "env WithInitVar has level as an InitVar, which config.json would lose; make it a field"
