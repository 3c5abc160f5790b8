"""The server's directory is its user's alone: what it has in it, and what its processes write."""

import os
import subprocess

import pytest
import torch

tinker = pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.errors import ConfigError  # noqa: E402
from rl.models.lora import write_adapter  # noqa: E402
from rl.paths import LOCK, lock_directory  # noqa: E402
from rl.tinker.own_directory import own_directory  # noqa: E402
from rl.types import LoRA  # noqa: E402
from tests.tinker.fakes import NAME, FakeBackend, serving  # noqa: E402
from tests.tinker.test_protocol import client  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Writing(FakeBackend):
    """Saves as an engine does, and with a process of its own."""

    async def save(self, model, directory, optimizer):
        write_adapter(directory, LoRA(4), "tiny", {"a": torch.zeros(2)})
        subprocess.run(["touch", str(directory / "by_a_child")], check=True)


def modes(root):
    return {path: path.stat().st_mode & 0o777 for path in [root, *root.rglob("*")]}


def test_nobody_else_may_read_what_a_server_writes(tmp_path):
    root, before = tmp_path / "new" / "server", os.umask(0o022)
    try:
        with own_directory(root):
            with serving(root, Writing()) as (url, _):
                training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
                path = training.save_state("x").result().path
                training.save_weights_and_get_sampling_client().result()
                client(url).create_rest_client().publish_checkpoint_from_tinker_path(path).result()
            assert len(modes(root)) > 10
            wide = {path: mode for path, mode in modes(root).items() if mode & 0o077}
            assert not wide
        assert os.umask(0o022) == 0o022  # this process's own again
        write_adapter(tmp_path / "a_runs", LoRA(4), "tiny", {"a": torch.zeros(2)})
        assert modes(tmp_path / "a_runs")[tmp_path / "a_runs" / "adapter_model.safetensors"] == 0o644
    finally:
        os.umask(before)


def test_a_directory_that_an_older_server_made_is_narrowed(tmp_path):
    root = tmp_path / "server"
    root.mkdir(mode=0o755)
    os.close(lock_directory(root, "server"))
    (root / "server.db").touch(0o644)
    with own_directory(root):
        assert root.stat().st_mode & 0o777 == 0o700
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o755)
    with own_directory(empty):
        assert empty.stat().st_mode & 0o777 == 0o700


def test_a_directory_with_other_things_is_left_as_it_is(tmp_path):
    root = tmp_path / "shared"
    root.mkdir(mode=0o755)
    (root / "thesis.txt").touch()
    refused = pytest.raises(ConfigError, match=rf"others may enter {root} \(mode 755\).*chmod 700 {root}")
    with refused, own_directory(root):
        pass
    assert root.stat().st_mode & 0o777 == 0o755 and not (root / LOCK).exists()
    root.chmod(0o700)
    with own_directory(root):
        pass
