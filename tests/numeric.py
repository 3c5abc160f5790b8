"""Comparisons bounded by a reference's own rounding error, measured in the same run.

A fixed bound such as 1e-5 holds only for the processors on which somebody measured it. Here the exact result is
computed in float64. A result in fp32 or bf16 may then be MARGIN times as far from it as a reference in the same dtype
is, on the same machine.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers.integrations import moe

MARGIN = 4  # how many times the reference's own error
ULPS = 2  # units in the last place of the largest exact number: allowed even where the reference happens to be exact


def assert_close_as(
    reference: Any, ours: Any, exact: Any, what: Any = "", mean: bool = False, least: float = 0.0
) -> None:
    """Tensors, arrays, numbers, or lists or dicts of them, of equal shapes. `mean`: compare mean errors, not largest.

    Of a few numbers alone a reference may be right by luck. `least` is its error where it computes many more.
    """
    error, limit = error_of(ours, exact, mean), limit_by(reference, exact, mean, least)
    # holds: reference
    assert error <= limit, (
        f"{what}: {error:.3g} from float64; a reference of the same dtype allows {limit:.3g}"
    )


def limit_by(reference: Any, exact: Any, mean: bool = False, least: float = 0.0) -> float:
    """MARGIN times the reference's own error, or ULPS units in the last place."""
    largest = max((np.abs(row).max() for row in _rows(exact).values() if row.size), default=0.0)
    own = max(error_of(reference, exact, mean), least)
    return max(MARGIN * own, ULPS * _last_place(reference) * largest)


def error_of(result: Any, exact: Any, mean: bool = False) -> float:
    """The largest difference from the exact result, or the mean one."""
    rows, exact_rows = _rows(result), _rows(exact)
    assert rows.keys() == exact_rows.keys()
    assert all(rows[n].shape == exact_rows[n].shape for n in rows)
    errors = [np.abs(rows[n] - exact_rows[n]).ravel() for n in rows]
    if not any(row.size for row in errors):
        return 0.0
    return float((np.mean if mean else np.max)(np.concatenate(errors)))


def _rows(result: Any) -> dict[Any, np.ndarray]:
    if isinstance(result, dict):
        return {(n, *at): row for n, part in result.items() for at, row in _rows(part).items()}
    if isinstance(result, list):
        return _rows(dict(enumerate(result)))
    tensor = result.detach() if isinstance(result, torch.Tensor) else torch.as_tensor(result)
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return {(): tensor.to(torch.float64).numpy()}


def _last_place(result: Any) -> float:
    """One unit in the last place of 1, in its coarsest dtype; a Python number or an array stands for fp32."""
    if isinstance(result, dict | list):
        parts = result.values() if isinstance(result, dict) else result
        return max(map(_last_place, parts), default=0.0)
    dtype = result.dtype if isinstance(result, torch.Tensor) else torch.float32
    return torch.finfo(dtype).eps


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Inside, whatever asks torch for float32 gets float64: the project's own code computes exactly."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)  # whose kernels lack float64
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(_FLOAT32)


_FLOAT32 = torch.float32


@contextlib.contextmanager
def exact_twin(engine: Any, directory: Path, **settings: Any) -> Iterator[Any]:
    """The same engine with the same weights in float64, for as long as the context lasts.

    `directory` is where the weights pass through; a value head starts at 0 again.
    """
    engine.save_hf(directory)
    widen(directory)
    with float64():
        yield type(engine)(directory, replace(engine.config, seed=None, **settings))


def widen(directory: Path) -> None:
    """Makes the tensors of a model's directory float64, and drops a value head, which engines do not read."""
    for file in directory.glob("*.safetensors"):
        tensors = {n: t.double() for n, t in load_file(file).items() if n != "value_head.weight"}
        save_file(tensors, file, metadata={"format": "pt"})
