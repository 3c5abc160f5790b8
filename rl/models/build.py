"""The kinds of engine, by name."""

from collections.abc import Callable
from pathlib import Path

import torch

from rl.models.engine import Engine
from rl.models.hf_engine import HFEngine
from rl.models.titan import TitanEngine

ENGINES: dict[str, type[Engine]] = {"titan": TitanEngine, "hf": HFEngine}

DRAW: dict[str, Callable[[Path, int], dict[str, torch.Tensor]]] = {
    "titan": TitanEngine.draw,
    "hf": HFEngine.draw,
}
"""(model directory, seed) -> random weights in fp32, by their names in Hugging Face directories."""
