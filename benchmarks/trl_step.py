"""TRL's GRPOTrainer on the task of benchmarks.rl_step, which runs this in TRL's own environment.

`trl_step.py` prints the seconds of each step, by its fastest setting that works on a CPU: weights in bf16, one batch of
all samples, no reference, no gradient checkpointing. `trl_step.py ACCURACY` trains until so many of the held-out
problems are right, and prints the seconds of training and the accuracy after each step; weights are then fp32 under
autocast to bf16, which takes as long: with weights in bf16 most updates are rounded away.
"""

import json
import re
import sys
import tempfile
import time

import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
STEPS = 5
MOST_STEPS, NUM_EVAL, EVAL_SEED = 30, 128, 10**6


def problems(count: int, first: int = 0) -> Dataset:
    rows = []
    for seed in range(first, first + count):
        options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
        item = reasoning_gym.create_dataset("chain_sum", seed=seed, size=1, **options)[0]
        rows.append(
            {"prompt": [{"role": "user", "content": item["question"]}], "answer": str(item["answer"])}
        )
    return Dataset.from_list(rows)


TOKENIZER = AutoTokenizer.from_pretrained("models/smollm2-135m-instruct")


def last_number_is_right(completion_ids, answer, **_) -> list[float]:
    return [float(is_right(ids, a)) for ids, a in zip(completion_ids, answer, strict=True)]


def is_right(ids: list[int], answer: str) -> bool:
    """As ReasoningGym.reward says."""
    numbers = NUMBER.findall(TOKENIZER.decode(ids, skip_special_tokens=True))
    return TOKENIZER.eos_token_id in ids and bool(numbers) and numbers[-1].replace(",", "") == answer


class Clock(TrainerCallback):
    """Seconds of each step, without what a callback after it takes."""

    def __init__(self):
        self.seconds, self.began = [], 0.0

    def on_step_begin(self, *_, **__):
        self.began = time.monotonic()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.monotonic() - self.began)


class Evaluation(TrainerCallback):
    """Greedy accuracy before training and after each step; ends the training that has reached `goal`."""

    def __init__(self, goal: float):
        self.goal, self.accuracies = goal, []
        self.held_out = problems(NUM_EVAL, EVAL_SEED)

    def on_train_begin(self, args, state, control, model, **_):
        self.accuracies.append(self.accuracy(model))

    def on_step_end(self, args, state, control, model, **_):
        self.accuracies.append(self.accuracy(model))
        print(f"step {state.global_step}: {self.accuracies[-1]:.3f}", file=sys.stderr, flush=True)
        control.should_training_stop = self.accuracies[-1] >= self.goal

    @torch.no_grad()
    def accuracy(self, model) -> float:
        texts = [
            TOKENIZER.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            for prompt in self.held_out["prompt"]
        ]
        shape = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
        batch = TOKENIZER(texts, add_special_tokens=False, **shape)
        was_training = model.training
        model.eval()
        with torch.autocast("cpu", torch.bfloat16):
            tokens = model.generate(**batch, max_new_tokens=24, do_sample=False)
        model.train(was_training)
        answers = tokens[:, batch["input_ids"].shape[1] :].tolist()
        right = map(is_right, answers, self.held_out["answer"])
        return sum(right) / len(answers)


def main() -> None:
    goal = float(sys.argv[1]) if len(sys.argv) > 1 else None
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=24,
        max_steps=MOST_STEPS if goal else STEPS,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        beta=0.0,
        bf16=goal is not None,
        model_init_kwargs={"dtype": "float32" if goal else "bfloat16"},
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    )
    clock = Clock()
    evaluation = [Evaluation(goal)] if goal else []
    trainer = GRPOTrainer(
        model="models/smollm2-135m-instruct",
        reward_funcs=last_number_is_right,
        args=config,
        train_dataset=problems(16 * config.max_steps),
        callbacks=[clock, *evaluation],
    )
    sys.stdout, kept = sys.stderr, sys.stdout
    trainer.train()
    accuracies = evaluation[0].accuracies if goal else []
    print(json.dumps({"seconds": clock.seconds, "accuracies": accuracies}), file=kept)


if __name__ == "__main__":
    main()
