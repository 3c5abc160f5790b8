"""A recipe with shared prefixes computed once, and without: seconds of training, and the learning curves.

`python -m benchmarks.prefix_trees_recipe [--seeds N] [--steps N]` writes docs/prefix_trees_recipe.md. The runs of
`benchmarks.rl_step` with a held-out accuracy every five steps: SmolLM2 on chain_sum, with the chat template.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.rl_step import SKIPPED, learning
from benchmarks.runs import median, run, write_table
from rl.controller.config import RunConfig


def recipe() -> RunConfig:
    config = learning()
    return replace(config, env=replace(config.env, num_eval=256), eval_every=5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    rows = [
        ["seed", "prefixes", "tokens of a step", "train, s", "step, s", "ratio of train", "accuracy at step"]
    ]
    for seed in range(options.seeds):
        once = 0.0
        for share in (True, False):
            settings = ("--seed", seed, "--steps", options.steps, "--trainer.share_prefixes", share)
            done = run(f"{__file__}:recipe", *settings)
            steps = done["steps"][SKIPPED:]
            train = median(steps, "time/train")
            once = once or train
            curve = ", ".join(
                f"{step}: {accuracy:.3f}" for step, accuracy in sorted(done["accuracy"].items())
            )
            rows.append([
                str(seed), "once" if share else "of each sample", f"{median(steps, 'tokens/computed'):,.0f}",
                f"{train:.2f}", f"{median(steps, 'time/step'):.2f}", f"{train / once:.2f}", curve,
            ])  # fmt: skip
            print(rows[-1], flush=True)
    notes = (
        "SmolLM2-135M-Instruct on chain_sum, 16 prompts x 8 samples, at most 24 new tokens, bf16, one update, AdamW at a constant\n"
        "2e-5. Medians of the steps. Accuracy: greedy, of 256 held-out problems (standard error 0.03)."
    )
    command = f"python -m benchmarks.prefix_trees_recipe --seeds {options.seeds} --steps {options.steps}"
    path = Path("docs/prefix_trees_recipe.md")
    write_table(path, "A recipe with and without shared prefixes", command, rows, notes)


if __name__ == "__main__":
    main()
