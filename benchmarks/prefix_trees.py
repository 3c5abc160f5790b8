"""Rows as trees against plain packing: a step's seconds, the ideal by FLOPs, and peak memory.

`python -m benchmarks.prefix_trees [--rounds N]` writes docs/prefix_trees.md. SmolLM2-135M's shape with random weights; all
responses are trained on; one update. Each way takes a step to warm up, then the ways take steps in turns, and another
begins each round. A ratio is the median over rounds of the ratio within one. Peak memory is that of a process of each
way's own. A step packs its samples, too. Padded rows are in benchmarks/engine.py.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.engine import SMOLLM2, make_model
from benchmarks.pages import machine, spread, write_page
from benchmarks.runs import as_trainer
from rl.cluster.machine import has_bfloat16

MAX_TOKENS = 4096  # of a micro-batch, each way
WAYS = ("plain", "trees")


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


SHAPES = (
    (8, 48, 20),
    (8, 48, 128),
    (8, 48, 512),
    (8, 512, 20),
    (8, 512, 128),
    (8, 512, 512),
    (8, 2048, 20),
    (16, 48, 128),
    (16, 512, 128),
)
"""Of groups: their samples, the prompt's tokens, a response's."""
COMPUTED = 1024  # tokens of a step's trees at least: an update alone takes as long as 150


def cases() -> dict[str, Callable[[], list[Any]]]:
    """The last has nothing to share."""
    made: dict[str, Callable[[], list[Any]]] = {}
    for size, prompt, response in SHAPES:
        count = -(-COMPUTED // (prompt + size * response))
        made[f"{count} x {size}, {prompt} + {response}"] = partial(groups, count, size, prompt, response)
    made["turns: 1 x 4, 128 + 4 x 48"] = partial(turns, 1, 4, 128, 4, 48)
    made["32 x 1, 16 + 48"] = partial(groups, 32, 1, 16, 48)
    return made


MEASURES_MEMORY = ("5 x 8, 48 + 20", "2 x 8, 512 + 20", "1 x 8, 2048 + 20")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    # Of a process that measures its peak memory:
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="", choices=["", *WAYS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    as_trainer()
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        if options.case:
            (step,) = steps(Path(directory), cases()[options.case](), options.way)
            step()  # makes the moments
            step()
            status = Path("/proc/self/status").read_text()  # getrusage would tell what the parent took
            print(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 2**20)
            return
        machine()
        rows = [
            [
                "samples",
                "plain, s",
                "trees, s",
                "plain / trees",
                "ideal",
                "of ideal",
                "GiB plain",
                "GiB trees",
            ]
        ]
        for name, case in cases().items():
            rows.append([name, *measure(Path(directory), case(), options.rounds), *memory(name)])
            print(rows[-1], flush=True)
    notes = (
        "Samples: groups x samples of each, prompt + response; turns: tasks x rollouts, prompt + turns x response, each turn a\n"
        f"sample. Seconds of a step: median (least to most) of {options.rounds} rounds, in which the ways take turns, each warm.\n"
        "`plain / trees`: the median of the rounds' ratios. `ideal`: FLOPs of plain packing to those of a tree that holds each\n"
        "distinct prefix once, the head's and attention's included. Where sharing saves under a tenth of the tokens,\n"
        f"batches are packed plainly, so trees cannot reach the ideal. Both compute in {dtype()}, at most {MAX_TOKENS:,} tokens at a time.\n"
        "A step's seconds include the packing of its samples. GiB: the peak of a process of its own that takes two steps."
    )
    command = f"python -m benchmarks.prefix_trees --rounds {options.rounds}"
    write_page("prefix_trees", "What shared prefixes save", command, rows, notes, packages=("torchtitan",))


def dtype() -> Literal["bfloat16", "float32"]:
    """The one that this processor has instructions for."""
    return "bfloat16" if has_bfloat16() else "float32"


def measure(directory: Path, samples: list[Any], num_rounds: int) -> list[str]:
    """The cells of a case."""
    by_way = dict(zip(WAYS, steps(directory, samples, *WAYS), strict=True))
    for step in by_way.values():
        step()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for i in range(num_rounds):
        for way in WAYS if i % 2 else reversed(WAYS):
            seconds[way].append(timed(by_way[way]))
    ratios = [plain / trees for plain, trees in zip(seconds["plain"], seconds["trees"], strict=True)]
    best = ideal(samples)
    times = [spread(seconds[way]) for way in WAYS]
    return [*times, spread(ratios), f"{best:.2f}", f"{statistics.median(ratios) / best:.2f}"]


def memory(case: str) -> list[str]:
    return [f"{peak(case, way):.1f}" for way in WAYS] if case in MEASURES_MEMORY else ["", ""]


def timed(step: Callable[[], Any]) -> float:
    began = time.monotonic()
    step()
    return time.monotonic() - began


_made: dict[str, Any] = {}


def steps(directory: Path, samples: list[Any], *ways: str) -> list[Callable[[], Any]]:
    """A whole step each way. The engine is made once."""
    from rl.batching import pack
    from rl.loss.cross_entropy import CrossEntropy
    from rl.models.engine_config import EngineConfig
    from rl.models.titan import TitanEngine
    from rl.types import OptimParams

    def of(way: str) -> Callable[[], Any]:
        if "engine" not in _made:
            _made["engine"] = TitanEngine(directory, EngineConfig(dtype=dtype()))
        engine = _made["engine"]
        packing = {**engine.packing, "share_prefixes": way == "trees"}

        def step() -> None:
            batch = pack(samples, max_tokens=MAX_TOKENS, **packing)
            engine.forward_backward(batch, CrossEntropy())
            engine.optim_step(OptimParams(1e-5, 1 / batch.num_target_tokens))

        return step

    return [of(way) for way in ways]


def ideal(samples: list[Any]) -> float:
    """FLOPs of every sequence by itself to those of one tree of all of them."""
    depths = [np.arange(len(sample)) for sample in samples]
    alone = flops(np.concatenate(depths), samples)
    return alone / flops(tree_depths(samples), samples)


def tree_depths(samples: list[Any]) -> np.ndarray:
    """The depth of each node of a tree in which equal leading tokens are the same nodes."""
    depths: list[int] = []
    before: tuple[int, ...] = ()
    for tokens in sorted(tuple(sample.tokens.tolist()) for sample in samples):
        shared = next(
            (i for i, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b), len(before)
        )
        depths += range(shared, len(tokens))
        before = tokens
    return np.array(depths)


def flops(depths: np.ndarray, samples: list[Any]) -> float:
    """Of forward and backward: 6 for each weight and token, attention's own, and the head of each target.

    depths: of each token that is computed, how many it sees before it.
    """
    dim, layers, heads = SMOLLM2["hidden_size"], SMOLLM2["num_hidden_layers"], SMOLLM2["num_attention_heads"]
    head_dim, kv = SMOLLM2["head_dim"], SMOLLM2["num_key_value_heads"]
    weights = layers * (dim * head_dim * 2 * (heads + kv) + 3 * dim * SMOLLM2["intermediate_size"])
    attention = 12 * layers * heads * head_dim * int((depths + 1).sum())
    head = 6 * dim * SMOLLM2["vocab_size"] * sum(sample.num_targets for sample in samples)
    return 6 * weights * len(depths) + attention + head


def peak(case: str, way: str) -> float:
    """GiB of a process that takes two steps."""
    command = [sys.executable, "-m", "benchmarks.prefix_trees", "--case", case, "--way", way]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
