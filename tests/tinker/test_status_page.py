"""The status page as a browser shows it, and what it counts."""

import os
import shutil
import subprocess

import pytest

tinker = pytest.importorskip("tinker", reason="needs the extra `serve`")
from tinker import types  # noqa: E402

from rl.tinker.rate import Rate  # noqa: E402
from rl.tinker.status import status_page  # noqa: E402
from tests.tinker.fakes import KEYS, NAME, serving  # noqa: E402

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
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()


def expected(page):
    assert "<td>training requests</td><td>1</td>" in page
    assert "<td>sampled tokens</td><td>3</td>" in page
    assert "optim_step without a gradient; call forward_backward first" in page
    assert "rl serve: tiny" in page and not any(key in page for key in KEYS)


def test_what_it_says(tmp_path):
    with serving(tmp_path / "server") as (url, service):
        use(url)
        expected(status_page(service, ("tiny",)))
        service.queue._waiting["<script>alert(1)</script>"] = 1  # no name is taken for HTML
        assert "<script>" not in status_page(service, ("tiny",))


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed")
def test_a_browser_shows_it(tmp_path):
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
