"""What HFEngine finds out about an architecture when it is built: which rows it computes, and that it can.

transformers' architectures differ in ways that no list covers. So a few short sequences go through
transformers' own forward and through ours, in fp32, on the host, before the model is sharded.
"""

from typing import Any

import numpy as np
import torch

from rl.errors import ConfigError, one_line
from rl.models.hf_model import HFModel

_ROWS = _TREES, _PACKED, _PADDED = "packed rows that share prefixes", "packed rows", "padded rows"
_LENGTHS = (37, 14, 25, 6)
_SHARED = (0, 9, 11, 0)
_TOLERANCE = 1e-3
"""Of the logits' standard deviation. A wrong mask or position changes them by over a tenth of it."""


@torch.no_grad()
def choose_rows(model: HFModel, share_prefixes: bool) -> bool:
    """Have the model compute the cheapest rows that give transformers' own logits, and print which.

    Returns whether rows may share prefixes. Raises ConfigError where no kind of rows gives these logits, or
    where the model's forward is random.
    """
    model.eval()
    documents = _documents(model.vocab_size)
    expected = _reference(model, documents)
    name = type(model.lm).__name__
    limit = _TOLERANCE * torch.cat(expected).std()
    reasons: dict[str, str] = {}
    for rows in _ROWS if share_prefixes else _ROWS[1:]:
        try:
            difference = _difference(model, rows, documents, expected)
        except NotImplementedError as reason:
            reasons[rows] = str(reason)
            continue
        if difference < limit:
            why = "".join(f" ({dearer}: {reason})" for dearer, reason in [*reasons.items()][-1:])
            print(f"HFEngine: {name} computes {rows}{why}", flush=True)
            return rows == _TREES
        reasons[rows] = f"{difference:.1e}"
    raise ConfigError(
        f"HFEngine does not compute what transformers computes for {name}: "
        f"logits differ by {', '.join(f'{by} in {rows}' for rows, by in reasons.items())}; "
        f"use an architecture that TitanEngine has"
    )


def check_selective(model: HFModel) -> None:
    """Once its layers are checkpointed: a backward of a short sequence. Raises ConfigError where it fails.

    Some layers change in place what the selective policy keeps. Only gradients of the input are computed:
    those of the weights would take as much memory again.
    """
    inputs: list[torch.Tensor] = []

    def begin(*call: Any) -> torch.Tensor:
        inputs.append(call[-1].detach().requires_grad_())
        return inputs[-1].clone()

    tokens = _documents(model.vocab_size)[0]
    places = np.arange(len(tokens))
    hook = model.lm.get_input_embeddings().register_forward_hook(begin)
    try:
        torch.autograd.grad(model.compute(tokens, places, places, None).sum(), inputs, allow_unused=True)
    except RuntimeError as error:
        raise ConfigError(
            f"trainer.activation_checkpointing=selective does not suit {type(model.lm).__name__} "
            f"({one_line(error)}); set it to full or none"
        ) from error
    finally:
        hook.remove()


def _reference(model: HFModel, documents: list[np.ndarray]) -> list[torch.Tensor]:
    """transformers' own logits [T, V] of each document. Raises ConfigError where they are random."""
    random_state = torch.get_rng_state()
    first, second = ([model.reference(torch.from_numpy(d[None]))[0] for d in documents] for _ in range(2))
    difference = max((a - b).abs().max() for a, b in zip(first, second, strict=True))
    is_repeated = difference <= _TOLERANCE * torch.cat(first).std()
    if not (is_repeated and torch.equal(random_state, torch.get_rng_state())):
        raise ConfigError(
            f"{type(model.lm).__name__} draws random numbers when it computes logits, which then differ from "
            f"the generator's; remove them from its forward method, or use another architecture"
        )
    return first


def _documents(vocab_size: int) -> list[np.ndarray]:
    """Of which the second goes on after tokens of the first, and the third after tokens of the second."""
    rng = np.random.default_rng(0)
    documents: list[np.ndarray] = []
    for length, shared in zip(_LENGTHS, _SHARED, strict=True):
        new = rng.integers(0, vocab_size, length - shared)
        documents.append(np.concatenate([documents[-1][:shared], new]) if shared else new)
    return documents


def _difference(
    model: HFModel, rows: str, documents: list[np.ndarray], expected: list[torch.Tensor]
) -> torch.Tensor:
    """The largest. Raises NotImplementedError where the model cannot compute such rows."""
    model.use(packed=rows != _PADDED)
    if model.packed and (reason := model.bypasses_packing()):
        raise NotImplementedError(reason)
    shared = _SHARED if rows == _TREES else (0,) * len(documents)
    tokens = np.concatenate([row[k:] for row, k in zip(documents, shared, strict=True)])
    positions = np.concatenate([np.arange(k, len(row)) for row, k in zip(documents, shared, strict=True)])
    logits = model.compute(tokens, positions, np.arange(len(tokens)), None)
    expected_logits = torch.cat([logits[k:] for logits, k in zip(expected, shared, strict=True)])
    return (logits - expected_logits).abs().max()
