"""Whole runs with models of transformers: one whose buffers reach the generator, one that vLLM computes otherwise."""

import pytest

from rl.envs.sort_letters import ALPHABET
from rl.models.sources import TinyQwen3
from tests.devices import needs
from tests.integration.runs import read_metrics, rl
from tests.models.small_configs import random_model

pytestmark = [needs(2), pytest.mark.slow]


def train(directory, model_type, **changes):
    """A short run with a small random model, and the quickstart's tokenizer."""
    model_dir = TinyQwen3(alphabet=ALPHABET).materialize(directory)
    random_model(model_type, vocab_size=64, **changes).save_pretrained(model_dir)
    run_dir = directory / "run"
    flags = ["--model.path", model_dir, "--run_dir", run_dir]
    return rl("train", "tests/recipes.py:of_transformers", *flags), run_dir


def test_buffers_reach_the_generator(tmp_path):
    done, run_dir = train(tmp_path, "gemma4_text")
    assert done.returncode == 0, done.stderr[-3000:]
    gaps = [step["logprob_diff/mean"] for step in read_metrics(run_dir) if "logprob_diff/mean" in step]
    assert len(gaps) == 2 and max(gaps) < 1e-4  # holds: meaning, without the buffers it is over 1e-2


def test_a_model_that_vllm_computes_otherwise_ends_before_its_first_update(tmp_path):
    """Cohere2's sliding windows; the weights are there, since tokens within the window agree."""
    done, run_dir = train(tmp_path, "cohere2", sliding_window=12)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("rl: error: step 1: ")]
    assert "the generator's logprobs differ from the trainer's by" in line
    assert "over max_logprob_diff=0.003" in line and "attend differently" in line
    assert [row["step"] for row in read_metrics(run_dir)] == [0]
