"""Seconds of each step of TRL's GRPOTrainer on the smollm2 recipe. Run by benchmarks.rl_step in TRL's own environment.

Its fastest setting that works on a CPU: weights in bf16, one batch of all samples, no reference, no gradient checkpointing.
"""

import json
import re
import sys
import tempfile
import time

import reasoning_gym
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
STEPS, SKIPPED = 5, 1


def problems(count: int) -> Dataset:
    rows = []
    for seed in range(count):
        options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
        item = reasoning_gym.create_dataset("chain_sum", seed=seed, size=1, **options)[0]
        rows.append(
            {"prompt": [{"role": "user", "content": item["question"]}], "answer": str(item["answer"])}
        )
    return Dataset.from_list(rows)


def last_number_is_right(completions, answer, **_) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    found = [NUMBER.findall(text) for text in texts]
    return [float(bool(n) and n[-1].replace(",", "") == a) for n, a in zip(found, answer, strict=True)]


class Clock(TrainerCallback):
    def __init__(self):
        self.seconds, self.began = [], 0.0

    def on_step_begin(self, *_, **__):
        self.began = self.began or time.monotonic()

    def on_step_end(self, *_, **__):
        now = time.monotonic()
        self.seconds.append(now - self.began)
        self.began = now


def main() -> None:
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=24,
        max_steps=STEPS,
        learning_rate=2e-5,
        beta=0.0,
        bf16=False,
        model_init_kwargs={"dtype": "bfloat16"},
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model="models/smollm2-135m-instruct",
        reward_funcs=last_number_is_right,
        args=config,
        train_dataset=problems(16 * STEPS),
        callbacks=[clock],
    )
    sys.stdout, kept = sys.stderr, sys.stdout
    trainer.train()
    print(json.dumps(clock.seconds[SKIPPED:]), file=kept)


if __name__ == "__main__":
    main()
