"""Attention of packed rows on a CPU: which way is the fastest, forward and backward.

`python -m benchmarks.attention` writes docs/attention.md. One layer of SmolLM2 (9 heads, 3 key heads, size 64).
`attention.matmul_is_faster` and `attention._FAN_PATHS` hold what the tables say.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.runs import as_trainer, table
from rl.models import attention

SIZES = [
    (256, 4, 44), (128, 20, 68), (64, 24, 96), (32, 20, 148), (16, 20, 532), (16, 128, 640), (8, 128, 2176),
    (128, 66, 66), (32, 64, 64), (16, 128, 128), (8, 256, 256), (4, 512, 512), (1, 2048, 2048),
]  # fmt: skip
SIBLINGS = [
    (16, 20, 512), (16, 48, 512), (16, 80, 512), (8, 128, 512), (16, 128, 512), (8, 512, 512), (16, 512, 512),
    (16, 20, 1024), (16, 48, 1024), (8, 20, 2048), (16, 48, 2048), (8, 512, 2048),
]  # fmt: skip
HEADS, KEY_HEADS, SIZE = 9, 3, 64
TITLE = "Attention of short rows, and of siblings"


def main() -> None:
    import os; os.environ.get("NOAS") or as_trainer()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rows = [["dtype", "n x q of k", "flash, ms", "matmuls, ms", "ratio", "taken"]]
    fans = [["dtype", "n x own after path", "each, ms", "fan, ms", "ratio", "taken"]]
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for n, num_queries, num_keys in SIZES:
            flash, matmuls, taken = of_rows(n, num_queries, num_keys, dtype, rounds)
            rows.append(line(name, f"{n} x {num_queries} of {num_keys}", flash, matmuls, taken))
        for n, own, path in SIBLINGS:
            each, fan, taken = of_siblings(n, own, path, dtype, rounds)
            fans.append(line(name, f"{n} x {own} after {path}", each, fan, taken))
    text = f"""# {TITLE}

Made by `python -m benchmarks.attention` on two cores of an AMD EPYC (Zen 4).

n rows of q queries, the last of which sees k keys:

{table(rows)}

n samples whose own tokens follow a shared path: attention of each by itself, over the path and its own tokens,
or of all of them over keys that stand in memory once (`rl/models/fan_attention.py`):

{table(fans)}

Medians of {rounds} rounds, forward and backward; the first is left out. `taken`: what such rows are computed with.
"""
    Path("docs/attention.md").write_text(text)


def of_rows(
    n: int, num_queries: int, num_keys: int, dtype: torch.dtype, rounds: int
) -> tuple[float, float, str]:
    q, k, v = inputs((n, HEADS, num_queries), (n, KEY_HEADS, num_keys), dtype)
    last = torch.arange(num_keys - num_queries, num_keys)
    mask = (torch.arange(num_keys) <= last[:, None]).expand(n, 1, num_queries, num_keys)
    given = None if num_queries == num_keys else mask
    taken = "matmuls" if attention.matmul_is_faster(q, k, given is None) else "flash"

    def by(matmul: bool) -> torch.Tensor:
        with patch.object(attention, "matmul_is_faster", lambda *_: matmul):
            return attention._attend(q, k, v, given, None, dropout=0.0)

    return *seconds([lambda: by(False), lambda: by(True)], (q, k, v), rounds), taken


def of_siblings(n: int, own: int, path: int, dtype: torch.dtype, rounds: int) -> tuple[float, float, str]:
    positions = np.concatenate([np.arange(path + own), *[np.arange(path, path + own)] * (n - 1)])
    of = inputs((len(positions), HEADS), (len(positions), KEY_HEADS), dtype)
    cpu = torch.device("cpu")
    taken = "fan" if attention.pack_documents(positions, cpu, fans=True).fans else "each"
    each = attention.pack_documents(positions, cpu)
    with patch.object(attention, "_FAN_PATHS", (1, 1)):
        fan = attention.pack_documents(positions, cpu, fans=True)

    def by(documents: attention.PackedDocuments) -> torch.Tensor:
        return attention.packed_attention(*of, documents, None)

    return *seconds([lambda: by(each), lambda: by(fan)], of, rounds), taken


def inputs(queries: tuple[int, ...], keys: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.randn(*shape, SIZE, dtype=dtype, requires_grad=True) for shape in (queries, keys, keys)
    )


def seconds(
    ways: list[Callable[[], torch.Tensor]], of: tuple[torch.Tensor, ...], rounds: int
) -> tuple[float, float]:
    """The median of some rounds, in turns."""
    found: list[list[float]] = []
    for _ in range(rounds + 1):
        found.append([])
        for way in ways:
            began = time.monotonic()
            out = way()
            torch.autograd.grad(out, of, torch.ones_like(out))
            found[-1].append(time.monotonic() - began)
    first, second = np.median(found[1:], axis=0).tolist()
    return first, second


def line(dtype: str, what: str, first: float, second: float, taken: str) -> list[str]:
    made = [dtype, what, f"{1e3 * first:.1f}", f"{1e3 * second:.1f}", f"{first / second:.2f}", taken]
    print(made, flush=True)
    return made


if __name__ == "__main__":
    main()
