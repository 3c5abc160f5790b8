"""Parts of the algorithm refuse impossible values when they are built.

The cases are made from the annotations of every dataclass in rl/loss, so that a new one is among them.
"""

import dataclasses
import importlib
import json
import math
import pickle
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Ge, Gt, Le, Lt

import rl.loss
from configs.quickstart import quickstart
from rl.bounds import NonNegativeFloat, Share, ZeroOrOver
from rl.config.codec import from_json, to_json
from rl.config.flags import override
from rl.config.recipes import load_recipe
from rl.config.validate import validate
from rl.errors import ConfigError
from rl.fields import check_fields, postpone_refusals
from rl.loss.advantages.base import Trajectory
from rl.loss.advantages.gae import GAE
from rl.loss.advantages.group_mean import GroupMean
from rl.loss.advantages.reinforce_pp import ReinforcePP
from rl.loss.base import TokenInputs
from rl.loss.clip import Clip
from rl.loss.correction import Correction
from rl.loss.entropy import EntropyBonus
from rl.loss.gspo import GSPO
from rl.loss.kl import KL
from rl.loss.objective import Objective
from rl.loss.shaping import Shaping

DATA = {TokenInputs, Trajectory}  # what parts are given: tensors and arrays, made for every micro-batch
NEEDED = {Objective: {"loss": Clip()}, Correction: {"old_logprobs": "trainer"}}  # for a value that is tried


def modules() -> Iterator[Any]:
    for info in pkgutil.walk_packages(rl.loss.__path__, "rl.loss."):
        yield importlib.import_module(info.name)


def parts() -> list[type]:
    """Every dataclass of rl/loss that has fields, but for data."""
    kinds = {
        kind
        for module in modules()
        for kind in vars(module).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    }
    chosen = [kind for kind in kinds - DATA if dataclasses.fields(kind)]
    return sorted(chosen, key=lambda kind: kind.__qualname__)


def edges(mark: Any, of_ints: bool) -> tuple[list[Any], list[Any]]:
    """(values that a bound accepts, values that it refuses), as near to it as numbers go."""
    if isinstance(mark, ZeroOrOver):
        above = math.nextafter(mark.bound, math.inf)
        return [0.0, above, 1e9], [float(mark.bound), math.nextafter(mark.bound, 0.0), -1.0]
    (bound,) = dataclasses.astuple(mark)
    down, up = (
        (bound - 1, bound + 1)
        if of_ints
        else (math.nextafter(bound, -math.inf), math.nextafter(bound, math.inf))
    )
    return {
        Ge: ([bound], [down]),
        Le: ([bound], [up]),
        Gt: ([up], [bound]),
        Lt: ([down], [bound]),
    }[type(mark)]


def values(hint: Any) -> tuple[list[Any], list[Any]]:
    """(values that a field of this annotation takes, values that it does not)."""
    if get_origin(hint) is Literal:
        return list(get_args(hint)), ["none of them", 1, None]
    if hint is bool:
        return [True, False], ["True", 1, None]
    kind, *marks = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    if kind not in (int, float):
        return [], []
    good, bad = [], [math.nan, math.inf, "1", None, True]
    for mark in marks:
        if isinstance(mark, Ge | Gt | Le | Lt | ZeroOrOver):
            accepted, refused = edges(mark, kind is int)
            good, bad = good + accepted, bad + refused
    return good, bad


def cases() -> list[Any]:
    """(class, field, value, whether it is accepted), for every field with a bound or a choice."""
    rows = []
    for kind in parts():
        hints = get_type_hints(kind, include_extras=True)
        for f in dataclasses.fields(kind):
            good, bad = values(hints[f.name])
            for value, accepted in [*((v, True) for v in good), *((v, False) for v in bad)]:
                word = "takes" if accepted else "refuses"
                name = f"{kind.__name__}.{f.name} {word} {value!r}"
                rows.append(pytest.param(kind, f.name, value, accepted, id=name))
    return rows


@pytest.mark.parametrize("kind", parts(), ids=lambda kind: kind.__name__)
def test_every_part_refuses(kind):
    assert kind.__dataclass_params__.frozen and hasattr(kind, "__post_init__")
    hints = get_type_hints(kind, include_extras=True)
    for f in dataclasses.fields(kind):
        is_number = hints[f.name] in (int, float)
        assert not is_number, f"{kind.__name__}.{f.name} is a number without a bound; see rl/bounds.py"


@pytest.mark.parametrize(("kind", "name", "value", "accepted"), cases())
def test_each_edge_of_a_bound_is_accepted_and_what_is_past_it_refused(kind, name, value, accepted):
    arguments = NEEDED.get(kind, {}) | {name: value}
    if not accepted:
        with pytest.raises(ConfigError) as error:
            kind(**arguments)
        (line,) = str(error.value).splitlines()
        assert line.startswith(f"{kind.__name__}.{name}=") and " must be " in line
        with pytest.raises(ConfigError):
            replace(kind(**NEEDED.get(kind, {})), **{name: value})
        return
    assert getattr(kind(**arguments), name) == value


def test_the_cases_are_of_all_parts():
    fields = {(case.values[0].__name__, case.values[1]) for case in cases()}
    assert {name for name, _ in fields} == {kind.__name__ for kind in parts()}
    assert {
        ("Clip", "dual"),
        ("GSPO", "level"),
        ("GroupMean", "adv_norm"),
        ("Shaping", "overlong_tokens"),
    } <= fields
    assert len(fields) > 30


def test_all_problems_of_a_part_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        Clip(low=-0.1, high="x", dual=0.5)
    assert str(error.value).splitlines() == [
        "Clip.low=-0.1 must be at least 0 and at most 1",
        "Clip.high='x' must be a number",
        "Clip.dual=0.5 must be over 1, or 0 for none",
    ]
    with pytest.raises(ConfigError) as error:
        Correction(tis_clip=2.0, mask_low=3.0, mask_high=2.0, level="tokens")
    assert str(error.value).splitlines() == [
        "Correction.level='tokens' must be one of 'token', 'sequence'",
        "Correction.tis_clip=2.0 needs Correction.old_logprobs=trainer; set it",
        "Correction.mask_high=2.0 is under Correction.mask_low=3.0; swap them",
    ]


def test_fields_that_go_together_are_accepted():
    assert Correction(old_logprobs="trainer", tis_clip=2.0).tis_clip == 2.0
    assert Correction(mask_low=2.0, mask_high=2.0).mask_high == 2.0
    assert Correction(mask_low=2.0).mask_low == 2.0  # without an upper bound


def test_unpickling_does_not_check():
    with postpone_refusals():
        wrong = Clip(low=-0.1)
    assert pickle.loads(pickle.dumps(wrong)).low == -0.1
    with pytest.raises(ConfigError):
        replace(wrong, high=0.3)


@dataclass(frozen=True)
class Narrow(Clip):
    """A user's loss that derives from one of ours, and annotates a field anew without its bound."""

    low: float = 0.1
    share: Share = 0.5


@dataclass(frozen=True)
class Own:
    """A user's loss that knows nothing of this."""

    scale: NonNegativeFloat = -1.0
    inner: Clip = field(default_factory=Clip)

    def __call__(self, logprobs, inputs):
        return self.inner(logprobs, inputs)


def test_a_loss_of_the_users_own():
    with pytest.raises(ConfigError, match=r"Narrow.low=2.0 must be at least 0 and at most 1"):
        Narrow(low=2.0)
    with pytest.raises(ConfigError, match=r"Narrow.share=2.0"):
        Narrow(share=2.0)
    assert Own().scale == -1.0  # it needs nothing, and is checked before a run
    assert "loss.scale=-1.0 must be at least 0" in validate(replace(quickstart(), loss=Own()))


# A run's settings: all problems at once, by the names of the settings


def test_the_command_line_names_the_setting():
    for flags, line in [
        (["--loss.low=-3"], "loss.low=-3.0 must be at least 0 and at most 1"),
        (["--loss.dual", "0.5"], "loss.dual=0.5 must be over 1, or 0 for none"),
        (["--kl.coef", "-1"], "kl.coef=-1.0 must be at least 0"),
        (
            ["--correction.tis_clip", "2"],
            "correction.tis_clip=2.0 needs correction.old_logprobs=trainer; set it",
        ),
        (
            ["--correction.mask_low", "2", "--correction.mask_high", "1"],
            "correction.mask_high=1.0 is under correction.mask_low=2.0; swap them",
        ),
    ]:
        config, misread = override(quickstart(), flags, "rl")
        assert [*misread, *validate(config)] == [line]
    flags = ["--correction.tis_clip", "2", "--correction.old_logprobs", "trainer"]
    config, misread = override(quickstart(), flags, "rl")  # the first alone would be refused
    assert [*misread, *validate(config)] == [] and config.correction.tis_clip == 2.0
    flags = [
        "--loss.low=-3",
        "--steps",
        "x",
        "--correction.mask_low=-1",
        "--correction.tis_clip",
        "2",
        "--seed=-1",
    ]
    config, misread = override(quickstart(), flags, "rl")
    assert [line.split("=")[0].split(" ")[0] for line in [*misread, *validate(config)]] == [
        "--steps",
        "loss.low",
        "correction.mask_low",
        "seed",
        "correction.tis_clip",
    ]


RECIPE = """
from dataclasses import replace
from configs.quickstart import quickstart
from rl.config import RunConfig
from rl.loss.advantages.gae import GAE
from rl.loss.clip import Clip
from rl.loss.kl import KL

def several() -> RunConfig:
    return replace(quickstart(), loss=Clip(low=-0.1), advantages=GAE(lam=2, discount=-1), steps=0)

def hidden() -> RunConfig:
    inner = Clip(low=-0.1)
    return replace(quickstart(), loss=lambda logprobs, inputs: inner(logprobs, inputs))
"""


def test_a_recipe_with_several_mistakes_is_answered_with_all(tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE)
    _, config = load_recipe(f"{tmp_path}/mine.py:several")
    assert [line.split("=")[0] for line in check_fields(config)[1]] == [
        "loss.low",
        "advantages.discount",
        "advantages.lam",
        "steps",
    ]


def test_a_part_that_a_recipes_function_holds_is_refused_too(tmp_path):
    (tmp_path / "mine.py").write_text(RECIPE)
    with pytest.raises(ConfigError, match=r"^Clip.low=-0.1 must be at least 0 and at most 1$"):
        load_recipe(f"{tmp_path}/mine.py:hidden")


def test_an_old_config_json_with_several_mistakes_is_answered_with_all(tmp_path):
    data = to_json(quickstart())
    data["loss"]["low"], data["advantages"]["adv_norm"], data["steps"] = 2.0, "batch", 0
    (tmp_path / "config.json").write_text(json.dumps({"recipe": "quickstart", **data}))
    _, config = load_recipe(str(tmp_path))
    assert [line.split("=")[0] for line in check_fields(config)[1]] == [
        "loss.low",
        "advantages.adv_norm",
        "steps",
    ]
    with pytest.raises(ConfigError, match=r"Clip.low=2.0"):
        from_json(data)


def test_values_that_used_to_compute_something_else():
    for build in (lambda: Clip(low=-0.1), lambda: GSPO(level="tokens"), lambda: GroupMean(adv_norm="batch")):
        with pytest.raises(ConfigError):
            build()
    for build in (lambda: KL(estimator="k4"), lambda: GAE(lam=1.5), lambda: Clip(dual=1.0)):
        with pytest.raises(ConfigError):
            build()


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (Correction(level="sequence"), "level"),
        (Correction("trainer", level="sequence", tis_clip=2.0), ""),
        (Correction(level="sequence", mask_low=0.5), ""),
        (Correction(level="sequence", mask_high=2.0), ""),
        (Correction(), ""),
        (EntropyBonus(adapt=0.1), "adapt"),
        (EntropyBonus(adapt=0.1, target=0.3), ""),
        (EntropyBonus(), ""),
        (Shaping(overlong_penalty=2.0), "overlong_penalty"),
        (Shaping(overlong_tokens=5, overlong_penalty=0.0), "overlong_tokens"),
        (Shaping(overlong_tokens=5, overlong_penalty=2.0), ""),
        (Shaping(overlong_tokens=5), ""),
        (GAE(whiten=False, eps=0.1), "eps"),
        (GAE(eps=0.1), ""),
        (GAE(whiten=False), ""),
        (GroupMean(adv_norm="none", eps=0.1), "eps"),
        (GroupMean(eps=0.1), ""),
        (GroupMean(adv_norm="none"), ""),
        (ReinforcePP(baseline="group_mean", discount=0.5), "discount"),
        (ReinforcePP(discount=0.5), ""),
        (ReinforcePP(baseline="group_mean"), ""),
    ],
)
def test_a_field_that_nothing_reads_is_named_with_what_would_read_it(part, field):
    lines = part.unread("a.b.")
    assert len(lines) == bool(field) and all(line.startswith(f"a.b.{field}=") for line in lines)
    assert all(re.search("has no effect with.*; (set|leave) ", line) for line in lines)
