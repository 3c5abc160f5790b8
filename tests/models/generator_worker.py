"""Run in a generator's environment: samples with what was published, prints tokens and logprobs as JSON.

usage: generator_worker.py JOB, a pickle of {model_dir, transport, max_lora_rank, prompt,
loads: [(label, manifest, adapters to ask)]}
"""

import asyncio
import json
import pickle
import sys

from rl.models.generator import GeneratorEngine
from rl.types import SamplingParams


async def main() -> None:
    with open(sys.argv[1], "rb") as file:
        job = pickle.load(file)
    engine = GeneratorEngine(
        job["model_dir"],
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_gib=0.0625,
        max_lora_rank=job["max_lora_rank"],
        max_adapters=2,
    )
    answers = {}

    async def ask(label: str, adapters: list[str | None]) -> None:
        """All adapters of a label at once, in one batch."""
        done = await asyncio.gather(
            *(engine.sample(job["prompt"], 1, SamplingParams(12, 0.0, adapter=a)) for a in adapters),
            return_exceptions=True,
        )
        for adapter, result in zip(adapters, done, strict=True):
            answer = str(result) if isinstance(result, Exception) else [result[0].tokens, result[0].logprobs]
            answers[f"{label}/{adapter}"] = answer

    for label, manifest, adapters in job["loads"]:
        await engine.load_weights(manifest, await job["transport"].fetch(manifest))
        await ask(label, adapters)
    print(json.dumps(answers), flush=True)


asyncio.run(main())
