"""Every engine under every layout that four processes allow, against the same engine in one process.

Under a layout prefixes that sequences share are computed once, where the engine can; in one process they are not.

`python -m tests.models.conformance` writes the table of differences to docs/conformance.md;
tests/models/test_conformance.py compares both with float64: a layout may differ from it by as much as one process does,
with a margin (limits). With the file of a job as its argument this module is the worker.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl.models.layout import Layout
from rl.processes import importing
from tests.models.small_configs import small_config
from tests.numeric import MARGIN, exact_twin
from tests.ports import free_port
from tests.tiny import write_config

LAYOUTS = {
    "FSDP2 x 2": Layout(shard=2),
    "HSDP 2 x 1": Layout(replicate=2),
    "TP2": Layout(tensor_parallel=2),
    "CP2": Layout(context_parallel=2),
    "FSDP2 x 4": Layout(shard=4),
    "HSDP 2 x 2": Layout(replicate=2, shard=2),
    "FSDP2 x TP2": Layout(shard=2, tensor_parallel=2),
    "FSDP2 x CP2": Layout(shard=2, context_parallel=2),
    "CP2 x TP2": Layout(context_parallel=2, tensor_parallel=2),
    "CP4": Layout(context_parallel=4),
}
ONE = "one process"
KINDS = {"titan": "TitanEngine", "hf": "HFEngine"}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Qwen3-MoE": {"model_type": "qwen3_moe", **MOE},
    "Llama": {"model_type": "llama", "tie_word_embeddings": False},
    "Gemma 2": {"model_type": "gemma2", "sliding_window": 24},  # soft-capped attention: padded rows
    "Gemma 3": {"model_type": "gemma3_text", **WINDOWS},
}
SMALL = {
    "Apertus": "apertus",  # persistent buffers
    "DeepSeek-V3": "deepseek_v3",  # experts that transformers stacks and vLLM does not
    "Zamba2": "zamba2",  # layers that share parameters
}
"""By model_type: small_configs.py."""


@dataclass(frozen=True)
class Case:
    engine: str
    model: str
    layout: str = ONE
    settings: dict[str, Any] = field(default_factory=dict)  # of EngineConfig
    in_float64: bool = False

    @property
    def name(self) -> str:
        words = [self.engine, self.model, *(f"{k}={v}" for k, v in self.settings.items()), self.layout]
        words += ["float64"] * self.in_float64
        return ", ".join(words)

    @property
    def one_process(self) -> "Case":
        """What it is compared with: the same without parallelism, and without recomputation."""
        settings = {k: v for k, v in self.settings.items() if k != "activation_checkpointing"}
        return replace(self, layout=ONE, settings=settings)

    @property
    def exact(self) -> "Case":
        """One process in float64, whatever the case computes in."""
        settings = {k: v for k, v in self.one_process.settings.items() if k not in ("dtype", "float8")}
        return replace(self, layout=ONE, settings=settings, in_float64=True)


def _titan(model: str, layouts: list[str], **settings: Any) -> list[Case]:
    return [Case("titan", model, layout, settings) for layout in layouts]


def _hf(model: str, layouts: list[str], **settings: Any) -> list[Case]:
    return [replace(case, engine="hf") for case in _titan(model, layouts, **settings)]


CASES = [
    *_titan("Qwen3", list(LAYOUTS)),
    *_titan("Qwen3", ["FSDP2 x 2", "CP2"], activation_checkpointing="selective"),
    *_titan("Qwen3", ["FSDP2 x TP2"], activation_checkpointing="full"),
    *_titan("Qwen3", ["FSDP2 x 2", "FSDP2 x TP2"], dtype="bfloat16"),
    *_titan("Qwen3", ["FSDP2 x 2"], float8=True),
    *_titan("Qwen3", ["FSDP2 x 2", "TP2", "CP2", "FSDP2 x TP2", "HSDP 2 x 2"], adapters=True),
    *_titan("Llama", ["FSDP2 x 2", "TP2", "FSDP2 x TP2", "CP2 x TP2"]),
    *_hf("Qwen3", ["FSDP2 x 2", "HSDP 2 x 2"]),
    *_hf("Gemma 3", ["FSDP2 x 2", "FSDP2 x 4", "HSDP 2 x 2"]),
    *_hf("Gemma 3", ["FSDP2 x 2"], activation_checkpointing="full"),
    *_hf("Gemma 3", ["FSDP2 x 2", "HSDP 2 x 2"], adapters=True),
    *_hf("Gemma 3", ["FSDP2 x 2"], dtype="bfloat16"),
    *_hf("Gemma 2", ["FSDP2 x 2"]),
    *_hf("Apertus", ["FSDP2 x 2"]),
    *_hf("DeepSeek-V3", ["FSDP2 x 2"]),
    *_hf("Zamba2", ["FSDP2 x 2"]),
    *_titan("Qwen3-MoE", ["FSDP2 x 2", "TP2", "CP2", "FSDP2 x 4", "FSDP2 x TP2"]),
]


# ---- the worker


def run_case(case: Case, directory: Path) -> dict[str, Any]:
    """Gathered on every rank: logits, gradients, and the losses of three AdamW steps."""
    import torch

    from rl.models.build import ENGINES
    from rl.models.engine_config import EngineConfig
    from rl.types import LoRA

    torch.set_num_threads(1)
    layout = LAYOUTS.get(case.layout, Layout())
    config = EngineConfig(layout=layout, seed=7, **case.settings)
    engine = ENGINES[case.engine](model_directory(directory, case.model), config)
    adapter = "policy" if engine.config.adapters else None
    if adapter:
        engine.adapters.add(adapter, LoRA(rank=4, alpha=8), seed=1)
    if not case.in_float64:
        return _compute(engine, adapter, case, directory)
    with exact_twin(engine, directory / f"{case.name}-weights") as twin:
        if adapter:
            twin.adapters.add(adapter, LoRA(rank=4, alpha=8), seed=1)
            for name, parameter in engine.adapters[adapter].parameters.items():
                twin.adapters[adapter].parameters[name].data.copy_(parameter.data)
        return _compute(twin, adapter, case, directory)


def _compute(engine: Any, adapter: str | None, case: Case, directory: Path) -> dict[str, Any]:
    from rl.batching import pack
    from rl.loss.cross_entropy import CrossEntropy
    from rl.types import OptimParams

    layout = engine.config.layout
    rng = np.random.default_rng(0)
    samples = _samples(rng)
    packing = engine.packing
    if case.layout == ONE:
        packing |= {"share_prefixes": False}
    batch = pack(samples, max_tokens=96, **packing)
    assert (batch.num_tokens < batch.num_unshared_tokens) == packing["share_prefixes"]
    scale = 1 / batch.num_target_tokens
    result: dict[str, Any] = {
        "losses": [],
        "initial": _published(engine, adapter),
        "logits": _gather_rows(engine, batch, adapter),
    }

    def loss() -> float:
        metrics = engine.forward_backward(batch, CrossEntropy(), adapter)
        parts = _everyone(metrics["loss:sum"])[:: layout.procs_per_row]
        return sum(parts) * scale

    # With eps far over the gradient AdamW moves each weight by lr / eps times its gradient: this reads the
    # gradient off, scaled up so far that the weights, and the rounding of what is published, do not blur it.
    checkpoint = directory / f"{case.name}-initial"
    engine.save(checkpoint)
    result["losses"].append(loss())
    read_off = OptimParams(lr=1e8, eps=1e4, betas=(0.0, 0.0), grad_scale=scale, max_grad_norm=0)
    engine.optim_step(read_off, adapter)
    after = _published(engine, adapter)
    result["gradients"] = {name: (result["initial"][name] - after[name]) / 1e4 for name in after}
    engine.load(checkpoint)
    for _ in range(3):
        result["losses"].append(loss())
        norm = engine.optim_step(OptimParams(lr=1e-3, grad_scale=scale), adapter)["grad_norm"]
        result.setdefault("norms", []).append(norm)
    logprobs: dict[int, Any] = {}
    for part in _everyone(engine.forward(batch, adapter)):
        logprobs |= part
    result["logprobs"] = logprobs
    if case.engine == "titan" and not (adapter or case.in_float64):
        result["loaded"] = _load_others(engine, case, directory)
    return result


def _load_others(engine: Any, case: Case, directory: Path) -> dict[str, Any]:
    """The engine takes over other weights from a directory.

    wrong: the tensors that it then publishes otherwise than the files have them. read, kept, file: elements that each
    rank read and has of them, and that the files hold.
    """
    import torch.distributed as dist

    from rl.models.export import named_state
    from rl.models.hf import HFWeights, tensor_names
    from rl.models.learner import local
    from rl.models.random_weights import draw_once

    path = model_directory(directory, case.model, "-with-weights")
    if dist.get_rank() == 0:
        draw_once("titan", path, 8)
    dist.barrier()
    read, whole = [], HFWeights.__call__

    def counting(weights: Any, name: str, part: Any = ()) -> Any:
        tensor = whole(weights, name, part)
        read.append(tensor.numel())
        return tensor

    HFWeights.__call__ = counting  # type: ignore[method-assign]
    try:
        engine.load_weights(path)
    finally:
        HFWeights.__call__ = whole  # type: ignore[method-assign]
    published, files = _published(engine, None), HFWeights(path)
    expected = {name: files(name).float() for name in tensor_names(path)}
    return {
        "wrong": sorted(n for n in published if not expected[n].equal(published[n])),
        "read": _everyone(sum(read)),
        "kept": _everyone(sum(local(tensor.detach()).numel() for _, tensor in named_state(engine._model))),
        "file": sum(tensor.numel() for tensor in expected.values()),
    }


def _samples(rng: np.random.Generator) -> list[Any]:
    """Groups with a prompt of their own, two answers of each going on after the same tokens; and one alone."""
    from rl.batching import supervised_sample

    samples = [supervised_sample(rng.integers(0, 128, 3), rng.integers(0, 128, 70))]
    for _ in range(3):
        prompt, begun = rng.integers(0, 128, rng.integers(1, 25)), rng.integers(0, 128, 6)
        for start in ([], begun, begun):
            answer = [*start, *rng.integers(0, 128, rng.integers(1, 50))]
            samples.append(supervised_sample(prompt, answer))
    return samples


def model_directory(directory: Path, model: str, suffix: str = "") -> Path:
    """Made whole or not there: ranks of two jobs ask for it at the same time."""
    path = directory / f"{model}{suffix}"
    if not path.exists():
        made = Path(tempfile.mkdtemp(dir=directory))
        if model in SMALL:
            small_config(SMALL[model]).save_pretrained(made)
        else:
            write_config(made, **MODELS[model])
        with suppress(OSError):  # another process was first
            made.rename(path)
    return path


def _everyone(value: Any) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _published(engine: Any, adapter: str | None) -> dict[str, Any]:
    """What a generator would assemble from every rank's shards."""
    from rl.weight_sync.manifest import Shard, assemble

    shards: dict[str, list[Any]] = {}
    own = [
        (Shard(s.name, s.data.dtype, s.global_shape, s.offsets, tuple(s.data.shape), ""), s.data.clone())
        for s in engine.export(adapter)
    ]
    for part in _everyone(own):
        for shard, data in part:
            shards.setdefault(shard.name, []).append((shard, data))
    return {name: tensor.float() for name, tensor in assemble(shards)}


def _gather_rows(engine: Any, batch: Any, adapter: str | None) -> dict[int, Any]:
    """Sample -> [its target tokens, V] logits."""
    rows = {}
    for micro, logits in zip(batch.ranks[engine.dp_rank], engine.logits(batch, adapter), strict=True):
        rows |= {int(i): logits[micro.sample_ids == i].float().numpy() for i in np.unique(micro.sample_ids)}
    return {i: row for part in _everyone(rows) for i, row in part.items()}


# ---- the comparison


def run(directory: Path, cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Case name -> its result, the reference cases included."""
    import torch

    references = [reference for case in cases for reference in (case.one_process, case.exact)]
    wanted = {case.name: case for case in [*cases, *references]}

    job = directory / "job.json"
    job.write_text(
        json.dumps([[c.engine, c.model, c.layout, c.settings, c.in_float64] for c in wanted.values()])
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.conformance", str(job)], env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: torch.load(directory / f"{name}.pt", weights_only=False) for name in wanted}


def differences(got: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Largest absolute differences. Other tensors than expected are an error.

    Of gradients: the norm of a tensor's difference in proportion to the norm of that gradient, or to a
    ten-thousandth of the whole gradient's where that is larger.
    """
    assert got["initial"].keys() == expected["initial"].keys()
    assert got["logits"].keys() == expected["logits"].keys() == got["logprobs"].keys()

    def worst(key: str) -> float:
        pairs = [(np.asarray(got[key][n]), np.asarray(expected[key][n])) for n in expected[key]]
        return max(float(np.abs(a - b).max()) for a, b in pairs)

    def norm(gradients: Any) -> float:
        return float(np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in gradients)))

    whole = norm(expected["gradients"].values())
    apart = [
        norm([got["gradients"][n] - g]) / max(norm([g]), 1e-4 * whole)
        for n, g in expected["gradients"].items()
    ]
    return {
        "initial": worst("initial"),  # random weights do not depend on the layout
        "logits": worst("logits"),
        "loss": abs(got["losses"][0] - expected["losses"][0]),
        "gradients": max(apart),
        "3 steps": float(np.abs(np.subtract(got["losses"], expected["losses"])).max()),
        "norms": float(np.abs(np.divide(got["norms"], expected["norms"]) - 1).max()),
        "logprobs": worst("logprobs"),
    }


def limits(case: Case, results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What each difference of a case from float64 may be: a margin times that of one process.

    A loss is a mean over tokens and a norm one number: by luck one process may be right about them, so they count as
    no nearer than the mean logit and the gradient are.
    """
    one, exact = results[case.one_process.name], results[case.exact.name]
    own = differences(one, exact)
    mean = np.mean([np.abs(one["logits"][i] - exact["logits"][i]).mean() for i in exact["logits"]])
    least = dict.fromkeys(own, 2**-23) | {"loss": mean, "3 steps": mean, "norms": own["gradients"]}
    # Twice for float8, whose own gradients are off by a quarter.
    margin = 2 if case.settings.get("float8") else MARGIN
    return {name: margin * max(error, least[name]) for name, error in own.items()}


def write_table(path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        results = run(Path(directory), CASES)
    lines = [
        "# Conformance of the engines",
        "",
        "Each engine under each layout against the same engine in one process, from the same random weights:",
        "largest differences of the logits, the loss, the gradients (the norm of each tensor's difference in",
        "proportion to that tensor's gradient, or to a ten-thousandth of all of it where that is more; read off the",
        "weights after one step, so their reduction over ranks is included) and the losses of three AdamW steps.",
        "fp32 where nothing else is said; 10 sequences of 22 to 73 tokens, tiny models. Under a layout tokens that",
        "sequences share are computed once (but for Gemma 2 and Zamba2, whose rows are padded); in one process each",
        "sequence computes its own. The last column compares both with one process in float64: a test fails where a",
        f"layout is over {MARGIN} times as far from it as one process is, or as a rounding floor where that is more (float8:",
        "twice); the number is the largest share of that. float8 scales each rank's activations by their own maximum,",
        "so its results depend on how tokens are split.",
        "",
        "Made by `python -m tests.models.conformance` on a CPU.",
        "",
        "| engine | model | layout | settings | logits | loss | gradients | losses of 3 steps | of the limit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        d = differences(results[case.name], results[case.one_process.name])
        settings = ", ".join(f"{k}={v}" for k, v in case.settings.items())
        numbers = " | ".join(f"{d[key]:.0e}" for key in ("logits", "loss", "gradients", "3 steps"))
        allowed, apart = limits(case, results), differences(results[case.name], results[case.exact.name])
        share = max(apart[name] / limit for name, limit in allowed.items() if name != "initial")
        lines.append(
            f"| {KINDS[case.engine]} | {case.model} | {case.layout} | {settings} | {numbers} | {share:.2f} |"
        )
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    if len(sys.argv) == 1:
        write_table(Path("docs/conformance.md"))
        return
    _run_job(Path(sys.argv[1]))


def _run_job(job: Path) -> None:
    """The ranks are forked once everything is imported: one and two fit beside each other, then four."""
    with importing():
        from torch.multiprocessing import start_processes

        from rl.models.build import ENGINES

        list(ENGINES.values())
    cases = [Case(*arguments) for arguments in json.loads(job.read_text())]

    def start(num_procs: int) -> Any:
        alike = [case for case in cases if LAYOUTS.get(case.layout, Layout()).num_procs == num_procs]
        arguments = (num_procs, free_port(), alike, job.parent)
        return start_processes(_rank, arguments, num_procs if alike else 0, join=False, start_method="fork")

    for side_by_side in ((1, 2), (4,)):
        for ranks in [start(num_procs) for num_procs in side_by_side]:
            while not ranks.join():
                pass


def _rank(rank: int, num_procs: int, port: int, cases: list[Case], directory: Path) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_procs)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for case in cases:
        result = run_case(case, directory)
        if rank == 0:
            torch.save(result, directory / f"{case.name}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
