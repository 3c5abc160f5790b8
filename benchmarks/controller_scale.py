"""How far one controller goes: CPU per sample with fake actors, a simulation of large runs in virtual time, long samples.

`python -m benchmarks.controller_scale [--tokens N] [--generators N ...] [--component_seconds GROUP TRAIN PUBLISH LOAD]` writes
docs/controller_scale.md. The controller's code is the real one (loop, buffer, pools, replicas, weight store, training batch,
packing, recorder, TensorBoard); only the processes are made up, with answers of --tokens tokens that are unpickled as a message is.
In the simulation the event loop's clock jumps to the next timer, so that a run of hundreds of generators takes no longer than the
controller's own work; the share of the virtual time for which that work would have kept a core busy says where the first bottleneck
lies. The last section, long samples in real time, is benchmarks/long_samples.py.
"""

import argparse
import asyncio
import io
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

from benchmarks import long_samples
from benchmarks.fakes import AtOnce, Completions, Seconds, config, fake_actors
from benchmarks.pages import machine, write_page
from rl.config import GeneratorConfig, RewardConfig, RunConfig
from rl.config.learning import learning_of
from rl.controller.stages import RunStages
from rl.models.tokenizer import HFTokenizer
from rl.observability.recorder import Recorder
from rl.observability.sinks import TrackingConfig, open_sinks
from rl.observability.timeline import Timeline
from rl.waiting import beside
from tests.virtual_time import VirtualLoop


def run(settings: RunConfig, seconds: Seconds, num_rewards: int) -> tuple[float, float]:
    """CPU seconds of the controller, its threads included, and virtual seconds, of all steps."""
    with (
        tempfile.TemporaryDirectory(prefix="rl-benchmark-") as directory,
        mock.patch("rl.observability.files.Writer", AtOnce),
        mock.patch("rl.observability.sinks.Writer", AtOnce),
    ):
        return _run(settings, seconds, num_rewards, Path(directory))


def _run(settings: RunConfig, seconds: Seconds, num_rewards: int, run_dir: Path) -> tuple[float, float]:
    tokenizer = HFTokenizer(settings.model.materialize(run_dir))

    async def main() -> float:
        complete = Completions(settings.env.max_new_tokens)
        actors = fake_actors(settings, seconds, num_rewards, complete=complete)
        sinks = open_sinks(TrackingConfig(sinks=("tensorboard",)), run_dir, {})
        recorder = Recorder(run_dir, settings.steps, Timeline(), sinks, out=io.StringIO())
        async with recorder, beside(actors.generators.run(), actors.rewards.run()):
            await asyncio.gather(actors.generators.started(), actors.rewards.started())
            began = asyncio.get_running_loop().time()
            await RunStages(learning_of(settings), settings.resume, actors, tokenizer, recorder).run()
            return asyncio.get_running_loop().time() - began

    random.seed(0)
    loop = VirtualLoop()
    began = time.process_time()
    try:
        virtual = loop.run_until_complete(main())
    finally:
        loop.close()
    return time.process_time() - began, virtual


def scaled(
    num_tokens: int, prompts_per_step: int, steps: int, num_generators: int, group_size: int = 8
) -> RunConfig:
    base = config(
        prompts_per_step=prompts_per_step,
        group_size=group_size,
        steps=steps,
        max_offpolicy_steps=1,
        generator=GeneratorConfig(num_replicas=num_generators, block_size=128),
        reward=RewardConfig(num_procs=max(1, num_generators // 4)),
    )
    longest = max(8192, 2 * num_tokens)
    return replace(
        base,
        env=replace(base.env, max_new_tokens=num_tokens),
        trainer=replace(base.trainer, micro_batch_tokens=longest),
        max_seq_len=longest,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--component_seconds", type=float, nargs=4, default=[3.5, 5.0, 0.1, 0.3])
    parser.add_argument("--generators", type=int, nargs="*", default=[8, 32, 64, 128, 256, 512])
    options = parser.parse_args()
    machine()
    group, train, publish, load = options.component_seconds
    seconds, tokens = Seconds(group, 0.3, 0.01, train, publish, load), options.tokens

    run(scaled(tokens, 8, 4, 2), seconds, 1)  # imports and caches
    rows = [["groups in flight", "prompts", "samples", "CPU a sample, us"]]
    for in_flight in (8, 32, 128, 512):
        settings = scaled(tokens, in_flight // 2, max(4, 2048 // in_flight), 8)
        rows.append(row(settings, seconds, in_flight))
    for prompts in (1_000, 10_000, 100_000):
        rows.append(row(scaled(tokens, 100, prompts // 100, 8, group_size=2), seconds, 200))

    header = ["generators", "samples a step", "s/step", "samples/s", "CPU a sample, us"]
    simulated = [[*header, "controller's CPU to the time of the run"]]
    for num in options.generators:
        settings = scaled(tokens, 16 * num, 4, num)
        cpu, virtual = run(settings, seconds, settings.reward.num_procs)
        samples = settings.prompts_per_step * settings.group_size
        a_sample = cpu / (samples * settings.steps)
        simulated.append([str(num), str(samples), f"{virtual / settings.steps:.1f}",
                          f"{samples * settings.steps / virtual:.0f}", f"{a_sample * 1e6:.0f}",
                          f"{cpu / virtual:.0%}"])  # fmt: skip
        print(simulated[-1], flush=True)
    notes = (
        f"Answers have {tokens} tokens. 16 prompts x 8 samples a step for each generator; each group of 8 takes {group} s\n"
        f"(the median of a log-normal, sigma 0.3), all at the same time; training takes {train} s a step on as many\n"
        f"trainers as that needs, publishing {publish} s, loading {load} s. Where the last column is over 100%,\n"
        "one core is too little, and the controller is the bottleneck.\n"
        "The CPU is the whole process's: tokenising, packing, metrics, rollouts on the disk, TensorBoard."
    )
    flags = f"--tokens {tokens} --generators {' '.join(map(str, options.generators))}"
    command = f"python -m benchmarks.controller_scale {flags}"
    blocks = (rows, "## Simulation", notes, simulated, *long_samples.section())
    write_page("controller_scale", "How far one controller goes", command, *blocks)


def row(settings: RunConfig, seconds: Seconds, in_flight: int) -> list[str]:
    cpu, _ = run(settings, replace(seconds, spread=0.3), settings.reward.num_procs)
    prompts = settings.prompts_per_step * settings.steps
    samples = prompts * settings.group_size
    cells = [str(in_flight), str(prompts), str(samples), f"{cpu / samples * 1e6:.0f}"]
    print(cells, flush=True)
    return cells


if __name__ == "__main__":
    main()
