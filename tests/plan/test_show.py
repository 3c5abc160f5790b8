"""What `rl plan --diff RUN` says of a run's plan.json."""

# holds: exact

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.quickstart import quickstart
from rl.cli import _dispatch
from rl.config.names import MOVED, RENAMED, SPLIT
from rl.config.settle import settle
from rl.controller.plan import plan, settled_otherwise
from rl.errors import ConfigError
from rl.plan.show import differences, plan_json, write_plan
from rl.plan.types import VERSION, Settled
from tests.plans import cluster


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


def words(capsys, *arguments) -> list[str]:
    """What the command prints, once it has ended well."""
    assert _dispatch([*arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_dry_run_is_the_plan(capsys):
    flags = ("--cluster", "4xH100-80", "--generator.num_replicas", "2")
    lines = words(capsys, "plan", "quickstart", *flags)
    assert lines[-1] == "it fits" and sum("generator" in line for line in lines) > 2
    assert words(capsys, "train", "quickstart", "--dry_run", *flags) == lines


def test_as_json_it_is_what_a_run_writes(capsys, tmp_path):
    made = settle(quickstart(), cluster=cluster("1xH100-80"))
    lines = words(capsys, "plan", "quickstart", "--cluster", "1xH100-80", "--json")
    write_plan(tmp_path / "plan.json", made)
    assert json.loads("\n".join(lines)) == json.loads((tmp_path / "plan.json").read_text())
    assert json.loads("\n".join(lines))["replicas"][0]["name"] == "trainer" == made.replicas[0].name
    assert plan_json(made)["version"] == VERSION


def test_what_does_not_fit_is_json_too(capsys):
    assert _dispatch(["plan", "quickstart", "--cluster", "1xH100-80", "--placement", "alone", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith("2 processes (trainer 1 + generator 1) need a GPU each")


@pytest.mark.parametrize("words", [["plan", "quickstart"], ["train", "quickstart", "--dry_run"]])
def test_settings_that_a_run_refuses_are_no_plan(words, capsys):
    """All problems at once, those of the settings before those of the cluster."""
    flags = ["--trainer.lora.alpha", "8", "--trainer.betas", "2", "2", "--generator.num_replicas", "999"]
    assert _dispatch([*words, *flags, "--cluster", "1xH100-80"]) == 1
    _, betas, lora, too_many = capsys.readouterr().out.splitlines()
    assert betas == "problem: trainer.betas=(2.0, 2.0) must lie in [0, 1)"
    assert "trainer.lora.targets have no effect with trainer.lora.rank=0" in lora
    assert "processes are more than this machine can hold" in too_many


def test_a_run_and_what_it_would_be_elsewhere(capsys, tmp_path):
    run = str(tmp_path)
    write_plan(tmp_path / "plan.json", settle(quickstart(), cluster=cluster("1xH100-80")))
    assert words(capsys, "plan", "quickstart", "--cluster", "1xH100-80", "--diff", run) == [
        f"settled as in {run}"
    ]
    lines = words(capsys, "plan", "quickstart", "--cluster", "2xH100-80", "--diff", run)
    assert (
        f"placement: side_by_side in {run} (2 processes for 1 GPU), alone now (2 processes for 2 GPUs)"
        in lines
    )


def test_the_page_of_old_names_has_each():
    page = (Path(__file__).parents[2] / "docs/renamed.md").read_text()
    rows = re.findall(r"^\| (.*) \| (.*) \|$", page, re.M)[1:]
    assert len(rows) > 4
    for (setting, before), now in RENAMED.items():
        assert (f"`--{setting} {before}`", f"`--{setting} {now}`") in rows
    for before, now in SPLIT.items():
        (words,) = [after for old, after in rows if f"`--{before} N`" in old]
        assert all(f"`--{name} N`" in words for name in now)
    for before, now in MOVED.items():
        assert any(before in old and now in new for old, new in rows)
