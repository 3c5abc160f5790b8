"""A recipe with shared prefixes computed once, and without: seconds of training by the same work, and the learning curves.

`python -m benchmarks.prefix_trees_recipe [--seeds N] [--steps N]` writes docs/prefix_trees_recipe.md. The runs of
`benchmarks.rl_step` with a held-out accuracy every five steps: SmolLM2 on chain_sum, with the chat template.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.pages import machine, write_page
from benchmarks.rl_step import GROUP, PROMPTS, SKIPPED, learning, products
from benchmarks.runs import median, run
from rl.config import RunConfig

NOTES = f"""SmolLM2-135M-Instruct on chain_sum, {PROMPTS} prompts x {GROUP} samples, at most 24 new tokens,
one update, AdamW at a constant 2e-5, in {products()}. Groups without an advantage are not computed, so two
runs may have other tokens to train on: the work of a step is its tokens if no prefix was shared
(`tokens/computed_unshared`), and runs are compared by seconds of training to a thousand of those, over all
steps but the first two. An update takes as long however many tokens there are, and is in those seconds. Each
seed begins with the other way. Seconds are medians of the steps. Accuracy: greedy, of 256 held-out problems
(standard error at most 0.03)."""


def training_ms(steps: Sequence[Mapping[str, float]]) -> float:
    """Milliseconds of training to a token, as many as there are if no prefix is shared."""
    seconds = sum(step["time/train"] for step in steps)
    return 1e3 * seconds / sum(step["tokens/computed_unshared"] for step in steps)


def recipe() -> RunConfig:
    config = learning()
    return replace(config, env=replace(config.env, num_eval=256), eval_every=5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    machine()
    header = [
        "seed",
        "prefixes",
        "tokens of a step",
        "computed",
        "train, s",
        "step, s",
        "train, s a 1,000 tokens",
    ]
    rows = [[*header, "times as fast", "accuracy at step"]]
    for seed in range(options.seeds):
        done = {}
        for share in (True, False) if seed % 2 else (False, True):
            settings = ("--seed", seed, "--steps", options.steps, "--trainer.share_prefixes", share)
            done[share] = run(f"{__file__}:recipe", *settings)
        each = {share: training_ms(done[share]["steps"][SKIPPED:]) for share in done}
        for share, of in sorted(done.items(), reverse=True):
            steps = of["steps"][SKIPPED:]
            curve = ", ".join(f"{step}: {accuracy:.3f}" for step, accuracy in sorted(of["accuracy"].items()))
            tokens = (f"{median(steps, f'tokens/{kind}'):,.0f}" for kind in ("computed_unshared", "computed"))
            seconds = (f"{median(steps, f'time/{kind}'):.2f}" for kind in ("train", "step"))
            rows.append([
                str(seed), "once" if share else "of each sample", *tokens, *seconds, f"{each[share]:.2f}",
                f"{each[False] / each[share]:.2f}", curve,
            ])  # fmt: skip
            print(rows[-1], flush=True)
    command = f"python -m benchmarks.prefix_trees_recipe --seeds {options.seeds} --steps {options.steps}"
    write_page("prefix_trees_recipe", "A recipe with and without shared prefixes", command, rows, NOTES)


if __name__ == "__main__":
    main()
