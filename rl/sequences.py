"""Tokens with their logprobs, as arrays: 8 bytes a token in a rollout, 5 more in its sample. T tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np


def become_arrays(record: object, **dtypes: type) -> None:
    """In `__post_init__` of a frozen dataclass: the fields named become arrays [T] of these types."""
    for name, dtype in dtypes.items():
        object.__setattr__(record, name, np.asarray(getattr(record, name), dtype))


def are_equal(a: Any, b: Any) -> bool:
    """Of two dataclass instances: whether they are of one class and every field is equal, arrays included."""
    if type(a) is not type(b):
        return False
    pairs = ((getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return all(np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y for x, y in pairs)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens that were all sampled by the policy, or all not; `logprobs` are then 0.

    It may be made of lists, which become arrays.
    """

    tokens: np.ndarray  # [T] int32
    sampled: bool
    logprobs: np.ndarray  # [T] float32, nats

    def __post_init__(self) -> None:
        become_arrays(self, tokens=np.int32, logprobs=np.float32)

    def __eq__(self, other: object) -> bool:
        return are_equal(self, other)

    @classmethod
    def unsampled(cls, tokens: Sequence[int] | np.ndarray) -> "Segment":
        """Tokens that the policy did not sample."""
        return cls(np.asarray(tokens, np.int32), False, np.zeros(len(tokens), np.float32))


def lay_out(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The same segments, their arrays side by side in one buffer, which `joined` gives back as it is."""
    tokens = np.concatenate([segment.tokens for segment in segments])
    logprobs = np.concatenate([segment.logprobs for segment in segments])
    ends = np.cumsum([len(segment.tokens) for segment in segments]).tolist()
    return tuple(
        Segment(tokens[begin:end], segment.sampled, logprobs[begin:end])
        for segment, begin, end in zip(segments, [0, *ends], ends, strict=False)
    )


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One after the other. Not a copy where they are all the parts of one buffer, in their order."""
    filled = [array for array in arrays if len(array)]
    buffer = filled[0].base if filled else None
    if isinstance(buffer, np.ndarray) and all(a.base is buffer and a.dtype == buffer.dtype for a in filled):
        place = _address(buffer)
        for array in filled:
            if _address(array) != place or array.strides != buffer.strides:
                return np.concatenate(arrays)
            place += array.nbytes
        if place == _address(buffer) + buffer.nbytes:
            return buffer
    return np.concatenate(arrays)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence. All arrays are [T]; those after `loss_mask` count only where it is True.

    Nobody writes to the arrays: they may be parts of a rollout's, or one number for all tokens
    (np.broadcast_to).
    """

    tokens: np.ndarray  # int32 or int64
    loss_mask: np.ndarray  # bool
    generator_logprobs: np.ndarray  # float32, nats
    advantages: np.ndarray  # float32
    weights: np.ndarray  # float32, the token's share in the loss
    loss_inputs: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # float32, what else a loss reads: ref_logprobs, values, ...
    id: str = ""  # for people
    labels: np.ndarray | None = (
        None  # int64: which token is scored where a target is; None: the target itself
    )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def target_mask(self) -> np.ndarray:
        """[T] bool: the tokens that can be learnt. A sequence's first has no context to be predicted from."""
        mask = self.loss_mask.copy()
        mask[:1] = False
        return mask

    @property
    def num_targets(self) -> int:
        """M"""
        return int(np.count_nonzero(self.loss_mask[1:]))

    def scatter(self, values: np.ndarray | float) -> np.ndarray:
        """[M] values of the target tokens, or one for all -> [T], 0 elsewhere."""
        scattered = np.zeros(len(self), np.float32)
        scattered[self.target_mask] = values
        return scattered

    def with_loss_inputs(self, **loss_inputs: np.ndarray) -> "Sample":
        """With more loss inputs [T]."""
        return replace(self, loss_inputs={**self.loss_inputs, **loss_inputs})

    def with_advantages(self, advantages: np.ndarray | float) -> "Sample":
        """advantages: [M] of its target tokens, or one for all of them."""
        return replace(self, advantages=self.scatter(advantages))

    def with_weights_divided(self, number: int) -> "Sample":
        """With a smaller share in the loss."""
        if self.weights.strides == (0,):  # one number for all tokens
            return replace(self, weights=np.broadcast_to(self.weights[:1] / number, len(self)))
        return replace(self, weights=self.weights / number)
