"""Nearly every architecture that transformers and vLLM share, on HFEngine and as a generator: right, or refused.

`python -m tests.models.architectures` writes the table to docs/models.md; test_architectures.py holds it. With
a directory, this module is the generator's side: it samples with what was published there, and writes answers.
"""

# holds: meaning, rounding moves these by 1e-5 at most and a wrong tensor by over 0.1

import asyncio
import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.small_configs import random_model

OF_THE_CONFORMANCE_TABLE = ("qwen3", "qwen3_moe", "llama", "gemma2", "gemma3_text")
# Of which an audit named a mistake: buffers, randomness, windows, positions, parameters that layers share.
ONCE_WRONG = (
    *("gemma4_text", "apertus", "deepseek_v3", "glm4_moe", "minimax_m2", "solar_open", "mimo_v2_flash"),
    *("exaone_moe", "seed_oss", "phimoe", "starcoder2", "mixtral", "opt", "cohere2", "gpt_neo", "zamba2"),
)
OTHERS = (
    *("afmoe", "arcee", "axk1", "bloom", "cohere", "cohere2_moe", "cwm", "dbrx", "deepseek_v2"),
    *("deepseek_v32", "deepseek_v4", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "falcon_h1"),
    *("falcon_mamba", "flex_olmo", "gemma", "gemma3n_text", "glm", "glm4", "glm4_moe_lite", "glm_moe_dsa"),
    *("gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe"),
    *("granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hrm_text", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "inkling_text", "jais2", "jamba", "kimi_linear"),
    *("laguna", "lfm2", "lfm2_moe", "llama4_text", "longcat_flash", "mamba", "mamba2", "mellum"),
    *("minicpm3", "ministral3", "mistral", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3"),
    *("olmo_hybrid", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3_5_moe_text", "qwen3_5_text"),
    *("qwen3_next", "smollm3", "stablelm", "vaultgemma"),
)
MODEL_TYPES = (*OF_THE_CONFORMANCE_TABLE, *ONCE_WRONG, *OTHERS)
LIMIT = 1e-3
"""Of the logits' standard deviation, and of the gradient's norm: rounding makes 1e-6, a wrong tensor 0.1."""
GAP_LIMIT = 3e-3  # nats: the default of max_logprob_diff in float32, over which a run ends at its first step


@dataclass
class Row:
    """What became of one architecture. Differences are None where there was nothing to compare."""

    model_type: str
    architecture: str
    rows: str = ""  # how HFEngine computes them
    logits: float | None = None  # in standard deviations of transformers' logits
    gradient: float | None = None  # in norms of transformers' gradient
    twice: float | None = None  # the gradient's second computation against the first
    reload: float | None = None  # logits of what save_hf wrote, in transformers
    gap: float | None = None  # nats, mean: vLLM with the published weights against the engine
    own_gap: float | None = None  # where that is over the limit: the same with the directory's weights
    refused: str = ""

    @property
    def outcome(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        differences = (self.logits, self.gradient, self.twice, self.reload)
        if any(d is None or not d < LIMIT for d in differences):
            return "wrong"
        if self.gap is None:
            return "wrong"
        if self.gap < GAP_LIMIT:
            return "right"
        same = self.own_gap is not None and abs(self.own_gap - self.gap) < GAP_LIMIT
        return "ends at step 1: vLLM computes it otherwise" if same else "wrong"


# ---- HFEngine


def audit_engine(model_type: str, directory: Path) -> Row:
    """Build, compare and publish. Leaves a job for the generator where it was not refused."""
    import torch

    from rl.batching import pack, supervised_sample
    from rl.errors import ConfigError
    from rl.loss.cross_entropy import CrossEntropy
    from rl.models.hf_engine import HFEngine

    home = directory / model_type
    reference = random_model(model_type)
    reference.save_pretrained(home)
    row = Row(model_type, type(reference).__name__)
    rng = np.random.default_rng(0)
    documents = [rng.integers(2, 128, n) for n in (60, 3, 37, 2)]
    try:
        engine = HFEngine(home)
    except ConfigError as error:
        row.refused = str(error)
        return row
    row.rows = "packed" if engine._model.packed else "padded"
    batch = pack([supervised_sample(d[:1], d[1:]) for d in documents])
    expected = [logits_of(reference, d) for d in documents]
    scale = torch.cat(expected).std().item()

    (logits,) = engine.logits(batch)
    ids = torch.from_numpy(batch.ranks[0][0].sample_ids)
    row.logits = max((logits[ids == i] - of).abs().max().item() for i, of in enumerate(expected)) / scale

    wanted = gradient_of(reference, documents)
    gradients = []
    for _ in range(2):
        engine._learners()["model"].clear()
        engine.forward_backward(batch, CrossEntropy())
        tensors = {name: t for name, t in engine._tensors.items() if t.grad is not None}
        gradients.append({name: whole(t.grad).double() for name, t in tensors.items()})
    norm = norm_of(wanted.values())
    row.gradient = norm_of(gradients[0].get(name, 0.0) - of for name, of in wanted.items()) / norm
    row.twice = norm_of(gradients[1][name] - of for name, of in gradients[0].items()) / norm

    engine.save_hf(home / "saved")
    again = type(reference).from_pretrained(home / "saved", dtype=torch.float32)
    apart = [(logits_of(again, d) - of).abs().max().item() for d, of in zip(documents, expected, strict=True)]
    row.reload = max(apart) / scale

    publish_job(engine, home, rng)
    return row


def publish_job(engine: Any, home: Path, rng: np.random.Generator) -> None:
    """Two versions, of which the second is right; what is sampled with it is longer than its windows."""
    from rl.weight_sync.manifest import Manifest
    from rl.weight_sync.shared_memory import SharedMemory

    transport = SharedMemory(str(home))

    def publish(version: int, factor: float) -> Manifest:
        shards = [
            replace(s, data=s.data * factor if s.dtype.is_floating_point else s.data) for s in engine.export()
        ]
        return Manifest(version, tuple(asyncio.run(transport.publish("model", version, 0, shards))))

    job = {
        "directory": str(home),
        "transport": transport,
        "versions": [publish(0, 0.5), publish(1, 1.0)],
        "prompts": [rng.integers(2, 128, n).tolist() for n in (40, 5)],
    }
    (home / "job.pickle").write_bytes(pickle.dumps(job))


def gap_of(model_type: str, directory: Path, weights: str) -> tuple[float | None, str]:
    """The largest mean difference, in nats, between what vLLM answered and the engine; or why it refused."""
    from rl.batching import pack, supervised_sample
    from rl.models.hf_engine import HFEngine

    answer = json.loads((directory / model_type / f"{weights}.json").read_text())
    if "refused" in answer:
        return None, answer["refused"]
    engine = HFEngine(directory / model_type)
    gaps = []
    for prompt, tokens, logprobs in answer["samples"]:
        (ours,) = engine.forward(pack([supervised_sample(prompt, tokens)])).values()
        gaps.append(float(np.abs(ours - logprobs).mean()))
    return max(gaps, default=None), ""


def logits_of(model: Any, document: np.ndarray) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.from_numpy(document)[None], use_cache=False).logits[0, :-1].float()


def gradient_of(model: Any, documents: list[np.ndarray]) -> dict[str, Any]:
    """transformers' own gradient of the sum of -logp, in eval mode."""
    import torch

    model.zero_grad()
    for document in documents:
        tokens = torch.from_numpy(document)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
        (-logits.log_softmax(-1).gather(1, tokens[1:, None]).sum()).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def norm_of(tensors: Any) -> float:
    return float(sum(tensor.square().sum() for tensor in tensors) ** 0.5)


# ---- vLLM


def run_generators(directory: Path, weights: str, model_types: list[str]) -> None:
    """Answer these jobs in processes of vLLM's own, with weights "published" or of the "directory"."""
    from rl.models.generator.environment import generator_environment

    command = [sys.executable, "-m", "tests.models.architectures", str(directory), weights, *model_types]
    log = directory / f"{weights}.log"
    with log.open("w") as file:
        environment = os.environ | generator_environment(1)
        done = subprocess.run(command, env=environment, stdout=file, stderr=file, timeout=3600)
    assert done.returncode == 0, log.read_text()[-3000:]


def answer_jobs(directory: Path, weights: str, model_types: list[str]) -> None:
    """A fork for each job: vLLM is imported once, and what one model leaves behind no other sees."""
    import rl.models.generator.vllm_engine

    assert rl.models.generator.vllm_engine
    for model_type in model_types:
        if not (child := os.fork()):
            job = pickle.loads((directory / model_type / "job.pickle").read_bytes())
            (directory / model_type / f"{weights}.json").write_text(json.dumps(answer_job(job, weights)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:  # neither an answer nor a refusal: the row is wrong
            (directory / model_type / f"{weights}.json").write_text(json.dumps({"samples": []}))


def answer_job(job: dict[str, Any], weights: Any) -> dict[str, Any]:
    """What vLLM samples with the last published version, or with the weights of the directory."""
    from rl.errors import ConfigError, RunError
    from rl.models.generator.commands import Admit, Load
    from rl.models.generator.vllm_config import VLLMConfig
    from rl.models.generator.vllm_engine import VLLM
    from rl.types import SamplingParams

    sizes = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_gib": 0.0625}
    params = SamplingParams(24, ignore_eos=True)
    admits = [Admit(10 + i, tuple(p), replace(params, seed=i)) for i, p in enumerate(job["prompts"])]
    loads = (
        [Load(i, manifest) for i, manifest in enumerate(job["versions"])] if weights == "published" else []
    )
    try:
        engine = VLLM(VLLMConfig(job["directory"], weights=weights, **sizes), job["transport"])
        answers = engine.tick([*loads, *admits]).answers
        while len(answers) < len(loads) + len(admits):
            answers |= engine.tick([]).answers
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
    except (ConfigError, RunError) as error:
        return {"refused": str(error)}
    return {
        "samples": [
            (a.prompt, answers[a.id].tokens.tolist(), answers[a.id].logprobs.tolist()) for a in admits
        ]
    }


# ---- the table


def audit(directory: Path, model_types: tuple[str, ...] = MODEL_TYPES) -> list[Row]:
    rows = [audit_engine(model_type, directory) for model_type in model_types]
    by_type = {row.model_type: row for row in rows if not row.refused}
    run_generators(directory, "published", list(by_type))
    for row in by_type.values():
        row.gap, row.refused = gap_of(row.model_type, directory, "published")
    if apart := [row for row in by_type.values() if row.gap is not None and row.gap >= GAP_LIMIT]:
        run_generators(directory, "directory", [row.model_type for row in apart])
        for row in apart:
            row.own_gap, _ = gap_of(row.model_type, directory, "directory")
    return rows


def write_table(path: Path) -> None:
    import transformers
    import vllm

    with tempfile.TemporaryDirectory() as directory:
        rows = audit(Path(directory))
    counts = {
        kind: sum(row.outcome.startswith(kind) for row in rows) for kind in ("right", "ends", "refused")
    }
    lines = [
        "# Architectures",
        "",
        f"{len(rows)} architectures, nearly all that transformers {transformers.__version__} and vLLM {vllm.__version__}",
        "share (Qwen4Exp is not among them) and some that vLLM lacks, as a small random model on HFEngine and as a",
        "generator, in fp32 on a CPU. Parameters and persistent buffers are all random.",
        "",
        "- rows: whether sequences are packed, or padded, which costs as much as the longest of them each.",
        "- logits: the largest difference from transformers', in standard deviations of the logits.",
        "- gradient: the norm of the difference from transformers', in norms of it; the second computation of it",
        "  differs from the first by less than 1e-3.",
        "- reload: the logits of what `save_hf` writes, loaded by transformers.",
        "- generator: nats a token between vLLM's logprobs, with published weights, and the engine's. vLLM loads",
        "  other weights first. Up to 3e-3, the default limit in float32, a run goes on.",
        "",
        f"Right: {counts['right']}. Refused before the first sample: {counts['refused']}. Ends at the first step, "
        f"because vLLM samples from another",
        f"policy, with weights from the directory too: {counts['ends']}. None is wrong: a test holds that. Sizes",
        "are small; an architecture that vLLM refuses in fp32 on a CPU may work in bfloat16 or on a GPU.",
        "",
        "Made by `python -m tests.models.architectures`.",
        "",
        "| model_type | rows | logits | gradient | reload | generator | outcome |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = (row.logits, row.gradient, row.reload, row.gap)
        cells = ["" if number is None else f"{number:.0e}" for number in numbers]
        outcome = " ".join(
            row.outcome.replace("|", "/").replace(f"{directory}/{row.model_type}", "...").split()
        )
        lines.append(f"| {row.model_type} | {row.rows} | {' | '.join(cells)} | {outcome:.200} |")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        write_table(Path("docs/models.md"))
    else:
        answer_jobs(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
