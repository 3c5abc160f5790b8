"""Two steps of episodes with a tool: the run of test_calculator.py, and over two hosts that of tests/hosts."""

# holds: meaning, tokens that were not sampled move logprobs by nats

from pathlib import Path

from rl.observability.json_lines import read_records
from tests.integration.runs import read_metrics

TWO_STEPS = (
    "calculator", "--steps", 2, "--warmup.steps", 100, "--warmup.batch_size", 16, "--env.corruption", 0,
    "--trainer.num_threads", 1, "--prompts_per_step", 4, "--env.num_eval", 8,
)  # fmt: skip
"""What `rl train` is asked."""


def check_episodes(run_dir: Path) -> None:
    steps = [line for line in read_metrics(run_dir) if "loss" in line]
    assert len(steps) == 2
    assert all(line["logprob_diff/max"] < 1e-4 and line["reward/errors"] == 0 for line in steps)
    rollouts = read_records(run_dir / "rollouts.jsonl")
    assert all(rollout["messages"][0]["role"] == "user" for rollout in rollouts)
    calls = [m for rollout in rollouts for m in rollout["messages"] if m["role"] == "tool"]
    assert calls and all(call["content"].isdigit() or "Error" in call["content"] for call in calls)
