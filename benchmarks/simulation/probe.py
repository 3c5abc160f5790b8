"""What the parts of this machine take: its cores, Monarch's messages, and a quickstart of two sizes on it.

No run of another model than the quickstart's is measured: how long larger ones take follows from their sizes.
"""

import asyncio
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from monarch.actor import Actor, endpoint

from benchmarks.runs import run
from benchmarks.simulation.seconds import Controls, Device, Machine, Overheads, Work
from configs.quickstart import quickstart
from rl.cluster.environment import engine_environment
from rl.cluster.machine import num_cores
from rl.envs.base import derive_seed
from rl.models.tokenizer import HFTokenizer
from rl.plan.model_shape import ModelShape
from rl.weight_sync.remote_files import STREAMS

_WIDTH, _MLP = 576, 1536  # of the matrices that are multiplied: as large as those of a small model
_ROWS = (1, 16, 64, 128, 256, 2048)
_NUMBERS = 50_000
_GROUPS = (96, 16)  # of a step, of the two quickstarts, where the recipe's own has 64
STEPS = 12


def probe(link: float) -> Machine:
    """link: bytes a second between two hosts."""
    # A process's own: memory and threads are set up as in one that trains.
    command = [sys.executable, "-m", "benchmarks.simulation.probe"]
    environment = os.environ | engine_environment(num_cores())
    devices = pickle.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    )
    controls = asyncio.run(messages())
    runs = [quickstart_steps(groups) for groups in _GROUPS]
    cut = statistics.fmean(step["rollout/truncated"] for step in runs[0])
    return Machine(devices, overheads(devices, runs, cut), controls, link, cut)


def devices() -> dict[int, Device]:
    return {threads: device(threads) for threads in sorted({1, num_cores()})}


def link_rate() -> float:
    """Bytes a second from one host of tests/hosts/namespaces.py to another, over as many streams as weights take."""
    from tests.hosts.namespaces import hosts, worker

    rates = []
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as directory,
        hosts(2) as (source, target),
        worker(source, Path(directory) / "worker.log"),
    ):
        measured = f"measure({source.worker_address!r}, 2**29, {STREAMS})"
        script = f"import json; from rl.cluster.link_speed import measure; print(json.dumps({measured}))"
        for _ in range(5):
            answer = json.loads(target.output(sys.executable, "-c", script))
            rates.append(answer["size"] / answer["seconds"])
    return statistics.median(rates)


def seconds(work: Callable[[], object], least: float = 0.5) -> float:
    """The median of as many calls as take so long."""
    work()
    taken: list[float] = []
    while sum(taken) < least or len(taken) < 3:
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def device(threads: int) -> Device:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        flops: dict[str, dict[int, float]] = {}
        for dtype in (torch.float32, torch.bfloat16):
            right = torch.randn(_WIDTH, _MLP, dtype=dtype)
            rates = flops.setdefault(str(dtype).removeprefix("torch."), {})
            for rows in _ROWS:
                left = torch.randn(rows, _WIDTH, dtype=dtype)
                rates[rows] = 2 * rows * _WIDTH * _MLP / seconds(lambda left=left, right=right: left @ right)
        source = torch.zeros(64 * 2**20)
        target = torch.empty_like(source)
        memory = 2 * source.nbytes / seconds(lambda: target.copy_(source))
        small = torch.ones(64, 64)
        op = seconds(lambda: [small * small for _ in range(1000)]) / 1000
        generator, numbers = torch.Generator().manual_seed(0), torch.empty(_NUMBERS)
        random = (
            seconds(lambda: numbers.exponential_(generator=generator)) / _NUMBERS
        )  # as vLLM samples by a seed
    finally:
        torch.set_num_threads(before)
    return Device(flops, memory, op, random)


class Echo(Actor):
    @endpoint
    async def echo(self, message: bytes) -> bytes:
        return message


async def messages() -> Controls:
    """What a call costs this process's core, and how long its answer takes."""
    from monarch.actor import this_host

    mesh = this_host().spawn_procs(per_host={"procs": 1})
    echo = mesh.spawn("echo", Echo)
    small, large = bytes(500), bytes(2**20)

    async def calls(message: bytes, count: int, at_once: int) -> tuple[float, float]:
        """Seconds of the core, and of the clock, for each."""
        cpu, began = time.process_time(), time.perf_counter()
        for _ in range(count // at_once):
            await asyncio.gather(*(_called(echo, message) for _ in range(at_once)))
        return (time.process_time() - cpu) / count, (time.perf_counter() - began) / count

    try:
        await calls(small, 100, 1)
        core, _ = await calls(small, 2000, 20)
        _, latency = await calls(small, 200, 1)
        for_large, _ = await calls(large, 100, 1)
    finally:
        await mesh.stop("measured")
    return Controls(core, max(0.0, for_large - core) / (2 * len(large)), latency)


async def _called(echo: Any, message: bytes) -> None:
    await echo.echo.call(message)


def quickstart_steps(groups: int) -> list[dict[str, float]]:
    """Metrics of each step but the first two of a real run."""
    settings = ("--steps", STEPS, "--prompts_per_step", groups, "--eval_every", 10**6)
    return run("quickstart", *settings)["steps"][2:]


def longest_demonstration() -> int:
    """Tokens, its end included."""
    config = quickstart()
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = HFTokenizer(config.model.materialize(Path(directory)))
    env, seeds = config.env, range(500)
    problems = [env.train_problem(derive_seed("simulation", i)) for i in seeds]
    return max(
        len(tokenizer.encode_plain(env.demonstration(p, i))) + 1 for p, i in zip(problems, seeds, strict=True)
    )


def overheads(
    devices: dict[int, Device], runs: Sequence[Sequence[dict[str, float]]], cut: float
) -> Overheads:
    """What the quickstart took beyond what its sizes explain. runs: of many groups and of few. cut: the share of
    answers that reach their limit."""
    config, nothing = quickstart(), Overheads(0, 0, 0, 0, 0, 0, 0)
    work = Work(ModelShape.of(config.model.config()), "float32", devices[max(devices)], nothing)

    def middle(steps: Sequence[dict[str, float]], name: str) -> float:
        return statistics.median(step.get(name, 0.0) for step in steps)

    many, few = runs
    # In how many decoding steps: an answer of a step is as long as it may be, or all end as the demonstrations do.
    limit, ended = config.env.max_new_tokens, longest_demonstration()
    samples = [groups * config.group_size for groups in _GROUPS]
    longest = [ended + (limit - ended) * (1 - (1 - cut) ** count) for count in samples]
    in_steps = [
        middle(steps, "time/generate") / count for steps, count in zip((many, few), longest, strict=True)
    ]
    alone = [  # that decode, on average
        middle(steps, "tokens/sampled") / count for steps, count in zip((many, few), longest, strict=True)
    ]
    known = [work.decode(round(sequences)) for sequences in alone]
    sequence = ((in_steps[0] - known[0]) - (in_steps[1] - known[1])) / (alone[0] - alone[1])
    decode = max(0.0, in_steps[1] - known[1] - alone[1] * sequence)
    tokens, targets = (round(middle(few, name)) for name in ("tokens/computed", "tokens/trained"))
    train = max(0.0, middle(few, "time/train") - work.train(tokens, targets, 0) - work.optim(1))
    publish = max(0.0, middle(many, "time/sync_blocking") - work.publish(1))
    load = max(0.0, middle(many, "time/sync") - middle(many, "time/sync_blocking") - work.load())
    reward = middle(many, "time/reward") / _GROUPS[0]
    # Of what a step of training takes, a half is the optimizer's: nothing tells them apart.
    return Overheads(train / 2, train / 2, decode, max(0.0, sequence), publish, load, reward)


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(devices()))
