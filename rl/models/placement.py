"""Placement: where an engine's model and optimizer are, on its device or on the host."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from rl.errors import RunError


class Placement:
    """Attribute `mode`: within which context the engine is, if any."""

    def __init__(self, device: torch.device, **movers: Callable[[torch.device], None]):
        """movers: for each part, what moves it. All parts are on `device` to begin with."""
        self.mode: Literal["train", "eval"] | None = None
        self._device = device
        self._movers = movers
        self._on = dict.fromkeys(movers, device)

    @contextmanager
    def in_mode(self, mode: Literal["train", "eval"], *needed: str) -> Iterator[None]:
        """The needed parts are on the device within the context, and afterwards where they were."""
        if self.mode is not None:
            raise RunError(f"{mode}_mode inside {self.mode}_mode; leave that first")
        was = dict(self._on)
        self._move(dict.fromkeys(needed, self._device))
        self.mode = mode
        try:
            yield
        finally:
            self.mode = None
            self._move(was)

    def to(self, device: str | torch.device, **parts: bool) -> None:
        """Move the parts that are True."""
        if self.mode is not None:
            raise RunError(f"to() inside {self.mode}_mode, which would undo it; leave that first")
        device = torch.device(device)
        if device.type not in ("cpu", self._device.type):
            raise RunError(
                f"to({str(device)!r}): this engine computes on {self._device}; give that, or 'cpu'"
            )
        target = torch.device("cpu") if device.type == "cpu" else self._device
        self._move({part: target for part, wanted in parts.items() if wanted})

    def require(self, verb: str, *parts: str) -> None:
        """Raises RunError where a part that the verb needs is on the host."""
        away = [part for part in parts if self._on[part] != self._device]
        if away:
            raise RunError(
                f"{verb}: the {' and the '.join(away)} is on the host; use train_mode() or eval_mode(), "
                f"or to({str(self._device)!r})"
            )

    def _move(self, places: Mapping[str, torch.device]) -> None:
        for part, device in places.items():
            if self._on[part] != device:
                self._movers[part](device)
                self._on[part] = device
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def move_in_place(model: nn.Module, device: torch.device) -> None:
    """Parameters and buffers stay the same objects. Module.to alone makes new buffers."""
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    model.to(device)
