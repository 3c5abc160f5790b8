"""Weights published by an engine in this process, and vLLM in processes of its own that samples with them."""

import asyncio
import json
import pickle
import socket
import subprocess
import sys
import tempfile

from rl.models.generator.environment import generator_environment
from rl.weight_sync.manifest import Manifest
from tests.devices import with_all

SMALL = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_gib": 0.0625}


def publish(transport, name, version, shards, adapter=None):
    return Manifest(version, tuple(asyncio.run(transport.publish(name, version, 0, shards))), adapter)


def ask(directory, config, transport, prompt, loads, **more):
    """See generator_worker.py. Returns what its first rank printed."""
    job = directory / "job.pickle"
    job.write_bytes(
        pickle.dumps({"config": config, "transport": transport, "prompt": prompt, "loads": loads, **more})
    )
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    count = config.tensor_parallel
    with tempfile.TemporaryDirectory() as temporary:  # vLLM's files and sockets go with it
        ranks = [_start(job, rank, count, port, temporary) for rank in range(count)]
        try:
            output, errors = ranks[0].communicate(timeout=200)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    assert ranks[0].returncode == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


def _start(job, rank, num_ranks, port, temporary):
    env = with_all() | generator_environment(max(1, 2 // num_ranks)) | {"TMPDIR": temporary}
    if num_ranks > 1:
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "tests.models.generator_worker", str(job)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
