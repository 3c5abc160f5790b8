"""How far one controller goes: CPU per sample with fake actors, a simulation of large runs in virtual time, long samples.

`python -m benchmarks.controller_scale [--component_seconds GROUP TRAIN PUBLISH LOAD]` writes docs/controller_scale.md;
with `--only_long` its last section alone (benchmarks/long_samples.py). The
controller's code is the real one (loop, buffer, pools, replicas, weight store, training batch, packing); only the processes
are made up. In the simulation the event loop's clock jumps to the next timer, so that a run of thousands of generators takes
no longer than the controller's own work; the share of the virtual time for which that work would have kept its one core busy
says where the first bottleneck lies.
"""

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks import long_samples
from benchmarks.fakes import NoRecorder, Seconds, config, fake_actors
from benchmarks.runs import table, write_table
from rl.controller.config import GeneratorConfig, RewardConfig, RunConfig
from rl.controller.stages import RunStages
from rl.models.tokenizer import HFTokenizer
from rl.waiting import beside
from tests.virtual_time import VirtualLoop

PAGE = Path("docs/controller_scale.md")


def run(settings: RunConfig, seconds: Seconds, num_rewards: int) -> tuple[float, float]:
    """CPU seconds of the controller, and virtual seconds, of all steps."""
    directory = tempfile.mkdtemp(prefix="rl-benchmark-")
    tokenizer = HFTokenizer(settings.model.materialize(Path(directory)))

    async def main() -> float:
        actors = fake_actors(settings, seconds, num_rewards)
        async with beside(actors.generators.run(), actors.rewards.run()):
            await asyncio.gather(actors.generators.started(), actors.rewards.started())
            began = asyncio.get_running_loop().time()
            await RunStages(settings, actors, tokenizer, NoRecorder(Path(directory))).run()
            return asyncio.get_running_loop().time() - began

    random.seed(0)
    loop = VirtualLoop()
    began = time.process_time()
    try:
        virtual = loop.run_until_complete(main())
    finally:
        loop.close()
    return time.process_time() - began, virtual


def scaled(prompts_per_step: int, steps: int, num_generators: int, group_size: int = 8) -> RunConfig:
    return config(
        prompts_per_step=prompts_per_step,
        group_size=group_size,
        steps=steps,
        max_offpolicy_steps=1,
        generator=GeneratorConfig(num_replicas=num_generators, block_size=128),
        reward=RewardConfig(num_procs=max(1, num_generators // 4)),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--component_seconds", type=float, nargs=4, default=[3.5, 5.0, 0.1, 0.3])
    parser.add_argument("--generators", type=int, nargs="*", default=[8, 32, 128, 512, 4096])
    parser.add_argument("--only_long", action="store_true")
    options = parser.parse_args()
    if options.only_long:
        before, _, _ = PAGE.read_text().partition(long_samples.TITLE)
        PAGE.write_text(before + long_samples.section())
        return
    group, train, publish, load = options.component_seconds
    seconds = Seconds(group, 0.3, 0.01, train, publish, load)

    run(scaled(8, 4, 2), seconds, 1)  # imports and caches
    rows = [["groups in flight", "prompts", "samples", "CPU a sample, us"]]
    for in_flight in (8, 32, 128, 512):
        settings = scaled(in_flight // 2, max(4, 2048 // in_flight), 8)
        rows.append(row(settings, seconds, in_flight))
    for prompts in (1_000, 10_000, 100_000):
        rows.append(row(scaled(100, prompts // 100, 8, group_size=2), seconds, 200))

    simulated = [["generators", "samples a step", "s/step", "samples/s", "CPU a sample, us", "core is busy"]]
    most = 0.0
    for num in options.generators:
        settings = scaled(16 * num, 4 if num < 1000 else 2, num)
        cpu, virtual = run(settings, seconds, settings.reward.num_procs)
        samples = settings.prompts_per_step * settings.group_size
        a_sample = cpu / (samples * settings.steps)
        simulated.append([str(num), str(samples), f"{virtual / settings.steps:.1f}",
                          f"{samples * settings.steps / virtual:.0f}", f"{a_sample * 1e6:.0f}",
                          f"{cpu / virtual:.0%}"])  # fmt: skip
        most = num * virtual / cpu if cpu < virtual or not most else most
        print(simulated[-1], flush=True)
    notes = "\n".join(
        [
            "## Simulation",
            "",
            f"16 prompts x 8 samples a step for each generator, which takes {group} s for them (log-normal, sigma 0.3);",
            f"training takes {train} s a step on as many trainers as that needs, publishing {publish} s, loading {load} s.",
            "Where the controller's core is busy for over 100% of the time, it is the bottleneck: with these times at",
            f"about {most:.0f} generators. What it does then is the samples themselves (tokenising, packing, metrics): the",
            "cost of a sample hardly depends on how many generators there are.",
            "",
            table(simulated),
            "",
            long_samples.section(),
        ]
    )
    command = "python -m benchmarks.controller_scale"
    write_table(PAGE, "How far one controller goes", command, rows, notes)


def row(settings: RunConfig, seconds: Seconds, in_flight: int) -> list[str]:
    cpu, _ = run(settings, replace(seconds, spread=0.3), settings.reward.num_procs)
    prompts = settings.prompts_per_step * settings.steps
    samples = prompts * settings.group_size
    cells = [str(in_flight), str(prompts), str(samples), f"{cpu / samples * 1e6:.0f}"]
    print(cells, flush=True)
    return cells


if __name__ == "__main__":
    main()
