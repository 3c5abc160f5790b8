"""What `rl eval` says of answers."""

# holds: exact

import asyncio
import dataclasses
import json
import pickle
import re
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import combinations, product
from statistics import fmean, pstdev
from types import SimpleNamespace

import pytest

from configs.quickstart import quickstart
from rl.batching import to_sample
from rl.config import ReferenceConfig, TrainerConfig, WarmupConfig
from rl.config.codec import write_config
from rl.config.flags import setting_names
from rl.config.recipes import load_recipe
from rl.config.resume import take_over_weights
from rl.config.settle import settle
from rl.controller import evaluate as evaluation
from rl.controller import replay as replaying
from rl.controller.evaluate import evaluate, measures, pass_at_k
from rl.controller.replay import replay
from rl.errors import ConfigError
from rl.loss.correction import Correction
from rl.loss.kl import KL
from rl.models.random_weights import draw_once
from rl.observability.batches import VERSION, check_batch, read_batch
from rl.owned_directory import temporary_directory
from rl.plan.cluster import Cluster, Host
from rl.types import LoRA, Score
from tests.controller.fakes import fake_actors, run_fakes
from tests.controller.test_training_batch import group


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(right, k):
    answers = [1] * right + [0] * (5 - right)
    assert pass_at_k(5, right, k) == pytest.approx(fmean(max(chosen) for chosen in combinations(answers, k)))


def test_measures_of_greedy_answers_and_of_samples():
    found = measures([group(1), group(0)], [group(1, 0, 0), group(0, 0, 0)])
    assert found["eval/accuracy"] == 0.5 and found["mean reward of 3"] == pytest.approx(1 / 6)
    assert [found[f"pass@{k}"] for k in (1, 2, 3)] == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    assert "pass@1" not in measures([group(1)], [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model"], "no recipe is named"),
        (["--samples", "8"], "no model is named"),
        (["--samples=8", "--steps", "3"], "no model is named"),
        (["model", "quickstart", "--samples"], "--samples has no value; write --samples 8"),
        (["model", "quickstart", "--samples", "0"], "from 1 to 1024"),
        (["model", "quickstart", "--samples=8", "--samples", "9"], "--samples is given 2 times"),
        (["/nothing", "quickstart"], "/nothing has no config.json"),
        (["/nothing", "no_such_recipe"], "no_such_recipe"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(arguments, said):
    with pytest.raises(ConfigError, match=said):
        evaluate(arguments)


def test_the_standard_error_is_that_of_every_resample():
    """The accuracy's deviation over all 5^5 ways to draw the problems again."""
    answers = [1, 0, 0, 1, 1]
    accuracies = [fmean(drawn) for drawn in product(answers, repeat=5)]
    metrics = measures([group(answer) for answer in answers], [])
    assert metrics["eval/accuracy"] == pytest.approx(fmean(accuracies))
    assert metrics["eval/standard_error"] == pytest.approx(pstdev(accuracies))


QUICKSTART = quickstart()


class Started(Exception):
    """What would be started."""


@pytest.fixture
def a_run(tmp_path, monkeypatch):
    """A run with an adapter on random weights, and a random teacher; what else is made is below it, too."""
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "run"
    base = replace(
        QUICKSTART, seed=5, steps=2, save_every=1, record_batches=2, trainer=TrainerConfig(lora=LoRA(4)), kl=KL(coef=0.1),
        reference=ReferenceConfig(model=QUICKSTART.model), prompts_per_step=2, group_size=2,
    )  # fmt: skip
    config = replace(base, warmup=WarmupConfig())
    run_dir.mkdir()
    run_fakes(config, run_dir)
    write_config(run_dir, "quickstart", config)
    (run_dir / "metrics.jsonl").touch()
    for step in (1, 2):
        record_of_an_adapter(run_dir / "checkpoints" / f"step-{step}" / "record.json", config.trainer.lora)

    @asynccontextmanager
    async def launch(plan, models, *_):
        raise Started({role: (plan.of(role)[0].spec, models) for role in plan.roles})
        yield

    monkeypatch.setattr(evaluation, "launch", launch)
    monkeypatch.setattr(replaying, "launch", launch)
    return run_dir, config


def record_of_an_adapter(path, lora):
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"adapters": {"policy": dataclasses.asdict(lora)}}))


def started(command, *arguments):
    """Of what a command starts: role -> where its model is, and the seed that draws weights if there are none."""
    with pytest.raises(Started) as error:
        command(list(map(str, arguments)))
    specs = error.value.args[0].items()
    return {
        role: (models[spec.model], getattr(spec.config, "seed", None))
        for role, (spec, models) in specs
        if role != "reward"
    }


def test_a_run_is_evaluated_and_replayed_on_the_weights_that_it_drew(a_run, tmp_path):
    """Whatever seed the recipe and the command line have: the adapter was learned on these."""
    run_dir, _ = a_run
    roles = started(evaluate, run_dir, "quickstart", "--run_dir", tmp_path / "1")
    assert roles["trainer"][1] == 5  # of a version that kept none
    for path in ("model", "teacher/model"):
        QUICKSTART.model.materialize((run_dir / path).parent)
        draw_once("titan", run_dir / path, 5)
    for number, source in enumerate((run_dir, run_dir / "checkpoints" / "step-1")):
        out = tmp_path / f"with weights {number}"
        roles = started(evaluate, source, "quickstart", "--run_dir", out, "--seed", "9")
        assert roles["trainer"] == roles["generator"] == (run_dir / "model", None)
    roles = started(replay, run_dir, "--step", "2", "--seed", "5")
    assert roles["trainer"] == (run_dir / "model", None)
    assert "reference" not in roles  # its logprobs were recorded


@pytest.mark.parametrize("command", [evaluate, replay])
def test_a_setting_that_a_command_does_not_read_is_refused(a_run, command):
    run_dir, _ = a_run
    words = [str(run_dir), "quickstart"] if command is evaluate else [str(run_dir), "--step", "2"]
    flags = ["--resume", "latest", "--tracking.project=x", "--save-every", "3"]
    with pytest.raises(ConfigError) as error:
        command([*words, *flags])
    name = "rl eval" if command is evaluate else "rl replay"
    assert str(error.value).splitlines()[:3] == [
        f"--{setting} has no effect on {name}; leave it out"
        for setting in ("resume", "tracking.project", "save_every")
    ]


def test_what_a_recorded_batch_holds_already_is_refused_on_a_replay(a_run):
    run_dir, _ = a_run
    flags = ["--loss_agg", "seq_mean", "--entropy.coef", "0.1", "--max_logprob_diff", "1"]
    with pytest.raises(ConfigError) as error:
        replay([str(run_dir), "--step", "2", *flags])
    assert str(error.value).splitlines()[:3] == [
        f"--{setting} has no effect on rl replay; leave it out"
        for setting in ("loss_agg", "entropy.coef", "max_logprob_diff")
    ]


def test_a_kl_in_the_rewards_is_in_the_recorded_advantages(a_run):
    run_dir, config = a_run
    words = [str(run_dir), "--step", "2", "--kl.coef", "0.5"]
    assert started(replay, *words)  # of a KL in the loss
    write_config(run_dir, "quickstart", replace(config, kl=replace(config.kl, into="reward", estimator="k1")))
    for more in ([], ["--kl.into", "loss"]):
        with pytest.raises(ConfigError, match="--kl.coef has no effect on rl replay; leave it out"):
            replay([*words, *more])


def test_a_run_directory_without_metrics_is_replayed_without_what_was_recorded(a_run):
    run_dir, _ = a_run
    (run_dir / "metrics.jsonl").unlink()
    assert started(replay, run_dir, "--step", "2")


def test_more_updates_than_were_recorded_for_need_logprobs_that_are_not_there():
    """Without them each update would be compared with itself, and nothing clipped."""
    config = replace(quickstart(), minibatches=2, correction=Correction(old_logprobs="trainer"))
    sample = to_sample(group(1).rollouts[0], 1.0)

    def batch(*samples):
        return SimpleNamespace(groups=[SimpleNamespace(samples=samples)])

    with pytest.raises(ConfigError, match="step 7 was recorded without the trainer's logprobs"):
        replaying._check_old_logprobs(batch(sample), config.algorithm, 7)
    with_them = replace(sample, loss_inputs={"old_logprobs": sample.generator_logprobs})
    replaying._check_old_logprobs(batch(with_them), config.algorithm, 7)
    replaying._check_old_logprobs(batch(sample), replace(config, minibatches=1).algorithm, 7)


@pytest.mark.parametrize("unread", [evaluation.UNREAD, replaying.UNREAD])
def test_what_commands_do_not_read_are_settings(unread):
    known = setting_names(QUICKSTART)
    assert unread <= {*known, *(name.partition(".")[0] for name in known)}


def test_an_evaluation_is_planned_as_one(a_run, monkeypatch):
    """Without the critic, whose layout does not divide the model; and nothing is packed in it."""
    run_dir, _ = a_run
    flags = ["--max_seq_len", "100", "--trainer.micro_batch_tokens", "64"]
    roles = started(evaluate, run_dir, "ppo", "--run_dir", run_dir / "eval", *flags)
    assert roles.keys() == {"trainer", "generator"}
    with pytest.raises(ConfigError, match="micro_batch_tokens=64 holds no sequence of 100 tokens"):
        replay([str(run_dir), "--step", "2", *flags])


OWN_TASK = """
from dataclasses import dataclass
from rl.configs.quickstart import quickstart
from dataclasses import replace
from rl.config import RunConfig
from rl.envs.sort_letters import SortLetters

@dataclass(frozen=True)
class Mine(SortLetters):
    num_eval: int = 2

def mine() -> RunConfig:
    return replace(quickstart(), env=Mine())
"""


def test_problems_that_the_run_did_not_hold_out_are_counted(a_run, tmp_path, capsys):
    run_dir, config = a_run
    for number, (more, longer) in enumerate(((0, ()), (7, ()), (7, ("--env.max_new_tokens", "9")))):
        count = config.env.num_eval + more
        words = ("--run_dir", tmp_path / str(number), "--env.num_eval", count, *longer)
        started(evaluate, run_dir, "quickstart", *words)
        words = f"quickstart: {more} of {count} problems were not held out of the run's training; lower env.num_eval"
        assert (words in capsys.readouterr().out) == (more > 0)
    path = tmp_path / "mine.py"
    path.write_text(OWN_TASK)
    _, own = load_recipe(f"{path}:mine")
    write_config(run_dir, f"{path}:mine", replace(own, model=config.model))
    evaluated = started(
        evaluate, run_dir, f"{path}:mine", "--run_dir", tmp_path / "mine", "--env.num_eval", 5
    )
    assert evaluated and f"{path}:mine: 3 of 5 problems were not held out" in capsys.readouterr().out
    write_config(run_dir, "quickstart", config)
    other = ("--env.prompt_prefix", "b", "--env.num_eval", config.env.num_eval + 7)  # another task
    started(evaluate, run_dir, "quickstart", "--run_dir", tmp_path / "other", *other)
    assert "were not held out" not in capsys.readouterr().out


def test_who_goes_on_from_another_run_takes_over_the_weights_that_it_drew(a_run, tmp_path):
    run_dir, config = a_run
    QUICKSTART.model.materialize(run_dir)
    draw_once("titan", run_dir / "model", 5)
    branch = run_dir / "abandoned" / "1" / "checkpoints" / "step-1"
    for number, checkpoint in enumerate((run_dir / "checkpoints" / "step-1", branch)):
        other = tmp_path / str(number)
        other.mkdir()
        take_over_weights(replace(config, resume=str(checkpoint)), other)
        weights, drawn = (path / "model" / "model.safetensors" for path in (other, run_dir))
        assert weights.read_bytes() == drawn.read_bytes()


class Materialized(Exception):
    """Where the model is made."""


@pytest.mark.parametrize("kind", ["eval", "replay"])
def test_temporary_files_lie_where_they_go_with_the_process_however_it_ends(kind, tmp_path, monkeypatch):
    def made(config, plan, directory):
        raise Materialized(directory)

    plan = settle(quickstart(), cluster=Cluster((Host(2, 20.0),)))
    for module in (evaluation, replaying):
        monkeypatch.setattr(module, "settle", lambda config, command: plan)
        monkeypatch.setattr(module, "model_dirs", made)
    config = SimpleNamespace(hosts="")
    run = {
        "eval": lambda: evaluation._answers(config, 0, tmp_path / "plan.json"),
        "replay": lambda: replaying._learn_again(config, tmp_path, 1, tmp_path),
    }
    with pytest.raises(Materialized) as error:
        asyncio.run(run[kind]())
    (directory,) = error.value.args
    assert temporary_directory() in directory.parents and not directory.exists()


def test_what_the_infrastructure_lost_lowers_no_pass_at_k_and_is_counted():
    lost, wrong = (
        Score(0.0, "the judge did not answer", cause="judge"),
        Score(0.0, "it raised", cause="raised"),
    )
    metrics = measures(
        [group(1)], [group(lost, lost, lost, lost), group(1, lost, lost, lost), group(1, 1, wrong, 0)]
    )
    assert metrics["errors of 4"] == 8
    assert metrics["pass@1"] == pytest.approx((1 + 0.5) / 2) and metrics["mean reward of 4"] == pytest.approx(
        3 / 5
    )
    assert metrics["pass@2"] == pytest.approx(1 - 1 / 6) and metrics["pass@4"] == 1.0
    nothing = measures([group(1)], [group(lost, lost)])
    assert nothing["errors of 2"] == 2 and not any(name.startswith("pass@") for name in nothing)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A run of six steps, its metrics by step, and what is asked of the actors that a command starts."""
    monkeypatch.chdir(tmp_path)
    config = replace(
        QUICKSTART, env=replace(QUICKSTART.env, num_eval=4), warmup=WarmupConfig(), steps=6, save_every=2,
        keep_checkpoints=3, record_batches=6, prompts_per_step=8, group_size=4, eval_every=6,
    )  # fmt: skip
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    _, recorder = run_fakes(config, run_dir)
    write_config(run_dir, "quickstart", config)
    actors, calls = fake_actors(config, tmp_path)

    @asynccontextmanager
    async def launch(*_):
        yield actors

    for module in (evaluation, replaying):
        monkeypatch.setattr(module, "launch", launch)
        monkeypatch.setattr(module, "temporary_directory", lambda: tmp_path)
    return run_dir, recorder.steps, calls


def test_a_step_is_replayed_from_the_checkpoint_before_it_and_compared_with_what_was_recorded(
    recorded, capsys
):
    run_dir, steps, _ = recorded
    lines = [{"step": 6, "eval/accuracy": 1.0}]
    lines += [{"step": n, **{name: float(value) for name, value in of.items()}} for n, of in steps.items()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay([str(run_dir), "--step", "6"]) == 0
    out = capsys.readouterr().out
    assert f"steps 5 to 6, from {run_dir}/checkpoints/step-4" in out
    table = out[out.index("\nstep 6 ") + 1 :].partition("\n")[2]
    rows = {name: rest for name, *rest in re.findall(r"^(\S+) +(\S+) +(\S+) +(\S+)$", table, re.M)}
    assert {"loss", "grad_norm", "lr", "updates"} <= rows.keys()
    assert all(before == now for before, now, _ in rows.values()), rows
    assert rows["loss"] == [f"{steps[6]['loss']:.6g}"] * 2 + ["0.0e+00"]
    assert f"{steps[5]['loss']:.6g}" != rows["loss"][1]


def test_an_evaluation_is_of_the_weights_of_its_checkpoint_greedy_and_as_often_sampled_as_asked(
    recorded, tmp_path
):
    run_dir, _, calls = recorded
    out = tmp_path / "eval"
    words = ["--samples", "3", "--run_dir", str(out), "--env.num_eval", "4"]
    assert evaluate([str(run_dir / "checkpoints" / "step-2"), "quickstart", *words]) == 0
    assert [call[1:] for call in calls if call[0] == "trainer"] == [
        ("load_checkpoint", "step-2"), ("publish_weights", 0),
    ]  # fmt: skip
    asked = Counter((call[2], call[3].temperature) for call in calls if call[0] == "generators")
    assert dict(asked) == {(1, 0.0): 4, (3, 1.0): 4}
    report = json.loads((out / "eval.json").read_text())
    assert (report["model"], report["samples"]) == (f"{run_dir}/checkpoints/step-2", 3)
    assert {"eval/accuracy", "errors of 3", "mean reward of 3", "pass@1"} <= report["quickstart"].keys()
    answers = [json.loads(line) for line in (out / "rollouts.jsonl").open()]
    assert [answer["split"] for answer in answers] == ["greedy"] * 4 + ["sampled"] * 12


def test_a_recorded_batch_that_is_damaged_or_of_another_version_is_refused_before_anything_starts(a_run):
    run_dir, _ = a_run
    path = run_dir / "batches" / "step-2.pkl"
    whole = path.read_bytes()
    assert started(replay, run_dir, "--step", "2")
    first = len(pickle.dumps(VERSION))
    without_version = whole[first:]
    for content, words in (
        (
            pickle.dumps(VERSION + 1) + without_version,
            f"has version {VERSION + 1}, and this rl reads {VERSION}",
        ),
        (without_version, f"has version 0, and this rl reads {VERSION}; use the rl that wrote it"),
        (b"", "is damaged .*; replay a step without it"),
        (b"text", "is damaged .*; replay a step without it"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            replay([str(run_dir), "--step", "2"])
    path.write_bytes(whole[:-9])
    check_batch(run_dir, 2)  # its version alone
    with pytest.raises(ConfigError, match="is damaged"):
        read_batch(run_dir, 2)


def test_recipes_with_several_directories_are_refused(tmp_path, monkeypatch):
    QUICKSTART.model.materialize(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("here", "there"):
        (tmp_path / f"{name}.py").write_text(
            "from dataclasses import replace\nfrom rl.configs.quickstart import quickstart\n"
            f"def {name}():\n    return replace(quickstart(), run_dir='out/{name}')\n"
        )
    draw_once("titan", tmp_path / "model", 1)
    with pytest.raises(
        ConfigError, match=r"several directories \(out/here, out/there\); name one with --run_dir"
    ):
        evaluate([str(tmp_path / "model"), "here.py", "there.py"])
    assert not (tmp_path / "out").exists()
