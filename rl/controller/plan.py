"""`rl plan RECIPE [--cluster 8xH100-80]`: who runs where, with which memory, and what does not fit."""

import json
from collections.abc import Sequence
from pathlib import Path

from rl.cluster.machine import look_at_host
from rl.command_flags import flag_name, take_switch, take_value
from rl.config.flags import override
from rl.config.recipes import load_recipe
from rl.config.settle import check_models_read, cluster_of, plan_or_problems
from rl.config.validate import check_settings
from rl.errors import ConfigError, check_version
from rl.plan.cluster import parse_cluster
from rl.plan.show import PLAN, differences, plan_json, show
from rl.plan.types import VERSION, Plan

_ROW = {"setting", "value", "why"}
_USAGE = (
    "usage: rl plan RECIPE [--cluster 8xH100-80 | '2 x 8xH100-80' | cpu] [--json] [--diff RUN] "
    "[--section.field value ...]"
)


def plan(arguments: Sequence[str]) -> int:
    """Print the plan. Returns 0 where the run fits, 1 where it does not or is refused. Raises ConfigError."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    name, *rest = arguments
    if "--devices" in map(flag_name, rest):
        raise ConfigError("--devices is called --cluster now; write --cluster 8xH100-80")
    as_json, run = take_switch(rest, "--json"), take_value(rest, "--diff", "runs/RUN")
    cluster = take_value(rest, "--cluster", "8xH100-80")
    if as_json and run:
        raise ConfigError("--json has no effect with --diff; leave one of them out")
    recipe, config = load_recipe(name)
    config, problems = override(config, rest, prog=f"rl plan {name}")
    if problems:
        raise ConfigError("\n".join(problems))
    config = config.without_weights()
    hosts = parse_cluster(cluster, look_at_host()) if cluster else cluster_of(config)
    before = _read(Path(run)) if run else None
    problems = check_settings(config, "train")
    result = plan_or_problems(config, "train", hosts)
    if isinstance(result, list):
        problems += result
    elif not problems:
        if as_json:
            print(json.dumps(plan_json(result), indent=1))
        else:
            lines = differences(before, result, run) if before is not None else describe(recipe, result)
            print("\n".join(lines))
        return 0
    check_models_read(config, "train")
    if as_json:
        print(json.dumps({"version": VERSION, "problems": problems}, indent=1))
    else:
        print("\n".join([f"{recipe} on {hosts}", *(f"problem: {line}" for line in problems)]))
    return 1


def describe(recipe: str, plan: Plan) -> list[str]:
    return [*show(recipe, plan), "it fits"]


def settled_otherwise(run: Path, plan: Plan) -> list[str]:
    """What was asked of both and is now another, one line each; but for caches, which follow free memory.

    Empty where the run's plan cannot be read, as an older version's.
    """
    try:
        before = {row["setting"]: row for row in _read(run)["settled"]}
    except ConfigError:
        return []
    otherwise = "settled otherwise than in the checkpoint's run"
    return [
        f"{otherwise}: {now.setting} {was['value']} -> {now.value} ({now.why})"
        for now in plan.settled
        if (was := before.get(now.setting)) and was.get("asked") == now.asked and was["value"] != now.value
        if not now.setting.endswith("kv_cache_gib")
    ]


def _read(run: Path) -> dict:
    """A run's plan.json. Raises ConfigError."""
    try:
        data = json.loads((run / PLAN).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--diff {run}: no {PLAN} can be read there ({error}); name a run's directory"
        ) from None
    rows = data.get("settled") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= _ROW for row in rows):
        raise ConfigError(f"--diff {run}: its {PLAN} is not what a run wrote; name a run's directory")
    check_version(f"--diff {run}: its {PLAN}", data.get("version"), VERSION)
    return data
