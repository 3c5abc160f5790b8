"""What `rl plan --diff RUN` says of a run's plan.json."""

# holds: exact

from types import SimpleNamespace

from rl.plan.show import differences
from rl.plan.types import Settled


def settled(**values):
    return SimpleNamespace(
        settled=[Settled(name, "auto", value, f"why {value}") for name, value in values.items()]
    )


def before(**values):
    return {"settled": [{"setting": n, "value": v, "why": f"because {v}"} for n, v in values.items()]}


def test_each_value_that_differs_is_one_line_with_both_reasons():
    lines = differences(
        before(dtype="float32", threads=2, cache=4), settled(dtype="bfloat16", threads=2, seed=1), "runs/a"
    )
    assert lines == [
        "cache: 4 in runs/a, not there now",
        "dtype: float32 in runs/a (because float32), bfloat16 now (why bfloat16)",
        "seed: not there in runs/a, 1 now",
    ]


def test_a_plan_that_settles_the_same_says_so():
    assert differences(before(dtype="float32"), settled(dtype="float32"), "runs/a") == [
        "settled as in runs/a"
    ]
    assert differences(before(), settled(), "runs/a") == ["settled as in runs/a"]
