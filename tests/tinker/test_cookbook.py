"""The shortened form of `make cookbook`."""

import importlib.util

import pytest

from tests.integration.runs import ROOT
from tests.tinker.cookbook import RUNS, prepare, run, serving

MODEL_DIR = ROOT / "models" / "smollm2-135m-instruct"


@pytest.mark.slow
def test_recipes_of_the_cookbook_run_to_their_end(tmp_path):
    if importlib.util.find_spec("tinker_cookbook") is None or not MODEL_DIR.is_dir():
        pytest.skip("needs tinker-cookbook and SmolLM2: make cookbook")
    prepare(tmp_path, MODEL_DIR)
    with serving(MODEL_DIR, tmp_path) as (url, key):
        for name in RUNS:
            if name != "dpo":  # 1,024 rows of evaluation: `make cookbook`
                good, output = run(name, tmp_path, url, key)
                assert good, (name, output[-3000:])
