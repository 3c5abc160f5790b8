"""`rl plan` of public models without a network, and of GPUs that nothing uses."""

import pytest

from rl.config.recipes import load_recipe
from rl.config.settle import settle
from rl.models.known_shapes import KNOWN, known_config
from rl.models.sources import ModelDir
from rl.plan.model_shape import ModelShape
from rl.plan.show import show
from tests.config.test_bad_table import outcome
from tests.plans import cluster

PUBLISHED = {  # parameters in billions, as the models' own pages have them
    "Qwen/Qwen3-0.6B": 0.6,
    "Qwen/Qwen3-1.7B": 1.7,
    "Qwen/Qwen3-4B": 4.0,
    "Qwen/Qwen3-8B": 8.2,
    "Qwen/Qwen3-14B": 14.8,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "meta-llama/Llama-3.1-8B": 8.0,
    "meta-llama/Llama-3.1-70B": 70.6,
    "meta-llama/Llama-3.2-1B": 1.2,
    "meta-llama/Llama-3.2-3B": 3.2,
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_shape_has_the_published_number_of_parameters(name):
    billions = ModelShape.of(known_config(name)).num_parameters / 1e9
    assert round(billions, 1) == PUBLISHED[name]  # rounding: of the published number


def test_variants_have_the_shape_of_their_model():
    assert known_config("meta-llama/Llama-3.1-8B-Instruct") == known_config("meta-llama/Llama-3.1-8B")
    assert known_config("Qwen/Qwen3-8B@main") == known_config("Qwen/Qwen3-8B-Base")
    assert known_config("Qwen/Qwen3-9B") is None and known_config("nowhere") is None


@pytest.fixture
def offline(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def test_a_plan_needs_no_network(offline):
    assert ModelDir("Qwen/Qwen3-0.6B").config()["hidden_size"] == 1024
    told = outcome(["plan", "qwen3_0_6b", "--cluster", "1xH100-80"])
    assert told.code in (None, 0) and not told.lines
    lines = told.out.splitlines()
    assert lines[0] == "qwen3_0_6b on 1 x H100 of 78.8 GiB, bfloat16, GiB of each process:"
    assert not any("nothing runs there" in line for line in lines)


def test_a_plan_names_gpus_that_nothing_uses(offline):
    recipe, config = load_recipe("quickstart")
    lines = show(recipe, settle(config, cluster=cluster("4xH100-80")))
    (line,) = [line for line in lines if "nothing runs there" in line]
    assert line.startswith("GPU 2, 3:") and "--generator.num_replicas" in line


def test_gpus_of_several_hosts_that_nothing_uses_are_named_with_their_host(offline):
    recipe, config = load_recipe("quickstart")
    lines = show(recipe, settle(config, cluster=cluster("2 x 2xH100-80")))
    (line,) = [line for line in lines if "nothing runs there" in line]
    assert line.startswith("GPU 1:0, 1:1:")
