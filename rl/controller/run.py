"""One run from a checked config to its artefacts, and a clean end whatever happens."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rl.cluster.group import PATIENCE
from rl.cluster.launch import launch
from rl.config.codec import to_json, write_config
from rl.config.learning import learning_of
from rl.config.recipe_modules import modules_of
from rl.config.rehearsal import Take, rehearse
from rl.config.replay_rules import what_a_replay_needs
from rl.config.resume import (
    began_from,
    changed_settings,
    going_on,
    home_of,
    is_own,
    origin_of,
    take_over_weights,
    whole,
    with_newest_checkpoint,
)
from rl.config.run import RunConfig
from rl.config.settle import fallback_of, model_dirs, settle
from rl.config.validate import validate
from rl.controller.abandoned import abandon_after, remove_unfinished
from rl.controller.checkpoints import remove_older
from rl.controller.origin import drop_origin, keep_origin
from rl.controller.plan import settled_otherwise
from rl.controller.recovery import step_of, train_and_export
from rl.controller.reward_hosts import try_reward_hosts
from rl.envs.base import held_out
from rl.errors import TOLD, ConfigError, RunError
from rl.models.checkpoint_dir import latest
from rl.models.tokenizer import HFTokenizer
from rl.observability.log_tail import log_tail
from rl.observability.recorder import Recorder
from rl.observability.silence import break_silence
from rl.observability.sinks import open_sinks
from rl.observability.timeline import Timeline
from rl.observability.watches import LossWatch, SharingWatch, Watch
from rl.paths import disk_failure, lock_directory, run_directory
from rl.plan.show import PLAN, settled_line, write_plan
from rl.processes import on_interrupt
from rl.waiting import beside, give_way_often

_SAME_SIGNAL_SECONDS = 1.0
_NOTICE_SECONDS = 60.0  # until a lost host is given up


def run(
    recipe: str, config: RunConfig, source: str = "", known: Sequence[str] = (), hosts_last: bool = True
) -> int:
    """Check, then train. Returns the exit code.

    source: where the recipe is, as `rl train` was told; config.json names it. known: problems that are known
    already. hosts_last: config.hosts are there after the run, too, and stand in config.json. Raises
    ConfigError with every problem before any process starts.
    """
    asked_for = whole(config.resume)
    config, missing, in_place = going_on(source or recipe, config)
    is_named = bool(asked_for) and config.resume == asked_for
    if problems := validate(config, [*known, *missing], in_place=in_place):
        raise ConfigError("\n".join(problems))
    with modules_of(source):
        rehearsal = rehearse(config, config.model.tokenizer())
        if rehearsal.problems:
            raise ConfigError("\n".join(rehearsal.problems))
    try:
        run_dir = run_directory(config.run_dir, recipe)
        with break_silence(f"waiting until no other process has {run_dir}"):
            lock = lock_directory(run_dir, "run", _patience(config) if in_place else 0.0)
        if in_place:
            remove_unfinished(run_dir)
            if asked_for and not is_named:  # one that lacked only its name has it now
                config, _ = with_newest_checkpoint(source or recipe, replace(config, resume=asked_for))
        resumed_at, is_its_own = step_of(config.resume), is_own(config.resume, run_dir)
        if in_place and (left := abandon_after(run_dir, resumed_at if is_its_own else -1)):
            print(f"{left}; going on from {config.resume or 'the beginning'}", flush=True)
        replays = what_a_replay_needs(config, resumed_at, not config.resume or is_its_own)
        for line in [*changed_settings(config), *replays]:
            print(line, flush=True)
        lasting = config if hosts_last else replace(config, hosts="")
        # Who starts again from these settings starts where this run began.
        began = began_from(run_dir) if in_place else config.resume and os.path.abspath(config.resume)
        write_config(run_dir, source or recipe, replace(lasting, resume=began))
        if began and not is_its_own:
            if why := keep_origin(began, run_dir):
                print(
                    f"{began} is not linked into {run_dir} ({why:.200}); leave it until this run has ended",
                    flush=True,
                )
            config = replace(config, resume=origin_of(run_dir))  # the other run may remove its own any time
    except OSError as error:
        where = Path(config.run_dir or "runs")
        if failure := disk_failure(error, where):
            raise RunError(f"{failure}{_go_on(where)}") from error
        raise ConfigError(
            f"the run's directory {config.run_dir or 'runs/'} cannot be made ({error}); give another run_dir"
        ) from error
    try:
        with modules_of(source):
            asyncio.run(_main(recipe, config, run_dir, in_place, is_named, rehearsal.takes))
        drop_origin(run_dir)
        remove_older(run_dir, config.keep_checkpoints)
    except KeyboardInterrupt:
        print(f"what the run has done is in {run_dir}{_go_on(run_dir)}", file=sys.stderr)
        raise
    except RunError as error:
        print(log_tail(run_dir, str(error)), file=sys.stderr, end="")
        if "--resume" in str(error):
            raise
        raise RunError(f"{error}{_go_on(run_dir)}") from error
    except OSError as error:
        if not (failure := disk_failure(error, run_dir)):
            raise
        raise RunError(f"{failure}{_go_on(run_dir)}") from error
    finally:
        os.close(lock)
    return 0


def _patience(config: RunConfig) -> float:
    """Seconds for the controller of a job that was started again: the one before lives until it notices."""
    is_of_a_job = TOLD in os.environ or PATIENCE in os.environ
    return config.deadlines.start + _NOTICE_SECONDS if is_of_a_job else 0.0


def _go_on(run_dir: Path) -> str:
    try:
        newest = latest(run_dir / "checkpoints")
    except OSError:  # of a disk that has failed
        return ""
    return f"; go on with --resume {newest}" if newest else ""


async def _main(
    recipe: str, config: RunConfig, run_dir: Path, in_place: bool, is_named: bool, tried: Sequence[Take]
) -> None:
    main = asyncio.current_task()
    assert main is not None
    came: list[tuple[int, float]] = []

    def interrupt(number: int) -> None:
        """The first has the run save a checkpoint and end, the second has it end without; others nothing.

        Who starts a run may pass on a signal that the run got too: what comes at once is the same one. In a
        job of Slurm's no SIGTERM counts as a second: one that is preempted gets it twice.
        """
        if came and number == signal.SIGTERM and TOLD in os.environ:
            return
        if came and time.monotonic() - came[-1][1] < _SAME_SIGNAL_SECONDS:
            return
        came.append((number, time.monotonic()))
        if len(came) <= 2:
            main.cancel()

    on_interrupt(interrupt)
    try:
        await run_recipe(recipe, config, run_dir, in_place, is_named, tried)
    except asyncio.CancelledError:
        raise KeyboardInterrupt(*(number for number, _ in came[:1])) from None


async def run_recipe(
    recipe: str,
    config: RunConfig,
    run_dir: Path,
    in_place: bool = False,
    is_named: bool = False,
    tried: Sequence[Take] = (),
) -> None:
    """From the first process to the last file.

    in_place: the directory holds the run's earlier steps. is_named: `config.resume` is what the user named.
    tried: how the environment did here, which it has to do on each host that rewards.
    """
    give_way_often()
    plan = settle(config)
    learning = learning_of(config, plan.value_of("dtype"))
    for line in settled_otherwise(home_of(config.resume), plan) if config.resume else []:
        print(line, flush=True)
    write_plan(run_dir / PLAN, plan)
    with break_silence("preparing the model's files"):
        take_over_weights(config, run_dir)
        models = model_dirs(config, plan, run_dir)
        tokenizer = HFTokenizer(models["model"])
    started = ", ".join(f"{count} {role}" for role, count in plan.roles.items())
    print(f"run directory: {run_dir}\n{settled_line(plan, run_dir / PLAN)}")
    print(f"starting processes: {started} ...", flush=True)
    timeline = Timeline(config.trace, hosts=plan.hosts)
    sinks = open_sinks(config.tracking, run_dir, to_json(config))
    watches: list[Callable[[], Watch]] = [SharingWatch] if config.trainer.share_prefixes else []
    if config.data != "rollouts":
        watches.append(partial(LossWatch, "trainer.lr"))
    recorder = Recorder(
        run_dir,
        config.steps,
        timeline,
        sinks,
        watches,
        num_rollouts=config.record_rollouts,
        write_seconds=config.deadlines.checkpoint,
    )
    title, checkpoint, trainer = _title(recipe, config), config.resume, config.trainer
    goes_on_without = trainer.min_hosts > 0 or bool(trainer.spare_hosts)
    fallback = fallback_of(config, plan) if goes_on_without else None
    del config  # what follows is in the Plan and in Learning
    async with recorder:
        if in_place:
            await recorder.rewind(step_of(checkpoint) if is_own(checkpoint, run_dir) else -1)
        processes = launch(plan, models, run_dir, learning.env, timeline, engines_without=fallback)
        async with beside(recorder.break_silence()), processes as actors:
            await try_reward_hosts(tried, learning, plan, actors, tokenizer)
            goes_on = in_place and (not checkpoint or is_own(checkpoint, run_dir))  # else it begins anew
            await train_and_export(learning, checkpoint, actors, tokenizer, recorder, goes_on, is_named)
        curve = recorder.draw_curve(title)
        print(_summary(recorder.accuracies, len(held_out(learning.env)), run_dir, curve))
        print(_overhead(timeline))


def _overhead(timeline: Timeline) -> str:
    share = timeline.overhead_seconds / timeline.total_seconds if timeline.total_seconds else 0.0
    return f"controller overhead: {share:.1%} of the steps' time, in which no process had anything to do"


def _title(recipe: str, config: RunConfig) -> str:
    unit = {
        "rollouts": f"prompts x {config.group_size} samples",
        "demonstrations": "demonstrations",
        "preferences": "pairs",
    }[config.data]
    return f"{recipe}: {config.prompts_per_step} {unit} a step"


def _summary(
    accuracies: dict[int, tuple[float, float]], num_problems: int, run_dir: Path, curve: Path
) -> str:
    (first, before), (last, after) = next(iter(accuracies.items())), next(reversed(accuracies.items()))
    start = "before training" if first == 0 else f"at step {first}"
    return (
        f"\nheld-out accuracy {start}: {before[0]:.3f} +- {before[1]:.3f}"
        f"\nheld-out accuracy after {last} steps: {after[0]:.3f} +- {after[1]:.3f}  ({num_problems} "
        f"problems, greedy; +- standard error)"
        f"\nlearning curve: {curve}"
        f"\nmodel: {run_dir / 'hf'} (loads in transformers and vLLM)"
    )
