"""Actors in real processes: parity after each weight sync, and a control with one update left out. Prints JSON."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import psutil

from rl.batching import pack, to_sample
from rl.cluster.launch import launch
from rl.config.settle import model_dirs, settle
from rl.envs.base import RolloutContext
from rl.models.layout import Layout
from rl.models.tokenizer import HFTokenizer
from rl.owned_directory import temporary_directory
from rl.types import OptimParams, SamplingParams
from tests.recipes import mortal

SEED = 11


async def main(run_dir: Path) -> dict:
    config = mortal()
    trainer = dataclasses.replace(config.trainer, layout=Layout(shard=2))
    generator = dataclasses.replace(config.generator, num_replicas=2)
    config = dataclasses.replace(config, trainer=trainer, generator=generator)
    plan = settle(config)
    plan = dataclasses.replace(plan, replicas=tuple(r for r in plan.replicas if r.role != "reward"))
    models = model_dirs(config, plan, run_dir)
    env, tokenizer = config.env, HFTokenizer(models["model"])
    result: dict = {"synced": [], "versions": []}
    temporary_directory()  # whose janitor lives as long as this process
    of_this_process = set(psutil.Process().children(recursive=True))
    async with launch(plan, models, run_dir, env) as actors:
        generators = actors.generators

        async def publish(version: int) -> None:
            """Returns when every generator serves it."""
            await actors.publish(version)
            await generators.changed.wait_for(lambda: all(r.version == version for r in generators.replicas))

        params = SamplingParams(8, 1.0, SEED, (tokenizer.eos_id,))

        async def learn() -> tuple[float, float]:
            """Sample from the generators, measure the gap to the trainer, take a step. Returns the mean and the largest."""
            prompts = [env.encode(env.train_problem(seed), tokenizer) for seed in range(8)]
            context = RolloutContext(actors.generators, tokenizer, params, max_tokens=128)
            driven = await asyncio.gather(*(env.drive(p, 4, context) for p in prompts))
            rollouts = [rollout for group in driven for rollout in group]
            result["versions"].append(sorted({(r.versions.oldest, r.versions.newest) for r in rollouts}))
            batch = pack([to_sample(r, 1.0 if i % 2 else -1.0) for i, r in enumerate(rollouts)], num_ranks=2)
            metrics = await actors.trainer.forward_backward(batch, config.loss)
            await actors.trainer.optim_step(OptimParams(lr=1e-2, grad_scale=1 / batch.num_target_tokens))
            return metrics["logprob_diff:sum"] / metrics["tokens:sum"], metrics["logprob_diff:max"]

        for version in range(3):
            await publish(version)
            result["synced"].append(await learn())
        # The trainer has moved on, and this time nothing is published.
        result["left_out"] = await learn()
        await publish(4)

        # Requests join while others run, and do not change what those sample.
        prompt = env.encode(env.train_problem(0), tokenizer).tokens
        alone = await actors.generators.sample(prompt, 4, params)
        crowd = await asyncio.gather(*(actors.generators.sample(prompt, n, params) for n in (4, 1, 4, 2, 4)))
        result["reproducible"] = all(
            c.tokens.tolist() == a.tokens.tolist()
            for group in crowd
            for c, a in zip(group, alone, strict=False)
        )
        result["distinct"] = len({tuple(c.tokens) for c in alone})

        # A request that cannot be served costs no other, now or later.
        refused, *served = await asyncio.gather(
            actors.generators.sample(prompt, 1, SamplingParams(0, 1.0, SEED)),
            *(actors.generators.sample(prompt, 4, params) for _ in range(4)),
            return_exceptions=True,
        )
        again = await actors.generators.sample(prompt, 4, params)
        result["refused"] = str(refused)
        result["unharmed"] = all(
            c.tokens.tolist() == a.tokens.tolist()
            for group in [*served, again]
            for c, a in zip(group, alone, strict=True)
        )

        # One generator dies: its work goes to the other.
        import os
        import signal

        victim = [
            c for c in psutil.Process().children(recursive=True) if _log_name(c.pid) == "generator-1.log"
        ]
        os.kill(victim[0].pid, signal.SIGKILL)
        after_kill = await asyncio.gather(*(generators.sample(prompt, 2, params) for _ in range(6)))
        await publish(5)  # it is back, with the newest weights
        result["survived"] = [generators.num_alive, generators.replicas[1].num_restarts, len(after_kill)]
        again = await asyncio.gather(*(generators.sample(prompt, 4, params) for _ in range(4)))
        result["same_everywhere"] = all(
            c.tokens.tolist() == a.tokens.tolist() for g in again for c, a in zip(g, again[0], strict=True)
        )
    result["left_running"] = len(set(psutil.Process().children(recursive=True)) - of_this_process)
    return result


def _log_name(pid: int) -> str:
    import os

    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/fd/1"))
    except OSError:
        return ""


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))), flush=True)
