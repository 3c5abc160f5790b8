"""Asynchronous runs on real processes: the bound, evaluation beside training, shared memory, and killing generators."""

import json
import os
import signal
import time

import numpy as np
import psutil
import pytest

from rl.models.checkpoint_dir import latest
from tests.integration.runs import (
    MAX_VERSIONS,
    SharedVersions,
    pid_of,
    read_metrics,
    rl,
    shared_leftovers,
    start,
    wait_for_line,
)

RECIPE = "tests/recipes.py:asynchronous"


def test_an_asynchronous_run_keeps_its_bound_and_measures_one_version(tmp_path):
    done = rl("train", RECIPE, "--run_dir", tmp_path / "run", "--steps", "12")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "controller overhead: " in done.stdout
    metrics = {m["step"]: m for m in read_metrics(tmp_path / "run")}
    ages = [metrics[step]["offpolicy/max"] for step in range(1, 13)]
    assert max(ages) == 1 and ages[0] == 0
    assert all(metrics[step]["eval/version"] == step for step in range(0, 13, 2))
    for step in range(1, 13):
        has_signal = metrics[step]["group/with_signal"] > 0  # which weights sampled a step is not fixed
        assert (metrics[step]["grad_norm"] > 0) == has_signal and metrics[step]["generators/alive"] == 2
        assert 0 <= metrics[step]["time/controller"] <= metrics[step]["time/step"]
        assert {"idle/trainer", "idle/generator-0", "idle/generator-1", "idle/reward-0"} <= metrics[
            step
        ].keys()
    lanes = {
        e["args"]["name"] for e in json.loads((tmp_path / "run" / "trace.json").read_text()) if "args" in e
    }
    assert lanes == {"trainer", "generator-0", "generator-1", "reward-0"}
    lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    recorded = {(r["step"], r["prompt"]) for r in map(json.loads, lines) if r["split"] == "train"}
    assert sum(metrics[step]["grad_norm"] > 0 for step in range(1, 13)) >= 6
    # One group of each step, and those whose reward failed; none in two steps.
    assert {step for step, _ in recorded} == set(range(1, 13))
    assert len({prompt for _, prompt in recorded}) == len(recorded)
    a_reward_that_raises_hangs_or_exits_costs_its_own_samples(tmp_path / "run", done.stdout)


def a_reward_that_raises_hangs_or_exits_costs_its_own_samples(run_dir, output):
    lines = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["error"]]
    causes = {line["question"][:2]: line["error"] for line in failed}
    assert "ValueError: no reward for bs" in causes["bs"]
    assert "over 0.5 s" in causes["ap"]
    assert "code 7" in causes["ld"]
    assert set(causes) == {"bs", "ap", "ld"} and len(failed) == 12  # four samples of each
    metrics = read_metrics(run_dir)
    assert sum(m.get("reward/errors", 0) + m.get("eval/errors", 0) for m in metrics) == len(failed)
    assert "rewards failed" in output


@pytest.mark.slow
def test_a_mixture_learns_by_dro_from_completions_of_one_version_each(tmp_path):
    done = rl("train", "tests/recipes.py:drained_mixture", "--run_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    trained = [r for r in map(json.loads, lines) if r["split"] == "train"]
    versions = [r["policy_version"] for r in trained]
    assert len(versions) == 12 * 32 and all(oldest == newest for oldest, newest in versions)
    assert len({oldest for oldest, _ in versions}) >= 6  # the weights did change meanwhile
    lengths = [len(r["answer"]) for r in trained]
    # holds: meaning, three of four are short: five standard deviations of 96 prompts
    assert 0.5 < sum(length < 6 for length in lengths) / len(lengths) < 0.98
    metrics = [m for m in read_metrics(tmp_path / "run") if "loss" in m]
    assert max(m["offpolicy/max"] for m in metrics) == 1
    # The policy that sampled is the one before: DRO's pull is by how far they are apart.
    apart = [m["apart_squared"] for m in metrics]
    assert all(np.isfinite(apart)) and max(apart) > 0 and all(m["grad_norm"] > 0 for m in metrics)
    evaluations = [m for m in metrics if "eval/accuracy/short" in m]
    assert len(evaluations) >= 5 and all("eval/accuracy/long" in m for m in evaluations)


@pytest.mark.slow
def test_killed_generators_and_reward_workers_come_back_and_the_run_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    process = start("train", RECIPE, "--run_dir", run_dir, "--steps", "1000000", "--env.num_eval", "8")
    versions = SharedVersions(process.pid)
    wait_for_line(process, "step 1/")
    children = psutil.Process(process.pid).children(recursive=True)

    def last():
        return read_metrics(run_dir)[-1]

    def until(holds, seconds=200):
        deadline = time.monotonic() + seconds
        while not holds():
            assert process.poll() is None and time.monotonic() < deadline, last()
            time.sleep(0.1)

    slow = pid_of(process, run_dir, "generator-1")
    os.kill(slow, signal.SIGSTOP)  # slow, not dead: the other goes on, and three versions are enough
    began = last()["step"]
    until(lambda: last()["step"] > began + 5)
    os.kill(slow, signal.SIGCONT)
    for victim in ("generator-0", "generator-1", "reward-0"):
        os.kill(pid_of(process, run_dir, victim), signal.SIGKILL)
    began = last()["step"]
    until(lambda: last()["step"] > began + 5 and last()["generators/serving"] == 2)
    after = last()
    assert after["generators/alive"] == 2 and after["offpolicy/max"] <= 1
    versions.stop()
    assert versions.most <= MAX_VERSIONS and len(versions.seen) > 10
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    steps = [m["step"] for m in read_metrics(run_dir) if "updates" in m]
    assert latest(run_dir / "checkpoints").name == f"step-{steps[-1]}", output
    assert f"go on with --resume {run_dir}/checkpoints/step-{steps[-1]}" in output
    assert output.count("it is started again (1 of 3)") == 3, output
    assert max(m["offpolicy/max"] for m in read_metrics(run_dir) if "offpolicy/max" in m) <= 1
    _, alive = psutil.wait_procs(children, timeout=1)
    assert not alive
    assert not shared_leftovers()
