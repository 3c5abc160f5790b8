"""The shortened form of `make cookbook`."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.runs import ROOT
from tests.needs import need
from tests.tinker import cookbook  # whose server keeps its records in SQLite
from tests.tinker.cookbook import KILLED, RUNS, prepare, run

MODEL_DIR = ROOT / "models" / "smollm2-135m-instruct"
LEFT_OUT = {
    "dpo": "1,024 rows of evaluation",
    "rl_loop, gspo": "the path of rl_loop; its loss: tests/integration/test_serve.py",
    "math_rl, ppo": "the path of math_rl; its loss: tests/integration/test_serve.py",
}
"""`make cookbook` runs them."""


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_recipes_of_the_cookbook_run_to_their_end(tmp_path):
    """Two at a time, since most of a recipe's time is that of its imports."""
    need("cookbook", importlib.util.find_spec("tinker_cookbook") is not None and MODEL_DIR.is_dir())
    prepare(tmp_path, MODEL_DIR)
    in_order = [(KILLED, "chat_sl, resumed")]
    in_order += [(name,) for name in RUNS if name not in (*LEFT_OUT, *in_order[0])]

    def run_all(names, url, key):
        for name in names:
            good, output = run(name, tmp_path, url, key)
            assert good, (name, output[-3000:])

    with cookbook.serving(MODEL_DIR, tmp_path) as (url, key), ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run_all, names, url, key) for names in in_order]:
            done.result()
