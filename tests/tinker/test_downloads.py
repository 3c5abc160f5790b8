"""Weights are downloaded with the official SDK: by their owner, or anybody where published, at URLs that end."""

# holds: exact

import importlib.util
import json
import urllib.error
import urllib.request

import httpx
import pytest

tinker = pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.tinker.database import now  # noqa: E402
from tests.needs import need  # noqa: E402
from tests.tinker.fakes import KEYS, FakeBackend, serving  # noqa: E402
from tests.tinker.test_optional_routes import copy, trained  # noqa: E402
from tests.tinker.test_protocol import client, post  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
HAS_AGE = importlib.util.find_spec("pyrage") is not None
LARGE = bytes(range(256)) * 20_000


class Backend(FakeBackend):
    async def save(self, model, directory, optimizer):
        await super().save(model, directory, optimizer)
        (directory / "adapter_model.safetensors").write_bytes(LARGE)
        if optimizer:
            (directory / "optimizer.safetensors").write_bytes(b"moments")


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path / "server", Backend()) as (url, service):
        yield url, service


def rest(url, key=KEYS[0]):
    return tinker.RestClient(base_url=url, api_key=key)


def fetch(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        body = answer.read()
        assert int(answer.headers["Content-Length"]) == len(body)
        return body


def status_of(url):
    try:
        fetch(url)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def test_what_is_saved_is_downloaded(server):
    """Without an API key, as the SDK's command line does it."""
    url, _ = server
    training = trained(url)
    path = training.save_weights_external("final", ttl_seconds=7200).result().path
    assert path == f"tinker://{training.model_id}/external_weights/final"
    signed = rest(url).get_external_weights_urls(path).result()
    assert 600 < signed.expires.timestamp() - now() <= 3600
    files = {name: fetch(file) for name, file in signed.urls.items()}
    assert files.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert files["adapter_model.safetensors"] == LARGE
    assert json.loads(files["adapter_config.json"])["value"] == pytest.approx(0.3)
    (listed,) = rest(url).list_checkpoints(training.model_id).result().checkpoints
    assert (listed.checkpoint_type, listed.tinker_path) == ("external", path) and listed.expires_at
    assert listed.size_bytes == sum(map(len, files.values()))
    rest(url).set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    rest(url).delete_checkpoint_from_tinker_path(path).result()
    assert {status_of(file) for file in signed.urls.values()} == {404}


def test_a_url_is_for_its_file_and_its_time(server, monkeypatch):
    url, _ = server
    path = trained(url).save_weights_external("final").result().path
    signed = rest(url).get_external_weights_urls(path).result().urls
    config, model = signed["adapter_config.json"], signed["adapter_model.safetensors"]
    assert status_of(config) == status_of(model) == 200
    head, signature, *where, _ = config.split("/")[-5:]
    base = config[: -len("/".join([head, signature, *where, "adapter_config.json"]))]
    for parts in (
        [head, signature, *where, "adapter_model.safetensors"],
        [head, signature, *where, "..%2F..%2Fserver.db"],
        [str(int(head) + 1), signature, *where, "adapter_config.json"],
        [head, signature[:-1] + ("0" if signature[-1] != "0" else "1"), *where, "adapter_config.json"],
        [head, signature, where[0], "other", "adapter_config.json"],
        ["x", "y", *where, "adapter_config.json"],
        ["9" * 400, signature, *where, "adapter_config.json"],
    ):
        assert status_of(base + "/".join(parts)) == 404, parts
    later = now() + 3601
    monkeypatch.setattr("rl.tinker.downloads.now", lambda: later)
    assert status_of(config) == 403
    assert httpx.get(f"{url}/api/v1/downloads/", timeout=5).status_code in (401, 404)


def test_urls_outlive_a_restart(tmp_path):
    with serving(tmp_path / "server", Backend()) as (url, _):
        path = trained(url).save_weights_external("final").result().path
        signed = rest(url).get_external_weights_urls(path).result().urls
    secret = tmp_path / "server" / "download_key"
    assert secret.stat().st_mode & 0o777 == 0o600 and len(secret.read_bytes()) == 32
    port = int(url.rpartition(":")[2])
    with serving(tmp_path / "server", Backend(), port=port):
        assert fetch(signed["adapter_model.safetensors"]) == LARGE


def test_tenants_download_their_own_and_what_is_published(server, monkeypatch):
    url, _ = server
    training = trained(url)
    path = training.save_weights_external("final", ttl_seconds=3600).result().path
    with pytest.raises(Exception, match="no checkpoint"):
        rest(url, KEYS[1]).get_external_weights_urls(path).result()
    rest(url).publish_checkpoint_from_tinker_path(path).result()
    signed = rest(url, KEYS[1]).get_external_weights_urls(path).result().urls
    assert fetch(signed["adapter_model.safetensors"]) == LARGE
    later = now() + 3700
    monkeypatch.setattr("rl.tinker.checkpoints.now", lambda: later)
    assert status_of(signed["adapter_config.json"]) == 404
    with pytest.raises(Exception, match="no checkpoint"):
        rest(url).get_external_weights_urls(path).result()


def test_external_weights_are_for_download_alone(server):
    url, _ = server
    training = trained(url)
    path = training.save_weights_external("final").result().path
    session = training.model_id.split(":")[0]
    for refused in (
        lambda: client(url).create_sampling_client(model_path=path).result(),
        lambda: client(url).create_training_client_from_state(path).result(),
        lambda: training.load_state(path).result(),
    ):
        with pytest.raises(Exception, match="are for download alone; save_weights_for_sampler"):
            refused()
    assert "for download alone" in copy(url, session, 7, path).json()["error"]
    assert rest(url).get_weights_info_by_tinker_path(path).result().lora_rank == 8
    own = f"{url}/api/v1/training_runs/{training.model_id}/checkpoints"
    state = training.save_state("state").result().path.split("/")[-1]
    answer = httpx.get(f"{own}/weights/{state}/external_weights_urls", headers={"X-API-Key": KEYS[0]})
    assert answer.status_code == 422 and "save_weights_external" in answer.json()["error"]


def test_recipients_are_checked_before_anything_is_saved(server):
    url, service = server
    training = trained(url)
    before = len(service.backend.log)
    for recipients, match in [
        (["age1nonsense"], "no recipient of age" if HAS_AGE else "needs pyrage"),
        (["nobody"], "no recipient of age" if HAS_AGE else "needs pyrage"),
        (["x"] * 11, "11 recipients; at most 10"),
    ]:
        body = {
            "model_id": training.model_id,
            "seq_id": 90,
            "path": "final",
            "age_encryption_recipients": recipients,
        }
        answer = post(url, "save_weights_external", body)
        assert answer.status_code == 422 and match in answer.json()["error"], answer.text
    assert len(service.backend.log) == before


@pytest.mark.skipif(not HAS_AGE, reason="needs pyrage, of the extra `serve`")
def test_what_is_encrypted_is_read_by_its_recipient_alone(server, tmp_path):
    """As tinker-cookbook's weights.download does it."""
    import pyrage

    url, _ = server
    own, other = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    training = (
        client(url).create_training_client_from_state(trained(url).save_state("s").result().path).result()
    )
    recipients = [str(own.to_public())]
    path = training.save_weights_external("download", 3600, recipients).result().path
    signed = rest(url).get_external_weights_urls(path).result().urls
    assert signed.keys() == {"adapter_config.json.age", "adapter_model.safetensors.age"}
    data = fetch(signed["adapter_model.safetensors.age"])
    assert pyrage.decrypt(data, [own]) == LARGE
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(data, [other])


def test_the_cookbook_downloads_what_was_saved(server, tmp_path, monkeypatch):
    """Its weights.download, unmodified: state through an export that it encrypts, external weights as they are."""
    need("cookbook", importlib.util.find_spec("tinker_cookbook") is not None)
    weights = importlib.import_module("tinker_cookbook.weights")
    url, _ = server
    monkeypatch.setenv("TINKER_API_KEY", KEYS[0])
    training = trained(url)
    for path in (training.save_state("s").result().path, training.save_weights_external("e").result().path):
        directory = tmp_path / path.split("/")[-1]
        weights.download(tinker_path=path, output_dir=str(directory), base_url=url)
        assert sorted(file.name for file in directory.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        assert (directory / "adapter_model.safetensors").read_bytes() == LARGE
