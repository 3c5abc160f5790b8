"""`rl check RECIPE`: a recipe's settings, and its environment at work, in seconds and without a model.

The same checks come before each run. What this machine lacks (the model's files, devices) is only named.
"""

from collections.abc import Sequence

from rl.config.flags import override
from rl.config.recipe_modules import modules_of
from rl.config.recipes import from_anywhere, load_recipe, source_of
from rl.config.rehearsal import rehearse
from rl.config.resume import going_on
from rl.config.run import RunConfig
from rl.config.settle import OPTIONAL, why_no_plan
from rl.config.validate import check_texts, validate
from rl.envs.base import held_out
from rl.errors import ConfigError
from rl.interfaces import Tokenizer
from rl.models.sources import ModelSource, TinyQwen3
from rl.plan.cluster import Host, parse_cluster

_USAGE = "usage: rl check RECIPE [--section.field value ...]"
_AMPLE = parse_cluster("16 x 8xH100-80", Host(1, 1.0))
"""What is wrong with a recipe here and there is no machine's fault."""
_PRINTABLE = "".join(map(chr, range(32, 127))) + "\n\t"


def check(arguments: Sequence[str]) -> int:
    """Print what the environment did. Raises ConfigError with every problem of the recipe."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    name, *flags = arguments
    place = from_anywhere(name)  # before its code runs, which may change the directory
    recipe, config = load_recipe(name)
    config, wrong = override(config, flags, prog=f"rl check {name}")
    config, absent, in_place = going_on(source_of(place, recipe), config.without_weights())
    with modules_of(source_of(name)):
        missing = _missing_here(config)
        problems = [
            line for line in validate(config, [*wrong, *absent], in_place=in_place) if line not in missing
        ]
        if missing and not problems and not config.model.validate():  # else they were looked at
            problems = check_texts(config)
        if problems:
            raise ConfigError("\n".join(problems))
        rehearsal = rehearse(config, _tokenizer(config.model))
        if rehearsal.problems:
            raise ConfigError("\n".join(rehearsal.problems))
        num_eval = len(held_out(config.env))
    print(f"{recipe}: {type(config.env).__name__}, {num_eval} held-out problems")
    print("\n".join(rehearsal.notes))
    for line in missing:
        print(f"this machine cannot run it: {line}")
    print(f"{recipe} is sound" if missing else f"{recipe} is sound; start it with: rl train {name}")
    return 0


def _missing_here(config: RunConfig) -> list[str]:
    """What `validate` says of this machine, and of the files of models, which another machine may have."""
    models = {"": config.model, "judge.model: ": config.judge.model}
    lines = [f"{name}{line}" for name, model in models.items() if model for line in _absent(model)]
    lines += _absent(config.reference.model) if config.reference.model else []
    known = not config.model.validate()
    here = why_no_plan(config, model_known=known)
    nowhere = why_no_plan(config, cluster=_AMPLE, model_known=known) if here else []
    of_recipe = {line for line in nowhere if not any(name in line for name in OPTIONAL)}
    return list(dict.fromkeys([*lines, *(line for line in here if line not in of_recipe)]))


def _absent(model: ModelSource) -> list[str]:
    """Why a model's files are not here. A TinyQwen3 has none."""
    return [] if isinstance(model, TinyQwen3) else model.validate()


def _tokenizer(model: ModelSource) -> Tokenizer:
    """The model's, or, where its files are not here, one of single characters."""
    return (TinyQwen3(alphabet=_PRINTABLE) if _absent(model) else model).tokenizer()
