"""The checks of `rl gpu-check` in which trainer, weight sync and generator work together.

Imports are inside, as in gpu_checks.py.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl.envs.base import RolloutContext
from rl.errors import RunError
from rl.gpu_checks import hold, with_weights
from rl.observability.log_tail import log_tail

_NUM_PROMPTS = 64
_SMALL_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True, "hidden_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 192, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def stack(
    dtype: str,
    limit: float,
    trainer: Mapping[str, Any] | None = None,
    placement: str = "auto",
    **generator: Any,
) -> Callable[[Path], dict[str, Any]]:
    """Trainer, weight sync and generator together, over three published versions.

    limit: nats, of the mean gap between them. trainer, generator: settings of their sections.
    """
    settings = {"dtype": dtype, "placement": placement, "trainer": trainer or {}, "generator": generator}

    def run(model: Path) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="rl-gpu-check-") as run_dir:
            try:
                return asyncio.run(_parity(model, Path(run_dir), limit, **settings))
            except RunError as error:  # the log that it names goes with the directory
                print(log_tail(Path(run_dir), str(error)), file=sys.stderr, end="")
                raise

    return run


async def _parity(
    model: Path, run_dir: Path, limit: float, trainer: Any, generator: Any, **settings: Any
) -> dict[str, Any]:
    from rl.batching import to_sample
    from rl.cluster.launch import launch
    from rl.config.run import GeneratorConfig, RunConfig, TrainerConfig
    from rl.config.settle import model_dirs, settle
    from rl.envs.sort_letters import SortLetters
    from rl.loss.clip import Clip
    from rl.models.sources import ModelDir
    from rl.models.tokenizer import HFTokenizer
    from rl.plan.types import Phase
    from rl.types import OptimParams, SamplingParams

    config = RunConfig(
        model=ModelDir(str(model)),
        env=SortLetters(max_new_tokens=64),
        trainer=TrainerConfig(micro_batch_tokens=512, **trainer),
        max_seq_len=512,
        generator=GeneratorConfig(kv_cache_gib=0.5, **generator),
        **settings,
    )
    tokenizer, gaps, seconds, sync, tokens = HFTokenizer(model), [], 0.0, 0.0, 0
    plan, switches = settle(config), []
    async with launch(plan, model_dirs(config, plan, run_dir), run_dir, config.env) as actors:

        async def enter(phase: Phase) -> None:
            began = time.monotonic()
            await actors.enter(phase)
            switches.append(time.monotonic() - began)

        prompts = [config.env.encode(config.env.train_problem(i), tokenizer) for i in range(_NUM_PROMPTS)]
        for version in range(3):
            await enter("sync")
            began = time.monotonic()
            await actors.publish(version)
            await enter("generate")
            await _served(actors.generators, version)
            sync, began = time.monotonic() - began, time.monotonic()
            params = SamplingParams(64, 1.0, version, (tokenizer.eos_id,), actors.adapter)
            context = RolloutContext(actors.generators, tokenizer, params, config.max_seq_len)
            groups = await asyncio.gather(*(config.env.drive(prompt, 4, context) for prompt in prompts))
            seconds = time.monotonic() - began
            rollouts = [rollout for group in groups for rollout in group]
            tokens = sum(sum(rollout.turn_lengths) for rollout in rollouts)
            samples = [to_sample(r, 1.0 - 2 * (i % 2)) for i, r in enumerate(rollouts)]
            await enter("train")
            batch = await actors.trainer.pack(samples)
            metrics = await actors.trainer.forward_backward(batch, Clip(), actors.adapter)
            gaps.append((metrics["logprob_diff:sum"] / metrics["tokens:sum"], metrics["logprob_diff:max"]))
            optim = OptimParams(lr=1e-4, grad_scale=1 / metrics["tokens:sum"])
            await actors.trainer.optim_step(optim, actors.adapter)
        await actors.enter("sync")
        num_bytes = (await actors.trainer.publish_weights(3, actors.policy)).num_bytes
    for mean, _ in gaps:
        hold(mean, limit)
    turns = {"switch s": max(switches[3:])} if actors.turns and actors.turns.alternate else {}  # once warm
    return {
        "gap mean": max(mean for mean, _ in gaps),
        "gap max": max(most for _, most in gaps),
        "tokens/s": tokens / seconds,
        "sync s": sync,
        "sync GB/s": num_bytes / sync / 1e9,
        **turns,
    }


async def _served(pool: Any, version: int) -> None:
    await pool.changed.wait_for(lambda: all(replica.version == version for replica in pool.replicas))


def moe(model: Path) -> dict[str, Any]:
    """A small Qwen3-MoE in place of the model, its weights published twice."""
    with tempfile.TemporaryDirectory(prefix="rl-gpu-check-") as scratch:
        directory = _of_shape(model, Path(scratch), _SMALL_MOE)
        return stack("bfloat16", 0.05)(with_weights(directory, Path(scratch)))


def _of_shape(model: Path, scratch: Path, shape: dict[str, Any]) -> Path:
    """The model's tokenizer, and its config.json with other sizes."""
    directory = scratch / "shape"
    directory.mkdir()
    for file in model.iterdir():
        if file.suffix == ".json" and "safetensors" not in file.name:
            (directory / file.name).write_bytes(file.read_bytes())
    hf = json.loads((directory / "config.json").read_text()) | shape
    (directory / "config.json").write_text(json.dumps(hf))
    return directory
