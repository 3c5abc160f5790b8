"""What a training step costs, of both engines, two bare loops and transformers with padded rows.

`python -m benchmarks.engine [--rounds N] [--write]` prints a table; with --write it goes to docs/engine_benchmark.md. All
variants take a step in turns, in one process: the machine's noise meets all of them. A ratio is the median over rounds of
the ratio within one round. Peak memory is that of a process of each variant's own.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import Rows, machine, spread, table, write_page
from rl.cluster.machine import num_cores

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
NUM_TOKENS, NUM_PROMPT = 2048, 16
LR = 1e-5
NEAR = 0.02  # nats: how far losses in bf16 may lie apart where the computation is the same
NOTES = f"""SmolLM2-135M's shape with random weights, the same for all; {NUM_TOKENS:,} tokens in sequences of unequal length, of which all but the
first {NUM_PROMPT} are trained on; bf16 with fp32 master weights, gradients clipped, fused AdamW. The first losses of all variants lie within
{NEAR} nats.

- TitanEngine, HFEngine: ours, a packed row.
- our attention and head in a bare loop: TitanEngine's module (torchtitan's decoder with our blockwise attention and our head,
  which scores targets alone), without the engine around it.
- transformers in a bare loop: transformers' own module with its SDPA and its whole head, each sequence by itself, so that nothing
  is padded; bf16 weights compute and fp32 ones are optimized.
- transformers, padded rows: what its Trainer does with bf16=True: autocast over fp32 weights, one batch of rows that are padded
  to the longest, the mean over all of its targets.

Seconds: median of the rounds (least to most). The share of the peak is of the best bf16 matmul measured before or after."""


def samples() -> list[Any]:
    from rl.batching import supervised_sample

    rng = np.random.default_rng(0)
    lengths = rng.integers(64, 448, 8)
    lengths[-1] += NUM_TOKENS - lengths.sum()
    rows = [rng.integers(0, SMOLLM2["vocab_size"], n) for n in lengths]
    return [supervised_sample(row[:NUM_PROMPT], row[NUM_PROMPT:]) for row in rows]


# ---- the variants: each returns a function that takes one whole step


def engine_step(kind: str, model_dir: Path) -> Callable[[], float]:
    from rl.batching import pack
    from rl.loss.cross_entropy import CrossEntropy
    from rl.models.build import ENGINES
    from rl.models.engine_config import EngineConfig
    from rl.types import OptimParams

    engine = ENGINES[kind](model_dir, EngineConfig(dtype="bfloat16"))
    batch = pack(samples())

    def step() -> float:
        metrics = engine.forward_backward(batch, CrossEntropy())
        engine.optim_step(OptimParams(LR, 1 / batch.num_target_tokens))
        return metrics["loss:sum"] / metrics["tokens:sum"]

    return step


def bare_step(model: Any, add_gradients: Callable[[], float]) -> Callable[[], float]:
    """bf16 weights compute, fp32 ones are optimized. add_gradients: returns the mean loss, in whose units gradients are."""
    import torch

    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)

    def step() -> float:
        loss = add_gradients()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        return loss

    return step


def our_module_step(model_dir: Path) -> Callable[[], float]:
    """TitanEngine's module with nothing around it."""
    import torch

    from rl.batching import pack
    from rl.models.attention import pack_documents
    from rl.models.decoder_config import model_spec
    from rl.models.hf import HFWeights, expert_names, hf_name, read_config
    from rl.models.load_weights import load_tensors

    model, cpu = model_spec(read_config(model_dir), packed_attention=True).model.build(), torch.device("cpu")
    with torch.no_grad():
        model.init_states(buffer_device=cpu)
    load_tensors(model, HFWeights(model_dir), hf_name, expert_names, cpu)
    (micro,) = pack(samples()).ranks[0]
    tokens, positions = map(torch.from_numpy, (micro.tokens, micro.positions))
    predictors, targets = map(torch.from_numpy, (micro.predictors, micro.targets))

    def add_gradients() -> float:
        documents = pack_documents(micro.positions, cpu)
        logprobs, _ = model(tokens[None], positions[None], documents, predictors, targets)
        loss = -logprobs.sum() / len(targets)
        loss.backward()
        return loss.item()

    return bare_step(model, add_gradients)


def transformers_module_step(model_dir: Path) -> Callable[[], float]:
    """transformers' module, each sequence by itself."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    rows = samples()
    num_targets = sum(row.num_targets for row in rows)

    def add_gradients() -> float:
        total = 0.0
        for row in rows:
            labels = torch.from_numpy(np.where(row.loss_mask, row.tokens, -100))[None]
            tokens = torch.from_numpy(row.tokens)[None]
            loss = model(tokens, labels=labels, use_cache=False, num_items_in_batch=num_targets).loss
            loss.backward()
            total += loss.item()
        return total

    return bare_step(model, add_gradients)


def padded_batch_step(model_dir: Path) -> Callable[[], float]:
    step = padded_step(model_dir)
    return lambda: step(samples())


def padded_step(model_dir: Path, max_tokens: int = 0) -> Callable[[list[Any]], float]:
    """What transformers' Trainer does with bf16=True: a step on some samples.

    That is autocast over fp32 weights, rows padded to the longest, labels of -100, and the mean over all targets.
    max_tokens: of a micro-batch, as equal in rows as can be; 0: one batch.
    """
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(samples: list[Any]) -> float:
        longest, num_targets = max(map(len, samples)), sum(row.num_targets for row in samples)
        most_rows = max(1, max_tokens // longest) if max_tokens else len(samples)
        parts = np.array_split(np.arange(len(samples)), -(-len(samples) // most_rows))
        losses = [add_gradient([samples[i] for i in part], longest, num_targets) for part in parts]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses)

    def add_gradient(rows: list[Any], longest: int, num_targets: int) -> float:

        def padded(values: Callable[[Any], np.ndarray], fill: int) -> torch.Tensor:
            whole = [np.pad(values(row), (0, longest - len(row)), constant_values=fill) for row in rows]
            return torch.from_numpy(np.stack(whole))

        batch = {
            "input_ids": padded(lambda row: row.tokens, 0),
            "attention_mask": padded(lambda row: np.ones(len(row), np.int64), 0),
            "labels": padded(lambda row: np.where(row.loss_mask, row.tokens, -100), -100),
        }
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch, use_cache=False, num_items_in_batch=num_targets).loss
        loss.backward()
        return loss.item()

    return step


VARIANTS: dict[str, Callable[[Path], Callable[[], float]]] = {
    "TitanEngine": lambda model_dir: engine_step("titan", model_dir),
    "our attention and head in a bare loop": our_module_step,
    "HFEngine": lambda model_dir: engine_step("hf", model_dir),
    "transformers in a bare loop": transformers_module_step,
    "transformers, padded rows": padded_batch_step,
}


# ---- what is measured


def times(model_dir: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, variants in turns."""
    steps = {name: build(model_dir) for name, build in VARIANTS.items()}
    first = {name: step() for name, step in steps.items()}  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    last = {}
    for i in range(rounds):
        names = list(steps)
        for name in names[i % len(names) :] + names[: i % len(names)]:  # nobody always follows the same one
            started = time.perf_counter()
            last[name] = steps[name]()
            seconds[name].append(time.perf_counter() - started)
    assert all(last[name] < first[name] for name in steps), (first, last)  # each one trains
    assert max(first.values()) - min(first.values()) < NEAR, first  # and all compute the same
    return seconds


def peak_gib(variant: str, model_dir: Path) -> float:
    """Of this process, libraries included."""
    step = VARIANTS[variant](model_dir)
    step()
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def matmul_peak() -> float:
    """The best of a few bf16 matmuls of the step's own size and larger, in FLOP/s."""
    import torch

    best = 0.0
    sizes = [(2048, 576, 1536), (2048, 1536, 576), (2048, 576, 49152), (2048,) * 3, (4096,) * 3]
    for m, k, n in sizes:
        a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
        for _ in range(4):
            started = time.perf_counter()
            a @ b
            best = max(best, 2 * m * k * n / (time.perf_counter() - started))
    return best


def step_flops() -> float:
    """Multiplications and additions in matmuls and attention, forward and backward (3 times the forward)."""
    rows, c = samples(), SMOLLM2
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    per_token = c["hidden_size"] * (2 * q + 2 * kv + 3 * c["intermediate_size"])
    attention = sum(len(row) ** 2 for row in rows) * q  # causal: half of q k^T and of p v
    head = sum(int(row.loss_mask.sum()) for row in rows) * c["hidden_size"] * c["vocab_size"]
    return 3 * 2 * (c["num_hidden_layers"] * (NUM_TOKENS * per_token + attention) + head)


# ---- all of them


def make_model(directory: Path) -> None:
    """A model directory with random weights, for all variants."""
    import torch
    import transformers

    (directory / "config.json").write_text(json.dumps(SMOLLM2))
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(directory)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(SMOLLM2))


def run_all(rounds: int) -> tuple[Rows, str]:
    """The table, and what else there is to know."""
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        memory = {name: _child(directory, "--memory_of", name) for name in VARIANTS}
        measured = _child(directory, "--times", "--rounds", str(rounds))
    peak, sizes = measured["peak"], [len(row) for row in samples()]
    rows = [
        ["", "s a step", "tokens/s", "share of bf16 peak", "TitanEngine is faster by", "peak memory, GiB"]
    ]
    for name, seconds in measured["seconds"].items():
        middle = statistics.median(seconds)
        titan = measured["seconds"]["TitanEngine"]
        ratios = [other / own for other, own in zip(seconds, titan, strict=True)]
        rows.append([
            name, spread(seconds), f"{NUM_TOKENS / middle:.0f}", f"{step_flops() / middle / peak:.0%}", spread(ratios),
            f"{memory[name]:.1f}",
        ])  # fmt: skip
    facts = (
        f"{rounds} rounds; {peak / 1e9:.0f} GFLOP/s bf16 matmul peak; {len(sizes)} sequences of {min(sizes)} to {max(sizes)} tokens, "
        f"{len(sizes) * max(sizes)} tokens when padded; {step_flops() / 1e12:.2f} TFLOP a step without padding."
    )
    return rows, facts


def _child(model_dir: str, *arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.engine", "--model_dir", model_dir, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(num_cores())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="write docs/engine_benchmark.md")
    parser.add_argument("--model_dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory_of", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--times", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(json.dumps(peak_gib(arguments.memory_of, arguments.model_dir)))
    elif arguments.times:
        peak = matmul_peak()
        seconds = times(arguments.model_dir, arguments.rounds)
        print(json.dumps({"seconds": seconds, "peak": max(peak, matmul_peak())}))
    else:
        machine()
        rows, facts = run_all(arguments.rounds)
        if arguments.write:
            command = f"python -m benchmarks.engine --rounds {arguments.rounds} --write"
            packages = ("transformers", "torchtitan")
            write_page(
                "engine_benchmark",
                "What a training step costs",
                command,
                rows,
                facts,
                NOTES,
                packages=packages,
            )
        else:
            print(table(rows), facts, sep="\n")


if __name__ == "__main__":
    main()
