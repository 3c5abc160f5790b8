"""Which checkpoint is meant, in whose directory, and one run at a time in a directory."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from configs.quickstart import quickstart
from rl.controller.resume import is_own, with_newest_checkpoint
from rl.errors import ConfigError
from rl.paths import lock_directory


def complete(directory, step):
    path = directory / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    (path / "record.json").write_text('{"state": {}}')
    return path


def test_latest_with_a_run_directory_is_its_own_newest_or_the_beginning(tmp_path):
    config = replace(quickstart(), run_dir=str(tmp_path / "run"), resume="latest")
    assert with_newest_checkpoint("quickstart", config) == (replace(config, resume=""), [])
    complete(tmp_path / "run", 20)
    newest = complete(tmp_path / "run", 100)
    found, missing = with_newest_checkpoint("quickstart", config)
    assert found.resume == str(newest) and not missing
    assert is_own(found.resume, found.run_dir) and not is_own(found.resume, tmp_path / "other")
    assert not is_own(found.resume, "") and not is_own("", found.run_dir)


def test_a_second_run_in_a_directory_is_refused_until_the_first_has_ended(tmp_path):
    code = "import sys; from rl.paths import *; lock_directory(Path(sys.argv[1]), 'run'); print(1, flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline()
    with pytest.raises(ConfigError, match=rf"belongs to a run that is under way \(pid {other.pid}\)"):
        lock_directory(tmp_path, "run")
    other.kill()
    other.wait()
    os.close(lock_directory(tmp_path, "run"))
