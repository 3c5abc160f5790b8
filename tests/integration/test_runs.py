"""Whole runs on real Monarch processes, real torchtitan and real vLLM; on GPUs where there are enough, else on the CPU."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from statistics import fmean

import psutil
import pytest
import torch

from configs.quickstart import quickstart
from rl.envs.base import derive_seed
from rl.models.checkpoint_dir import is_complete
from rl.observability.rollout_log import read_whole_rollouts
from tests.chaos.chaos import TWO
from tests.devices import limit, needs
from tests.integration.runs import (
    MAX_VERSIONS,
    ROOT,
    pid_of,
    read_metrics,
    rl,
    shared_leftovers,
    start,
    wait_for_line,
)

pytestmark = needs(2)
MORTAL = "tests/recipes.py:mortal"
TWO_RANKS = TWO[:2]


def test_fsdp2_with_two_generators_trains_and_measures_parity_on_every_step(whole):
    assert len(whole.versions) > MAX_VERSIONS  # more than there may be at once: the bound is watched
    metrics = read_metrics(whole.run_dir)
    assert [m["step"] for m in metrics] == [*range(13)]
    for step in metrics[1:]:
        assert step["tokens/trained"] > 0
        # holds: meaning, a missed weight sync moves the mean by over 3e-2
        assert max(step["logprob_diff/mean"], step["logprob_diff/max"]) < limit("generator against trainer")
        assert step["logprob_diff/ratio_outside"] == 0
        assert {
            "loss",
            "grad_norm",
            "entropy",
            "reward/mean",
            "time/generate",
            "time/train",
            "time/sync",
            "time/step",
        } <= step.keys()
    assert all("eval/accuracy" in metrics[i] for i in (0, 4, 8, 12))


def test_a_run_leaves_its_artefacts(whole):
    run_dir = whole.run_dir
    config = json.loads((run_dir / "config.json").read_text())
    assert config["trainer"]["layout"]["shard"] == 2 and config["env"]["type"].endswith(":PartialCredit")
    assert (run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").iterdir())
    assert {p.name for p in (run_dir / "checkpoints").iterdir()} == {"step-10", "step-12"}
    rollouts = read_whole_rollouts(run_dir, "train", 1)
    assert len(rollouts) >= config["record_rollouts"] == 32
    for rollout in rollouts:
        prompt, answer = rollout["branches"][0]
        assert answer["sampled"] and not prompt["sampled"]
        assert len(answer["logprobs"]) == len(answer["tokens"]) > 0
    assert "held-out accuracy before training" in whole.output
    assert not shared_leftovers() and not whole.left_behind


def test_the_exported_model_loads_in_transformers_and_vllm_with_equal_logprobs(whole):
    import transformers

    run_dir = whole.run_dir
    tokenizer = transformers.AutoTokenizer.from_pretrained(run_dir / "hf")
    prompt = tokenizer.encode("hello>")
    assert tokenizer.decode(prompt, skip_special_tokens=True) == "hello>"
    model = transformers.AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype=torch.float32)
    script = f"""
import gc, json
gc.disable()  # it takes seconds of the imports
from vllm import LLM, SamplingParams
llm = LLM({str(run_dir / "hf")!r}, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 << 20, max_model_len=64)
out = llm.generate([{{"prompt_token_ids": {prompt}}}], SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True))[0].outputs[0]
print(json.dumps([list(out.token_ids), [d[t].logprob for t, d in zip(out.token_ids, out.logprobs)]]))
"""
    from rl.models.generator.environment import generator_environment

    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | generator_environment(2),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, logprobs = json.loads(done.stdout.splitlines()[-1])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert logits.argmax(-1).tolist() == tokens
    # holds: meaning, other weights move logprobs by over 1e-2
    assert (expected - torch.tensor(logprobs)).abs().max() < 1e-4


# What may differ between two runs of one seed: clocks, how many generators there are, and what each had in its cache.
MAY_DIFFER = ("time/", "idle/", "generators/", "tokens/prompt_computed")


def numbers(run_dir, may_differ=MAY_DIFFER):
    """Every line of metrics.jsonl, without what may differ."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{n: v for n, v in line.items() if not n.startswith(may_differ)} for line in lines]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers_with_one_generator_and_with_two(whole, tmp_path):
    """Bit for bit: so two runs of the same settings do."""
    done = rl("train", MORTAL, *TWO_RANKS, "--run_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]

    assert numbers(tmp_path / "run") == numbers(whole.run_dir)
    assert len(numbers(whole.run_dir)) == 16 and "logprob_diff/max" in numbers(whole.run_dir)[1]


@pytest.mark.slow
def test_by_turns_the_numbers_are_those_of_processes_that_all_stay(whole, tmp_path):
    """Bit for bit. The cache of a generator that was away is empty, and nothing serves while the trainer works."""
    turns = ("--placement", "by_turns", "--trace", "True")
    done = rl("train", MORTAL, *TWO, "--run_dir", tmp_path / "run", *turns)
    assert done.returncode == 0, done.stderr[-3000:]

    assert numbers(tmp_path / "run") == numbers(whole.run_dir) and len(numbers(whole.run_dir)) == 16
    names = Counter(event["name"] for event in json.loads((tmp_path / "run" / "trace.json").read_text()))
    assert names["resume"] >= 4 and names["suspend"] >= 12  # an engine and two generators


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mortal_with_lora", "ppo_with_everything", "tp2_and_torchstore"])
def test_by_turns_every_role_has_the_numbers_of_processes_that_all_stay(recipe, tmp_path):
    """An adapter; a critic and a refreshed reference; two ranks that share no host memory of their own."""

    def run(*settings):
        run_dir = tmp_path / f"run-{len(settings)}"
        done = rl("train", f"tests/recipes.py:{recipe}", "--run_dir", run_dir, *settings)
        assert done.returncode == 0, done.stderr[-3000:]
        return numbers(run_dir, (*MAY_DIFFER, "buffer/"))

    stayed = run()
    assert len(stayed) >= 7 and run("--placement", "by_turns") == stayed


@pytest.mark.slow
def test_streamed_groups_give_the_same_run(whole, tmp_path):
    """Micro-batches of the groups that are finished train while others are generated; only sums are reordered.

    A part in which no group has an advantage trains one of them, to measure the gap to the generator. Of a whole step
    that has advantages none is trained so: entropy is then a mean over fewer tokens.
    """
    two = ("--stream_groups", "2")
    done = rl("train", MORTAL, *TWO, "--run_dir", tmp_path / "run", *two)
    assert done.returncode == 0, done.stderr[-3000:]
    for streamed, at_once in zip(read_metrics(tmp_path / "run"), read_metrics(whole.run_dir), strict=True):
        same_tokens = streamed.get("tokens/trained") == at_once.get("tokens/trained")
        names = ("reward/mean", "loss", "grad_norm", "eval/accuracy", *["entropy"] * same_tokens)
        numbers, expected = ({n: m[n] for n in names if n in m} for m in (streamed, at_once))
        assert expected
        # holds: exact, sums in another order: a thirtieth of it in every variant measured
        assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_with_the_same_numbers(whole, tmp_path):
    resumed = tmp_path / "resumed"
    checkpoint = whole.run_dir / "checkpoints" / "step-10"
    done = rl("train", MORTAL, *TWO, "--run_dir", resumed, "--resume", checkpoint)
    assert done.returncode == 0, done.stderr[-3000:]
    before = {m["step"]: m for m in read_metrics(whole.run_dir)}
    after = {m["step"]: m for m in read_metrics(resumed)}
    assert set(after) == {10, 11, 12}
    for step in (11, 12):
        for name in ("reward/mean", "loss", "grad_norm", "entropy", "tokens/trained"):
            # holds: exact, the same steps twice on one machine
            assert after[step][name] == pytest.approx(before[step][name], abs=1e-5), (step, name)


@pytest.mark.slow
def test_tp2_with_torchstore_trains_and_holds_parity(tmp_path):
    run_dir = tmp_path / "run"
    done = rl("train", "tests/recipes.py:tp2_and_torchstore", "--run_dir", run_dir)
    assert done.returncode == 0, done.stderr[-3000:]
    for step in read_metrics(run_dir)[1:]:
        # holds: meaning, a missed weight sync moves the mean by over 3e-2
        assert step["logprob_diff/max"] < limit("generator against trainer") and step["grad_norm"] > 0


@pytest.mark.slow
def test_an_adapter_learns_under_context_parallelism_beside_its_reference(tmp_path):
    done = rl("train", "tests/recipes.py:lora_and_context_parallel", "--run_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "starting processes: 2 trainer, 1 generator, 1 reward" in done.stdout
    )  # the reference is a second adapter in the trainer
    metrics = {m["step"]: m for m in read_metrics(tmp_path / "run")}
    for step in (1, 2, 3, 4):
        # holds: meaning, a missed weight sync moves the mean by over 3e-2
        assert (
            metrics[step]["logprob_diff/max"] < limit("generator against trainer")
            and metrics[step]["grad_norm"] > 0
        )
        # holds: exact, the same logprobs twice: a KL of a few roundings squared
        assert metrics[step]["kl"] == pytest.approx(0, abs=1e-6)  # it follows the policy after every step
    assert {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()} == {"step-4"}
    assert (tmp_path / "run" / "hf-adapter" / "adapter_config.json").exists()
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Critic, reference that is refreshed, minibatches, epochs, correction, shaping, dynamic sampling."""
    run_dir = tmp_path_factory.mktemp("everything") / "run"
    done = rl("train", "tests/recipes.py:ppo_with_everything", "--run_dir", run_dir)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "starting processes: 1 trainer, 1 generator, 1 critic, 1 reference, 1 reward" in done.stdout
    return run_dir


def test_every_part_of_an_algorithm_at_once(everything):
    metrics = {m["step"]: m for m in read_metrics(everything)}
    for step in (1, 2, 3, 4):
        # holds: meaning, a missed weight sync moves the mean by over 3e-2
        assert metrics[step]["logprob_diff/max"] < limit("generator against trainer")
        assert metrics[step]["updates"] == 4
        assert metrics[step]["critic/grad_norm"] > 0  # holds: exact, a critic without a gradient has 0
        # holds: meaning, a generator with other weights is further off
        assert metrics[step]["tis/weight"] == pytest.approx(1, abs=1e-3)
    # holds: meaning, KL is zero before the first update and not after
    assert abs(metrics[1]["kl"]) < 1e-4 < abs(metrics[2]["kl"])  # it began where the policy was
    # holds: meaning, KL is zero before the first update and not after
    assert abs(metrics[3]["kl"]) < 1e-4 < abs(metrics[4]["kl"])  # and was refreshed after step 2
    assert {p.name for p in (everything / "critic_checkpoints").iterdir()} == {"step-2", "step-4"}


@pytest.mark.slow
def test_every_part_of_an_algorithm_goes_on_with_the_same_numbers(everything, tmp_path):
    checkpoint = everything / "checkpoints" / "step-2"
    done = rl(
        "train",
        "tests/recipes.py:ppo_with_everything",
        "--run_dir",
        tmp_path / "again",
        "--resume",
        checkpoint,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = [
        "reward/mean",
        "loss",
        "grad_norm",
        "entropy",
        "kl",
        "critic/loss",
        "critic/explained",
        "tokens/trained",
    ]
    before, after = ({m["step"]: m for m in read_metrics(run)} for run in (everything, tmp_path / "again"))
    for step in (3, 4):
        for name in names:
            # holds: exact, the same steps twice on one machine
            assert after[step][name] == pytest.approx(before[step][name], abs=1e-5), (step, name)


def learn(tmp_path, recipe, *settings):
    done = rl("train", f"tests/recipes.py:{recipe}", "--run_dir", tmp_path / recipe, *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return [m for m in read_metrics(tmp_path / recipe) if "loss" in m]


@pytest.mark.slow
def test_supervised_learning_then_distillation_by_the_transformers_engine(tmp_path):
    first, *_, last = learn(tmp_path, "teacher")
    assert last["loss"] < 0.8 * first["loss"] and "reward/mean" not in last  # holds: meaning, it learns
    steps = learn(tmp_path, "student", "--reference.model.path", tmp_path / "teacher" / "hf")
    # holds: meaning, a missed weight sync moves the mean by over 3e-2
    assert all(
        m["logprob_diff/max"] < limit("generator against trainer") and m["grad_norm"] > 0 for m in steps
    )
    # holds: meaning, it learns
    assert fmean(m["reverse_kl"] for m in steps[-10:]) < 0.8 * fmean(m["reverse_kl"] for m in steps[:3])


@pytest.mark.slow
def test_preferences(tmp_path):
    first, *_, last = learn(tmp_path, "pairs")
    # holds: meaning, log 2 is where policy and reference are the same
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: policy and reference are the same
    assert last["loss"] < 0.9 * first["loss"] and last["dpo/margin"] > 0.1  # holds: meaning, it learns


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_names_step_metric_and_sample_and_leaves_a_checkpoint(tmp_path):
    done = rl("train", "tests/recipes.py:explodes", "--run_dir", tmp_path / "run")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    seed = derive_seed(0, "problem", 7)
    problem = dataclasses.replace(quickstart().env, num_eval=32).train_problem(seed)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-0"
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("rl: error: ")]
    assert (
        error.startswith("rl: error: step 1, update 1 of 1 of the trainer: the gradient norm is ")
        and "(grad_norm)" in error
    )
    assert f"the sample is {problem.id}, rollout 0" in error and error.endswith(
        f"go on from --resume {checkpoint}"
    )
    assert is_complete(checkpoint)


@pytest.mark.slow
def test_with_lr_0_nothing_changes(tmp_path):
    """The control of the quickstart: the lift comes from GRPO's steps alone."""
    run_dir = tmp_path / "run"
    done = rl("train", "tests/recipes.py:no_learning_rate", "--run_dir", run_dir)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = read_metrics(run_dir)
    assert all(m["grad_norm"] > 0 for m in metrics[1:])
    assert len({m["eval/accuracy"] for m in metrics if "eval/accuracy" in m}) == 1
    answers = [
        json.loads(line)["response"]
        for line in (run_dir / "rollouts.jsonl").read_text().splitlines()
        if '"eval"' in line
    ]
    assert answers[:4] == answers[4:8] == answers[8:12]


def test_parity_after_each_sync_and_a_control_with_an_update_left_out(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.parity_worker", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    # holds: meaning, a missed weight sync moves the mean by over 3e-2
    assert all(largest < limit("generator against trainer") for _, largest in result["synced"]), result
    # holds: meaning, thirty times the bound above
    assert result["left_out"][0] > 0.03, result  # thirty times the bound, in the mean
    assert result["versions"] == [[[0, 0]], [[1, 1]], [[2, 2]], [[2, 2]]]
    assert result["reproducible"] and result["distinct"] > 1
    assert "max_tokens must be at least 1" in result["refused"] and result["unharmed"]
    assert result["survived"] == [2, 1, 6] and result["same_everywhere"]
    assert result["left_running"] == 0


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("starting", signal.SIGINT, 130),
        pytest.param("warm-up", signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_everything_within_ten_seconds(tmp_path, moment, number, code):
    command = [
        sys.executable,
        "-m",
        "rl.cli",
        "train",
        "quickstart",
        "--run_dir",
        str(tmp_path / "run"),
        "--warmup.steps",
        "100000",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    for line in process.stdout:
        if line.startswith(moment):
            break
    time.sleep(1.0)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    started = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: the whole foreground group
    else:
        process.send_signal(number)
    try:
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()  # one that goes on would work beside all other tests
    assert time.monotonic() - started < 10
    assert process.returncode == code
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(children, timeout=1)
    assert not alive
    assert not shared_leftovers()


@pytest.mark.slow
def test_a_killed_trainer_rank_without_restarts_ends_the_run_with_its_name_and_leaves_nothing(tmp_path):
    recipe, run_dir = MORTAL, tmp_path / "run"
    settings = (*TWO, "--warmup.steps", "100000", "--warmup.batch_size", "8", "--trainer.max_restarts", "0")
    process = start("train", recipe, "--run_dir", run_dir, *settings)
    wait_for_line(process, "warm-up")
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(pid_of(process, run_dir, "trainer-1"), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "rl: error: the process of trainer rank 1 died in " in output
    _, alive = psutil.wait_procs(children, timeout=1)
    assert not alive
    assert not shared_leftovers()
