"""The command line's settings: a recipe's config, changed by `--section.field value`."""

import contextlib
import dataclasses
import difflib
import io
import shlex
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import tyro

from rl.command_flags import asks_for_help, flag_name, is_flag, repeated
from rl.config.names import FOREIGN_NAMES, RENAMED, SAMPLING, SPLIT
from rl.config.run import ReferenceConfig, RunConfig
from rl.errors import ConfigError, one_line
from rl.fields import (
    check_fields,
    describe_type,
    expand_paths,
    is_instance,
    postpone_refusals,
    settable,
    short,
    shown,
)
from rl.type_hints import type_hints

T = TypeVar("T")
_SEVERAL = (tuple, list, dict, set, frozenset)
_TYRO = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)

# Of foreign names whose value means something else there: what to change in it.
FOREIGN_VALUES = {
    **dict.fromkeys(("epsilon", "clip_ratio", "eps_clip"), "does not set loss.high, which they set, too"),
    "vllm_importance_sampling_cap": "cuts a token's weight; TRL's, by default, masks whole sequences",
    "train_batch_size": "counts prompts; OpenRLHF's counts samples",
    "mini_batch_size": "is a number of them, not their size",
    "ppo_mini_batch_size": "is a number of them, not their size",
    "sft_loss_weight": "weighs the mean over the chosen's tokens; NeMo-RL's weighs their sum, by default",
}


def setting_names(config: Any, prefix: str = "") -> list[str]:
    """Every leaf of the nested config: "steps", "trainer.lr", "env.tasks.0.1.num_eval", ..."""
    names = []
    for name, value in _parts(config):
        names += setting_names(value, f"{prefix}{name}.") if _has_parts(value) else [prefix + name]
    return names


def _parts(owner: Any) -> list[tuple[str, Any]]:
    if isinstance(owner, tuple):
        return [(str(i), value) for i, value in enumerate(owner)]
    return [(field.name, getattr(owner, field.name)) for field in settable(owner)]


def _has_parts(value: Any) -> bool:
    """A dataclass, or a tuple with one somewhere in it."""
    if type(value) is tuple:  # not of another class, which could not be made again of its items
        return any(map(_has_parts, value))
    return is_instance(value)


def _value(config: Any, name: str) -> Any:
    """Of a setting or a section."""
    for part in name.split(".") if name else ():
        config = config[int(part)] if isinstance(config, tuple) else getattr(config, part)
    return config


def override(config: RunConfig, arguments: Sequence[str], prog: str) -> tuple[RunConfig, list[str]]:
    """Apply flags. Returns the changed config, and one line for each value of it, or of a flag, that is of a
    wrong type, out of its bounds or no setting's: its default is in its place.

    Prints and exits for --help. Raises ConfigError, with all the lines, where there is no such default.
    """
    config, wrong = check_fields(config)
    if asks_for_help(arguments):
        show_help(config, prog)
    with postpone_refusals():  # a flag alone may conflict with one that follows
        changed, misread = settings_of(config, arguments)
        changed = expand_paths(_without_what_was_switched_off(config, changed))
    changed, out_of_bounds = check_fields(changed)
    return changed, [*wrong, *misread, *out_of_bounds]


def settings_of(config: T, arguments: Sequence[str]) -> tuple[T, list[str]]:
    """Any config, changed by flags, and one line for each that makes no sense."""
    waiting, problems = _flags(config, arguments)
    while waiting:
        refused = []
        for flag, *values in waiting:
            try:
                config = _with(config, flag[2:].split("."), values)
            except ConfigError as error:  # it may go with one that follows
                refused.append(([flag, *values], str(error)))
        if len(refused) == len(waiting):
            return config, [*problems, *(problem for _, problem in refused)]
        waiting = [words for words, _ in refused]
    return config, problems


def _with(owner: Any, names: Sequence[str], values: Sequence[str], within: str = "") -> Any:
    """The part of the config with one field read from the command line. Raises ConfigError."""
    name, *rest = names
    path, current = f"{within}{name}", _value(owner, name)
    if rest:
        new = _with(current, rest, values, f"{path}.")
    else:
        hint = _hint(owner, name)
        new = _read(path, type(current) if hint is Any else hint, current, values)
    if isinstance(owner, tuple):
        return tuple(new if i == int(name) else value for i, value in enumerate(owner))
    try:
        return dataclasses.replace(owner, **{name: new})
    except ConfigError:
        raise
    except Exception as error:  # of a class of the user's own
        refused = f"{type(owner).__name__} refuses it ({one_line(error)})"
        raise ConfigError(f"--{path} {short(shlex.join(values))}: {refused}; give another value") from error


def _read(name: str, kind: Any, current: Any, values: Sequence[str]) -> Any:
    """A value of a type from words, as tyro reads it. name: of the setting, for the error."""
    if not values:
        return ()
    if kind == tuple[str, ...]:
        return tuple(values)  # as of a command: tyro would take "-m" for a flag
    default = dataclasses.field(default_factory=lambda: current)  # it may be a list
    holder = dataclasses.make_dataclass("Setting", [("value", kind, default)])
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            read: Any = tyro.cli(holder, args=_words("--value", *values), use_underscores=True, config=_TYRO)
            return read.value
    except SystemExit:
        new = RENAMED.get((name, " ".join(values)))
        hint = f"; it is called {new} now" if new else ""
        raise ConfigError(
            f"--{name} {short(shlex.join(values))} must be {describe_type(kind)}{hint}"
        ) from None


def _flags(config: Any, arguments: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Each known flag with its values, and what is wrong with the other arguments."""
    known, flags, problems = setting_names(config), [], []
    groups: list[list[str]] = []
    for argument in arguments:
        if is_flag(argument):
            _, equals, value = argument.partition("=")
            groups.append([flag_name(argument), *([value] if equals else [])])
        elif groups:
            groups[-1].append(argument)
        else:
            problems.append(_stray(argument, known))
    problems += repeated(flag for flag, *_ in groups)
    for flag, *values in groups:
        name = flag[2:]
        if name not in known:
            problems.append(_unknown(config, name, known))
            continue
        value, hint = _value(config, name), _hint(config, name)
        if callable(value) or (value is None and not _is_plain(hint)):
            problems.append(f"--{name} is a part that is made in Python; set it in a recipe of your own")
            continue
        several = isinstance(value, _SEVERAL) or (value is None and _may_be_several(hint))
        if values == ["None"] and _may_be_empty(hint):
            values = []
        elif not values:
            problems.append(f"--{name} has no value; write --{name} VALUE")
            continue
        if not several:
            problems += [_stray(value, known, after=name) for value in values[1:]]
        flags.append([flag, *(values if several else values[:1])])
    return flags, problems


def _hint(config: Any, name: str) -> Any:
    section, _, field = name.rpartition(".")
    return type_hints(type(_value(config, section))).get(field, Any)


def _may_be_empty(hint: Any) -> bool:
    """Whether `None` empties it: a tuple of any length, but of texts, of which it may be one."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return get_origin(hint) is tuple and get_args(hint)[-1:] == (...,) and get_args(hint)[0] is not str


def _is_plain(hint: Any) -> bool:
    """Whether words of a command line can be a value of the type."""
    kinds = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    if get_origin(hint) is Literal or hint is Ellipsis:
        return True
    if get_origin(hint) not in (None, Annotated, Union, UnionType, *_SEVERAL):  # a function
        return False
    if kinds:
        return all(map(_is_plain, kinds))
    return isinstance(hint, type) and issubclass(hint, str | int | float | Path | Enum | type(None))


def _may_be_several(hint: Any) -> bool:
    """Whether a value of the type may be several words."""
    return get_origin(hint) in _SEVERAL or any(map(_may_be_several, get_args(hint)))


def _stray(argument: str, known: Sequence[str], after: str = "") -> str:
    flag = argument.lstrip("-+")
    if "=" in argument and flag.split("=")[0] in known:
        return f"{shown(argument)} is no flag; write --{short(flag)}"
    where = f"--{after} takes one value; {shown(argument)} after it" if after else shown(argument)
    return f"{where} belongs to no setting; settings are written --section.field VALUE"


def show_help(config: Any, prog: str, description: str | None = None) -> NoReturn:
    """Every setting of a config. Exits. description: in the place of the config's docstring."""
    tyro.cli(
        type(config), default=config, args=["--help"], prog=prog, description=description,
        use_underscores=True, config=_TYRO,
    )  # fmt: skip
    raise SystemExit(0)


def _words(flag: str, *values: str) -> list[str]:
    """As one word with its first value, which may then begin with a dash."""
    return [f"{flag}={values[0]}", *values[1:]] if values else [flag]


def _without_what_was_switched_off(recipe: RunConfig, changed: RunConfig) -> RunConfig:
    """`--kl.coef 0` also takes away the recipe's other settings of the penalty, but not those given with it:
    without a penalty they would have no effect. `--warmup.steps 0` and `--trainer.lora.rank 0` do the same.
    """
    lora = _without(recipe.trainer.lora, changed.trainer.lora, "rank")
    kl, warmup = _without(recipe.kl, changed.kl, "coef"), _without(recipe.warmup, changed.warmup, "steps")
    was_penalized = recipe.kl.coef and not changed.kl.coef
    changed = dataclasses.replace(
        changed, kl=kl, warmup=warmup, trainer=dataclasses.replace(changed.trainer, lora=lora)
    )
    if was_penalized and changed.reference == recipe.reference and not changed.algorithm.needs_reference:
        changed = dataclasses.replace(changed, reference=ReferenceConfig())
    return changed


def _without(recipe: Any, changed: Any, switch: str) -> Any:
    """The section's defaults where its switch alone was changed, to 0."""
    if not getattr(recipe, switch) or getattr(changed, switch):
        return changed
    on_again = dataclasses.replace(changed, **{switch: getattr(recipe, switch)})
    return type(changed)() if on_again == recipe else changed


def _unknown(config: Any, name: str, known: Sequence[str]) -> str:
    """What to say of a name that is no setting: ours for it, or the nearest."""
    section, _, leaf = name.rpartition(".")
    if leaf in SAMPLING:
        return (
            f"there is no setting --{leaf}: training samples from the policy itself, at temperature 1; "
            f"evaluation is greedy"
        )
    if name in SPLIT:
        return f"--{name} is two settings now; set {' and '.join('--' + new for new in SPLIT[name])}"
    if part := next((k for k in known if name.startswith(f"{k}.") and _value(config, k) is None), ""):
        return f"--{part} is a part that is made in Python, and not there; set it in a recipe of your own"
    if inside := [k for k in known if k.startswith(f"{name}.")]:
        return f"--{name} is a section, not a setting; its settings: {', '.join('--' + k for k in inside)}"
    same_leaf = [k for k in known if k.split(".")[-1] == leaf]
    # DPO's beta is not the KL's, and the generator's size not the trainer's.
    here = next((k for k in same_leaf if k.startswith(("loss.", "advantages."))), None)
    theirs = FOREIGN_NAMES.get(".".join(name.split(".")[-2:])) or FOREIGN_NAMES.get(leaf)
    if section and theirs:
        parts = section.split(".")  # critic.optim.lr is critic.lr here
        beside = (".".join([*parts[:n], theirs.split(".")[-1]]) for n in range(len(parts), 0, -1))
        here = here or next((sibling for sibling in beside if sibling in known), None)
    ours = here or theirs
    if ours in known:
        note = f", and {FOREIGN_VALUES[leaf]}" if leaf in FOREIGN_VALUES else ""
        return f"unknown setting --{name}; it is called --{ours} here{note}"
    in_section = [k for k in known if section and k.startswith(f"{section}.")]
    near = difflib.get_close_matches(leaf, [k.removeprefix(f"{section}.") for k in in_section], n=1)
    close = [f"{section}.{k}" for k in near] or same_leaf
    if not close and not in_section:
        close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean --{close[0]}? (--help lists them)" if close else "--help lists them"
    return f"unknown setting --{short(name)}; {hint}"
