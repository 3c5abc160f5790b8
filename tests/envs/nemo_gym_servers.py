"""NeMo Gym's own servers of one of its examples: the resources server, the simple agent and the model server."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

VENV = Path(sys.prefix) / "nemo-gym"
IS_INSTALLED = (VENV / "bin" / "python").exists()
_KINDS = ("resources_servers", "responses_api_agents", "responses_api_models")
_START_SECONDS = 120.0


@dataclass(frozen=True)
class Servers:
    resources_url: str
    agent_url: str
    rows: Path
    """The example's own."""


@contextmanager
def serving(example, policy_url, log):
    """Its servers, started with the command and the variables that NeMo Gym's command line gives them.

    policy_url: of the chat completions that the model server asks. log: a file for what the servers print.
    """
    (packages,) = VENV.glob("lib/python*/site-packages")
    directory = packages / "resources_servers" / example
    model = packages / "responses_api_models" / "vllm_model" / "configs" / "vllm_model.yaml"
    config = {
        **yaml.safe_load((directory / "configs" / f"{example}.yaml").read_text()),
        **yaml.safe_load(model.read_text()),
        "policy_base_url": policy_url,
        "policy_api_key": "none",
        "policy_model_name": "policy",
        "head_server": {"host": "127.0.0.1", "port": 1},  # never asked: each server has the whole config
        "dry_run": False,
    }
    directories, urls = {}, {}
    for name, kind in _addressed(config):
        ((implementation, settings),) = config[name][kind].items()
        settings |= {"host": "127.0.0.1", "port": _free_port()}
        directories[name] = packages / kind / implementation
        urls[kind] = f"http://127.0.0.1:{settings['port']}"
    processes = []
    with open(log, "wb") as output:
        try:
            for name, path in directories.items():
                processes.append(_start(path, name, config, output))
            deadline = time.monotonic() + _START_SECONDS
            for url in urls.values():
                _wait_ready(url, processes, deadline, log)
            rows = directory / "data" / "example.jsonl"
            yield Servers(urls["resources_servers"], urls["responses_api_agents"], rows)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def _addressed(config):
    """Name and kind of each server that is started."""
    entries = [(name, entry) for name, entry in config.items() if isinstance(entry, dict)]
    return [(name, kind) for name, entry in entries for kind in _KINDS if kind in entry]


def _start(directory, name, config, output):
    environment = {
        **os.environ,
        "NEMO_GYM_CONFIG_DICT": json.dumps(config),
        "NEMO_GYM_CONFIG_PATH": name,
        "PYTHONPATH": str(directory),
    }
    command = [VENV / "bin" / "python", "app.py"]
    return subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=output)


def _wait_ready(url, processes, deadline, log):
    while True:
        try:
            return httpx.get(url).raise_for_status()
        except httpx.TransportError:
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                raise RuntimeError(f"a server of NeMo Gym did not start: {Path(log).read_text()}") from None
            time.sleep(0.1)


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
