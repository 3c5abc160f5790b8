"""Run the unit tests under each Python that the project works with: `make test-pythons`.

`--others` leaves out the Python of this environment, for `make test-all`, which has run its tests.

Unit tests are the quick tests of every folder but those that start runs or compute with whole models.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = ("3.11", "3.12", "3.13")
NOT_UNIT_TESTS = ("chaos", "integration", "models")


def unit_tests() -> list[str]:
    folders = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")} - set(NOT_UNIT_TESTS)
    files = {path.name for path in ROOT.glob("tests/test_*.py")}
    return [f"tests/{name}" for name in sorted(folders | files)]


def works(python: str) -> bool:
    """Whether this is a Python that `make setup` takes; prints the reason where it is not."""
    done = subprocess.run(["sh", "requirements/python.sh", python], cwd=ROOT, stdout=subprocess.DEVNULL)
    return done.returncode == 0


def summary(ran: list[str]) -> str:
    if len(ran) == 1:
        return f"unit tests ran under Python {ran[0]} alone: there is no other here"
    return f"unit tests ran under Python {', '.join(ran)}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--others", action="store_true", help="leave out the Python of this environment")
    options = parser.parse_args()
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    environments = {own: Path(sys.prefix)}
    for version in VERSIONS:
        if version != own and works(f"python{version}"):
            folder = environments[version] = ROOT / f".venv-{version}"
            command = ["make", "setup", f"VENV={folder.name}", f"PYTHON=python{version}"]
            if subprocess.run(command, cwd=ROOT).returncode:
                print(f"Python {version} works here, and {folder.name} could not be set up")
                return 1
    failed = []
    for version, folder in sorted(environments.items()):
        if options.others and version == own:
            continue
        print(f"unit tests under Python {version}", flush=True)
        command = [
            str(folder / "bin/python"),
            "-m",
            "pytest",
            "-n",
            "2",
            "-q",
            "-m",
            "not slow",
            *unit_tests(),
        ]
        if subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode:
            failed.append(version)
    print(summary(sorted(environments)))
    if failed:
        print(f"they failed under Python {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
