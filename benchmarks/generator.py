"""Generator actors against vLLM alone, and weight sync, on SmolLM2-135M-Instruct in bf16.

`python -m benchmarks.generator [--rounds N]`, after `rl fetch smollm2`; writes docs/generator.md. The actors are those of a
run (a trainer, a generator, a reward worker); vLLM alone is one more process with the same engine settings. They take the
same 128 requests (48 prompt tokens, 24 new ones) in turns, so that the machine's noise meets both; ratios are medians over
rounds of the ratio within one round.
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

from benchmarks.runs import write_table
from rl.cluster.environment import prepare_environment

MODEL = "models/smollm2-135m-instruct"
NUM_PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 16, 8, 48, 24


def requests(shared: bool, round_number: int) -> list[tuple[list[int], int]]:
    """(prompt, samples): 16 prompts of 8 samples, or 128 prompts of one. No prompt comes twice in a benchmark."""
    rng = random.Random(1000 * round_number + shared)
    count, n = (NUM_PROMPTS, GROUP) if shared else (NUM_PROMPTS * GROUP, 1)
    return [([rng.randrange(10, 40000) for _ in range(PROMPT_TOKENS)], n) for _ in range(count)]


def alone() -> None:
    """The other process: for each line of standard input, a round; prints its seconds."""
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
        )
    )
    for line in sys.stdin:
        shared, round_number = json.loads(line)
        work = requests(shared, round_number)
        began = time.monotonic()
        for i, (prompt, n) in enumerate(work):
            for j in range(n):
                params = SamplingParams(
                    max_tokens=NEW_TOKENS, temperature=1.0, seed=i * GROUP + j, logprobs=0, detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )  # fmt: skip
                engine.add_request(f"{round_number}-{i}-{j}", {"prompt_token_ids": prompt}, params)
        num_tokens = 0  # a sample may end before NEW_TOKENS
        while engine.has_unfinished_requests():
            num_tokens += sum(len(done.outputs[0].token_ids) for done in engine.step() if done.finished)
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
    from rl.controller.settle import settle
    from rl.models.generator.environment import generator_environment
    from rl.types import SamplingParams

    other = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.generator", "--alone"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | generator_environment(2),
    )  # fmt: skip
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

        async def by_other(shared: bool, number: int) -> float:
            print(json.dumps([shared, number]), file=other.stdin, flush=True)
            return float(await loop.run_in_executor(None, other.stdout.readline))

        await actors.publish(0)
        await pool.wait_served(0)
        seconds: dict[tuple[str, bool], list[float]] = {
            (w, s): [] for w in ("actor", "alone") for s in (False, True)
        }
        computed = {}
        for number in range(rounds + 1):
            for shared in (False, True):
                pool.take_counts()
                mine = await by_actors(requests(shared, number))
                total, cached = pool.take_counts()
                theirs = await by_other(shared, number)
                if number:  # the first is cold
                    seconds["actor", shared].append(mine)
                    seconds["alone", shared].append(theirs)
                    computed[shared] = (total - cached, total)
        other.kill()
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
    report(seconds, computed, num_bytes, written[1:], loaded[1:], peak)


def report(seconds, computed, num_bytes, written, loaded, peak) -> None:
    rows = [["128 samples of at most 24 tokens", "tokens/s", "of vLLM alone", "prompt tokens computed"]]
    for shared, name in ((False, "128 prompts"), (True, "16 prompts x 8")):
        ratios = [b / a for a, b in zip(seconds["actor", shared], seconds["alone", shared], strict=True)]
        for who in ("alone", "actor"):
            speed = 1 / statistics.median(seconds[who, shared])
            ratio = (
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                if who == "actor"
                else "1"
            )
            count = f"{computed[shared][0]} of {computed[shared][1]}" if who == "actor" else ""
            rows.append(
                [
                    f"{name}, {'vLLM alone' if who == 'alone' else 'generator actor'}",
                    f"{speed:.0f}",
                    ratio,
                    count,
                ]
            )
    pairs = zip(seconds["actor", False], seconds["actor", True], strict=True)
    sharing = statistics.median(a / b for a, b in pairs)
    write, load, gigabytes = statistics.median(written), statistics.median(loaded), num_bytes / 1e9
    extra = ", ".join(f"{name} {mib:.0f} MiB" for name, mib in peak.extra.items())
    notes = "\n".join(
        [
            f"Groups of 8 against as many prompts of their own: {sharing:.2f} times as fast. vLLM shares whole blocks of 32",
            f"tokens: of each prompt of {PROMPT_TOKENS} the first 32 are computed once, and the others by each of its samples.",
            "",
            "## Weight sync",
            "",
            f"{gigabytes:.2f} GB: written by the trainer in {write:.2f} s ({gigabytes / write:.2f} GB/s, fp32 to bf16), loaded by the",
            f"generator in {load:.2f} s ({gigabytes / load:.2f} GB/s, with vLLM's repacking). The machine copies as many bytes into "
            f"shared",
            f"memory and out of it at {copy_rate(num_bytes):.2f} GB/s. Most that was held beyond what is there between two syncs:",
            f"{extra} (one version is {num_bytes / 2**20:.0f} MiB).",
        ]
    )
    write_table(
        Path("docs/generator.md"), "Generators and weight sync", "python -m benchmarks.generator", rows, notes
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    if options.alone:
        alone()
    else:
        prepare_environment()
        asyncio.run(main(options.rounds))
