"""Two quickstarts side by side against one alone: `make bench-shared`. On a shared machine each may take twice as long.

OpenMP's threads spin while they wait and starve the others, unless rl/cluster/environment.py limits it, as it does by default.
"""

from concurrent.futures import ThreadPoolExecutor

from benchmarks.runs import run

SETTINGS = ("--warmup.steps", 200, "--steps", 20, "--eval_every", 10**6)


def main() -> None:
    alone = run("quickstart", *SETTINGS)["seconds"]
    with ThreadPoolExecutor(2) as pool:
        both = [r["seconds"] for r in pool.map(lambda _: run("quickstart", *SETTINGS), range(2))]
    ratios = ", ".join(f"{seconds / alone:.2f}" for seconds in both)
    print(
        f"one quickstart alone {alone:.0f} s; two side by side {both[0]:.0f} and {both[1]:.0f} s: {ratios} times one alone"
    )


if __name__ == "__main__":
    main()
