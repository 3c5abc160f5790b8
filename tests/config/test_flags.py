"""Values on the command line: whatever a value begins with, after = it is the value."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

import pytest

from configs.quickstart import quickstart
from rl.bounds import FilePath, PositiveInt
from rl.config.flags import override, setting_names, settings_of
from rl.envs.mixture import Mixture
from rl.envs.question_file import QuestionFile
from rl.fields import check_fields, expand_paths, postpone_refusals

CONFIG = replace(quickstart(), env=QuestionFile(path="questions.jsonl", num_eval=1))
SETTINGS = {name: attrgetter(name)(CONFIG) for name in setting_names(CONFIG)}
TEXTS = ["run_dir", "tracking.project", "env.prompt_prefix"]
ODD = [
    "-x",
    "-1",
    "--x",
    "--",
    "-",
    "",
    "=",
    "a=b",
    "--steps",
    "--steps=3",
    "-h",
    "--help",
    " ",
    "-x y",
    "None",
    "@",
]


@pytest.mark.parametrize("values", [ODD[i::6] for i in range(6)], ids=ascii)
def test_any_text_is_a_value(values):
    asked = dict(zip(TEXTS, values, strict=False))
    config, misread = override(CONFIG, [f"--{name}={value}" for name, value in asked.items()], "rl")
    assert misread == [] and {name: attrgetter(name)(config) for name in asked} == asked


@pytest.mark.parametrize("value", ["-x", "-"])
def test_a_dash_also_begins_the_next_word(value):
    config, misread = override(CONFIG, ["--run_dir", value, "--steps", "3"], "rl")
    assert misread == [] and (config.run_dir, config.steps) == (value, 3)


def test_and_the_first_of_several_values():
    config, misread = override(CONFIG, ["--env.stop=-x", "y", "--steps=3"], "rl")
    assert misread == [] and (config.env.stop, config.steps) == (("-x", "y"), 3)


def test_several_values_may_be_none():
    """As of a run with spare hosts that is started again without them."""
    trainer = replace(CONFIG.trainer, spare_hosts=(2,), hosts=(0, 1))
    words = ["--trainer.spare_hosts", "None", "--trainer.hosts=None", "--tracking.sinks", "None"]
    config, misread = override(replace(CONFIG, trainer=trainer), [*words, "--env.stop", "None"], "rl")
    assert misread == [] and config.trainer.spare_hosts == config.trainer.hosts == config.tracking.sinks == ()
    assert config.env.stop == ("None",)
    _, misread = override(CONFIG, ["--trainer.betas", "None"], "rl")
    assert len(misread) == 1 and "--trainer.betas" in misread[0]


def test_a_setting_of_a_part_that_is_not_there_is_not_taken_for_anothers():
    _, (line,) = override(CONFIG, ["--reference.model.path", "x"], "rl")
    assert line.startswith("--reference.model is a part that is made in Python")


def test_negative_numbers_are_read_as_such():
    """Their bounds are another's to check."""
    numbers = [name for name, value in SETTINGS.items() if type(value) in (int, float)]
    with postpone_refusals():
        config, misread = settings_of(CONFIG, [f"--{name}=-3" for name in numbers])
    assert misread == [] and {attrgetter(name)(config) for name in numbers} == {-3}


def test_a_value_that_cannot_be_read_is_named_beside_others():
    _, misread = override(CONFIG, ["--steps=-x", "--run_dir=-y"], "rl")
    assert [line.partition(" must")[0] for line in misread] == ["--steps -x"]


@dataclass(frozen=True)
class Hinting(QuestionFile):
    hint: str | None = None
    most: int | None = None
    level: Literal["easy", "hard"] | None = None
    judge: Callable[[str], float] | None = None


def test_a_setting_that_is_none_takes_words_and_numbers_where_it_may_have_them():
    config = replace(CONFIG, env=Hinting(path="questions.jsonl", num_eval=1))
    flags = ["--env.hint", "x", "--env.most", "7", "--env.level", "hard"]
    config, misread = override(config, flags, "rl")
    assert misread == [] and (config.env.hint, config.env.most, config.env.level) == ("x", 7, "hard")
    _, (line,) = override(config, ["--env.level", "most"], "rl")
    assert line.startswith("--env.level most must be")
    _, misread = override(config, ["--env.judge", "x"], "rl")
    assert misread == ["--env.judge is a part that is made in Python; set it in a recipe of your own"]


@dataclass(frozen=True)
class Command:
    command: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "words", [("python", "-m", "agent"), ("python", "-c", "print(1)"), ("a b", "-", "-1")]
)
def test_the_words_of_a_command_may_begin_with_a_dash(words):
    assert settings_of(Command(), ["--command", *words]) == (Command(words), [])


class Size(Enum):
    SMALL = "small"


@dataclass(frozen=True)
class Optional:
    count: Annotated[int, "at least 1"] | None = None
    file: Path | None = None
    size: Size | None = None
    numbers: tuple[int, ...] | None = None
    words: list[str] | None = None
    made: Callable | None = None


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--count 3", 3),
        ("--file a/b", Path("a/b")),
        ("--size SMALL", Size.SMALL),
        ("--numbers 1 2", (1, 2)),
        ("--words a b", ["a", "b"]),
    ],
)
def test_a_setting_that_may_be_none_takes_what_its_type_says(words, value):
    flag, *rest = words.split()
    config, problems = settings_of(Optional(), [flag, *rest])
    assert problems == [] and getattr(config, flag[2:]) == value
    config, problems = settings_of(config, [flag, "None"])
    assert problems == [] and getattr(config, flag[2:]) is None
    (problem,) = settings_of(Optional(), ["--made", "x"])[1]
    assert "is a part that is made in Python" in problem


def test_the_parts_of_a_mixture_are_settings(capsys):
    tasks = (
        ("words", QuestionFile(path="a.jsonl", num_eval=1)),
        ("more", QuestionFile(path="b.jsonl", num_eval=1)),
    )
    config = replace(quickstart(), env=Mixture(tasks=tasks))
    changed, problems = override(
        config, ["--env.tasks.1.1.num_eval", "5", "--env.tasks.0.0", "w"], "rl train x"
    )
    assert problems == []
    assert [(name, env.num_eval, env.path) for name, env in changed.env.tasks] == [
        ("w", 1, "a.jsonl"),
        ("more", 5, "b.jsonl"),
    ]
    with pytest.raises(SystemExit):
        override(config, ["--help"], "rl train x")
    shown = set(re.findall(r"--(env\.tasks[\w.]+)", capsys.readouterr().out))
    assert shown and shown == {name for name in setting_names(config) if name.startswith("env.tasks")}


@dataclass(frozen=True)
class Bounded:
    count: PositiveInt | None = None
    file: FilePath | None = None
    kinds: tuple[type, ...] = (Size, Optional)


def test_a_setting_that_may_be_none_keeps_its_bounds(monkeypatch):
    monkeypatch.setenv("HOME", "/home/x")
    assert setting_names(Bounded()) == ["count", "file", "kinds"]
    config, problems = settings_of(Bounded(), ["--count", "-5", "--file", "~/a"])
    assert problems == []
    _, problems = check_fields(config)
    assert problems == ["count=-5 must be at least 1"]
    assert expand_paths(config).file == "/home/x/a"
    _, (problem,) = check_fields(Bounded(file="a\0b"))
    assert "holds a NUL character" in problem


@dataclass(frozen=True)
class Between(QuestionFile):
    low: int = 1
    high: int = 10

    def __post_init__(self):
        if self.low >= self.high:
            raise ValueError("low has to be under high")


def test_flags_that_are_right_together_are_read_in_any_order():
    config = replace(CONFIG, env=Between(path="questions.jsonl", num_eval=1))
    for flags in (["--env.low", "50", "--env.high", "60"], ["--env.high", "60", "--env.low", "50"]):
        changed, misread = override(config, flags, "rl")
        assert misread == [] and (changed.env.low, changed.env.high) == (50, 60)
    changed, misread = override(config, ["--env.low", "50", "--steps=-x", "--env.high", "40"], "rl")
    assert [line.partition(":")[0] for line in misread if line.startswith("--env")] == ["--env.low 50"]
    assert len(misread) == 2 and changed.env.high == 40
