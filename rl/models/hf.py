"""Hugging Face directories: what is in them, and their weights, read and written as safetensors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rl.errors import ConfigError, RunError
from rl.paths import sync_tree

if TYPE_CHECKING:
    import torch

_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "moe.router.gate": "mlp.gate",
}
_EXPERT_NAMES = {"w1_EFD": "gate_proj", "w2_EDF": "down_proj", "w3_EFD": "up_proj"}
_ROOT_NAMES = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_SHARD_BYTES = 4 << 30
HEAD = "lm_head.weight"
_INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
"""The file of a model whose weights are one."""


def hf_name(name: str) -> str:
    """torchtitan's parameter name -> Hugging Face's. The tensors are equal, row for row."""
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name):
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"
    return _ROOT_NAMES.get(name, name)


def expert_names(name: str, num_experts: int) -> list[str] | None:
    """Hugging Face's name of each expert in torchtitan's stacked tensor [E, ...]; None for others."""
    match = re.fullmatch(r"layers\.(\d+)\.moe\.routed_experts\.inner_experts\.(\w+)", name)
    if match is None:
        return None
    experts, projection = f"model.layers.{match[1]}.mlp.experts", _EXPERT_NAMES[match[2]]
    return [f"{experts}.{e}.{projection}.weight" for e in range(num_experts)]


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """The contents of config.json. Raises ConfigError where there is none."""
    path = Path(model_dir) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(
            f"model directory {model_dir} has no config.json; "
            f"give the path of a Hugging Face model directory, or make one with: rl fetch smollm2"
        ) from error
    except PermissionError as error:
        raise ConfigError(f"{path} may not be read; give yourself access, or another model") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}); give another model") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no JSON object; fetch it again")
    return config


def max_positions(config: dict[str, Any]) -> int:
    """Longest sequence of a config.json, in tokens; state-space models name none."""
    parts, names = (config, text_config(config)), ("max_position_embeddings", "n_positions")
    return next((part[name] for part in parts for name in names if part.get(name)), 2**62)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Of the part of the model that reads and writes text; all of the config where there is no other part."""
    return config.get("text_config") or config


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes rope_parameters; version 4 wrote rope_theta and rope_scaling."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    return rope | {"rope_type": kind, "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0))}


def check_weights(model_dir: str | Path) -> None:
    """Open every safetensors header, and compare with the index, where there is one.

    Raises ConfigError naming the directory or the file that is at fault.
    """
    names = {path.name: set(_open(path).keys()) for path in _all_files(model_dir)}
    if not any(names.values()):
        raise ConfigError(f"the weights in {model_dir} hold no tensor; fetch them again")
    index = Path(model_dir) / _INDEX
    if not index.is_file():
        return
    places = _places(index)
    if missing := sorted(set(places.values()) - names.keys()):
        raise ConfigError(
            f"model directory {model_dir} lacks {len(missing)} of its weight files, such as {missing[0]}; "
            f"fetch them"
        )
    if missing := sorted(name for name, file in places.items() if name not in names[file]):
        file = places[missing[0]]
        raise ConfigError(f"{file} has no tensor {missing[0]}, which {index.name} names; fetch it again")


def _places(index: Path) -> dict[str, str]:
    """Tensor -> the file that holds it. Raises ConfigError where the index cannot be read."""
    try:
        places = dict(json.loads(index.read_text())["weight_map"])
        if not all(isinstance(file, str) for file in places.values()):
            raise TypeError("its weight_map does not map names to files")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index of weights ({error}); fetch it again") from error
    return places


def tensor_shapes(model_dir: str | Path) -> dict[str, list[int]]:
    """Read again where a file has changed: a start asks several times."""
    files = [(path, path.stat()) for path in weight_files(model_dir)]
    return _shapes(tuple((path, status.st_mtime_ns, status.st_size) for path, status in files))


@lru_cache(maxsize=4)
def _shapes(files: tuple[tuple[Path, int, int], ...]) -> dict[str, list[int]]:
    opened = (_open(path) for path, _, _ in files)
    return {name: file.get_slice(name).get_shape() for file in opened for name in file.keys()}  # noqa: SIM118


def tensor_names(model_dir: str | Path) -> set[str]:
    return set(tensor_shapes(model_dir))


def weight_files(model_dir: str | Path) -> list[Path]:
    """Those that transformers reads: the one, else those of the index, else all. Another may be left of an
    earlier export, or hold the same weights in another format. Raises ConfigError where there is none."""
    files, index = _all_files(model_dir), Path(model_dir) / _INDEX
    if Path(model_dir) / WEIGHTS in files:
        return [Path(model_dir) / WEIGHTS]
    named = {*_places(index).values()} if index.is_file() else {path.name for path in files}
    return [path for path in files if path.name in named]


def _all_files(model_dir: str | Path) -> list[Path]:
    files = sorted(Path(model_dir).glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"model directory {model_dir} has no *.safetensors weights; download them, or convert with "
            f"transformers' save_pretrained(safe_serialization=True)"
        )
    return files


class HFWeights:
    """Reads tensors of a directory, or parts of them, by Hugging Face name; notes which it was asked for."""

    def __init__(self, model_dir: str | Path):
        self._model_dir = model_dir
        self._files: dict[str, Any] = {}  # tensor -> the open file that has it
        for path in weight_files(model_dir):
            file = _open(path)
            self._files |= dict.fromkeys(file.keys(), file)
        self._read: set[str] = set()

    def __call__(self, name: str, part: tuple[slice, ...] = ()) -> torch.Tensor:
        """part: a slice of each dimension; empty: all of it."""
        self._read.add(name)
        return self._file(name).get_slice(name)[part] if part else self._file(name).get_tensor(name)

    def shape(self, name: str) -> list[int]:
        self._read.add(name)
        return self._file(name).get_slice(name).get_shape()

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise ConfigError(
                f"model directory {self._model_dir} has no tensor {name}, which its config.json asks for"
            )
        return self._files[name]

    def check_all_read(self, without_head: bool) -> None:
        """Raises ConfigError where a tensor was not asked for. without_head: by a model that has no head."""
        unread = {
            name for name in self._files.keys() - self._read if not name.endswith(".rotary_emb.inv_freq")
        }
        if without_head:
            unread.discard(HEAD)
        elif HEAD in unread:
            check_tied(self._model_dir, self("model.embed_tokens.weight"))
        if unread - {HEAD}:
            raise ConfigError(no_place(self._model_dir, unread - {HEAD}))


def check_tied(model_dir: str | Path, embeddings: torch.Tensor) -> None:
    """For tied embeddings. Raises ConfigError where the directory holds a head that is not equal to them."""
    head = HFWeights(model_dir)(HEAD)
    if not head.to(embeddings.dtype).equal(embeddings):
        raise ConfigError(
            f"{model_dir} has a {HEAD} of its own, but its config.json has tie_word_embeddings=true; set it "
            f"to false there, or remove the tensor"
        )


def no_place(model_dir: str | Path, names: Iterable[str]) -> str:
    names = sorted(names)
    return (
        f"{model_dir} holds {len(names)} tensors that a model of its config.json has no place for, such as "
        f"{names[0]}; fix config.json, or remove them"
    )


def other_shape(name: str, shape: Iterable[int], expected: Iterable[int]) -> RunError:
    return RunError(
        f"{name} has shape {tuple(shape)} in the weights but {tuple(expected)} by config.json; use weights "
        f"and a config.json of one model"
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file ({error}); fetch it again") from error


def export_directory(out_dir: str | Path, model_dir: str | Path) -> Path:
    """out_dir. Raises ConfigError where that is the model's own directory: an export would destroy it."""
    if Path(out_dir).resolve() == Path(model_dir).resolve():
        raise ConfigError(f"{out_dir} is the model that this engine reads; give another directory")
    return Path(out_dir)


def save_model(
    out_dir: Path, model_dir: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    """Write tensors (Hugging Face names) with the config and tokenizer files of `model_dir`.

    In the place of what an earlier export wrote there. It is on the disk when this returns.
    """
    from safetensors.torch import save_file

    out_dir.mkdir(parents=True, exist_ok=True)
    shards, total = [], 0
    for shard in _shards(tensors):
        total += sum(t.nbytes for t in shard.values())
        shards.append(list(shard))
        save_file(shard, out_dir / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
    for old in (*out_dir.glob("model*.safetensors"), out_dir / _INDEX):
        old.unlink(missing_ok=True)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        name = WEIGHTS if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        (out_dir / f"part-{i}.safetensors").rename(out_dir / name)
        weight_map |= dict.fromkeys(names, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out_dir / _INDEX).write_text(json.dumps(index, indent=1))
    copy_companions(model_dir, out_dir, dtype)
    make_readable(out_dir)
    sync_tree(out_dir)  # checkpoints note a reference's


def make_readable(out_dir: Path) -> None:
    """Weights as the config beside them: safetensors writes them with mode 0600, whatever the umask."""
    mode = (out_dir / "config.json").stat().st_mode & 0o777
    for path in out_dir.glob("*.safetensors"):
        path.chmod(mode)


def copy_companions(model_dir: str | Path, out_dir: Path, dtype: torch.dtype) -> None:
    """Config and tokenizer beside exported weights."""
    for path in Path(model_dir).iterdir():
        if path.suffix in (".json", ".jinja", ".model", ".txt") and "safetensors" not in path.name:
            shutil.copyfile(path, out_dir / path.name)  # without its mode, which may be to read alone
    config = read_config(model_dir) | {"dtype": str(dtype).removeprefix("torch.")}
    (out_dir / "config.json").write_text(json.dumps(config, indent=1))


def _shards(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard
