"""Evaluations and a server whose processes are on two hosts."""

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import tinker
import transformers
from tinker import types

from configs.quickstart import quickstart
from tests.hosts.namespaces import hosts
from tests.hosts.runs import (
    MORTAL,
    RL,
    addresses,
    left_on,
    two_hosts,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")]


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


@pytest.fixture
def model(directory):
    """One with random weights, for the quickstart's task."""
    path = quickstart().model.materialize(directory)
    config = transformers.AutoConfig.from_pretrained(path)
    transformers.set_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_an_evaluation_over_two_hosts_is_that_of_one_also_by_torchrun(directory, model):
    words = [
        "eval",
        str(model),
        MORTAL,
        "--samples",
        "4",
        "--generator.num_threads",
        "1",
        "--trainer.num_threads",
        "1",
    ]
    subprocess.run(
        [*RL, *words, "--run_dir", str(directory / "one")], check=True, capture_output=True, timeout=240
    )
    with two_hosts(directory) as made:
        places = ["--generator.hosts", "1", "--reward.hosts", "1"]
        hosts_words = ["--hosts", addresses(made), "--run_dir", str(directory / "two")]
        process = made[0].start(*RL, *words, *places, *hosts_words, **PIPES)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output[-4000:]
        assert [left_on(host) for host in made] == [[], []]
    torchrun = [str(Path(RL[0]).parent / "torchrun"), "--nnodes", "2", "--nproc-per-node", "1"]
    with hosts(2) as made:
        torchrun += ["--master-addr", made[0].address, "--master-port", "29501"]
        command = ["-m", "rl", *words, *places, "--run_dir", str(directory / "three")]
        started = [
            host.start(*torchrun, "--node-rank", str(i), *command, **PIPES) for i, host in enumerate(made)
        ]
        outputs = [process.communicate(timeout=240)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], outputs
    one, *others = (json.loads((directory / n / "eval.json").read_text()) for n in ("one", "two", "three"))
    assert others == [one, one] and "pass@4" in outputs[0] and "pass@4" not in outputs[1]
    assert not [path.name for path in (directory / "two").iterdir() if path.name.startswith("eval-")]


def logprobs_of(answer):
    return [float(value) for value in answer.result().loss_fn_outputs[0]["logprobs"].data]


def test_a_server_over_two_hosts(directory, model):
    """Its trainer is on both, its generator on the second: what is trained is sampled there."""
    with two_hosts(directory) as made:
        flags = ["--layout.shard", "2", "--trainer_hosts", "0", "1", "--generator_hosts", "1", "--no_api_key", "True",
                 "--host", made[0].address, "--port", "8000", "--context_length", "64", "--names", "tiny",
                 "--directory", str(directory / "server"), "--hosts", addresses(made)]  # fmt: skip
        process = made[0].start(*RL, "serve", str(model), *flags, **PIPES)
        try:
            for line in process.stdout:
                if line.startswith("serving"):
                    break
            else:
                pytest.fail("it did not start")
            client = tinker.ServiceClient(base_url=f"http://{made[0].address}:8000", api_key="tml-none")
            training = client.create_lora_training_client(base_model="tiny", rank=4, seed=0).result()
            tokens = list(range(3, 11))
            inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 7}
            datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
            untrained = logprobs_of(training.forward([datum], "cross_entropy"))
            for _ in range(8):
                training.forward_backward([datum], "cross_entropy")
                training.optim_step(types.AdamParams(learning_rate=0.01)).result()
            trained = logprobs_of(training.forward([datum], "cross_entropy"))
            # holds: meaning, eight steps gain 5 nats; at a rate of 0.05 the sum swings
            assert sum(trained) > sum(untrained) + 0.1
            sampler = training.save_weights_and_get_sampling_client("learned")
            sampled = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
            # holds: meaning, the adapter before differs by over 1e-2 on average
            assert sampled[1:] == pytest.approx(trained, abs=1e-4)
        finally:
            (inner,) = psutil.Process(process.pid).children()
            inner.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        assert process.returncode == 0
        assert [left_on(host) for host in made] == [[], []]
