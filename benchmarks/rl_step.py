"""What an RL step costs: ours synchronous and asynchronous, and TRL's GRPOTrainer, on the same machine in one run.

`python -m benchmarks.rl_step [--steps N] [--trl PYTHON] [--to_accuracy A]`, after `make tasks` and `rl fetch smollm2`. SmolLM2-135M-Instruct on
chain_sum: 16 prompts x 8 samples, at most 24 new tokens, bf16, one update. PYTHON is that of a virtual environment with
`pip install 'rl[trl]'` (TRL 1.16); without it TRL is left out. Writes docs/rl_step.md.
With --to_accuracy both train from the same start with the same hyperparameters until so many held-out problems are right;
writes docs/to_accuracy.md and .png, and nothing else.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from benchmarks.runs import median, run, write_table
from configs.smollm2 import smollm2
from rl.controller.config import RunConfig, WarmupConfig
from rl.envs.reasoning import ReasoningGym
from rl.loss.entropy import EntropyBonus

SAMPLES = 16 * 8
KINDS = ("generate", "reward", "train", "sync", "checkpoint", "controller")
NUM_EVAL, MOST_STEPS = 128, 30  # with --to_accuracy
SKIPPED = 2  # the first steps: caches and pages are cold


def task() -> RunConfig:
    """What TRL's script does: no demonstrations, no dynamic sampling, and no entropy bonus."""
    recipe = smollm2()
    env = ReasoningGym(
        dataset="chain_sum", options=recipe.env.options, chat=True, max_new_tokens=24, num_eval=4
    )
    plain = replace(recipe, warmup=WarmupConfig(), resampling_rounds=0, entropy=EntropyBonus())
    return replace(plain, env=env, prompts_per_step=16, group_size=8, minibatches=1, eval_every=10**6)


def learning() -> RunConfig:
    """The same, as TRL's script does it to an accuracy: a constant learning rate."""
    config = task()
    trainer = replace(config.trainer, lr_schedule="constant", lr_warmup_steps=0, lr_min_ratio=0.0)
    env = replace(config.env, num_eval=NUM_EVAL)
    return replace(config, env=env, trainer=trainer, steps=MOST_STEPS, eval_every=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trl", default="")
    parser.add_argument("--to_accuracy", type=float, default=0.0)
    options = parser.parse_args()
    if options.to_accuracy:
        return to_accuracy(options.to_accuracy, options.trl)
    recipe, once = f"{__file__}:task", ("--steps", options.steps)
    threads = ("--trainer.num_threads", 1, "--generator.num_threads", 1)
    pinned = {"trainer": 0, "generator-0": 1}
    asynchronous = ("--max_offpolicy_steps", 1)
    # Answers are short: they finish sooner than they are computed again.
    drain = ("--generator.updates", "drain")
    variants = {
        "ours, synchronous": lambda: run(recipe, *once),
        "ours, max_offpolicy_steps=1": lambda: run(recipe, *once, *asynchronous, *drain),
        "ours, max_offpolicy_steps=1, updates in flight": lambda: run(recipe, *once, *asynchronous),
        "a core each: synchronous": lambda: run(recipe, *once, *threads, cores=pinned),
        "a core each: max_offpolicy_steps=1": lambda: run(
            recipe, *once, *threads, *asynchronous, *drain, cores=pinned
        ),
    }
    trl_seconds = statistics.median(trl(options.trl)["seconds"][1:]) if options.trl else None
    rows = [["", "s/step", "samples/s", *KINDS, "sync blocks", "ratio"]]
    base: dict[str, float] = {}
    for name, measure in variants.items():
        steps = measure()["steps"][SKIPPED:-1]
        seconds = statistics.fmean(step["time/step"] for step in steps)
        pair = name.split(":")[0] if ":" in name else "ours"
        base.setdefault(pair, seconds)
        shares = [f"{median(steps, f'time/{kind}'):.2f}" for kind in KINDS]
        blocking = sum(step["time/sync_blocking"] for step in steps) / sum(
            step["time/step"] for step in steps
        )
        rows.append([name, f"{seconds:.2f}", f"{SAMPLES / seconds:.1f}", *shares, f"{blocking:.1%}",
                     f"{base[pair] / seconds:.2f}"])  # fmt: skip
        print(rows[-1], flush=True)
    if trl_seconds:
        rows.append(["TRL 1.16 GRPOTrainer", f"{trl_seconds:.2f}", f"{SAMPLES / trl_seconds:.1f}",
                     *[""] * (len(KINDS) + 1), f"{base['ours'] / trl_seconds:.2f}"])  # fmt: skip
    notes = (
        "SmolLM2-135M-Instruct on chain_sum: 16 prompts x 8 samples, at most 24 new tokens, bf16, one update a step.\n"
        "Seconds of a step in which each kind of work was under way (medians); they overlap where actors work at the same\n"
        "time. `controller`: no process had anything to do. `sync blocks`: share of the step for which publishing weights\n"
        "held up training. `ratio`: steps/s against the synchronous run of the same kind.\n\n"
        "On two cores that trainer and generator share, asynchrony wins what either leaves idle. With a core for each\n"
        "(`a core each`), the generator works while the trainer does. Answers are short here, so the asynchronous rows let them\n"
        "finish before new weights are loaded (`--generator.updates drain`): in flight, what each has so far is computed again."
    )
    write_table(
        Path("docs/rl_step.md"),
        "What an RL step costs",
        "python -m benchmarks.rl_step --trl PYTHON",
        rows,
        notes,
    )


def to_accuracy(goal: float, trl_python: str) -> None:
    """Seconds of training, evaluations left out, until the goal is reached for the first time."""
    done = run(f"{__file__}:learning")
    seconds = [0.0, *accumulate(step["time/step"] for step in done["steps"])]
    ours = [(seconds[step], accuracy) for step, accuracy in sorted(done["accuracy"].items())]
    curves = {"ours, synchronous": up_to(ours, goal)}
    found = trl(trl_python, goal)
    seconds = [0.0, *accumulate(found["seconds"])]
    curves["TRL 1.16 GRPOTrainer"] = up_to(list(zip(seconds, found["accuracies"], strict=True)), goal)
    rows = [["", "steps", "seconds of training", "held-out accuracy before", "after", "times as fast as TRL"]]
    slowest = curves["TRL 1.16 GRPOTrainer"][-1][0]
    for name, curve in curves.items():
        (_, before), (total, after) = curve[0], curve[-1]
        ratio = f"{slowest / total:.1f}" if after >= goal else "not reached"
        rows.append([name, str(len(curve) - 1), f"{total:.0f}", f"{before:.3f}", f"{after:.3f}", ratio])
    draw(curves, goal, Path("docs/to_accuracy.png"))
    notes = (
        f"SmolLM2-135M-Instruct on chain_sum until {goal:.0%} of {NUM_EVAL} held-out problems are right: 16 prompts x 8 samples,\n"
        "at most 24 new tokens, one update a step, AdamW at a constant 2e-5, no KL, no entropy bonus. Evaluations are not\n"
        "counted. TRL's weights are fp32 under autocast here.\n\n![learning curves](to_accuracy.png)"
    )
    command = f"python -m benchmarks.rl_step --to_accuracy {goal} --trl PYTHON"
    write_table(Path("docs/to_accuracy.md"), "To the same accuracy", command, rows, notes)


def up_to(curve: list[tuple[float, float]], goal: float) -> list[tuple[float, float]]:
    """(seconds, accuracy), cut after the first that reaches the goal."""
    reached = [i for i, (_, accuracy) in enumerate(curve) if accuracy >= goal]
    return curve[: reached[0] + 1] if reached else curve


def draw(curves: dict[str, list[tuple[float, float]]], goal: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=130)
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=name)
    axes.axhline(goal, color="grey", linestyle=":")
    axes.set(xlabel="seconds of training", ylabel="held-out accuracy")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def trl(python: str, goal: float | None = None) -> dict[str, list[float]]:
    """`seconds` of each step of TRL's trainer; with a goal, `accuracies` before the first and after each."""
    command = [python, "benchmarks/trl_step.py", *([str(goal)] if goal else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
