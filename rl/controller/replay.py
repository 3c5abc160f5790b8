"""`rl replay RUN --step N`: step N of an earlier run again, from its checkpoint and its recorded batches.

Under the run's own settings, or others given as flags, such as another layout or dtype: the tool for "why did
the loss jump there?". Only what learns is started: no generators, no rewards.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl.cluster.launch import launch
from rl.command_flags import take_value, without_effect
from rl.config.algorithm import Algorithm
from rl.config.flags import override
from rl.config.learning import learning_of
from rl.config.recipes import load_recipe
from rl.config.replay_rules import NEEDS
from rl.config.resume import with_drawn_weights
from rl.config.run import RunConfig
from rl.config.settle import NOT_STARTED, model_dirs, settle
from rl.config.validate import validate
from rl.controller.checkpoints import load_checkpoint
from rl.controller.recovery import step_of
from rl.controller.side_run import own_directory
from rl.controller.training_batch import TrainingBatch
from rl.controller.update import learn
from rl.controller.updaters import updaters
from rl.errors import ConfigError
from rl.loss.entropy import EntropyBonus
from rl.models.checkpoint_dir import is_complete
from rl.observability.batches import check_batch, has_batch, read_batch
from rl.observability.json_lines import read_records
from rl.owned_directory import temporary_directory
from rl.plan.show import PLAN, settled_line, write_plan

_USAGE = "usage: rl replay runs/RUN --step N [--section.field value ...]"

UNREAD = frozenset({
    *NOT_STARTED["replay"],
    "warmup", "tracking", "resume", "trace", "joining_hosts", "group_size",
    "max_offpolicy_steps", "stream_groups", "resampling_rounds", "eval_every", "save_every",
    "save_every_minutes", "keep_checkpoints", "record_rollouts", "record_batches", "loss_agg", "advantages",
    "shaping", "entropy", "max_logprob_diff", "prompts_per_step", "data",
})  # fmt: skip
"""Settings, and sections of them, that say how batches come about, or what is done between steps.

A recorded batch has its weights, its advantages and the entropy bonus.
"""


def replay(arguments: Sequence[str]) -> int:
    """Print each metric of the step, as it was recorded and as it is now. Raises ConfigError."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{_USAGE}\n\n{NEEDS}")
        return 0
    run_dir, rest = Path(arguments[0]), list(arguments[1:])
    step = _take_step(rest)
    if not (run_dir / "config.json").is_file():
        raise ConfigError(f"{run_dir} is not the directory of a run; {_USAGE}")
    recipe, config = load_recipe(str(run_dir / "config.json"))
    in_rewards = {"kl"} if config.kl.in_reward else set()  # which the recorded advantages have
    config, problems = override(config, rest, prog="rl replay")
    problems += without_effect(rest, UNREAD | in_rewards, "rl replay")
    checkpoint = _checkpoint_before(run_dir, step)
    for number in range(step_of(str(checkpoint)) + 1, step + 1):
        check_batch(run_dir, number)
    config = replace(config, resume=str(checkpoint), joining_hosts=0)  # it has no generators
    if problems := validate(config, problems, command="replay"):
        raise ConfigError("\n".join(problems))
    config = with_drawn_weights(config, run_dir)
    metrics = run_dir / "metrics.jsonl"
    lines = read_records(metrics) if metrics.is_file() else []
    recorded = next((line for line in lines if line["step"] == step and "loss" in line), {})
    print(f"{recipe}: steps {step_of(config.resume) + 1} to {step}, from {checkpoint}", flush=True)
    with own_directory("replay", config.run_dir) as out:
        print(f"directory: {out}", flush=True)
        replayed = asyncio.run(_learn_again(config, run_dir, step, out))
    print(f"\n{'step ' + str(step):28} {'recorded':>14} {'replayed':>14} {'difference':>12}")
    for name in sorted(replayed):
        before, now = recorded.get(name), replayed[name]
        difference = "" if before is None else f"{now - before:.1e}"
        print(
            f"{name:28} {'' if before is None else format(before, '.6g'):>14} {now:>14.6g} {difference:>12}"
        )
    return 0


def _take_step(rest: list[str]) -> int:
    value = take_value(rest, "--step", "20")
    if not value:
        raise ConfigError(f"--step is missing; {_USAGE}")
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"--step {value} must be a step, at least 1; {_USAGE}")
    return int(value)


def _checkpoint_before(run_dir: Path, step: int) -> Path:
    """The newest from which every batch up to the step is recorded."""
    complete = [path for path in (run_dir / "checkpoints").glob("step-*") if is_complete(path)]
    for path in sorted(complete, key=lambda path: step_of(str(path)), reverse=True):
        first = step_of(str(path)) + 1
        if first <= step and all(has_batch(run_dir, i) for i in range(first, step + 1)):
            return path
    raise ConfigError(
        f"{run_dir} has no checkpoint before step {step} with the batches from there on; rl replay {NEEDS}"
    )


def _check_old_logprobs(batch: TrainingBatch, algorithm: Algorithm, step: int) -> None:
    """Several updates compare the policy with what it was before the first: the run has to have that."""
    if not (algorithm.samples_rollouts and algorithm.reads_old_logprobs):
        return
    samples = (sample for group in batch.groups for sample in group.samples)
    if any(sample.num_targets and "old_logprobs" not in sample.loss_inputs for sample in samples):
        raise ConfigError(
            f"step {step} was recorded without the trainer's logprobs before its updates, which "
            f"minibatches={algorithm.minibatches} and epochs={algorithm.epochs} with these corrections need; "
            f"leave out what changes them"
        )


async def _learn_again(config: RunConfig, run_dir: Path, step: int, out: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="replay-", dir=temporary_directory()) as scratch:
        directory = Path(scratch)
        plan = settle(config, "replay")
        write_plan(out / PLAN, plan)
        print(settled_line(plan, out / PLAN), flush=True)
        models = model_dirs(config, plan, directory)
        learning, checkpoint = learning_of(config, plan.value_of("dtype")), config.resume
        del config  # what follows is in the Plan and in Learning
        async with launch(plan, models, out) as actors:
            await actors.enter("train")
            await load_checkpoint(actors, checkpoint)
            policy, critic = updaters(learning, actors)
            learned: dict[str, float] = {}
            for number in range(step_of(checkpoint) + 1, step + 1):
                batch, entropy_coef = read_batch(run_dir, number)
                batch = replace(batch, groups=batch.all_groups, streamed=())
                _check_old_logprobs(batch, learning.algorithm, number)
                algorithm = replace(learning.algorithm, entropy=EntropyBonus(entropy_coef))
                policy = replace(policy, loss=algorithm.objective)
                learned = await learn(batch, number, algorithm, learning.seed, policy, critic)
            return learned
