"""Our Tinker server and SkyRL's own, one after the other, on the same machine and model, each with its newest SDK.

`python -m benchmarks.tinker_servers MODEL_DIR --skyrl DIR [--seconds 30] [--write]`. DIR: where SkyRL is installed, as
docs/tinker_servers.md says. Both compute in bf16.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.runs import write_table
from benchmarks.tinker_load import serving

OUT = Path(__file__).resolve().parents[1] / "docs" / "tinker_servers.md"
CLIENT = Path(__file__).with_name("tinker_client.py")
CLIENTS, START_SECONDS = 4, 120
NOTES = f"""{CLIENTS} LoRA models of rank 8, a client for each, all at the same time, in bf16 on two cores. train: forward_backward (cross-entropy, 4 data of
128 tokens) and optim_step, sent together; sample: a snapshot of the weights, and 8 samples of 32 tokens after a prompt of 32. Rounds before
the timing warm up, until every shape is compiled. SkyRL's server: the JAX backend with all clients' data in one micro-batch."""


def measure(python: Path, url: str, key: str, model: str, seconds: int) -> dict[str, dict]:
    """What benchmarks/tinker_client.py prints, by kind."""
    settings = {"url": url, "api_key": key, "model": model, "clients": CLIENTS, "seconds": seconds}
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    environment = os.environ | {"TINKER_TELEMETRY": "0"}
    done = subprocess.run(
        [python, CLIENT, *flags], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return {line["kind"]: line for line in map(json.loads, done.stdout.splitlines())}


@contextmanager
def skyrl(root: Path, model_dir: str, directory: Path) -> Iterator[str]:
    """URL of SkyRL's server, which reads the command line of `uv run` to start its engine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = {
        "max_lora_adapters": CLIENTS + 1,
        "max_lora_rank": 8,
        "train_micro_batch_size": 0,
        "sample_max_num_sequences": 0,
        "gradient_checkpointing": False,
        "loss_chunk_size": 1024,
    }
    command = ["uv", "run", "--no-project", "--offline", "--", "python", "-m", "skyrl.tinker.api"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--base-model", model_dir, "--backend", "jax"]
    command += ["--backend-config", json.dumps(backend), "--database-url", f"sqlite:///{directory}/skyrl.db"]
    command += ["--checkpoints-base", str(directory / "checkpoints")]
    environment = os.environ | {
        "VIRTUAL_ENV": str(root / "venv"),
        "PATH": f"{root / 'venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(root / "source"),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    log = (directory / "skyrl.log").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=directory)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).read()
                break
            except OSError:
                ended = process.poll() is not None or time.monotonic() > deadline
                assert not ended, (directory / "skyrl.log").read_text()[-3000:]
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir")
    parser.add_argument("--skyrl", type=Path, required=True)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    model_dir = str(Path(options.model_dir).resolve())
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        with serving(model_dir, Path(directory), CLIENTS) as (url, _):
            found["ours"] = measure(Path(sys.executable), url, "tml-first", "base", options.seconds)
        print(found["ours"], flush=True)
        with skyrl(options.skyrl.resolve(), model_dir, Path(directory)) as url:
            python = options.skyrl.resolve() / "venv" / "bin" / "python"
            found["SkyRL"] = measure(python, url, "tml-none", model_dir, options.seconds)
    rows = [
        [
            "server",
            "SDK",
            *(f"{kind}: {unit}" for kind in ("train", "sample") for unit in ("requests/s", "tokens/s")),
        ]
    ]
    for name, kinds in found.items():
        numbers = [
            f"{kinds[kind][unit]:.2f}" for kind in ("train", "sample") for unit in ("requests/s", "tokens/s")
        ]
        rows.append([name, kinds["sdk"]["version"], *numbers])
    if options.write:
        command = f"python -m benchmarks.tinker_servers {options.model_dir} --skyrl DIR --write"
        write_table(OUT, "Our Tinker server and SkyRL's", command, rows, NOTES)
    else:
        print(*map(" | ".join, rows), NOTES, sep="\n")


if __name__ == "__main__":
    main()
