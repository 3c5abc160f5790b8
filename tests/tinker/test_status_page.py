"""The status page as a browser shows it, and what it counts."""

import asyncio
import os
import shutil
import subprocess
import time

import httpx
import pytest

tinker = pytest.importorskip("tinker", reason="needs the extra `serve`")
from tinker import types  # noqa: E402

from rl.tinker.rate import Rate  # noqa: E402
from tests.needs import need  # noqa: E402
from tests.tinker.fakes import KEYS, NAME, FakeBackend, serving  # noqa: E402
from tests.tinker.test_keys import hashed  # noqa: E402
from tests.tinker.test_protocol import datum  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
os.environ["TINKER_TELEMETRY"] = "0"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
HEADLESS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
)


def use(url):
    """Three tokens sampled, one training request done and one that failed."""
    client = tinker.ServiceClient(base_url=url, api_key=KEYS[0])
    sampler = client.create_sampling_client(base_model=NAME).result()
    params = types.SamplingParams(max_tokens=3, seed=0)
    sampler.sample(types.ModelInput.from_ints([5]), 1, params).result()
    training = client.create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
    with pytest.raises(tinker.RequestFailedError):
        training.forward_backward([datum(tokens=(13, 2, 3))], "cross_entropy").result()


def expected(page):
    assert "<td>training requests</td><td>1</td>" in page
    assert "<td>sampled tokens</td><td>3</td>" in page
    assert "13 is not a token that anybody wants" in page
    assert "rl serve: tiny" in page and not any(key in page for key in KEYS)


def page_of(url, key):
    return httpx.get(f"{url}/", headers={"X-API-Key": key}).raise_for_status().text


def test_what_it_says(tmp_path):
    with serving(tmp_path / "server") as (url, service):
        use(url)
        expected(page_of(url, KEYS[0]))
        id = "train:<script>"  # no text is taken for HTML
        row, _ = service.queue.submit(id, hashed(KEYS[0]), "sample", "nobody", b"")
        service.queue.failed(row, "<script>", "user")
        assert "<script>" not in page_of(url, KEYS[0])


class Slow(FakeBackend):
    """Answers no forward_backward: requests wait, and one runs."""

    async def forward_backward(self, *args):
        await asyncio.Event().wait()


def test_a_tenant_sees_its_own_alone(tmp_path):
    """Models, what waits, requests and errors of each; what all do together is one number."""
    with serving(tmp_path / "server", Slow()) as (url, service):
        models = {}
        for count, key in enumerate(KEYS, 1):
            client = tinker.ServiceClient(base_url=url, api_key=key)
            new = (client.create_lora_training_client(base_model=NAME, rank=8, seed=0) for _ in range(count))
            models[key] = [training.result() for training in new]
            for training in models[key]:
                training.save_state("name").result()
                with pytest.raises(tinker.RequestFailedError):
                    training.save_state("name").result()
        for training in (*models[KEYS[0]], *models[KEYS[1]]):
            training.forward_backward([datum()], "cross_entropy")
        tenants = {key: hashed(key) for key in KEYS}
        while service.queue.waiting() != {tenants[KEYS[0]]: 1, tenants[KEYS[1]]: 2}:
            time.sleep(0.01)
        for count, key in enumerate(KEYS, 1):
            page = page_of(url, key)
            (other,) = set(KEYS) - {key}
            session = models[other][0].model_id.split(":")[0]
            assert session not in page and tenants[other] not in page
            assert page.count("is there already") == count
            assert f">{count} of your models in the training engine<" in page
            assert f">{count} of your requests wait<" in page
            assert "<td>training requests</td><td>6</td>" in page


def test_a_browser_shows_it(tmp_path):
    need("chromium", BROWSER is not None)
    with serving(tmp_path / "server") as (url, _):
        use(url)
        with_key = url.replace("http://", f"http://anyone:{KEYS[0]}@")
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [BROWSER, *HEADLESS, profile, "--dump-dom", f"{with_key}/"]
        page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        expected(page.replace(with_key, ""))


def test_a_rate_is_of_the_last_minute():
    now = [1000.0]
    rate = Rate(lambda: now[0])
    rate.add(10)
    now[0] += 4
    rate.add(10)
    assert rate.per_second() == 20 / 4
    now[0] += 57
    assert rate.per_second() == 10 / 60
    now[0] += 10
    assert rate.per_second() == 0 and rate.total == 20
