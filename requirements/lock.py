"""Write cpu.txt and gpu.txt: each one lock for every Python that `make setup` takes. `make lock` runs it.

uv resolves for each Python alone, with wheels only, so that each version in the lock has a wheel for it.
Each resolution starts from the pins of the one before; where they still differ, lines carry markers.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_31"  # check.py refuses an older glibc
EXTRAS = ("dev", "fetch", "serve", "postgres")
OPTIONS = {
    # torch is installed before this lock, from an index with CPU builds where pip knows one.
    "cpu": ("--override=requirements/overrides_cpu.txt", "--no-emit-package=torch"),
    "gpu": (),
}


def resolve(device: str, python: str, pins: list[str], scratch: Path) -> list[str]:
    """The lock for one Python: one `name==version` a line, the nearest to `pins` that it can have."""
    scratch.write_text("\n".join(pins))
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "requirements/extra.in"]
    command += [f"--extra={extra}" for extra in (device, *EXTRAS)]
    command += ["--override=requirements/overrides.txt", *OPTIONS[device], "--only-binary=:all:"]
    command += [f"--python-version={python}", f"--python-platform={PLATFORM}"]
    command += ["--no-annotate", "--no-header", "--quiet", f"--output-file={scratch}"]
    subprocess.run(command, cwd=FOLDER.parent, check=True, stdout=subprocess.DEVNULL)
    lines = scratch.read_text().split()
    return drop_cuda(lines) if device == "cpu" else lines


def drop_cuda(lines: list[str]) -> list[str]:
    """Without what torch brings from an index that has no CPU builds."""
    return [line for line in lines if not re.match("nvidia-|cuda-", line)]


def merge(resolutions: dict[str, list[str]]) -> list[str]:
    """One lock of several, by Python: a line that not all have names, as a marker, the Pythons that do."""
    lock = []
    for line in sorted(set().union(*resolutions.values()), key=lambda line: line.split("==")):
        pythons = [python for python, lines in resolutions.items() if line in lines]
        markers = " or ".join(f'python_version == "{python}"' for python in pythons)
        lock.append(line if len(pythons) == len(resolutions) else f"{line} ; {markers}")
    return lock


def main() -> None:
    pins: list[str] = []
    for device in OPTIONS:
        path, resolutions = FOLDER / f"{device}.txt", {}
        if path.exists():
            pins = [line.split(" ;")[0] for line in path.read_text().splitlines()]
        with tempfile.TemporaryDirectory() as folder:
            for python in PYTHONS:
                pins = resolutions[python] = resolve(device, python, pins, Path(folder, "resolution.txt"))
        path.write_text("\n".join(merge(resolutions)) + "\n")


if __name__ == "__main__":
    main()
