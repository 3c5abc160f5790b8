"""Attention of packed rows on a CPU: torch's flash kernel against plain matmuls, forward and backward.

`python -m benchmarks.attention` writes docs/attention.md. One layer of SmolLM2 (9 heads, 3 key heads, size 64); n rows of q
queries, the last of k keys. `attention.matmul_is_faster` holds what this table says.
"""

import argparse
import time
from pathlib import Path

import torch

from benchmarks.runs import write_table
from rl.models import attention

SIZES = [
    (256, 4, 44), (128, 20, 68), (64, 24, 96), (32, 20, 148), (16, 20, 532), (16, 128, 640), (8, 128, 2176),
    (128, 66, 66), (32, 64, 64), (16, 128, 128), (8, 256, 256), (4, 512, 512), (1, 2048, 2048),
]  # fmt: skip
HEADS, KEY_HEADS, SIZE = 9, 3, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    rows = [["dtype", "n x q of k", "flash, ms", "matmuls, ms", "ratio", "taken"]]
    for dtype in (torch.bfloat16, torch.float32):
        for n, num_queries, num_keys in SIZES:
            make = torch.randn
            q = make(n, HEADS, num_queries, SIZE, dtype=dtype, requires_grad=True)
            k, v = (make(n, KEY_HEADS, num_keys, SIZE, dtype=dtype, requires_grad=True) for _ in range(2))
            last = torch.arange(num_keys - num_queries, num_keys)
            mask = (torch.arange(num_keys) <= last[:, None]).expand(n, 1, num_queries, num_keys)
            given = None if num_queries == num_keys else mask
            taken = "matmuls" if attention.matmul_is_faster(q, k, given is None) else "flash"
            flash, matmuls = (seconds(way, (q, k, v), given, rounds) for way in (False, True))
            ms = (f"{1e3 * found:.1f}" for found in (flash, matmuls))
            what = f"{n} x {num_queries} of {num_keys}"
            rows.append([str(dtype).removeprefix("torch."), what, *ms, f"{flash / matmuls:.2f}", taken])
            print(rows[-1], flush=True)
    notes = (
        "The best of some rounds, forward and backward. `taken`: what rows of that size are computed with."
    )
    write_table(
        Path("docs/attention.md"), "Attention of short rows", "python -m benchmarks.attention", rows, notes
    )


def seconds(
    by_matmul: bool, inputs: tuple[torch.Tensor, ...], mask: torch.Tensor | None, rounds: int
) -> float:
    """The best of some rounds, with attention.py's own code either way."""
    chosen = attention.matmul_is_faster
    attention.matmul_is_faster = lambda *_: by_matmul
    try:
        found = []
        for _ in range(rounds):
            began = time.monotonic()
            out = attention._attend(*inputs, mask, None)
            torch.autograd.grad(out, inputs, torch.ones_like(out))
            found.append(time.monotonic() - began)
        return min(found)
    finally:
        attention.matmul_is_faster = chosen


if __name__ == "__main__":
    main()
