"""`rl eval MODEL ENV ...`: how good a model, a run or a checkpoint is on held-out problems, without training.

Greedy, and, with --samples n, the mean over n samples of each problem and pass@k: the chance that one of k is
right (Chen et al., arXiv 2107.03374, section 2.1).
"""

import asyncio
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from rl.cluster.launch import launch
from rl.command_flags import take_value, without_effect
from rl.config.codec import read_config, to_json
from rl.config.flags import override
from rl.config.learning import learning_of
from rl.config.recipe_modules import modules_of
from rl.config.recipes import load_recipe, source_of
from rl.config.resume import whole, with_drawn_weights
from rl.config.run import RunConfig, WarmupConfig
from rl.config.settle import NOT_STARTED, model_dirs, settle
from rl.config.validate import validate
from rl.controller.rollouts import check_rewards
from rl.controller.side_run import own_directory
from rl.controller.updaters import rollouts
from rl.envs.base import Env, held_out
from rl.errors import ConfigError
from rl.models.checkpoint_dir import is_complete, latest
from rl.models.sources import ModelDir
from rl.models.tokenizer import HFTokenizer
from rl.observability.metrics import eval_metrics, group_metrics
from rl.observability.rollout_log import rollout_record
from rl.owned_directory import temporary_directory
from rl.plan.show import PLAN, settled_line, write_plan
from rl.types import Group

_USAGE = "usage: rl eval MODEL RECIPE [RECIPE ...] [--samples N] [--section.field value ...]"

_ASKS_THE_SAME = ("num_eval", "max_new_tokens", "stop")
"""Settings of an Env with which its problems stay the same."""

UNREAD = frozenset({
    *NOT_STARTED["eval"],
    "data", "loss", "loss_agg", "advantages", "correction", "kl", "entropy", "shaping", "warmup",
    "tracking", "steps", "prompts_per_step", "group_size", "minibatches", "epochs", "max_offpolicy_steps",
    "stream_groups", "resampling_rounds", "max_logprob_diff", "eval_every", "save_every",
    "save_every_minutes", "keep_checkpoints", "record_rollouts", "record_batches", "resume", "trace",
    "trainer.lr", "trainer.lr_warmup_steps", "trainer.lr_schedule", "trainer.lr_min_ratio",
    "trainer.lr_decay_ratio", "trainer.betas", "trainer.eps", "trainer.weight_decay", "trainer.decay_all",
    "trainer.max_grad_norm", "trainer.share_prefixes", "trainer.dropout", "trainer.min_hosts",
    "trainer.spare_hosts", "trainer.max_restarts",
})  # fmt: skip
"""Settings, and sections of them, that say how a run trains. MODEL names the checkpoint."""


def evaluate(arguments: Sequence[str]) -> int:
    """Print a table, and write eval.json, rollouts.jsonl and logs into --run_dir. Raises ConfigError."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            f"{_USAGE}\n\nMODEL: a Hugging Face directory or id, a run, or one of its checkpoints; "
            f"RECIPE: whose held-out problems"
        )
        return 0
    rest = list(arguments)
    num_samples = _take_samples(rest)
    flags = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    if flags < 2:
        raise ConfigError(f"no {'recipe' if flags else 'model'} is named; {_USAGE}")
    model, recipes, rest = whole(rest[0]), rest[1:flags], rest[flags:]
    configs = {name: _config(model, name, rest) for name in recipes}
    if len(run_dirs := {config.run_dir for config in configs.values()}) > 1:
        names = ", ".join(sorted(run_dir or "none" for run_dir in run_dirs))
        raise ConfigError(f"the recipes have several directories ({names}); name one with --run_dir")
    for name, config in configs.items():
        with modules_of(source_of(name)):
            count = _trained_on(Path(model), config.env)
        if count:
            print(
                f"{name}: {count} of {len(held_out(config.env))} problems were not held out of the run's "
                f"training; lower env.num_eval for those that were"
            )
    with own_directory("eval", configs[recipes[0]].run_dir) as out:
        print(f"directory: {out}", flush=True)
        _measure_all(configs, {"model": model, "samples": num_samples}, num_samples, out)
    print(f"\n{out}")
    return 0


def _measure_all(
    configs: Mapping[str, RunConfig], about: Mapping[str, Any], num_samples: int, out: Path
) -> None:
    """Each recipe's table is printed; then it goes into out/eval.json, the answers into out/rollouts.jsonl.

    In this order a disk that fills up costs the least.
    """
    metrics: dict[str, dict[str, float]] = {}
    with (out / "rollouts.jsonl").open("w") as file:
        for number, (name, config) in enumerate(configs.items(), 1):
            plan_file = out / (PLAN if len(configs) == 1 else f"plan-{number}.json")
            with modules_of(source_of(name)):
                print(f"{name}: {len(held_out(config.env))} problems ...", flush=True)
                greedy, sampled = asyncio.run(_answers(config, num_samples, plan_file))
            try:
                check_rewards([*greedy, *sampled])
                metrics[name] = measures(greedy, sampled)
                table = [f"  {metric:28} {value:.4f}" for metric, value in metrics[name].items()]
                print("\n".join(["", name, *table]), flush=True)
                (out / "eval.json").write_text(json.dumps({**about, **metrics}, indent=1))
            finally:
                _write_answers(file, name, {"greedy": greedy, "sampled": sampled})


def _write_answers(file: TextIO, recipe: str, splits: Mapping[str, Sequence[Group]]) -> None:
    for split, groups in splits.items():
        for group in groups:
            for rollout, score in zip(group.rollouts, group.scores, strict=True):
                record = rollout_record(group.index, rollout, score)
                print(json.dumps({"recipe": recipe, "split": split} | record), file=file)


def measures(greedy: Sequence[Group], sampled: Sequence[Group]) -> dict[str, float]:
    """What is said of them. sampled: n of each problem, or nothing. What the infrastructure lost of these is
    left out of means and of pass@k, and counted."""
    metrics = eval_metrics(greedy)
    skipped = ("reward/mean", "reward/std", "reward/errors", "reward/correct", "group/with_signal")
    metrics |= {n: v for n, v in group_metrics(greedy).items() if n not in skipped and math.isfinite(v)}
    if sampled:
        n = len(sampled[0].scores)
        kept = [[score for score in group.scores if not score.is_dropped] for group in sampled]
        metrics[f"errors of {n}"] = sum(
            score.error is not None for group in sampled for score in group.scores
        )
        metrics |= _mean(f"mean reward of {n}", [score.reward for scores in kept for score in scores])
        for k in [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < n] + [n]:
            rights = [(len(s), sum(score.correct for score in s)) for s in kept if len(s) >= k]
            metrics |= _mean(f"pass@{k}", [pass_at_k(num, right, k) for num, right in rights])
    return metrics


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    """Nothing where there are none."""
    return {name: statistics.fmean(values)} if values else {}


def pass_at_k(n: int, right: int, k: int) -> float:
    """Without bias, from `right` of n samples: 1 - C(n - right, k) / C(n, k)."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def _take_samples(rest: list[str]) -> int:
    value = take_value(rest, "--samples", "8")
    if value and not (value.isdecimal() and 1 <= int(value) <= 1024):
        raise ConfigError(f"--samples {value} must be a number from 1 to 1024; {_USAGE}")
    return int(value or 0)


def _trained_on(model: Path, env: Env) -> int:
    """How many of its problems the run itself may have trained on, where it had the same task."""
    run_dir, _ = _of_a_run(model)
    if run_dir is None:
        return 0
    # As it is written: to load it would make classes of a recipe's file anew, which are then others.
    written = read_config(str(run_dir))[1]["env"]
    settings = json.loads(json.dumps(to_json(env)))
    if written | {name: settings[name] for name in _ASKS_THE_SAME} != settings:
        return 0
    of_run = replace(env, num_eval=written["num_eval"])
    asked = {problem.key for problem in held_out(env) if env.may_train_on(problem)}
    return len(asked - {problem.key for problem in held_out(of_run)})


def _config(model: str, name: str, flags: Sequence[str]) -> RunConfig:
    """The recipe's, with this model; of a checkpoint, with what its run learned."""
    run_dir, checkpoint = _of_a_run(Path(model))
    learned = None if run_dir is None else load_recipe(str(run_dir / "config.json"))[1]
    _, config = load_recipe(name)  # last: its modules are those that its checks import
    if learned is None:
        config = replace(config, model=ModelDir(model))
    else:
        trainer = replace(learned.trainer, hosts=(), min_hosts=0, spare_hosts=())  # those were that run's
        config = replace(config, model=learned.model, trainer=trainer, dtype=learned.dtype)
        config = replace(config, seed=learned.seed)  # of the weights, where an older version kept none
    config, problems = override(config, flags, prog="rl eval")
    problems += without_effect(flags, UNREAD, "rl eval")
    config = replace(config, resume="", warmup=WarmupConfig())
    if problems := validate(config, problems, command="eval"):
        raise ConfigError("\n".join(problems))
    if run_dir is not None:
        config = with_drawn_weights(config, run_dir)
    return replace(config, resume=str(checkpoint or ""))


def _of_a_run(path: Path) -> tuple[Path | None, Path | None]:
    """The run's directory, and the checkpoint in it; nothing for another model."""
    if (path / "config.json").is_file() and (path / "metrics.jsonl").is_file():
        newest = latest(path / "checkpoints")
        if newest is None:
            raise ConfigError(f"the run {path} has no checkpoint; name its hf directory, if it has one")
        return path, newest
    if path.parent.name == "checkpoints" and path.name.startswith("step-"):
        if not is_complete(path):
            raise ConfigError(f"{path} is no complete checkpoint; name another of {path.parent}")
        return path.parent.parent, path
    return None, None


async def _answers(config: RunConfig, num_samples: int, plan_file: Path) -> tuple[list[Group], list[Group]]:
    """plan_file: in the evaluation's directory."""
    out = plan_file.parent
    place = out if config.hosts else temporary_directory()  # where all hosts see it
    with tempfile.TemporaryDirectory(prefix="eval-", dir=place) as scratch:
        directory = Path(scratch)
        plan = settle(config, "eval")
        write_plan(plan_file, plan)
        print(settled_line(plan, plan_file), flush=True)
        models = model_dirs(config, plan, directory)
        learning, checkpoint = learning_of(config, plan.value_of("dtype")), config.resume
        del config  # what follows is in the Plan and in Learning
        async with launch(plan, models, out, learning.env) as actors:
            await actors.enter("sync")
            if checkpoint:
                await actors.trainer.load_checkpoint(checkpoint)
            await actors.publish(0)
            await actors.enter("generate")
            generators = actors.generators
            await generators.wait_served(0)
            rollout_maker = rollouts(learning, HFTokenizer(models["model"]), actors)
            try:
                greedy = await rollout_maker.evaluate(generators)
                sampled = await rollout_maker.evaluate(generators, num_samples, 1.0) if num_samples else []
            finally:
                await rollout_maker.close()
        return greedy, sampled
