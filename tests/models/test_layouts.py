"""Every layout that four processes allow computes what one process computes, from the same random weights."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from rl.models.hf import hf_name
from tests.tiny import write_config

LAYOUTS = {
    "FSDP2 x 2": ((1, 2, 1), "none"),
    "TP2": ((1, 1, 2), "selective"),
    "FSDP2 x TP2": ((1, 2, 2), "full"),
    "HSDP 2 x 2": ((2, 2, 1), "none"),
}


def run_layout(directory, layout, checkpointing, checkpoint=None, **config):
    """Three steps under torchrun, without Monarch."""
    model = write_config(directory / "model", **config)
    out = directory / ("-".join(map(str, layout)) + ("-resumed" if checkpoint else "")) / "result.pt"
    out.parent.mkdir()
    num_procs = int(np.prod(layout))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_procs), "--standalone"]
    arguments = [model, out, *layout, checkpointing, *([checkpoint] if checkpoint else [])]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "tests.models.layout_worker", *map(str, arguments)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=False)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    directory = tmp_path_factory.mktemp("layouts")
    return directory, run_layout(directory, (1, 1, 1), "none")


def worst(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def check(got, expected):
    assert worst(got["initial"], expected["initial"]) == 0  # random initialisation does not depend on the layout
    assert np.abs(np.subtract(got["losses"], expected["losses"])).max() < 1e-5
    assert np.abs(np.subtract(got["norms"], expected["norms"])).max() < 1e-5
    assert got["gradients"].keys() == expected["gradients"].keys()
    assert worst(got["gradients"], expected["gradients"]) < 1e-5
    assert all(np.abs(got["logprobs"][i] - expected["logprobs"][i]).max() < 1e-3 for i in expected["logprobs"])
    # What a generator assembles from all ranks' shards is the weights, bit for bit.
    assert got["published"].keys() == {hf_name(n) for n in got["weights"]}
    assert all(torch.equal(got["published"][hf_name(n)], w) for n, w in got["weights"].items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(one_process, name):
    directory, expected = one_process
    check(run_layout(directory, *LAYOUTS[name]), expected)


def test_untied_llama_under_fsdp_and_tp_equals_one_process(tmp_path):
    config = {"model_type": "llama", "tie_word_embeddings": False}
    check(run_layout(tmp_path, (1, 2, 2), "none", **config), run_layout(tmp_path, (1, 1, 1), "none", **config))


def test_a_checkpoint_of_one_process_goes_on_under_another_layout(one_process):
    directory, _ = one_process
    checkpoint = directory / "1-1-1" / "result.checkpoint"
    same = run_layout(directory, (1, 1, 1), "none", checkpoint)
    other = run_layout(directory, (1, 2, 1), "none", checkpoint)
    assert np.abs(np.subtract(same["losses"], other["losses"])).max() < 1e-6


def test_the_comparison_notices_a_gradient_that_is_off(one_process):
    _, expected = one_process
    check(expected, expected)
    with pytest.raises(AssertionError):
        check(expected | {"gradients": {name: g + 2e-5 for name, g in expected["gradients"].items()}}, expected)
