"""How transformers writes a model's tensors: most as they are, some renamed, some split or joined.

transformers loads several architectures into tensors of its own making (stacked experts, fused projections)
and undoes that when it saves. vLLM reads what it saves.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from rl.errors import ConfigError, one_line


@dataclass(frozen=True)
class DiskTensors:
    """Names are those of the language model's own parameters and persistent buffers."""

    renamed: Mapping[str, str]
    """A tensor that is the same on disk -> its name there."""

    converted: tuple[tuple[str, ...], ...]
    """Tensors that are split or joined on disk, by layer: those of a layer are converted together."""

    names: frozenset[str]
    """All names on disk."""

    @property
    def names_converted(self) -> frozenset[str]:
        """Names on disk of the converted tensors."""
        return self.names - set(self.renamed.values())


def disk_tensors(lm: transformers.PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> DiskTensors:
    """Found by converting tensors of these shapes without data.

    Raises ConfigError where transformers cannot write them, or not layer by layer.
    """
    renamed: dict[str, str] = {}
    converted: list[tuple[str, ...]] = []
    names: set[str] = set()
    for group in _by_layer(tensors):
        shapes = {name: torch.empty_like(tensors[name], device="meta") for name in group}
        on_disk = convert(lm, shapes)
        name_of = {id(tensor): name for name, tensor in shapes.items()}
        same = {name_of[id(tensor)]: name for name, tensor in on_disk.items() if id(tensor) in name_of}
        converted_names = tuple(name for name in group if name not in same)
        if converted_names:
            converted.append(converted_names)
            apart = convert(lm, {name: shapes[name] for name in converted_names})
            if apart.keys() != on_disk.keys() - set(same.values()):
                raise ConfigError(
                    f"transformers joins {converted_names[0]} of {type(lm).__name__} with tensors that it "
                    f"also keeps; its weights cannot be exported"
                )
        renamed |= same
        names |= on_disk.keys()
    return DiskTensors(renamed, tuple(converted), frozenset(names))


def convert(lm: transformers.PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors by their names in the model -> what transformers writes of them, by names on disk.

    Raises ConfigError where transformers cannot.
    """
    try:
        return revert_weight_conversion(lm, tensors)
    except Exception as error:  # its operations raise many kinds
        raise ConfigError(
            f"transformers cannot write the weights of {type(lm).__name__} ({one_line(error):.200}); "
            f"use another architecture"
        ) from error


def _by_layer(names: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Grouped by what precedes the first number in a name, and that number."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = re.match(r".*?\.\d+(?=\.)", name)
        groups.setdefault(match[0] if match else "", []).append(name)
    return list(groups.values())
