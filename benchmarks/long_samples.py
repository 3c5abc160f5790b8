"""The controller with long samples: how long packing takes, how late its event loop is meanwhile, bytes a token.

A part of benchmarks/controller_scale.py. Pools, replicas, buffer, training batch, packing, recorder and sinks are the real
ones, in real time; only the processes are made up. One reward in sixteen fails, and is recorded with all its tokens.
"""

import asyncio
import io
import os
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fakes import Completions, FakeReward, FakeTrainer, Seconds, config, fake_actors
from benchmarks.pages import Rows
from rl.batching import pack
from rl.config import GeneratorConfig, RewardConfig, RunConfig
from rl.config.learning import learning_of
from rl.controller.stages import RunStages
from rl.controller.training_batch import build_training_batch
from rl.envs.base import RolloutContext
from rl.micro_batch import Batch
from rl.models.tokenizer import HFTokenizer
from rl.observability.recorder import Recorder
from rl.observability.sinks import TrackingConfig, open_sinks
from rl.observability.timeline import Timeline
from rl.types import Group, Prompt, Sample, SamplingParams, Score
from rl.waiting import beside, give_way_often

TITLE = "## Long samples"
NUM_GROUPS, GROUP_SIZE, NUM_TOKENS = 512, 16, 8192
_ATTENTION_COST = 1 / (6 * 4096)  # of a model with a hidden size of 4,096


class TimedTrainer(FakeTrainer):
    """Notes when it packs."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.spans: list[tuple[float, float]] = []

    async def pack(self, samples: Sequence[Sample], samples_per_unit: int = 1) -> Batch:
        began = time.perf_counter()
        batch = await super().pack(samples, samples_per_unit)
        self.spans.append((began, time.perf_counter()))
        return batch


class SomeFail(FakeReward):
    async def score(self, rollouts: Any) -> list[Score]:
        scores = await super().score(rollouts)
        return [Score(0.0, "it failed", cause="raised") if i % 10 == 9 else s for i, s in enumerate(scores)]


def pack_seconds(
    low: int, high: int, num: int, num_ranks: int, share_prefixes: bool
) -> tuple[int, float, float]:
    """Rows a rank; what packing `num` samples takes, and its CPU time, each the least of three."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, 10_000_000, dtype=np.int32)
    mask, values = np.ones(high, bool), np.broadcast_to(np.float32(1), high)
    samples = []
    for size, begin in zip(
        rng.integers(low, high, num), rng.integers(0, len(tokens) - high, num), strict=True
    ):
        arrays = mask[:size], values[:size], values[:size], values[:size]
        samples.append(Sample(tokens[begin : begin + size], *arrays))
    seconds, cpu_seconds = [], []
    for _ in range(3):
        began, cpu = time.perf_counter(), time.process_time()
        batch = pack(
            samples,
            num_ranks=num_ranks,
            max_tokens=32_768,
            share_prefixes=share_prefixes,
            attention_cost=_ATTENTION_COST,
        )
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu)
    return len(batch.ranks[0]), min(seconds), min(cpu_seconds)


def long_config(num_groups: int) -> RunConfig:
    base = config(
        prompts_per_step=num_groups,
        group_size=GROUP_SIZE,
        steps=3,
        max_offpolicy_steps=1,
        generator=GeneratorConfig(num_replicas=8, block_size=128),
        reward=RewardConfig(num_procs=4),
    )
    env = replace(base.env, max_new_tokens=NUM_TOKENS)
    trainer = replace(base.trainer, micro_batch_tokens=32_768)
    return replace(base, env=env, trainer=trainer, max_seq_len=32_768)


class Probe:
    """How late timers of a millisecond fire, and how much CPU this process takes until then.

    On a busy machine the lag is mostly what others take. The CPU time is a bound of what is the process's own.
    """

    def __init__(self) -> None:
        self.began: list[float] = []
        self.lags: list[float] = []
        self.cpu: list[float] = []

    async def run(self) -> None:
        while True:
            began, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            self.began.append(began)
            self.lags.append(time.perf_counter() - began - 0.001)
            self.cpu.append(time.process_time() - cpu)

    def percentiles(self, spans: Sequence[tuple[float, float]] = ((-np.inf, np.inf),)) -> list[str]:
        """Milliseconds: median, p99 and most of the lag, then of the CPU time, of timers that met a span."""
        ends = [began + lag + 0.001 for began, lag in zip(self.began, self.lags, strict=True)]
        met = [
            any(begin < last and end > first for first, last in spans)
            for begin, end in zip(self.began, ends, strict=True)
        ]
        columns = (np.array(values)[np.array(met)] for values in (self.lags, self.cpu))
        return [
            ", ".join(f"{1000 * np.percentile(column, q):.1f}" for q in (50, 99, 100)) for column in columns
        ]


def steps_under_way() -> dict[str, Any]:
    """Of three steps: percentiles of the probe while batches are packed (MLflow is imported beside the first) and of the whole; how long that took."""
    directory = Path(tempfile.mkdtemp(prefix="rl-benchmark-"))
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{directory}/mlflow.db"
    settings, probe = long_config(NUM_GROUPS), Probe()
    tokenizer = HFTokenizer(settings.model.materialize(directory))
    seconds = Seconds(group=10.0, spread=0.5, reward=0.01, train=5.0, publish=0.1, load=0.3)
    trainer = TimedTrainer(settings, seconds)

    async def main() -> None:
        actors = fake_actors(
            settings, seconds, 4, complete=Completions(NUM_TOKENS), reward=SomeFail(seconds), trainer=trainer
        )
        sinks = open_sinks(TrackingConfig(sinks=("tensorboard", "mlflow")), directory, {})
        recorder = Recorder(directory, settings.steps, Timeline(), sinks, out=io.StringIO())
        async with recorder, beside(actors.generators.run(), actors.rewards.run()):
            await asyncio.gather(actors.generators.started(), actors.rewards.started())
            async with beside(probe.run()):
                await RunStages(learning_of(settings), settings.resume, actors, tokenizer, recorder).run()

    give_way_often()
    asyncio.run(main())
    return {
        "packing": probe.percentiles(trainer.spans[2:]),
        "all": probe.percentiles(),
        "pack": [end - begin for begin, end in trainer.spans],
    }


async def _groups(num: int) -> list[Group]:
    settings = long_config(num)
    tokenizer = HFTokenizer(settings.model.materialize(Path(tempfile.mkdtemp(prefix="rl-benchmark-"))))
    context = RolloutContext(Completions(NUM_TOKENS), tokenizer, SamplingParams(NUM_TOKENS), 32_768)
    scores = tuple(Score(float(i % 2)) for i in range(GROUP_SIZE))
    groups = []
    for index in range(num):
        prompt = Prompt(settings.env.train_problem(index), tuple(range(5, 25)))
        groups.append(Group(index, tuple(await settings.env.drive(prompt, GROUP_SIZE, context)), scores))
    return groups


def bytes_a_token(num_groups: int = 16) -> tuple[float, float]:
    """Of rollouts; of rollouts with their samples. Responses, as text, are counted."""

    async def measure() -> None:
        await _groups(1)  # what is made once
        tracemalloc.start()
        groups = await _groups(num_groups)
        num_bytes.append(tracemalloc.get_traced_memory()[0])
        batch = await build_training_batch(groups, long_config(num_groups).algorithm, {})
        await asyncio.sleep(0.1)  # until threads have let go of their jobs
        num_bytes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        num_tokens.extend(len(s) for group in batch.groups for s in group.samples)

    num_bytes, num_tokens = list[int](), list[int]()
    asyncio.run(measure())
    rollouts, with_samples = num_bytes
    return rollouts / sum(num_tokens), with_samples / sum(num_tokens)


def advantage_seconds() -> tuple[float, float]:
    """From groups to samples with advantages, and the CPU time of it."""

    async def measure() -> None:
        groups = await _groups(NUM_GROUPS)
        began, cpu = time.perf_counter(), time.process_time()
        await build_training_batch(groups, long_config(NUM_GROUPS).algorithm, {})
        seconds.extend([time.perf_counter() - began, time.process_time() - cpu])

    seconds = list[float]()
    asyncio.run(measure())
    return seconds[0], seconds[1]


def section() -> list[str | Rows]:
    """The blocks of the page."""
    rows = [["samples", "tokens each", "ranks", "share prefixes", "rows a rank", "pack, s (CPU)"]]
    for low, high in ((17_000, 32_000), (2_000, 32_000), (8_000, 16_384)):
        for num in (1024, 8192):
            for num_ranks, share in ((1, False), (8, False), (8, True)):
                num_rows, seconds, cpu = pack_seconds(low, high, num, num_ranks, share)
                what = f"{low:,} to {high:,}", str(num_ranks), "yes" if share else "no"
                rows.append([str(num), *what, str(num_rows), f"{seconds:.3f} ({cpu:.3f})"])
                print(rows[-1], flush=True)
    rollouts, with_samples = bytes_a_token()
    seconds, cpu = advantage_seconds()
    run = steps_under_way()
    while_packing, always = run["packing"], run["all"]
    facts = [
        ["pack, s", ", ".join(f"{s:.2f}" for s in run["pack"])],
        ["the event loop's lag while it packs, ms: median, p99, most", while_packing[0]],
        ["CPU time of the process until a timer of 1 ms fires, while it packs, ms", while_packing[1]],
        ["the loop's lag in the whole run, ms", always[0]],
        ["CPU time until a timer fires, in the whole run, ms", always[1]],
        ["from groups to samples with advantages, s (CPU)", f"{seconds:.2f} ({cpu:.2f})"],
        ["bytes a token of rollouts, 1 of them their text", f"{rollouts:.1f}"],
        ["bytes a token of rollouts and the samples to train on", f"{with_samples:.1f}"],
    ]
    return [
        TITLE,
        f"At niceness {os.nice(0)}. Packing is the plan of the rows; the process that computes a row makes it.",
        rows,
        f"{NUM_GROUPS} groups x {GROUP_SIZE} samples x {NUM_TOKENS:,} tokens, three steps, asynchronous, with a recorder and two sinks\n"
        "(TensorBoard, MLflow), one reward in sixteen failed, the next groups arriving while the first two steps\n"
        "are packed. The lag while it packs is of the third step: before it MLflow makes its database.",
        [["long samples", "measured"], *facts],
    ]
