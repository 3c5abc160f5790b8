"""Each setting that leaves a value to the run has a row in its Plan: what it came to, the fact, and where it is."""

# holds: exact

import itertools
from dataclasses import replace
from typing import Literal, get_args, get_origin

import pytest

from rl.config import GeneratorConfig
from rl.config.learning import learning_of
from rl.config.run import RunConfig
from rl.config.settle import NOT_STARTED, plan_or_problems
from rl.fields import is_instance
from rl.models.generator.vllm_config import Fill
from rl.plan.types import Plan
from rl.type_hints import type_hints
from tests.plan.changes import CLUSTERS, cases, models, recipes

RECIPES = recipes()
for _name in ("ppo", "qwen3_0_6b"):
    RECIPES[_name] = replace(RECIPES[_name], generator=GeneratorConfig())
ZEROS = {
    "trainer.num_threads", "generator.num_threads", "generator.kv_cache_gib", "warmup.lr", "max_logprob_diff"
}  # fmt: skip
"""Settings of which 0 leaves the value to the run."""


def words_for_later(config, prefix=""):
    """The settings that may be "auto", with what they are."""
    for name, hint in type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal and "auto" in get_args(hint):
            yield prefix + name, value
        elif is_instance(value) and not prefix and name not in ("env", "model"):
            yield from words_for_later(value, f"{name}.")


def left_to_the_run(config: RunConfig, command: str) -> set[str]:
    """Of what the command's roles and its loop read."""
    auto = {setting for setting, value in words_for_later(config) if value in ("auto", "fastest")}
    zeros = {setting for setting in ZEROS if not value_of(config, setting)}
    unread = set() if command == "train" else {"warmup.lr", "max_logprob_diff"}
    if not config.warmup.steps:
        unread.add("warmup.lr")
    if config.data != "rollouts":
        unread.add("max_logprob_diff")
    if "generator" in NOT_STARTED[command]:
        unread |= {setting for setting in auto | zeros if setting.startswith(("generator.", "weight_sync."))}
    return (auto | zeros) - unread


def value_of(config, setting):
    for name in setting.split("."):
        config = getattr(config, name)
    return config


def in_the_plan(plan: Plan, config: RunConfig, setting: str) -> str:
    """The value by which the run goes, as a row has it."""
    (trainer,), generators = plan.of("trainer"), plan.of("generator")
    match setting:
        case "dtype":
            assert len({r.spec.config.dtype for r in plan.replicas if r.role != "reward"}) == 1
            return trainer.spec.config.dtype
        case "placement":
            places = [(p.host, p.gpus) for r in plan.replicas if r.role != "reward" for p in r.processes]
            shared = not plan.cluster.gpus or len({*places}) < len(places)
            return "by_turns" if plan.takes_turns else "side_by_side" if shared else "alone"
        case "weight_sync.delta":
            return "on" if plan.delta else "off"
        case "generator.cuda_graphs":
            return "on" if generators[0].spec.config.cuda_graphs else "off"
        case "generator.kv_cache_gib":
            cache = generators[0].spec.config.kv_cache_gib
            if isinstance(cache, Fill):
                return f"about {cache.expected_gib:.1f}"
            return f"{cache:.4g}"
        case "trainer.num_threads" | "generator.num_threads":
            return str(plan.of(setting.split(".")[0])[0].processes[0].threads)
        case "warmup.lr":
            return f"{learning_of(config, trainer.spec.config.dtype).warmup.lr:g}"
        case "max_logprob_diff":
            limit = learning_of(config, trainer.spec.config.dtype).max_logprob_diff
            return "no limit" if limit == float("inf") else f"{limit:g}"
    raise AssertionError(f"{setting} may be left to the run, and this test does not know where its value is")


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    return models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("command", NOT_STARTED)
def test_what_is_left_to_the_run_has_a_row_with_the_value_it_goes_by(command, sizes):
    plans, seen = 0, set()
    for name, (hosts, there) in itertools.product(("quickstart", "ppo", "qwen3_0_6b"), CLUSTERS.items()):
        for config in cases(RECIPES[name], hosts, sizes, 4, f"{name} settled"):
            plan = plan_or_problems(config, command, there)
            if not isinstance(plan, Plan):
                continue
            plans += 1
            rows = {row.setting: row for row in plan.settled}
            assert len(rows) == len(plan.settled), f"{name} on {hosts}: a setting has two rows"
            for setting in left_to_the_run(config, command):
                assert setting in rows, f"{name} on {hosts}: {setting} has no row"
                assert rows[setting].value == in_the_plan(plan, config, setting), (name, hosts, rows[setting])
                seen.add((setting, rows[setting].value))
            assert all(row.why and "default" not in row.why for row in plan.settled), (name, hosts)
    assert plans > 20
    assert {setting for setting, _ in seen} >= {"dtype", "placement", "trainer.num_threads"}
    if command == "train":
        values = {value for setting, value in seen if setting == "placement"}
        assert {"alone", "side_by_side"} <= values
        assert {"on", "off"} == {value for setting, value in seen if setting == "generator.cuda_graphs"}
        assert {setting for setting, _ in seen} >= ZEROS
