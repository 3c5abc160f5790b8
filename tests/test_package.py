"""What an installed wheel brings: one top-level package, typed, with the recipes inside."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_wheel_has_one_top_level_package_with_the_recipes_in_it(tmp_path):
    source = tmp_path / "source"
    for folder in ("rl", "configs"):
        shutil.copytree(ROOT / folder, source / folder)
    shutil.copy(ROOT / "pyproject.toml", source)
    options = ["-qq", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "."], cwd=source, check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"rl"}
    assert {"rl/py.typed", "rl/configs/quickstart.py"} <= set(names)
    list_recipes = (
        "from rl.config.recipes import recipe_names; import rl; print(rl.__file__, *recipe_names())"
    )
    done = subprocess.run(
        [sys.executable, "-c", list_recipes],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    where, *recipes = done.stdout.split()
    assert where.startswith(str(tmp_path / "site")) and {"quickstart", "ppo", "smollm2"} <= set(recipes), (
        done.stderr
    )


def test_every_folder_is_a_package_of_the_wheel():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "rl").rglob("*.py")}
    assert set(packages) == folders | {"rl.configs"}
