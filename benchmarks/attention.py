"""Attention of packed rows on a CPU: torch's flash kernel against `blockwise_attention.py`, forward and backward.

`python -m benchmarks.attention` writes docs/attention.md. One layer of SmolLM2 (9 heads, 3 key heads, size 64).
"""

import argparse
import statistics
import time

import numpy as np
import torch

from benchmarks.pages import machine, spread, write_page
from benchmarks.runs import as_trainer
from rl.models import attention

SEQUENCES = [(128, 66), (32, 64), (8, 256), (4, 512), (4, 1024), (1, 2048), (1, 4096)]
GROUPS = [
    (5, 8, 48, 20), (1, 8, 48, 512), (1, 16, 512, 20), (1, 16, 512, 128), (1, 8, 512, 512), (1, 16, 2048, 20),
    (1, 8, 2048, 128), (1, 8, 2048, 512),
]  # fmt: skip
HEADS, KEY_HEADS, SIZE = 9, 3, 64


def main() -> None:
    as_trainer(MALLOC_ARENA_MAX="8")
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    machine()
    of = {f"{n} of {length}": packed(n, length) for n, length in SEQUENCES}
    of |= {
        f"{groups} x {n}, {prompt} + {own}": trees(groups, n, prompt, own)
        for groups, n, prompt, own in GROUPS
    }
    rows = [["dtype", "sequences", "flash, ms", "blocks, ms", "ratio"]]
    for dtype in (torch.bfloat16, torch.float32):
        for name, positions in of.items():
            flash, blocks = milliseconds(positions, dtype, rounds)
            what = str(dtype).removeprefix("torch.")
            ratio = statistics.median(flash) / statistics.median(blocks)
            rows.append([what, name, spread(flash, 1), spread(blocks, 1), f"{ratio:.2f}"])
            print(rows[-1], flush=True)
    notes = f"""Medians (least to most) of {rounds} rounds in turns, forward and backward, after one that is left out. `n of l`: sequences that share
nothing. `groups x samples, prompt + response`: trees.

This table is made with eight malloc arenas; a process that trains has one for all of its threads
(`rl/cluster/environment.py`)."""
    write_page(
        "attention", "Attention on a CPU", f"python -m benchmarks.attention --rounds {rounds}", rows, notes
    )


def packed(n: int, length: int) -> np.ndarray:
    return np.concatenate([np.arange(length)] * n)


def trees(groups: int, n: int, prompt: int, own: int) -> np.ndarray:
    branch = np.arange(prompt, prompt + own)
    return np.concatenate([np.arange(prompt + own), *[branch] * (n - 1)] * groups)


def milliseconds(positions: np.ndarray, dtype: torch.dtype, rounds: int) -> tuple[list[float], list[float]]:
    """Of each round, by flash and by blocks."""
    shapes = ((len(positions), heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    of = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    documents = attention.pack_documents(positions, torch.device("cpu"))
    rows = np.zeros((rounds + 1, 2))
    for times in rows:
        for way, attend in enumerate((attention._by_sdpa, attention.packed_attention)):
            began = time.monotonic()
            out = attend(*of, documents, scale=None, window=None, dropout=0.0)
            torch.autograd.grad(out, of, torch.ones_like(out))
            times[way] = 1e3 * (time.monotonic() - began)
    flash, blocks = rows[1:].T.tolist()
    return flash, blocks


if __name__ == "__main__":
    main()
