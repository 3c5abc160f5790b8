"""What `rl plan --diff RUN` says of a run's plan.json."""

# holds: exact

import json
from types import SimpleNamespace

import pytest

from rl.controller.plan import plan, settled_otherwise
from rl.errors import ConfigError
from rl.plan.show import differences
from rl.plan.types import VERSION, Settled


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


def test_a_run_that_goes_on_is_told_what_the_same_request_has_become(tmp_path):
    """Such as another dtype, on a host without instructions for bfloat16."""
    rows = [
        {"setting": "dtype", "asked": "fastest", "value": "bfloat16", "why": "x"},
        {"setting": "threads", "asked": "2", "value": "2", "why": "x"},
        {"setting": "generator.kv_cache_gib", "asked": "0", "value": "1.0", "why": "x"},
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"version": VERSION, "settled": rows}))
    plan = SimpleNamespace(
        settled=[
            Settled("dtype", "fastest", "float32", "no instructions"),
            Settled("threads", "4", "4", "asked for"),  # which changed_settings says
            Settled("generator.kv_cache_gib", "0", "0.9", "what is left"),
            Settled("placement", "auto", "alone", "new"),
        ]
    )
    assert settled_otherwise(tmp_path, plan) == [
        "settled otherwise than in the checkpoint's run: dtype bfloat16 -> float32 (no instructions)"
    ]
    (tmp_path / "plan.json").write_text("{")
    assert settled_otherwise(tmp_path, plan) == settled_otherwise(tmp_path / "none", plan) == []


def test_a_plan_of_another_version_is_refused(tmp_path):
    content = {"version": VERSION + 1, "settled": []}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    words = f"its plan.json has version {VERSION + 1}, and this rl reads {VERSION}; use the rl that wrote it"
    with pytest.raises(ConfigError, match=words):
        plan(["quickstart", "--cluster", "cpu", "--diff", str(tmp_path)])
