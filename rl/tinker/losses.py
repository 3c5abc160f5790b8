"""Tinker's losses as ours, and its data as samples. The formulas: https://tinker-docs.thinkingmachines.ai.

Every loss is a sum over target tokens. A position that names several targets (K > 1) becomes as many samples
with equal tokens, which are computed once (see batching.pack).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rl.errors import ConfigError
from rl.interfaces import Loss
from rl.loss.base import TokenInputs
from rl.loss.cispo import CISPO
from rl.loss.clip import Clip
from rl.loss.cross_entropy import CrossEntropy
from rl.loss.dro import DRO
from rl.loss.gspo import GSPO
from rl.loss.importance_sampling import ImportanceSampling
from rl.tinker.backend import Datum, UserError
from rl.types import Sample

CLIP = ("clip_low_threshold", "clip_high_threshold")
NEEDS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
    "gspo": ("logprobs", "advantages"),
}
"""Loss -> what each datum has to carry beside target_tokens; cross_entropy's weights are 1 where missing."""
SETTINGS = {"ppo": CLIP, "cispo": CLIP, "gspo": CLIP, "dro": ("beta",)}
MAY_CARRY = {"ppo": CLIP, "cispo": CLIP, "gspo": (*CLIP, "sequence_ratio_mask")}
"""Loss -> what all data of a request may carry, or none; CLIP: each token's own thresholds."""
SEVERAL_TARGETS = ("cross_entropy", "importance_sampling")
NOT_OFFERED = {
    "stable_reinforce": "its formula is not public; use importance_sampling, ppo, cispo, dro or gspo",
    "custom": "custom losses run in the client here; create_custom_loss makes such a one",
}


def make_loss(name: str, config: Mapping[str, float]) -> Loss:
    """Raises UserError where a setting is not one of this loss, or makes no sense."""
    try:
        return _make_loss(name, config)
    except ConfigError as error:
        raise UserError(f"{name} cannot be computed: {'; '.join(str(error).splitlines())}") from error


def _make_loss(name: str, config: Mapping[str, float]) -> Loss:
    if unknown := sorted(set(config) - set(SETTINGS.get(name, ()))):
        raise UserError(
            f"{name} has no setting {unknown[0]!r}; it has {list(SETTINGS.get(name, ())) or 'none'}"
        )
    if name == "cross_entropy":
        return CrossEntropy()
    if name == "importance_sampling":
        return ImportanceSampling()
    if name == "dro":
        return DRO(beta=config.get("beta", 0.05))
    defaults = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}[name]
    low, high = (config.get(key, default) for key, default in zip(CLIP, defaults, strict=True))
    if not 0 <= low <= 1 <= high:
        raise UserError(
            f"{name} clips ratios to [{low}, {high}], which does not hold 1; set 0 <= low <= 1 <= high"
        )
    if name == "gspo":
        return GSPO(1 - low, high - 1, level="token")
    return (Clip if name == "ppo" else CISPO)(1 - low, high - 1)


def check(data: Sequence[Datum], loss: str, context_length: int, vocab_size: int) -> None:
    """Raises UserError, which names the datum."""
    if loss in NOT_OFFERED:
        raise UserError(f"loss_fn {loss!r} is not offered here: {NOT_OFFERED[loss]}")
    if loss not in NEEDS:
        raise UserError(f"unknown loss_fn {loss!r}; use one of {sorted(NEEDS)}")
    if not data:
        raise UserError("a forward_backward without data; send at least one datum")
    for i, datum in enumerate(data):
        if problem := _problem(datum, loss, context_length, vocab_size):
            raise UserError(f"datum {i}: {problem}")
    for name in MAY_CARRY.get(loss, ()):
        has = [name in datum.inputs for datum in data]
        if not all(has) and any(has):
            raise UserError(
                f"datum {has.index(False)} has no {name}, which datum {has.index(True)} has; give it to all "
                f"data or to none"
            )


def _problem(datum: Datum, loss: str, context_length: int, vocab_size: int) -> str:
    n, shape = len(datum.tokens), datum.targets.shape
    if not 0 < n < context_length:
        return f"{n} input tokens, of which there have to be 1 to {context_length - 1}"
    if not len(shape) or shape[0] != n or len(shape) > 2 or not all(shape):
        return f"target_tokens of shape {list(shape)} for {n} input tokens; make it [N] or [N, K]"
    if len(shape) == 2 and loss not in SEVERAL_TARGETS:
        return f"{loss} takes one target for each token, not {shape[1]}"
    for name, tokens in (("model_input", datum.tokens), ("target_tokens", datum.targets)):
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            return f"{name} has a token outside the vocabulary of {vocab_size}"
    known = {*NEEDS[loss], *MAY_CARRY.get(loss, ())}
    missing = [name for name in NEEDS[loss] if name not in datum.inputs and loss != "cross_entropy"]
    if missing:
        return f"{loss} needs {missing}; put them into loss_fn_inputs"
    if unknown := sorted(set(datum.inputs) - known):
        return f"{loss} does not read {unknown}; leave them out of loss_fn_inputs"
    for name, values in datum.inputs.items():
        if values.shape != shape:
            return f"{name} has shape {list(values.shape)} and target_tokens {list(shape)}; make them equal"
        if not np.isfinite(values).all():
            return f"{name} is not finite"
    return _threshold_problem(datum.inputs)


def _threshold_problem(inputs: Mapping[str, np.ndarray]) -> str:
    low, high = (inputs.get(name, np.ones(1, np.float32)) for name in CLIP)
    if low.min() < 0 or low.max() > 1:
        worst = low.min() if low.min() < 0 else low.max()
        return f"{CLIP[0]} has {worst:g}; each has to be 0 to 1"
    if high.min() < 1:
        return f"{CLIP[1]} has {high.min():g}; each has to be at least 1"
    return ""


def _in_the_ratio(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Over which tokens gspo's mean is: 1 or 0. By default the sampled ones: a prompt's have zeros alone."""
    mask = inputs.get("sequence_ratio_mask")
    if mask is None:
        mask = (inputs["logprobs"] != 0) | (inputs["advantages"] != 0)
    return (mask != 0).astype(np.float32)


def to_samples(data: Sequence[Datum], loss: str) -> list[Sample]:
    """One for each datum, or for each column of its targets, in order."""
    samples = []
    for number, datum in enumerate(data):
        columns = datum.targets.reshape(len(datum.tokens), -1)
        inputs = {name: values.reshape(columns.shape) for name, values in datum.inputs.items()}
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = _in_the_ratio(inputs)
        # The last target follows the last token; no other token sees it.
        tokens = np.concatenate([datum.tokens, columns[-1:, 0]])
        for k in range(columns.shape[1]):
            own = {name: _behind_first(values[:, k], np.float32) for name, values in inputs.items()}
            samples.append(
                _sample(tokens, _behind_first(columns[:, k], np.int64), own, loss, f"datum {number}")
            )
    return samples


def _sample(
    tokens: np.ndarray, labels: np.ndarray, inputs: dict[str, np.ndarray], loss: str, id: str
) -> Sample:
    zeros, ones = np.zeros(len(tokens), np.float32), np.ones(len(tokens), np.float32)
    extra = {name: values for name, values in inputs.items() if name not in NEEDS[loss]}
    return Sample(
        tokens=tokens,
        loss_mask=np.ones(len(tokens), bool),
        generator_logprobs=inputs.get("logprobs", zeros),
        advantages=inputs.get("advantages", zeros),
        weights=inputs.get("weights", ones),
        loss_inputs=extra,
        id=id,
        labels=labels,
    )


def measure(samples: Sequence[Sample], computed: Sequence[np.ndarray], loss: Loss) -> dict[str, float]:
    """The metrics that forward_backward gives, from logprobs [N + 1] of each sample alone."""

    def column(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        targets = [array[s.target_mask] for s, array in zip(samples, arrays, strict=True)]
        return torch.from_numpy(np.concatenate(targets))

    output = loss(
        column(computed),
        TokenInputs(
            generator_logprobs=column([s.generator_logprobs for s in samples]),
            advantages=column([s.advantages for s in samples]),
            weights=column([s.weights for s in samples]),
            sample_ids=column([np.full(len(s), i) for i, s in enumerate(samples)]),
            loss_inputs={
                name: column([s.loss_inputs[name] for s in samples]) for name in samples[0].loss_inputs
            },
        ),
    )
    return {name: float(value) for name, value in {**output.metrics, "loss:sum": output.loss}.items()}


def to_logprobs(data: Sequence[Datum], computed: Sequence[np.ndarray]) -> list[np.ndarray]:
    """computed: [N + 1] of each sample -> of each datum, in its targets' shape."""
    columns = iter(computed)
    return [
        np.stack([next(columns)[1:] for _ in range(datum.targets[0].size)], axis=1).reshape(
            datum.targets.shape
        )
        for datum in data
    ]


def _behind_first(values: np.ndarray, dtype: type) -> np.ndarray:
    """[N] of positions -> [N + 1] of the tokens that they predict."""
    return np.concatenate([np.zeros(1, dtype), values.astype(dtype)])
