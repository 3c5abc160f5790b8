"""Rows as trees against plain packing: a step's seconds, the ideal by FLOPs, and peak memory.

`python -m benchmarks.prefix_trees [--rounds N]` writes docs/prefix_trees.md. SmolLM2-135M's shape with random weights in bf16; groups
with a shared prompt, of which the responses are trained on; one update. Both ways take a step in turns, `--rounds` times; a ratio
is the median of the rounds' ratios. Peak memory is that of a process of each way's own.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.engine import SMOLLM2
from benchmarks.runs import write_table

# (groups, samples of a group, prompt, response); the last has nothing to share.
CASES = [
    (16, 8, 48, 18), (8, 16, 48, 20), (4, 8, 48, 128), (2, 8, 512, 20), (2, 16, 512, 20), (1, 8, 512, 128), (1, 8, 512, 512),
    (1, 8, 2048, 20), (1, 16, 2048, 20), (1, 8, 2048, 128), (16, 1, 48, 80),
]  # fmt: skip
MAX_TOKENS = 8192


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--case", type=int, default=-1, help="of one process: measures its peak memory")
    parser.add_argument("--trees", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SMOLLM2))
        if options.case >= 0:
            step(engine(directory), batch(CASES[options.case], bool(options.trees)))
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
            return
        rows = [
            [
                "groups x samples",
                "prompt + response",
                "plain, s",
                "trees, s",
                "ratio",
                "ideal",
                "of ideal",
                "GiB",
            ]
        ]
        one = engine(directory)
        for number, case in enumerate(CASES):
            plain, trees = batch(case, False), batch(case, True)
            step(one, trees)
            seconds = [(step(one, plain), step(one, trees)) for _ in range(options.rounds)]
            ratio = statistics.median(a / b for a, b in seconds)
            ideal = flops(case, False) / flops(case, True)
            memory = " -> ".join(f"{peak(number, way):.1f}" for way in (False, True))
            groups, size, prompt, response = case
            rows.append([
                f"{groups} x {size}", f"{prompt} + {response}", *(f"{min(t):.2f}" for t in zip(*seconds, strict=True)),
                f"{ratio:.2f}", f"{ideal:.2f}", f"{ratio / ideal:.2f}", memory,
            ])  # fmt: skip
            print(rows[-1], flush=True)
    notes = "`ideal`: FLOPs of plain packing to those of trees, the head's and attention's included. GiB: peak memory, plain -> trees."
    write_table(
        Path("docs/prefix_trees.md"),
        "What shared prefixes save",
        "python -m benchmarks.prefix_trees",
        rows,
        notes,
    )


def engine(directory: str):
    from rl.models.engine_config import EngineConfig
    from rl.models.titan import TitanEngine

    return TitanEngine(directory, EngineConfig(dtype="bfloat16", seed=0, share_prefixes=True))


def batch(case: tuple[int, int, int, int], trees: bool):
    from rl.batching import pack, supervised_sample

    groups, size, prompt_length, response_length = case
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, SMOLLM2["vocab_size"], n)  # noqa: E731
    samples = []
    for _ in range(groups):
        prompt = draw(prompt_length)
        samples += [supervised_sample(prompt, draw(response_length)) for _ in range(size)]
    return pack(samples, max_tokens=MAX_TOKENS, share_prefixes=trees)


def step(one, batch) -> float:
    from rl.loss.cross_entropy import CrossEntropy
    from rl.types import OptimParams

    began = time.monotonic()
    one.forward_backward(batch, CrossEntropy())
    one.optim_step(OptimParams(1e-5, 1 / batch.num_target_tokens))
    return time.monotonic() - began


def flops(case: tuple[int, int, int, int], trees: bool) -> float:
    """Of forward and backward: 6 for each weight and token, and attention's own."""
    groups, size, prompt, response = case
    dim, layers, heads = SMOLLM2["hidden_size"], SMOLLM2["num_hidden_layers"], SMOLLM2["num_attention_heads"]
    head_dim, kv = SMOLLM2["head_dim"], SMOLLM2["num_key_value_heads"]
    weights = layers * (dim * head_dim * 2 * (heads + kv) + 3 * dim * SMOLLM2["intermediate_size"])
    tokens = prompt + size * response if trees else size * (prompt + response)
    branch = response * (prompt + response / 2)
    pairs = prompt**2 / 2 + size * branch if trees else size * (prompt + response) ** 2 / 2
    attention = 12 * layers * heads * head_dim * pairs
    head = 6 * dim * SMOLLM2["vocab_size"] * size * response
    return groups * (6 * weights * tokens + attention + head)


def peak(case: int, trees: bool) -> float:
    """GiB of a process that takes one step."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.prefix_trees",
        "--case",
        str(case),
        "--trees",
        str(int(trees)),
    ]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
