"""What an RL step costs: ours synchronous and asynchronous, and TRL's GRPOTrainer, on the same machine in one run.

`python -m benchmarks.rl_step [--steps N] [--trl PYTHON]`, after `make tasks` and `rl fetch smollm2`. SmolLM2-135M-Instruct on
chain_sum: 16 prompts x 8 samples, at most 24 new tokens, bf16, one update. PYTHON is that of a virtual environment with
`pip install 'rl[trl]'` (TRL 1.16); without it TRL is left out. Writes docs/rl_step.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.runs import median, run, write_table
from configs.smollm2 import smollm2
from rl.controller.config import RunConfig
from rl.envs.reasoning import ReasoningGym

SAMPLES = 16 * 8
KINDS = ("generate", "reward", "train", "sync", "checkpoint", "controller")
SKIPPED = 2  # the first steps: caches and pages are cold


def task() -> RunConfig:
    """What TRL's script does."""
    recipe = smollm2()
    env = ReasoningGym(
        dataset="chain_sum", options=recipe.env.options, chat=True, max_new_tokens=24, num_eval=4
    )
    return replace(recipe, env=env, prompts_per_step=16, group_size=8, minibatches=1, eval_every=10**6)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trl", default="")
    options = parser.parse_args()
    recipe, once = f"{__file__}:task", ("--steps", options.steps)
    threads = ("--trainer.num_threads", 1, "--generator.num_threads", 1)
    pinned = {"trainer": 0, "generator-0": 1}
    variants = {
        "ours, synchronous": lambda: run(recipe, *once),
        "ours, max_offpolicy_steps=1": lambda: run(recipe, *once, "--max_offpolicy_steps", 1),
        "a core each: synchronous": lambda: run(recipe, *once, *threads, cores=pinned),
        "a core each: max_offpolicy_steps=1": lambda: run(
            recipe, *once, *threads, "--max_offpolicy_steps", 1, cores=pinned
        ),
    }
    trl_seconds = trl(options.trl) if options.trl else None
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
        "(`a core each`), the generator works while the trainer does."
    )
    write_table(
        Path("docs/rl_step.md"),
        "What an RL step costs",
        "python -m benchmarks.rl_step --trl PYTHON",
        rows,
        notes,
    )


def trl(python: str) -> float:
    """Seconds of a step of TRL's trainer."""
    done = subprocess.run([python, "benchmarks/trl_step.py"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
