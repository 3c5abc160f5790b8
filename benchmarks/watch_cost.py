"""What it costs to watch the processes, and to keep what a checkpoint needs, while nothing fails.

`python -m benchmarks.watch_cost [--rounds N]` runs the quickstart with and without, in turns, and prints the ratio of the
seconds of a step: the median over rounds of the ratio within one.
"""

import argparse
import asyncio
import statistics
import sys

from benchmarks.runs import median, run

SETTINGS = ("--warmup.steps", 200, "--steps", 40, "--save_every", 5, "--eval_every", 10**6)
UNWATCHED = ("benchmarks.watch_cost", "--unwatched")


def unwatched() -> None:
    """`rl` without heartbeats, without looks at stopped processes, and without finished groups beside checkpoints."""
    from rl import cli
    from rl.actors import replica
    from rl.actors.engine import EngineHandle
    from rl.controller import stages

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    replica._HEARTBEAT_SECONDS = 1e9
    EngineHandle._watch = never
    stages.write_prompts = lambda _, state: {"next": state.next, "unfinished": state.unfinished}
    cli.main()


def main() -> None:
    if "--unwatched" in sys.argv:
        sys.argv.remove("--unwatched")
        return unwatched()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    ratios = []
    for _ in range(parser.parse_args().rounds):
        watched = median(run("quickstart", *SETTINGS)["steps"], "time/step")
        without = median(run("quickstart", *SETTINGS, program=UNWATCHED)["steps"], "time/step")
        ratios.append(watched / without)
        print(f"{watched:.3f} s a step, {without:.3f} s without: {ratios[-1]:.3f}", flush=True)
    print(f"median of {len(ratios)} rounds: {statistics.median(ratios):.3f} times the seconds without")


if __name__ == "__main__":
    main()
