"""Are real generators busy while 256 episodes wait for tools of 0 to 2 s? Shares of a step, from metrics.jsonl.

    python -m benchmarks.busy_generators

SmolLM2-135M (`rl fetch smollm2`) talks three turns with a user who takes 0 to 2 s to answer; 3 steps each,
synchronous and with rollouts of at most one step before, on the same machine. Writes a table.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rl.bounds import PositiveInt
from rl.configs.smollm2 import smollm2
from rl.controller.config import RunConfig, WarmupConfig
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode
from rl.observability.json_lines import read_records
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
    recipe = replace(smollm2(), env=SlowUser(), steps=3, prompts_per_step=32, group_size=8, minibatches=1)
    return replace(recipe, warmup=WarmupConfig(), resampling_rounds=0, eval_every=3, save_every=0)


def main() -> None:
    print(
        "| max_offpolicy_steps | s a step | generator busy | trainer busy | user or tool at work | nobody |"
    )
    print("|---|---|---|---|---|---|")
    for k in (0, 1):
        with tempfile.TemporaryDirectory() as directory:
            asked = [f"{Path(__file__)}:slow_user", "--max_offpolicy_steps", str(k), "--run_dir", directory]
            subprocess.run([sys.executable, "-m", "rl.cli", "train", *asked], check=True, capture_output=True)
            lines = [line for line in read_records(Path(directory) / "metrics.jsonl") if "loss" in line]
        steps = [line["time/step"] for line in lines[1:]]

        def share(name: str, lines: list = lines) -> float:
            return fmean(line.get(name, 0.0) / line["time/step"] for line in lines[1:])

        busy = [1 - share(f"idle/{process}") for process in ("generator-0", "trainer")]
        shares = [*busy, share("time/episodes"), share("time/controller")]
        print(f"| {k} | {fmean(steps):.0f} | " + " | ".join(f"{s:.0%}" for s in shares) + " |", flush=True)


if __name__ == "__main__":
    main()
