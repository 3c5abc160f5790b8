"""Flags that commands take out of their words."""

import pytest

from rl.command_flags import flag_name, take_switch, take_value, without_effect
from rl.errors import ConfigError


@pytest.mark.parametrize(
    "written", [["--my_flag", "3"], ["--my-flag", "3"], ["--my_flag=3"], ["--my-flag=3"]]
)
def test_a_value_is_taken_out_however_it_is_written(written):
    words = ["--a.b=1", *written, "x"]
    assert take_value(words, "--my_flag", "N") == "3" and words == ["--a.b=1", "x"]
    assert take_value(words, "--my_flag", "N") == ""


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--flag"], "--flag has no value; write --flag N"),
        (["--flag="], "--flag has no value"),
        (["--flag", ""], "--flag has no value"),
        (["--flag", "--other"], "--flag has no value"),
        (["--flag", "1", "--flag=1"], "--flag is given 2 times; give it once"),
    ],
)
def test_a_flag_without_one_value_is_refused(words, match):
    with pytest.raises(ConfigError, match=match):
        take_value(words, "--flag", "N")


def test_a_switch_is_taken_out():
    words = ["a", "--dry-run", "b"]
    assert take_switch(words, "--dry_run") and words == ["a", "b"] and not take_switch(words, "--dry_run")
    with pytest.raises(ConfigError, match="--dry_run takes no value"):
        take_switch(["--dry_run=True"], "--dry_run")


def test_names():
    assert [*map(flag_name, ("--a-b.c-d=e-f", "--x", "-y", "z", "3"))] == ["--a_b.c_d", "--x", "", "", ""]


def test_what_a_command_does_not_read_is_named_by_setting_and_by_section():
    words = ["--kl.coef", "1", "--save-every=2", "--steps", "3"]
    assert without_effect(words, {"kl", "save_every"}, "rl x") == [
        "--kl.coef has no effect on rl x; leave it out",
        "--save_every has no effect on rl x; leave it out",
    ]
