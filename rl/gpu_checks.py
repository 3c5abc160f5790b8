"""The checks of `rl gpu-check` that need an engine alone, and what all share.

Each takes a model's directory, returns figures, and raises where something is wrong.

Imports are inside: each check runs in a process of its own.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = 300.0  # of a check; where nothing is compiled yet, vLLM's start alone took 50 to 80 on an H200


def with_weights(config_dir: Path, scratch: Path) -> Path:
    """What is in the directory, with random weights. Raises RuntimeError: its last line."""
    code = (
        "import sys; from rl.models.titan import TitanEngine as E; from rl.models.engine_config import "
        "EngineConfig as C; E(sys.argv[1], C(seed=0, max_seq_len=512)).save_hf(sys.argv[2])"
    )
    out = scratch / "weights"
    command = [sys.executable, "-c", code, str(config_dir), str(out)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.SubprocessError as error:
        raise RuntimeError(str(getattr(error, "stderr", "") or error).strip().splitlines()[-1]) from error
    return out


def imports(model: Path) -> dict[str, Any]:
    import monarch.actor  # noqa: F401
    import torch
    import torchstore  # noqa: F401
    import vllm

    values: dict[str, Any] = {"torch": torch.__version__, "vllm": vllm.__version__}
    if torch.cuda.is_available():
        from rl.models.cuda import activate_flash_attention

        values |= {"CUDA": torch.version.cuda, "varlen attention by": activate_flash_attention()}
    return values


def _batches(vocab_size: int, count: int = 20, multiple_of: int = 1) -> list[Any]:
    """Micro-batches of varied lengths, always the same ones."""
    import numpy as np

    from rl.batching import pack, supervised_sample

    rng = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        lengths = rng.integers(8, 120, rng.integers(1, 5)).tolist()
        rows = [rng.integers(3, vocab_size, 4 + length).tolist() for length in lengths]
        samples = [supervised_sample(row[:4], row[4:]) for row in rows]
        batches.append(pack(samples, num_ranks=1, max_tokens=512, multiple_of=multiple_of))
    return batches


def make_engine(model: Path, **settings: Any) -> Any:
    from rl.models.build import ENGINES
    from rl.models.engine_config import EngineConfig

    kind = settings.pop("kind", "titan")
    return ENGINES[kind](model, EngineConfig(max_seq_len=512, **settings))


def _gap(first: Any, second: Any, batches: list[Any], adapter: str | None = None) -> dict[str, float]:
    """Between the logprobs of two engines."""
    import numpy as np

    gaps = [
        np.abs(a - b)
        for batch in batches
        for a, b in zip(
            first.forward(batch, adapter).values(), second.forward(batch, adapter).values(), strict=True
        )
    ]
    joined = np.concatenate(gaps)
    return {"gap mean": float(joined.mean()), "gap max": float(joined.max())}


def compile_(model: Path) -> dict[str, Any]:
    """fullgraph=True, and a limit of compilations, which kinds of rows and of adapters must not pass."""
    from rl.batching import pack, supervised_sample
    from rl.loss.cross_entropy import CrossEntropy
    from rl.models.hf import read_config
    from rl.types import LoRA, OptimParams

    vocab_size = read_config(model)["vocab_size"]
    batches = _batches(vocab_size)
    for length in (20, 60, 90):  # with branches: rows of 60 tokens, 140 and 200
        prompt = [3 + i % (vocab_size - 3) for i in range(length)]
        samples = [supervised_sample(prompt, prompt[: 10 + i]) for i in range(length // 9)]
        batches.append(pack(samples, max_tokens=512, share_prefixes=True))
    gaps_of: dict[str, float] = {}
    for ranks in ((0,), (8, 16)):  # 0: the model itself
        first, second = (
            make_engine(model, dtype="bfloat16", adapters=ranks != (0,), compile=c) for c in (True, False)
        )
        for rank in ranks:
            adapter = f"rank {rank}" if rank else None
            for engine in (first, second):
                if adapter:
                    engine.adapters.add(adapter, LoRA(rank=rank), seed=0)
                for batch in batches:
                    engine.forward(batch, adapter)
                    engine.forward_backward(batch, CrossEntropy(), adapter)
                engine.optim_step(OptimParams(lr=1e-4), adapter)
            gaps = _gap(first, second, batches, adapter)
            gaps_of |= {f"{adapter or 'model'}: {name}": value for name, value in gaps.items()}
            hold(gaps["gap mean"], 0.05)
    return gaps_of


def float8(model: Path) -> dict[str, Any]:
    """Linear layers in float8 against bfloat16, both compiled. Raises where both compute the same."""
    from rl.loss.cross_entropy import CrossEntropy
    from rl.models.hf import read_config
    from rl.types import OptimParams

    plain, rounded = (make_engine(model, dtype="bfloat16", compile=True, float8=on) for on in (False, True))
    batches = _batches(read_config(model)["vocab_size"], 5, rounded.config.row_multiple)
    figures, norms = _gap(plain, rounded, batches), []
    for engine in (plain, rounded):
        for batch in batches:
            engine.forward_backward(batch, CrossEntropy())
        norms.append(engine.optim_step(OptimParams(lr=0.0))["grad_norm"])
    figures["gradient norms apart"] = abs(norms[1] / norms[0] - 1)
    if not figures["gap max"]:
        raise RuntimeError("float8=True changed nothing: no linear layer computes in float8")
    hold(figures["gap mean"], 0.2)
    hold(figures["gradient norms apart"], 0.2)
    return figures


def attention(model: Path) -> dict[str, Any]:
    """torchtitan's attention of this device against transformers', in bfloat16."""
    from rl.models.hf import read_config

    batches = _batches(read_config(model)["vocab_size"], 5)
    titan, hf = (make_engine(model, kind=kind, dtype="bfloat16") for kind in ("titan", "hf"))
    gaps = _gap(titan, hf, batches)
    hold(gaps["gap mean"], 0.05)
    return gaps


def trees(model: Path) -> dict[str, Any]:
    """Rows of trees against plain rows in bfloat16: distance to float32, gradient norm, seconds of a step."""
    import numpy as np

    from rl.batching import pack, supervised_sample
    from rl.loss.cross_entropy import CrossEntropy
    from rl.models.hf import read_config
    from rl.types import OptimParams

    rng = np.random.default_rng(0)
    engine, reference = make_engine(model, dtype="bfloat16"), make_engine(model, dtype="float32")

    def tokens(count: int) -> list[int]:
        return rng.integers(3, read_config(model)["vocab_size"], count).tolist()

    def distance(samples: list[Any], share: bool) -> tuple[Any, float]:
        batch = pack(samples, max_tokens=512, multiple_of=engine.config.row_multiple, share_prefixes=share)
        logprobs, exact = engine.forward(batch), reference.forward(pack(samples, max_tokens=512))
        return batch, float(np.mean([np.abs(logprobs[i] - exact[i]).mean() for i in exact]))

    samples = [supervised_sample(p, tokens(20 + i)) for p in (tokens(200), tokens(150)) for i in range(8)]
    norms, figures = [], {}
    for way, share in (("plain", False), ("trees", True)):
        batch, figures[f"{way}, gap mean"] = distance(samples, share)
        for _ in range(2):  # the first compiles
            began = time.monotonic()
            engine.forward_backward(batch, CrossEntropy())
            norms.append(engine.optim_step(OptimParams(lr=0.0))["grad_norm"])
            figures[f"{way}, s"] = time.monotonic() - began
    figures["gradient norms apart"] = abs(norms[-1] / norms[0] - 1)
    prompt = tokens(40)  # and 88 tokens in all: torch has another kernel for rows of under 128
    _, figures["short row, gap mean"] = distance(
        [supervised_sample(prompt, tokens(12)) for _ in range(4)], True
    )
    for way in ("trees", "short row"):
        hold(figures[f"{way}, gap mean"], 1.5 * figures["plain, gap mean"] + 1e-3)
    hold(figures["gradient norms apart"], 0.05)
    return figures


def suspend(model: Path) -> dict[str, Any]:
    import torch

    from rl.models.hf import read_config

    engine = make_engine(model, dtype="bfloat16")
    (batch,) = _batches(read_config(model)["vocab_size"], 1)
    before, held = engine.forward(batch), torch.cuda.memory_allocated()
    began = time.monotonic()
    engine.suspend("/")  # no file is written: what a GPU holds goes to the host's memory
    left, suspended = torch.cuda.memory_allocated(), time.monotonic()
    engine.resume()
    torch.cuda.synchronize()
    resumed = time.monotonic()
    after = engine.forward(batch)
    if any((before[i] != after[i]).any() for i in before):
        raise RuntimeError("logprobs differ after suspend() and resume()")
    seconds = {"seconds to suspend": suspended - began, "seconds to resume": resumed - suspended}
    return {"MiB on the device": held / 2**20, "MiB suspended": left / 2**20, **seconds}


def self_check(model: Path) -> dict[str, Any]:
    began = time.monotonic()
    engine = make_engine(model, kind="hf", dtype="bfloat16")
    return {"packed": engine._model.packed, "seconds": time.monotonic() - began}


_OF_A_RANK = re.compile(r"^(?:\[rank\d+\]:\s*)?((?!.*ChildFailedError)[\w.]*(?:Error|Exception)\b.*)", re.M)


def context_parallel(model: Path) -> dict[str, Any]:
    """Two processes of this same check, each with half of every row."""
    from rl.models.hf import read_config

    vocab_size = read_config(model)["vocab_size"]
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "rl.cli", "gpu-check", "--worker", "context_parallel", str(model)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            errors = _OF_A_RANK.findall(done.stderr)  # torchrun's own report follows
            raise RuntimeError(errors[-1] if errors else done.stderr[-300:])
        two = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"logprobs"')))
        alone = make_engine(model).forward(_batches(vocab_size, 1)[0])
        gap = max(
            abs(a - b) for i, row in alone.items() for a, b in zip(row, two["logprobs"][str(i)], strict=True)
        )
        hold(float(gap), 1e-3)
        return {"gap max": float(gap)}
    from rl.models.layout import Layout

    engine = make_engine(model, layout=Layout(context_parallel=2))
    (batch,) = _batches(vocab_size, 1, engine.config.row_multiple)
    return {"logprobs": {i: row.tolist() for i, row in engine.forward(batch).items()}}


def hold(value: float, limit: float) -> None:
    if not value < limit:
        raise RuntimeError(f"{value:.3g} is not under {limit:g}")
