"""`rl gpu-check`: the stack on a GPU, in one table, for its first hour. A check ends after five minutes.

Each check is a process of its own, so that what fails, hangs or crashes costs one row. On a CPU those run
that can, and the others say what they need.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.cluster.machine import look_at_host
from rl.command_flags import take_value
from rl.errors import ConfigError
from rl.gpu_checks import (
    SECONDS,
    attention,
    compile_,
    context_parallel,
    float8,
    imports,
    self_check,
    suspend,
    trees,
    with_weights,
)
from rl.gpu_memory_check import LEAST_GIB, memory
from rl.gpu_stack_checks import moe, stack
from rl.models.hf import read_config
from rl.models.layout import Layout
from rl.plan.cluster import Host
from rl.processes import kill_tree
from rl.types import LoRA

_LINES = 12
"""Of stderr that a row shows whose check failed: the end of a log may be among them."""


@dataclass(frozen=True)
class Check:
    """`run(model_dir)` returns figures, and raises where something is wrong. `needs`: GPUs, at least."""

    name: str
    question: str
    run: Callable[[Path], dict[str, Any]]
    needs: int = 0
    gib: float = 0.0  # of each GPU, at least
    capability: tuple[int, int] = (0, 0)  # likewise
    num_procs: int = 1  # that need a GPU each, where there is one
    own_model: bool = False  # means something for a model of the user's alone
    any_model: bool = True  # needs one


CHECKS = (
    Check("imports", "Monarch, torchstore and vLLM beside this torch", imports, any_model=False),
    Check("fp32", "trainer against generator in float32, three versions", stack("float32", 1e-3)),
    Check("bf16", "the same in bfloat16", stack("bfloat16", 0.05)),
    Check(
        "bf16_no_graphs", "the same without CUDA graphs", stack("bfloat16", 0.05, cuda_graphs="off"), needs=1
    ),
    Check("moe", "the same with experts", moe),
    Check("lora", "the same with an adapter that learns", stack("bfloat16", 0.05, {"lora": LoRA(rank=8)})),
    Check("turns", "the same by turns", stack("bfloat16", 0.05, placement="by_turns")),
    Check(
        "fsdp",
        "the same, a trainer of two processes",
        stack("bfloat16", 0.05, {"layout": Layout(shard=2)}),
        num_procs=2,
    ),
    Check(
        "tp",
        "the same, a generator of two processes",
        stack("bfloat16", 0.05, tensor_parallel=2),
        num_procs=2,
    ),
    Check("attention", "TitanEngine's attention against HFEngine's in bfloat16", attention),
    Check("trees", "prefixes that are computed once, against each sequence for itself", trees),
    Check(
        "compile",
        "torch.compile over rows of varied lengths, some with branches, and two adapters",
        compile_,
        1,
    ),
    Check("float8", "float8 and torch.compile against bfloat16", float8, needs=1, capability=(8, 9)),
    Check("suspend", "Engine.suspend() and resume()", suspend, needs=1),
    Check(
        "memory",
        "what a step of Qwen3-0.6B's shape takes, against rl plan",
        memory,
        needs=1,
        gib=LEAST_GIB,
        any_model=False,
    ),
    Check(
        "context_parallel", "two processes that share each row, against one", context_parallel, num_procs=2
    ),
    Check("self_check", "HFEngine's check of a model of yours", self_check, own_model=True),
)


def gpu_check(arguments: Sequence[str]) -> int:
    """Print a row for each check. Returns 0 where all that can run here passed."""
    if len(arguments) == 3 and arguments[0] == "--worker":
        return _work(arguments[1], Path(arguments[2]))
    rest = list(arguments)
    model_dir = take_value(rest, "--model", "DIRECTORY")
    if rest:
        raise ConfigError(f"rl gpu-check takes --model DIRECTORY or nothing, not {' '.join(arguments)!r}")
    own = Path(model_dir).resolve() if model_dir else None
    if own:
        read_config(own)
    machine, failed = look_at_host(), []
    print(f"{_describe(machine)}\n")
    with tempfile.TemporaryDirectory(prefix="rl-gpu-check-") as scratch:
        model, why_none = own, ""
        if model is None:
            try:
                model = _tiny_model(Path(scratch))
            except RuntimeError as error:
                why_none = f"there is no model: {error}"[:300]
                failed.append("model")
                print(f"FAIL  {'model':17} TitanEngine's random weights: {why_none}", flush=True)
        for check in CHECKS:
            reason = _why_not(check, machine, own)
            if reason or (why_none and check.any_model):
                reason = reason or "needs the model"
                print(f"-     {check.name:17} {check.question}: {reason}", flush=True)
                continue
            began = time.monotonic()
            wrong, figures = _run(check, model or Path(scratch))
            seconds = f"{time.monotonic() - began:.0f} s"
            print(f"{'FAIL' if wrong else 'ok':5} {check.name:17} {check.question}: ", end="")
            reason, *rest = wrong.splitlines() or [""]
            print(f"{reason or _words(figures)} ({seconds})")
            print("".join(f"        {line}\n" for line in rest), end="", flush=True)
            if wrong:
                failed.append(check.name)
    print(f"\n{'failed: ' + ', '.join(failed) if failed else 'all that could run passed'}")
    if machine.gpus:
        print("please report this table, with the model and the output of rl doctor")
    return 1 if failed else 0


def _why_not(check: Check, machine: Host, own: Path | None) -> str:
    needs = max(check.needs, check.num_procs) if machine.gpus else check.needs
    if len(machine.gpus) < needs:
        return f"needs {needs} GPU{'s' * (needs > 1)}"
    if any(gpu.gib < check.gib for gpu in machine.gpus):
        return f"needs a GPU of {check.gib:g} GiB"
    if any(gpu.capability < check.capability for gpu in machine.gpus):
        return "needs GPUs of compute capability " + ".".join(map(str, check.capability))
    return "needs --model DIRECTORY" if check.own_model and own is None else ""


def _run(check: Check, model: Path) -> tuple[str, dict[str, Any]]:
    """What went wrong, if anything, with the lines that came before on stderr; and the figures."""
    command = [sys.executable, "-m", "rl.cli", "gpu-check", "--worker", check.name, str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, errors = process.communicate(timeout=SECONDS)
        except BaseException as error:
            kill_tree(process.pid)  # torchrun's ranks have sessions of their own
            if isinstance(error, subprocess.TimeoutExpired):
                return f"took longer than {SECONDS:.0f} s", {}
            raise
    if process.returncode:
        lines = [line[:300] for line in errors.splitlines() if line.strip()][-_LINES:]
        *before, reason = lines or [f"ended with code {process.returncode}"]
        return "\n".join([reason, *before]), {}
    return "", json.loads(output.splitlines()[-1])


def _work(name: str, model: Path) -> int:
    (check,) = [check for check in CHECKS if check.name == name]
    figures = check.run(model)
    if os.environ.get("RANK", "0") == "0":  # of several processes, which all know them
        print(json.dumps(figures), flush=True)
    return 0


def _words(figures: dict[str, Any]) -> str:
    shown = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in figures.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _describe(machine: Host) -> str:
    if not machine.gpus:
        return f"no GPU: {machine.num_cores} cores"
    return "\n".join(
        f"GPU {i}: {g.name}, {g.gib:.1f} GiB, {g.capability}" for i, g in enumerate(machine.gpus)
    )


def _tiny_model(scratch: Path) -> Path:
    """A Qwen3 of random weights."""
    from rl.envs.sort_letters import ALPHABET
    from rl.models.sources import TinyQwen3

    return with_weights(TinyQwen3(ALPHABET, num_kv_heads=2, max_length=512).materialize(scratch), scratch)
