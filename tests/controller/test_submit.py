"""`rl train --launcher`: the script or manifest that is written, and what is refused before it is."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from configs.quickstart import quickstart
from rl import hub
from rl.cli import _dispatch
from rl.cluster.jobs import LAUNCHERS, JobConfig
from rl.cluster.kubernetes_job import KubernetesJob
from rl.cluster.slurm_job import seconds_of
from rl.config.codec import write_config
from rl.config.recipes import load_recipe
from rl.config.validate import validate
from rl.controller.submit import is_submitted
from rl.errors import ConfigError, RunError


@pytest.fixture(autouse=True)
def a_scheduler(tmp_path, monkeypatch):
    """sbatch and kubectl that note what they are given."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "kubectl"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho "{name} $@" | tee {tmp_path}/called\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    return tmp_path


def submit(tmp_path, *words, recipe="quickstart"):
    mount = ["--kubernetes.mount", str(tmp_path)] if any("kubernetes" in word for word in words) else []
    assert _dispatch(["train", recipe, *words, *mount, "--run_dir", str(tmp_path / "run")]) == 0


SLURM = ("--launcher", "slurm", "--slurm.nodes", "2")
KUBERNETES = ("--launcher=kubernetes", "--kubernetes.image", "rl:1", "--kubernetes.claim", "runs")


def test_a_script_for_slurm_has_its_settings_and_the_runs(tmp_path):
    submit(
        tmp_path, "--steps", "7", *SLURM, "--slurm.gpus_per_node", "8", "--slurm.partition=gpu", "--slurm.account", "me",
        "--slurm.time", "12:00:00", "--slurm.signal_seconds", "60", "--slurm.setup", "module load cuda", "source it",
        "--slurm.options", "qos=high", "--seed=3",
    )  # fmt: skip
    script = tmp_path / "run" / "slurm.sh"
    lines = script.read_text().splitlines()
    options = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert options == {
        "job-name=rl-run", "nodes=2", "ntasks-per-node=1", "gpus-per-node=8", "partition=gpu", "account=me",
        "time=12:00:00", "signal=TERM@60", f"output={tmp_path}/run/slurm-%j.log", "open-mode=append", "requeue",
        "exclusive", "mem=0", "qos=high",
    }  # fmt: skip
    (srun,) = [line for line in lines if line.startswith("srun ")]
    run = f"train quickstart --steps 7 --seed 3 --run_dir {tmp_path}/run --resume latest"
    how = "--export=ALL --mpi=none --cpu-bind=none --kill-on-bad-exit=0 --wait=0"
    assert srun == f"srun {how} {sys.executable} -m rl {run}"
    assert lines[0] == "#!/bin/bash -l"
    assert lines.index("module load cuda") + 1 == lines.index("source it") < lines.index(srun)
    assert f"cd {Path.cwd()}" in lines
    assert (tmp_path / "called").read_text() == f"sbatch {script}\n"
    assert subprocess.run(["bash", "-n", script], check=True, capture_output=True).stderr == b""
    assert "a secret" not in script.read_text()


def test_a_directory_with_a_space_is_one_word_of_the_script(tmp_path):
    (tmp_path / "my runs").mkdir()
    submit(tmp_path / "my runs", *SLURM)
    text = (tmp_path / "my runs" / "run" / "slurm.sh").read_text()
    (output,) = re.findall("^#SBATCH (--output=.*)$", text, re.M)
    assert shlex.split(output) == [f"--output={tmp_path}/my runs/run/slurm-%j.log"]


def test_nodes_that_are_shared_are_asked_for_by_cores(tmp_path):
    submit(tmp_path, *SLURM, "--slurm.cpus_per_node", "16")
    text = (tmp_path / "run" / "slurm.sh").read_text()
    assert (
        "#SBATCH --cpus-per-task=16" in text
        and "--exclusive" not in text
        and "--mem" not in text
        and "srun --export=ALL --mpi=none --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --cpus-per-task=16 "
        in text
    )


def test_the_memory_that_is_asked_for_stands(tmp_path):
    submit(tmp_path, *SLURM, "--slurm.options", "mem-per-gpu=64G")
    text = (tmp_path / "run" / "slurm.sh").read_text()
    assert "#SBATCH --mem-per-gpu=64G" in text and "--mem=0" not in text
    for option, asked in ("mem=", False), ("mem-bind=local", True):
        submit(tmp_path, *SLURM, "--slurm.options", option)
        text = (tmp_path / "run" / "slurm.sh").read_text()
        assert ("--mem=0" in text) == asked and "--mem=\n" not in text


def test_a_job_that_is_submitted_within_another_knows_nothing_of_that(tmp_path, monkeypatch):
    (tmp_path / "bin" / "sbatch").write_text(f"#!/bin/sh\nenv > {tmp_path}/environment\n")
    of_slurm = {
        "SLURM_CONF": "/etc/s.conf",
        "SLURM_MEM_PER_NODE": "8192",
        "SLURM_CPUS_PER_TASK": "4",
        "SBATCH_ACCOUNT": "me",
    }
    for job, expected in (
        ({}, of_slurm),
        ({"SLURM_JOB_ID": "17"}, {"SLURM_CONF": "/etc/s.conf", "SBATCH_ACCOUNT": "me"}),
    ):
        with monkeypatch.context() as patch:
            for name, value in (of_slurm | job).items():
                patch.setenv(name, value)
            submit(tmp_path, *SLURM)
        lines = (tmp_path / "environment").read_text().splitlines()
        variables = dict(
            line.split("=", 1) for line in lines if line.startswith(("SLURM_", "SBATCH_", "HF_TOKEN"))
        )
        assert variables == expected | {"HF_TOKEN": "a secret"}


def test_a_setup_that_fails_ends_the_job_before_it_runs(tmp_path):
    submit(tmp_path, *SLURM, "--slurm.setup", "false")
    (tmp_path / "bin" / "srun").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "bin" / "srun").chmod(0o755)
    environment = {**os.environ, "SLURM_JOB_ID": "17"}
    done = subprocess.run(
        ["bash", tmp_path / "run" / "slurm.sh"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and not (tmp_path / "started").exists()
    assert "slurm.setup: false failed" in done.stderr


@pytest.mark.parametrize(
    ("code", "told", "requeued"),
    [(143, "", True), (0, "", False), (1, "", False), (130, "", False), (253, "", False),
     (253, 'touch "$RL_TOLD"; ', True)],
)  # fmt: skip
def test_a_job_that_was_told_to_end_is_queued_again(tmp_path, code, told, requeued):
    """253: srun's own, where a process of the job was out of memory, though the run lived on."""
    submit(tmp_path, *SLURM)
    (tmp_path / "run" / "slurm-17.told").touch()  # of the job's last time
    for name, body in {"srun": f"{told}exit {code}", "scontrol": f'echo "$@" > {tmp_path}/requeued'}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {**os.environ, "SLURM_JOB_ID": "17"}
    done = subprocess.run(["bash", tmp_path / "run" / "slurm.sh"], env=environment, check=False)
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 17\n"


def test_a_manifest_for_kubernetes(tmp_path):
    submit(tmp_path, *KUBERNETES, "--kubernetes.nodes", "3", "--kubernetes.gpus_per_node", "8", "--kubernetes.secret", "tokens",
           "--kubernetes.memory_gib", "64", "--kubernetes.namespace", "team", "--kubernetes.signal_seconds", "300")  # fmt: skip
    file = tmp_path / "run" / "kubernetes.yaml"
    service, job = yaml.safe_load_all(file.read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job") and service["spec"]["clusterIP"] == "None"
    assert {item["metadata"]["namespace"] for item in (service, job)} == {"team"}
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["backoffLimit"] == 10 * 4  # a lost pod's, its successor's, and what both bring down
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    name = job["metadata"]["name"]
    assert variables == {
        "RANK": None,
        "WORLD_SIZE": "3",
        "RL_HOSTS_SECONDS": "3600",
        "MASTER_ADDR": f"{name}-0.{name}",
        "MASTER_PORT": "29500",
    }
    assert (
        pod["subdomain"] == service["metadata"]["name"]
        and service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    )
    assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    assert (
        container["resources"]["limits"]
        == {"nvidia.com/gpu": "8", "memory": "64Gi"}
        == container["resources"]["requests"]
    )
    run = ["--run_dir", str(tmp_path / "run"), "--resume", "latest"]
    assert container["command"] == ["python", "-m", "rl", "train", "quickstart", *run]
    assert "workingDir" not in container and pod["terminationGracePeriodSeconds"] == 300
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", str(tmp_path)}
    assert (
        tmp_path / "called"
    ).read_text() == f"kubectl create -f {file}\n" and "a secret" not in file.read_text()


def test_a_pod_has_the_images_python_its_directory_and_words_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "recipe.py").write_text(
        "from rl.configs.quickstart import quickstart\ndef mine(): return quickstart()\n"
    )
    monkeypatch.chdir(tmp_path)
    words = [
        "--kubernetes.python",
        "/env/bin/python",
        "--kubernetes.directory",
        "/code",
        "--tracking.project",
        "a$(HOME)$b",
    ]
    submit(tmp_path, *KUBERNETES, *words, recipe="recipe.py:mine")
    _, job = yaml.safe_load_all((tmp_path / "run" / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:5] == ["/env/bin/python", "-m", "rl", "train", "recipe.py:mine"]
    assert container["workingDir"] == "/code"
    assert "a$$(HOME)$$b" in container["command"]  # Kubernetes makes $ of $$, and a variable of $(HOME)


def test_a_run_of_kubernetes_is_on_the_claim(tmp_path, monkeypatch):
    """And what is submitted is in the working directory where the claim is not mounted here."""
    monkeypatch.chdir(tmp_path)
    for words in (["--run_dir", "runs/one"], ["--run_dir", "/nowhere"], ["--run_dir", "/nowhere/../one"]):
        with pytest.raises(ConfigError, match="is not below --kubernetes.mount /nowhere.*; give /nowhere/"):
            _dispatch(["train", "quickstart", *KUBERNETES, "--kubernetes.mount", "/nowhere", *words])
    for words, name in (([], "quickstart-"), (["--run_dir", "/nowhere/one"], "one")):
        assert _dispatch(["train", "quickstart", *KUBERNETES, "--kubernetes.mount", "/nowhere", *words]) == 0
        (file,) = tmp_path.glob(f"runs/{name}*/kubernetes.yaml")
        _, job = yaml.safe_load_all(file.read_text())
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert f"/nowhere/{file.parent.name}" in container["command"]
    assert not Path("/nowhere").exists()


def test_a_directory_of_the_claims_name_that_is_not_the_claim_is_not_written_to(tmp_path, monkeypatch):
    """A laptop has a /mnt, too, which is root's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnt").mkdir()
    job = KubernetesJob(mount=str(tmp_path / "mnt"))
    run_dir = tmp_path / "mnt" / "one"
    assert job.place(run_dir) == run_dir
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "mnt")
    assert job.place(run_dir) == tmp_path / "runs" / "one"
    run_dir.mkdir()  # the user's own, on a claim of root's
    assert job.place(run_dir) == run_dir


def test_a_job_ends_with_its_run(tmp_path):
    submit(tmp_path, *KUBERNETES)
    _, job = yaml.safe_load_all((tmp_path / "run" / "kubernetes.yaml").read_text())
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_a_run_whose_settings_are_taken_is_submitted_with_them(tmp_path, monkeypatch):
    write_config(tmp_path, "quickstart", replace(quickstart(), steps=123))
    monkeypatch.chdir(tmp_path)
    for recipe in (".", "config.json", str(tmp_path)):
        submit(tmp_path, *SLURM, recipe=recipe)
        (srun,) = re.findall("^srun .*$", (tmp_path / "run" / "slurm.sh").read_text(), re.M)
        words = shlex.split(srun)
        submitted = words[words.index("train") + 1]
        assert os.path.isabs(submitted) and load_recipe(submitted)[1].steps == 123


def test_a_recipes_name_stays_its_name_beside_a_directory_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "quickstart").mkdir()
    monkeypatch.chdir(tmp_path)
    submit(tmp_path, *SLURM)
    assert " -m rl train quickstart --run_dir " in (tmp_path / "run" / "slurm.sh").read_text()


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"slurm.sh cannot be written \(.*\); give another --run_dir"):
        submit(tmp_path, *SLURM)


def test_a_dry_run_writes_what_would_be_submitted_and_starts_nothing(tmp_path, capsys):
    submit(tmp_path, *SLURM, "--dry_run", "--cluster", "2 x 8xH100-80")
    assert not (tmp_path / "called").exists()
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert len(plan["cluster"]["hosts"]) == 2 and (tmp_path / "run" / "slurm.sh").exists()
    assert "nothing was started" in capsys.readouterr().out
    submit(tmp_path, *SLURM, "--dry_run")  # hosts as this one
    assert len(json.loads((tmp_path / "run" / "plan.json").read_text())["cluster"]["hosts"]) == 2


def test_a_checkpoint_that_only_the_recipe_names_is_not_left_out_in_silence(tmp_path):
    (tmp_path / "asked").mkdir()
    write_config(
        tmp_path / "asked",
        "quickstart",
        replace(load_recipe("quickstart")[1], resume="runs/a/checkpoints/step-4"),
    )
    words = r"resume='runs/a/checkpoints/step-4' of .* has no effect here: a job goes on from the newest .* --resume ''"
    with pytest.raises(ConfigError, match=words):
        submit(tmp_path, *SLURM, recipe=str(tmp_path / "asked"))
    assert not (tmp_path / "run").exists()
    submit(tmp_path, *SLURM, "--resume", "", recipe=str(tmp_path / "asked"))
    command = shlex.split(re.search(r"rl train .*", (tmp_path / "run" / "slurm.sh").read_text())[0])
    assert command.count("--resume") == 1 and command[-2:] == ["--resume", "latest"]


def test_a_dry_run_fetches_no_weights(tmp_path, monkeypatch):
    model, asked = quickstart().model.materialize(tmp_path / "hub"), []

    def snapshot(name, files=hub._MODEL_FILES):
        asked.append(files)
        return str(model)

    monkeypatch.setattr(hub, "_snapshot", snapshot)
    submit(tmp_path, *SLURM, "--dry_run", "--model.path", "someone/model", recipe="smollm2")
    assert asked and hub._MODEL_FILES not in asked


def test_two_that_are_submitted_in_one_second_have_a_directory_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    for _ in range(2):
        assert _dispatch(["train", "quickstart", *SLURM]) == 0
    for name in ("quickstart-20260101-000000", "quickstart-20260101-000000-2"):
        text = (tmp_path / "runs" / name / "slurm.sh").read_text()
        assert f"--run_dir {tmp_path}/runs/{name} " in text


def test_values_that_look_like_flags_are_handed_on_as_values(tmp_path):
    submit(tmp_path, *SLURM, "--env.prompt_prefix=--think", "--tracking.project", "---")
    (srun,) = re.findall("^srun .*$", (tmp_path / "run" / "slurm.sh").read_text(), re.M)
    words = shlex.split(srun)
    assert "--env.prompt_prefix=--think" in words
    assert words[words.index("--tracking.project") + 1] == "---"


def test_flags_may_be_written_with_dashes(tmp_path):
    run_dir = tmp_path / "run"
    words = ("--launcher=slurm", "--slurm.nodes=2", "--dry-run", f"--run-dir={run_dir}", "--save-every", "3")
    assert is_submitted(words) and _dispatch(["train", "quickstart", *words]) == 0
    command = shlex.split(re.search(r"rl train .*", (run_dir / "slurm.sh").read_text())[0])
    assert command[2:] == ["quickstart", "--save_every", "3", "--run_dir", str(run_dir), "--resume", "latest"]


REFUSED = {
    ("--launcher", "pbs"): ["write --launcher slurm or --launcher kubernetes, once"],
    ("--launcher",): ["write --launcher slurm or"],
    ("--slurm.nodes", "2"): ["write --launcher slurm or"],
    (*SLURM, "--launcher", "slurm"): ["once"],
    ("--launcher", "slurm", "--slurm.nodez", "2"): ["unknown setting --slurm.nodez; did you mean --slurm.nodes?"],
    ("--launcher", "slurm", "--slurm.nodes", "0"): ["slurm.nodes=0 must be at least 1"],
    ("--launcher", "slurm", "--slurm.nodes", "two"): ["--slurm.nodes two must be a whole number"],
    (*SLURM, "--trainer.lora.alpha", "8"): ["trainer.lora.targets have no effect with trainer.lora.rank=0; set a rank"],
    (*SLURM, "--kubernetes.nodes", "2"): ["--kubernetes.nodes has no effect with --launcher slurm; leave it out"],
    (*SLURM, "--hosts", "a:1"): ["--hosts has no effect here: the scheduler chooses hosts; leave it out"],
    (*SLURM, "--resume", "latest"): ["--resume has no effect here: a job goes on from the newest checkpoint"],
    (*SLURM, "--cluster", "8xH100-80"): ["--cluster has no effect without --dry_run; leave it out"],
    (*SLURM, "--dry_run", "--cluster", "4 x 8xH100-80"): ["slurm.nodes=2 and --cluster '4 x 8xH100-80' differ; set --slurm.nodes 4"],
    (*SLURM, "--slurm.gpus_per_node", "4", "--dry_run", "--cluster", "2 x 8xH100-80"): ["slurm.gpus_per_node=4 and --cluster '2 x 8xH100-80' differ; set --slurm.gpus_per_node 8"],
    (*SLURM, "--slurm.time", "2"): ["slurm.time=2 is not over slurm.signal_seconds=120, so that the run would be told to end"],
    (*SLURM, "--slurm.time", "0-0:01:59"): ["slurm.time=0-0:01:59 is not over"],
    (*SLURM, "--slurm.time", "01:00:00", "--slurm.signal_seconds", "3600"): ["slurm.time=01:00:00 is not over"],
    (*SLURM, "--stepz", "2"): ["unknown setting --stepz"],
    (*SLURM, "--steps", "0", "--sloth", "1"): ["steps=0 must be at least 1", "unknown setting --sloth"],
    ("--launcher", "kubernetes"): ["--kubernetes.image is missing; give it", "--kubernetes.claim is missing; give it"],
    ("--launcher", "slurm", "--dry_run", "--cluster", "1xH100-80", "--placement", "alone"): ["2 processes (trainer 1 + generator 1) need a GPU each"],
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_cannot_be_submitted_is_told_before_anything_is_written(tmp_path, words):
    with pytest.raises(ConfigError) as error:
        submit(tmp_path, *words)
    assert all(line in str(error.value) for line in REFUSED[words]), str(error.value)
    assert not (tmp_path / "run").exists() and not (tmp_path / "called").exists()


def test_a_scheduler_that_is_not_here_or_refuses(tmp_path, monkeypatch):
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    with pytest.raises(RunError, match=r"sbatch failed: no such partition; what it was given is .*slurm.sh"):
        submit(tmp_path, *SLURM)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match=r"sbatch is not here; submit .*slurm.sh where it is"):
        submit(tmp_path, *SLURM)


JOB, SERVICE = 'jobs.batch "rl-x" already exists', 'services "rl-x" already exists'
QUOTA = 'jobs.batch "rl-x" is forbidden: exceeded quota'


@pytest.mark.parametrize(
    ("errors", "what"),
    [
        ([JOB, SERVICE], "submitted before.* end it with kubectl delete --cascade=foreground -f .*kubernetes.yaml, and submit again"),
        ([JOB], "submitted before"),
        ([SERVICE, QUOTA], "kubectl failed: .*exceeded quota"),
        ([QUOTA], "kubectl failed: .*exceeded quota"),
    ],
)  # fmt: skip
def test_a_run_whose_job_is_still_there_is_not_started_in_silence(tmp_path, errors, what):
    refuses = "; ".join(f"echo 'Error from server (AlreadyExists): {error}' >&2" for error in errors)
    (tmp_path / "bin" / "kubectl").write_text(f"#!/bin/sh\n{refuses}; exit 1\n")
    with pytest.raises(RunError, match=what):
        submit(tmp_path, *KUBERNETES)


def test_a_service_that_was_left_does_not_keep_the_job_from_starting(tmp_path, capsys):
    answer = f"echo 'Error from server (AlreadyExists): {SERVICE}' >&2; echo job.batch/rl-x created; exit 1"
    (tmp_path / "bin" / "kubectl").write_text(f"#!/bin/sh\n{answer}\n")
    submit(tmp_path, *KUBERNETES)
    assert "the Job was created" in capsys.readouterr().out


def test_each_run_has_a_job_name_of_its_own(tmp_path):
    names = ["Run_7.b", "run-7-b", "-x-", "a" * 80, "a" * 79 + "b", "_", "été", "7", "run"]
    made = set()
    for directory in [*names, *(f"other/{name}" for name in names)]:
        words = [*KUBERNETES, "--kubernetes.mount", str(tmp_path), "--run_dir", str(tmp_path / directory)]
        assert _dispatch(["train", "quickstart", *words]) == 0
        text = (tmp_path / directory / "kubernetes.yaml").read_text()
        assert text.startswith("---\n")  # else kubectl before 1.33 reads one document
        service, job = yaml.safe_load_all(text)
        assert service["metadata"]["name"] == job["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,53}[a-z0-9])?", job["metadata"]["name"])
        made.add(job["metadata"]["name"])
    assert len(made) == 2 * len(names)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("words", [["--help"], ["--dry_run", "-h"]])
def test_help_lists_the_settings_of_the_launcher_alone(launcher, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        submit(tmp_path, "--launcher", launcher, *words)
    shown = capsys.readouterr().out
    settings = {f"--{launcher}.{field.name}" for field in fields(getattr(JobConfig(), launcher))}
    assert not exit.value.code and not (tmp_path / "run").exists()
    assert settings == {
        word for word in shown.split() if word.startswith(tuple(f"--{name}." for name in LAUNCHERS))
    }
    assert "The recipe's settings: rl train quickstart --help." in " ".join(shown.split())


def test_which_words_are_a_jobs():
    assert not is_submitted(["--steps", "2"]) and not is_submitted(["--slurmy", "2"])
    assert is_submitted(["--launcher=slurm"]) and is_submitted(["--kubernetes.nodes", "2"])


@pytest.mark.parametrize("launcher", [SLURM, KUBERNETES])
def test_a_job_starts_in_the_directory_that_its_submission_wrote_to(launcher, tmp_path):
    submit(tmp_path, *launcher)
    run_dir = tmp_path / "run"
    (run_dir / "slurm-1.log").write_text("of the job")
    (run_dir / "plan.json").write_text("{}")
    config = replace(quickstart(), run_dir=str(run_dir))
    assert validate(config, in_place=True) == []
    (run_dir / "thesis.tex").write_text("years")
    (problem,) = validate(config, in_place=True)
    assert "exists and is not empty; give another directory" in problem


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3", 180), ("3:05", 185), ("1:02:03", 3723), ("1-2", 93600), ("1-2:3", 93780), ("1-2:3:4", 93784), ("UNLIMITED", None), ("", None), ("0", None), ("0:00", None)],
)  # fmt: skip
def test_a_time_of_slurms_in_seconds(text, seconds):
    """Its formats are in sbatch's manual, at --time."""
    assert seconds_of(text) == seconds


def test_what_is_not_asked_for_is_not_in_a_manifest():
    """A Secret without a name is refused, and a pod of 0Gi is killed."""
    job = KubernetesJob(image="rl:1", claim="runs", cpus_per_node=4)
    service, manifest = yaml.safe_load_all(job.text(Path("/runs/one"), ["rl"]))
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == []
    assert container["resources"] == {"limits": {"cpu": "4"}, "requests": {"cpu": "4"}}
    assert service["spec"]["publishNotReadyAddresses"] is True  # pods meet before they are ready
