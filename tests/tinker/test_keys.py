"""Keys and tenants: a tenant may have several keys, and a file that changes is read again, unless it is bad."""

import hashlib
import os

import pytest

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.errors import ConfigError
from rl.tinker.keys import Keys
from tests.tinker.fakes import KEYS, NAME, serving
from tests.tinker.test_protocol import client


def hashed(key):
    """What a tenant without a name has always been called in databases."""
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys"


def write(path, *lines, mode=0o600):
    """In another moment than before, as far as the file tells."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text("\n".join(lines) + "\n")
    path.chmod(mode)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def test_keys_are_made_once_and_for_their_owner(path):
    Keys(path)
    key = path.read_text().strip()
    assert Keys(path).tenant_of(key) == hashed(key) and path.stat().st_mode & 0o777 == 0o600
    assert Keys(path).tenant_of("tml-a") is None


def test_a_name_is_a_tenant_and_may_have_several_keys(path):
    write(path, "# comment", "", "tml-plain", "alice  tml-a", "bob\ttml-b", "alice tml-c")
    keys = Keys(path)
    found = {
        key: keys.tenant_of(key) for key in ("tml-plain", "tml-a", "tml-b", "tml-c", "alice", "tml-", "")
    }
    assert found == {
        "tml-plain": hashed("tml-plain"), "tml-a": "alice", "tml-b": "bob", "tml-c": "alice",
        "alice": None, "tml-": None, "": None,
    }  # fmt: skip


def test_a_tenant_without_a_name_gets_another_key_under_what_it_is_called(path):
    write(path, f"{hashed('tml-lost')} tml-new")
    assert Keys(path).tenant_of("tml-new") == hashed("tml-lost") and Keys(path).tenant_of("tml-lost") is None


BAD = [
    ("", "has no API key"),
    ("# nothing", "has no API key"),
    ("not-a-key", "line 1 .*begin with tml-"),
    ("tml-a\nalice not-a-key", "line 2 .*begin with tml-"),
    ("tml-a tml-b", "line 1 .*name"),
    ("alice tml-a tml-b", "line 1"),
    ("a/b tml-a", "line 1 .*name"),
    ("alice tml-a\nbob tml-a", "line 2 .*same key"),
    ("\0", "line 1"),
]


@pytest.mark.parametrize(("content", "match"), BAD)
def test_a_bad_file_is_refused_at_the_start_and_changes_nothing_later(path, content, match, caplog):
    write(path, content)
    with pytest.raises(ConfigError, match=match) as refusal:
        Keys(path)
    assert "tml-a" not in str(refusal.value)  # a message is read by more people than the file
    write(path, "alice tml-a")
    keys = Keys(path)
    write(path, content)
    assert [keys.tenant_of("tml-a") for _ in range(3)] == ["alice"] * 3
    assert len(caplog.records) == 1 and "the keys before it stay" in caplog.text
    write(path, "bob tml-a")
    assert keys.tenant_of("tml-a") == "bob"


@pytest.mark.parametrize("harm", ["wide", "gone", "bytes", "directory"])
def test_a_file_that_cannot_be_read_again_changes_nothing(path, harm, caplog):
    write(path, "alice tml-a")
    keys = Keys(path)
    if harm == "wide":
        write(path, "bob tml-b", mode=0o644)
    elif harm == "bytes":
        path.write_bytes(b"\xff\xfe")
    else:
        path.unlink()
        if harm == "directory":
            path.mkdir(mode=0o700)
    assert keys.tenant_of("tml-a") == "alice" and keys.tenant_of("tml-b") is None
    assert len(caplog.records) == 1
    if harm == "directory":
        path.rmdir()
    write(path, "bob tml-b")
    assert keys.tenant_of("tml-b") == "bob" and keys.tenant_of("tml-a") is None


def test_a_file_of_another_is_read_by_nobody_else(path):
    write(path, "tml-a", mode=0o640)
    with pytest.raises(ConfigError, match=r"may be read by others \(mode 640\); chmod 600"):
        Keys(path)


@pytest.mark.filterwarnings("ignore")
def test_a_tenant_keeps_its_models_while_its_key_is_replaced(tmp_path):
    with serving(tmp_path / "server") as (url, _):
        path = tmp_path / "server" / "api_keys"
        old, new = KEYS[0], "tml-new"
        training = client(url, old).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()

        def runs(key):
            found = client(url, key).create_rest_client().list_training_runs().result().training_runs
            return [run.training_run_id for run in found]

        write(path, old, f"{hashed(old)} {new}", KEYS[1])
        assert runs(old) == runs(new) == [training.model_id] and runs(KEYS[1]) == []
        write(path, f"{hashed(old)} {new}", KEYS[1])
        assert runs(new) == [training.model_id]
        with pytest.raises(Exception, match="401|API key"):
            runs(old)
