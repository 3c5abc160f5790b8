"""Run in a generator's environment: samples with what was published, prints completions as JSON.

usage: generator_worker.py JOB, a pickle of {config: VLLMConfig, transport, prompt, loads: [(label, manifest or None,
adapters to ask)], suspended: a manifest, which is loaded again after it was suspended, in_flight: manifests that arrive one after the other while one long sample is drawn}. Under tensor parallelism each
rank is a process; the first prints.
"""

import asyncio
import json
import os
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from rl.errors import WeightsUnreachable
from rl.processes import importing
from rl.types import SamplingParams
from rl.weight_sync.manifest import Manifest

with importing():
    from rl.models.generator.engine import GeneratorEngine
    from rl.models.generator.lockstep import Lockstep
    from rl.models.generator.vllm_engine import VLLM


async def main(job: dict, engine: GeneratorEngine, backend: VLLM) -> dict:
    maps = Path("/proc/self/numa_maps")  # not of every kernel
    answers = {"bound to a node": maps.exists() and " bind:" in maps.read_text()}

    if job["config"].max_lora_rank:
        (answers["with adapters"],) = backend._engine.collective_rpc(
            lambda worker: sorted({type(m).__name__ for m in worker.model_runner.model.modules()})
        )

    async def ask(label: str, adapters: list[str | None]) -> None:
        """All adapters of a label at once, in one batch."""
        done = await asyncio.gather(
            *(engine.sample(job["prompt"], 1, SamplingParams(12, 0.0, adapter=a)) for a in adapters),
            return_exceptions=True,
        )
        for adapter, result in zip(adapters, done, strict=True):
            answer = (
                str(result)
                if isinstance(result, Exception)
                else [result[0].tokens.tolist(), result[0].logprobs.tolist()]
            )
            answers[f"{label}/{adapter}"] = answer

    for label, manifest, adapters in job["loads"]:
        if manifest is not None:
            await engine.load_weights(manifest)
        await ask(label, adapters)
    if job.get("in_flight"):
        answers["in flight"] = await change_under_way(job, engine)
    if job.get("suspended"):
        answers |= await suspended(job["suspended"], engine, backend, ask)
    if job.get("groups"):
        group = await engine.sample(job["groups"], 8, SamplingParams(4, 1.0, seed=5))
        answers["cached"] = [completion.num_cached_tokens for completion in group]
    return answers


async def suspended(manifest: Manifest, engine: GeneratorEngine, backend: VLLM, ask: Callable) -> dict:
    """Before, while it is suspended, and after: [bytes resident, bytes of the cache's storages]."""

    def taken() -> list[int]:
        (caches,) = backend._engine.collective_rpc(lambda worker: list(worker.model_runner.kv_caches))
        storages = {cache.untyped_storage()._cdata: cache.untyped_storage().nbytes() for cache in caches}
        return [psutil.Process().memory_info().rss, sum(storages.values())]

    found = {}
    await engine.load_weights(manifest)
    await ask("before", [None])
    found["taken before"] = taken()
    for _ in range(2):
        await engine.suspend()
    found["taken meanwhile"] = taken()
    await ask("meanwhile", [None])
    await engine.load_weights(manifest)
    await ask("after", [None])
    found["taken after"] = taken()
    return found


async def change_under_way(job: dict, engine: GeneratorEngine) -> dict:
    failures = []
    first, *others = job["in_flight"]
    await engine.load_weights(first)
    task = asyncio.create_task(engine.sample(job["prompt"], 1, SamplingParams(60, 1.0, seed=3)))
    for manifest in others:
        start = engine.progress.num_ticks
        while engine.progress.num_ticks < start + 12:
            await asyncio.sleep(0)
        try:
            await engine.load_weights(manifest)
        except WeightsUnreachable as error:
            failures.append(str(error))
    (sample,) = await task
    versions = [sample.versions.oldest, sample.versions.newest]
    return {
        "tokens": sample.tokens.tolist(), "logprobs": sample.logprobs.tolist(), "per_token": sample.token_versions.tolist(), "versions": versions, "failures": failures,
    }  # fmt: skip


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        job = pickle.load(file)
    config = job["config"]
    thread = ThreadPoolExecutor(1)
    backend = thread.submit(VLLM, config, job["transport"]).result()
    lockstep = Lockstep(backend, config.tensor_parallel)
    if int(os.environ.get("RANK", 0)):
        lockstep.follow()
    engine = GeneratorEngine(lockstep.tick, thread)
    print(json.dumps(asyncio.run(main(job, engine, backend))), flush=True)
    os._exit(0)  # not by vLLM's own way out, which waits for the other ranks
