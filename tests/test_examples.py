"""The examples run as their first line says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_engine_alone_runs_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [ROOT / "examples" / "engine_alone.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    # holds: meaning, it learns; every variant measured ends within 0.001 of the same loss
    assert len(losses) == 20 and losses[-1] < 0.2 * losses[0]
    assert (tmp_path / "runs" / "engine_alone" / "hf" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_loss_and_an_estimator_of_your_own_run(tmp_path):
    command = [sys.executable, "-m", "rl.cli", "train", "examples/own_algorithm.py:best_of_group"]
    command += ["--run_dir", str(tmp_path / "run")]
    command += ["--warmup.steps", "100", "--warmup.batch_size", "16", "--steps", "2", "--env.num_eval", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [m for m in steps if "updates" in m]
    assert [m["updates"] for m in steps] == [2, 2]
    # holds: meaning, the policy has hardly moved since it sampled
    assert all(m["grad_norm"] > 0 and m["ratio"] > 0.5 for m in steps)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["loss"]["python"].endswith(":squared_ratio")
    assert config["advantages"]["python"].endswith(":only_the_best")


def test_the_estimator_of_the_example_worked_by_hand():
    import numpy as np

    from examples.own_algorithm import only_the_best
    from rl.loss.advantages.base import Trajectory

    group = [Trajectory(np.array([0.0, r]), r) for r in (0.0, 1.0, 1.0, 0.5)]
    assert only_the_best([group, group[:1], []]) == [[0, 1, 1, 0], [0], []]


def test_the_grader_of_the_example_is_taught_what_it_will_be_asked_and_may_reply():
    from examples.own_judge import JUDGE, grade_of, grader, writer
    from rl.envs.judge import verdict_in
    from rl.types import StopReason

    assert [grade_of("word " * n) for n in (1, 2, 3, 4, 21, 60)] == [10, 10, 9, 9, 0, 0]
    env, grades = grader().env, set()
    for seed in range(50):
        problem = env.generate(seed)
        answer = problem.messages[1]["content"].partition("Answer: ")[2]
        assert problem.messages == JUDGE.messages(
            problem.messages[1]["content"].split("\n")[0].removeprefix("Question: "), answer
        )
        reply = env.demonstration(problem, seed)
        assert (
            verdict_in(reply, "grade") == grade_of(answer)
            and env.reward(problem, reply, StopReason.STOP).correct
        )
        grades.add(grade_of(answer))
    assert len(grades) > 8 and not env.reward(problem, "a fine answer", StopReason.STOP).correct
    assert writer().env.judge == JUDGE


def test_the_writer_of_the_example_is_not_paid_for_silence(monkeypatch):
    from examples.own_judge import Judge, writer

    monkeypatch.setattr(Judge, "grade", lambda *_: pytest.fail("the judge was asked"))
    assert writer().env.reward_episode(SimpleNamespace(response=" \n")) == 0
