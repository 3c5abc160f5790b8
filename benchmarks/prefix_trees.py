"""Rows as trees against plain packing and padded rows: a step's seconds, the ideal by FLOPs, and peak memory.

`python -m benchmarks.prefix_trees` writes docs/prefix_trees.md. SmolLM2-135M's shape with random weights in bf16; what
responses there are is trained on; one update. A round is a step of trees, one of plain packing, and one of trees; its
ratio is that of plain packing's seconds to the mean of the other two, and a case's the median of its rounds'. Peak
memory is that of a process of each way's own.
"""

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine import SMOLLM2, padded_step
from benchmarks.runs import as_trainer, write_table

MAX_TOKENS = 4096  # of a micro-batch, each way
WAYS = ("plain", "trees", "padded")


def _draw(rng: np.random.Generator, size: int) -> list[int]:
    return rng.integers(0, SMOLLM2["vocab_size"], size).tolist()


def groups(count: int, size: int, prompt: int, response: int) -> list[Any]:
    from rl.batching import supervised_sample

    rng, samples = np.random.default_rng(0), []
    for _ in range(count):
        shared = _draw(rng, prompt)
        samples += [supervised_sample(shared, _draw(rng, response)) for _ in range(size)]
    return samples


def turns(count: int, size: int, prompt: int, num_turns: int, response: int) -> list[Any]:
    """Tasks with `size` rollouts each, whose every turn is a sample: the history so far, and its own response."""
    from rl.batching import supervised_sample

    rng, samples = np.random.default_rng(0), []
    for _ in range(count):
        task = _draw(rng, prompt)
        for _ in range(size):
            history = task
            for _ in range(num_turns):
                answer = _draw(rng, response)
                samples.append(supervised_sample(history, answer))
                history = [*history, *answer, *_draw(rng, 16)]  # and what a tool said
    return samples


PROMPTS, RESPONSES, SIZES = (48, 512, 2048), (20, 128, 512), (8, 16)
COMPUTED = 1024  # tokens of a step's trees at least: an update alone takes as long as 150
SMALL = 7000  # tokens of plain packing: a case that is measured in ROUNDS, and with padded rows
ROUNDS = 5


def cases() -> dict[str, Callable[[], list[Any]]]:
    """The last has nothing to share."""
    made: dict[str, Callable[[], list[Any]]] = {}
    for size, prompt, response in itertools.product(SIZES, PROMPTS, RESPONSES):
        count = -(-COMPUTED // (prompt + size * response))
        made[f"{count} x {size}, {prompt} + {response}"] = partial(groups, count, size, prompt, response)
    made["turns: 1 x 4, 128 + 4 x 48"] = partial(turns, 1, 4, 128, 4, 48)
    made["32 x 1, 16 + 48"] = partial(groups, 32, 1, 16, 48)
    return made


MEASURES_MEMORY = ("5 x 8, 48 + 20", "2 x 8, 512 + 20", "1 x 8, 2048 + 128")


def main() -> None:
    parser = argparse.ArgumentParser()
    # Of a process that measures its peak memory:
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="", choices=["", *WAYS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    as_trainer()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SMOLLM2))
        if options.case:
            steps(Path(directory), cases()[options.case](), options.way)[0]()
            status = Path("/proc/self/status").read_text()  # getrusage would tell what the parent took
            print(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 2**20)
            return
        rows = [["samples", "plain, s", "trees, s", "padded, s", "plain / trees", "ideal", "of ideal", "padded / trees",
                 "GiB plain", "GiB trees"]]  # fmt: skip
        for name, case in cases().items():
            plain, trees, padded = steps(Path(directory), case(), *WAYS)
            is_small = sum(len(sample.tokens) for sample in case()) <= SMALL
            trees()
            rounds = [
                [timed(step) for step in (trees, plain, trees)] for _ in range(ROUNDS if is_small else 1)
            ]
            ratio = statistics.median(2 * middle / (first + last) for first, middle, last in rounds)
            ideal = flops(case(), share=False) / flops(case(), share=True)
            best_plain = min(middle for _, middle, _ in rounds)
            best_trees = min(seconds for first, _, last in rounds for seconds in (first, last))
            with_padding = timed(padded) if is_small else None
            memory = [f"{peak(name, way):.1f}" for way in WAYS[:2]] if name in MEASURES_MEMORY else ["", ""]
            rows.append([
                name, f"{best_plain:.2f}", f"{best_trees:.2f}", f"{with_padding:.2f}" if with_padding else "",
                f"{ratio:.2f}", f"{ideal:.2f}", f"{ratio / ideal:.2f}",
                f"{with_padding / best_trees:.2f}" if with_padding else "", *memory,
            ])  # fmt: skip
            print(rows[-1], flush=True)
    notes = (
        "Samples: groups x samples of each, prompt + response; turns: tasks x rollouts, prompt + turns x response, each turn a\n"
        f"sample. Seconds of a step: the least of {ROUNDS} rounds of trees, plain, trees; of one round where plain packing has\n"
        f"over {SMALL:,} tokens. `plain / trees`: the median of the rounds' ratios. `ideal`:\n"
        "FLOPs of plain packing to those of trees, the head's and attention's included. padded: transformers' model on rows\n"
        "padded to the longest, bf16 under autocast, once.\n"
        f"Each way computes at most {MAX_TOKENS} tokens at a time."
    )
    write_table(
        Path("docs/prefix_trees.md"),
        "What shared prefixes save",
        "python -m benchmarks.prefix_trees",
        rows,
        notes,
    )


def timed(step: Callable[[], Any]) -> float:
    began = time.monotonic()
    step()
    return time.monotonic() - began


_made: dict[str, Any] = {}


def steps(directory: Path, samples: list[Any], *ways: str) -> list[Callable[[], Any]]:
    """A whole step each way. Engine and padded model are made once."""
    from rl.batching import pack
    from rl.loss.cross_entropy import CrossEntropy
    from rl.models.engine_config import EngineConfig
    from rl.models.titan import TitanEngine
    from rl.types import OptimParams

    def packed(share: bool) -> Callable[[], Any]:
        if "engine" not in _made:
            _made["engine"] = TitanEngine(directory, EngineConfig(dtype="bfloat16", seed=0))
        engine = _made["engine"]
        batch = pack(samples, max_tokens=MAX_TOKENS, **{**engine.packing, "share_prefixes": share})

        def step() -> None:
            engine.forward_backward(batch, CrossEntropy())
            engine.optim_step(OptimParams(1e-5, 1 / batch.num_target_tokens))

        return step

    def padded() -> Callable[[], Any]:
        if "padded" not in _made:
            _made["padded"] = padded_step(directory)
        return lambda: _made["padded"](samples)

    return [padded() if way == "padded" else packed(way == "trees") for way in ways]


def flops(samples: list[Any], share: bool) -> float:
    """Of forward and backward: 6 for each weight and token, and attention's own."""
    from rl.batching import pack

    dim, layers, heads = SMOLLM2["hidden_size"], SMOLLM2["num_hidden_layers"], SMOLLM2["num_attention_heads"]
    head_dim, kv = SMOLLM2["head_dim"], SMOLLM2["num_key_value_heads"]
    weights = layers * (dim * head_dim * 2 * (heads + kv) + 3 * dim * SMOLLM2["intermediate_size"])
    batch = pack(samples, max_tokens=MAX_TOKENS, share_prefixes=share)
    pairs = sum(
        int((micro.positions + 1).sum()) for micro in batch.ranks[0]
    )  # of a token and one that it sees
    attention = 12 * layers * heads * head_dim * pairs
    head = 6 * dim * SMOLLM2["vocab_size"] * batch.num_target_tokens
    return 6 * weights * batch.num_tokens + attention + head


def peak(case: str, way: str) -> float:
    """GiB of a process that takes one step."""
    command = [sys.executable, "-m", "benchmarks.prefix_trees", "--case", case, "--way", way]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
