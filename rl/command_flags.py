"""Flags of a command's own, which it takes out of its words before it reads the rest as settings.

A flag may be written with dashes or underscores, and its value after a space or after `=`.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from rl.errors import ConfigError


def flag_name(word: str) -> str:
    """`--run-dir=D` as `--run_dir`; empty for a word that is no flag."""
    name = word.partition("=")[0]
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else ""


def is_flag(word: str) -> bool:
    """Whether it names a flag: dashes alone are a value."""
    return word.startswith("--") and bool(word.partition("=")[0].strip("-"))


def asks_for_help(words: Iterable[str]) -> bool:
    return bool({"-h", "--help"} & {*words})


def take_value(words: list[str], flag: str, example: str) -> str:
    """The flag's value, taken out of the words; empty where they do not have the flag.

    Raises ConfigError where it has no value, or is there twice.
    """
    if (at := _place(words, flag)) is None:
        return ""
    _, equals, value = words[at].partition("=")
    after = words[at + 1 : at + 2]
    if not equals and after and not after[0].startswith("--"):
        (value,) = after
        del words[at + 1]
    if not value:
        raise ConfigError(f"{flag} has no value; write {flag} {example}")
    del words[at]
    return value


def take_switch(words: list[str], flag: str) -> bool:
    """Whether the words have the flag, which is taken out. Raises ConfigError where it has a value."""
    if (at := _place(words, flag)) is None:
        return False
    if "=" in words[at]:
        raise ConfigError(f"{words[at]}: {flag} takes no value; write {flag}")
    del words[at]
    return True


def without_effect(words: Iterable[str], settings: Collection[str], command: str) -> list[str]:
    """One line for each flag of settings, or of whole sections, that the command does not read."""
    names = [name[2:] for name in map(flag_name, words) if name]
    unread = [name for name in names if name in settings or name.partition(".")[0] in settings]
    return [f"--{name} has no effect on {command}; leave it out" for name in unread]


def _place(words: list[str], flag: str) -> int | None:
    names = list(map(flag_name, words))
    if problems := repeated(name for name in names if name == flag):
        raise ConfigError(problems[0])
    return names.index(flag) if flag in names else None


def repeated(flags: Iterable[str]) -> list[str]:
    """One line for each flag that a command line has more than once: the last would win in silence."""
    counts = Counter(flags)
    return [f"{flag} is given {count} times; give it once" for flag, count in counts.items() if count > 1]
