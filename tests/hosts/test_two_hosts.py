"""Whole runs over hosts that share nothing but files and a network. They need root, as namespaces do."""

import json
import os
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import transformers

from configs.calculator import calculator
from rl.cluster.kubernetes_job import KubernetesJob
from tests.certificates import Authority, environment
from tests.hosts import api_server as kubectl
from tests.hosts.namespaces import hosts, worker
from tests.hosts.runs import (
    MORTAL,
    OVER_BOTH,
    RL,
    addresses,
    check_same,
    left_on,
    numbers,
    start,
    steps_of,
    train,
    two_hosts,
    wait_for,
)
from tests.hosts.slurm import install, slurm
from tests.integration.calculator import TWO_STEPS, check_episodes
from tests.integration.runs import read_metrics

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")


def test_hosts_share_neither_memory_nor_processes_nor_names():
    with hosts(2) as (one, other):
        for host in (one, other):
            host.output("touch", f"/dev/shm/{host.name}")
        for host in (one, other):
            assert sorted(host.output("ls", "/dev/shm").split()) == [host.name, "tmp"]
            assert host.output("hostname").strip() == host.name and not host.processes()
        assert one.name != other.name and not Path("/dev/shm", one.name).exists()
    assert one.name not in subprocess.run(["ip", "link"], check=True, capture_output=True, text=True).stdout


def test_a_run_over_two_hosts(directory):
    """A trainer whose ranks are on both, a generator on the second, episodes on the first."""
    run_dir = directory / "run"
    with two_hosts(directory) as made:
        places = ("--trainer.hosts", 0, 1, "--generator.hosts", 1, "--reward.hosts", 0)
        more = ("--trainer.layout.shard", 2, "--run_dir", run_dir)
        output = train(made, *TWO_STEPS, *places, *more)
        assert [left_on(host) for host in made] == [[], []]
    assert "held-out accuracy after 2 steps" in output
    plan = json.loads((run_dir / "plan.json").read_text())
    by_name = {r["name"]: [p["host"] for p in r["processes"]] for r in plan["replicas"]}
    assert by_name == {"trainer": [0, 1], "generator-0": [1], "reward-0": [0]}
    steps = [line for line in numbers(run_dir) if "loss" in line]
    # holds: meaning, weights of another version differ by 3e-2; rounding makes 3e-7
    assert all(line["logprob_diff/mean"] < 1e-5 for line in steps), steps
    check_episodes(run_dir)
    sampled = {json.loads(line)["policy_version"][0] for line in (run_dir / "rollouts.jsonl").open()}
    assert max(sampled) >= 1  # with weights that the trainer had changed
    assert not (run_dir / ".hosts").exists()
    for name, host, rank in (("trainer-0", 0, 0), ("trainer-1", 1, 1), ("generator-0", 1, 0)):
        first = (run_dir / "logs" / f"{name}.log").read_text().splitlines()[0]
        assert f"host {made[host].worker_address}, rank {rank}: process " in first
    last = [line for line in read_metrics(run_dir) if "loss" in line][-1]
    # holds: meaning, each host was idle for a part of the step
    assert 0 < last["idle/host-0"] < last["time/step"] and 0 <= last["idle/host-1"] < last["time/step"]


@pytest.mark.slow
def test_a_host_list_gives_the_numbers_of_one_host(directory, on_one_host):
    with two_hosts(directory) as made:
        train(made, MORTAL, *OVER_BOTH, "--run_dir", directory / "run")
    check_same(numbers(directory / "run"), on_one_host)


@pytest.mark.slow
def test_hosts_that_speak_tls_give_the_numbers_of_one_host(directory, on_one_host):
    """rl worker, Monarch's processes, and the weights between hosts; who has no certificate is refused."""
    with hosts(2) as made, ExitStack() as kept:
        everybody = [*(host.address for host in made), made[0].address.rpartition(".")[0] + ".254"]
        kept.enter_context(environment(Authority(directory).variables("hosts", everybody)))
        for host in made:
            kept.enter_context(worker(host, directory / f"worker-{host.number}.log"))
        train(made, MORTAL, *OVER_BOTH, "--run_dir", directory / "run")
        with environment({}):
            stranger = start(made, MORTAL, *OVER_BOTH, "--run_dir", directory / "another")
            output, _ = stranger.communicate(timeout=60)
        assert stranger.returncode == 2 and "it sent no greeting: is RL_TLS_CERT set there" in output
        assert [left_on(host) for host in made] == [[], []]
    check_same(numbers(directory / "run"), on_one_host)
    for host in made:
        assert "listening by TLS on" in (directory / f"worker-{host.number}.log").read_text()


@pytest.mark.slow
def test_torchrun_gives_the_numbers_of_one_host(directory, on_one_host):
    torchrun = str(Path(RL[0]).parent / "torchrun")
    with hosts(2) as made:
        place = [
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            "--master-addr",
            made[0].address,
            "--master-port",
            "29501",
        ]
        words = ["-m", "rl", "train", MORTAL, *OVER_BOTH, "--run_dir", str(directory / "run")]
        started = [
            host.start(
                torchrun,
                *place,
                "--node-rank",
                str(i),
                *words,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for i, host in enumerate(made)
        ]
        outputs = [process.communicate(timeout=240)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], outputs
        # torchrun's own directories aside
        assert [[path for path in left_on(host) if "torchelastic" not in path] for host in made] == [[], []]
    check_same(numbers(directory / "run"), on_one_host)


@pytest.fixture
def a_slurm(directory):
    install()
    with hosts(2) as made, slurm(made, directory / "slurm") as environment:
        yield made, environment


@pytest.mark.slow
def test_srun_gives_the_numbers_of_one_host(a_slurm, directory, on_one_host):
    made, environment = a_slurm
    words = ["srun", "--mpi=none", "-N2", "--ntasks-per-node=1", *RL, "train", MORTAL, *OVER_BOTH]
    done = subprocess.run(
        [*words, "--run_dir", directory / "run"], env=environment, capture_output=True, text=True, timeout=240, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [left_on_a_node(host) for host in made] == [[], []]
    check_same(numbers(directory / "run"), on_one_host)


def left_on_a_node(host):
    return [words for words in left_on(host) if "slurm" not in words]


@pytest.mark.slow
def test_a_job_of_slurms_that_is_told_to_end_goes_on_when_its_turn_comes_again(
    a_slurm, directory, on_one_host
):
    """As at the end of its time: a signal, a checkpoint, the queue, and the same numbers."""
    _, environment = a_slurm
    words = [*RL, "train", MORTAL, *OVER_BOTH, "--save_every", "1000", "--run_dir", str(directory / "run")]
    job = ["--launcher", "slurm", "--slurm.nodes", "2", "--slurm.cpus_per_node", "1", "--slurm.time", "30"]
    made = subprocess.run(
        [*words, *job], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert made.returncode == 0 and "Submitted batch job 1" in made.stdout, made.stderr

    def state():
        """Empty while Slurm does not answer."""
        words = ["scontrol", "show", "job", "1", "-o"]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False).stdout

    wait_for(lambda: steps_of(directory / "run") >= 4, directory / "run")
    subprocess.run(["scancel", "--signal=TERM", "1"], env=environment, check=True)
    wait_for(lambda: "Restarts=1" in state(), directory / "run")
    assert "TERM@" in (directory / "run" / "slurm.sh").read_text()

    pending: list[float] = []

    def has_ended():
        """Slurm holds a job that was queued again for two minutes; an operator would wait. Some seconds it has to: a job
        that starts in the second in which it was ended is killed, as its credential was revoked in that second."""
        (directory / "job").write_text(state())
        if "JobState=PENDING" in state():
            pending.append(time.monotonic())
            if pending[-1] - pending[0] > 5:
                subprocess.run(
                    ["scontrol", "update", "JobId=1", "StartTime=now"], env=environment, check=False
                )
        return "JobState=COMPLETED" in state()

    logs = [directory / "job", Path(environment["SLURM_CONF"]).with_name("slurmctld.log")]
    wait_for(has_ended, directory / "run", logs=logs)
    output = (directory / "run" / "slurm-1.log").read_text()
    assert "interrupted: saving a checkpoint of step " in output
    assert output.count("warm-up 1/20") == 1  # it went on from there
    assert "held-out accuracy after 12 steps" in output
    check_same(numbers(directory / "run"), on_one_host)


@pytest.mark.slow
def test_a_job_of_kubernetes_gives_the_numbers_of_one_host(directory, on_one_host):
    """kubectl hands the manifest to an API server that is as strict as a real one. Its pods are started as their kubelets would."""
    kubectl.install()
    run_dir = directory / "run"
    words = [*RL, "train", MORTAL, *OVER_BOTH, "--run_dir", str(run_dir), "--launcher", "kubernetes", "--kubernetes.nodes", "2",
             "--kubernetes.python", RL[0], "--kubernetes.mount", str(directory), "--kubernetes.image", "rl", "--kubernetes.claim", "runs", "--kubernetes.namespace", "team",
             "--kubernetes.secret", "tokens", "--kubernetes.gpus_per_node", "8", "--kubernetes.memory_gib", "64"]  # fmt: skip
    with kubectl.api_server() as cluster:
        environment = {**os.environ, **cluster.kubeconfig(directory / "kubeconfig")}
        how = {"env": environment, "capture_output": True, "text": True, "timeout": 60}
        first = subprocess.run(words, **how)
        assert first.returncode == 0, first.stderr
        ((_, _, name),) = [place for place in cluster.objects if place[0] == "jobs"]
        assert f"job.batch/{name} created" in first.stdout and f"service/{name} created" in first.stdout
        again = subprocess.run(words, **how)
        assert again.returncode == 1 and again.stderr.count("\n") == 1 and "submitted before" in again.stderr
        pods = cluster.pods("team", name)
        names = [cluster.names_of("team", pod) for pod in pods]
        with hosts(len(pods)) as made:
            names_file = directory / "names"
            names_file.write_text("".join(
                f"{host.address} {' '.join(of_pod)}\n" for host, of_pod in zip(made, names, strict=True)
            ))  # fmt: skip
            started = []
            for pod, host in zip(pods, made, strict=True):
                host.output("mount", "--bind", str(names_file), "/etc/hosts")
                (container,) = pod["spec"]["containers"]
                output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
                started.append(host.start(*container["command"], env=kubectl.variables_of(pod), **output))
            outputs = [process.communicate(timeout=240)[0] for process in started]
            assert [process.returncode for process in started] == [0, 0], outputs
            assert [left_on(host) for host in made] == [[], []]
    check_same(numbers(run_dir), on_one_host)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "what"),
    [
        ('"subdomain"', '"subDomain"', 'unknown field "spec.template.spec.subDomain"'),
        ('"8"', '"eight"', "is no quantity"),
        ('"completions": 2', '"completions": "2"', "spec.completions: expected int"),
        ('"restartPolicy": "Never"', '"restartPolicy": "Always"', "restartPolicy: Never or OnFailure"),
    ],
)
def test_the_api_server_of_these_tests_refuses_what_a_real_one_would(directory, right, wrong, what):
    kubectl.install()
    manifest = KubernetesJob(nodes=2, image="rl", claim="runs", gpus_per_node=8).text(directory, ["rl"])
    assert right in manifest
    with kubectl.api_server() as cluster:
        environment = {**os.environ, **cluster.kubeconfig(directory / "kubeconfig")}
        for text, code in ((manifest.replace(right, wrong), 1), (manifest, 0)):
            (directory / "job.yaml").write_text(text)
            words = ["kubectl", "apply", "-f", str(directory / "job.yaml")]
            done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
            assert done.returncode == code, done.stderr
            assert code == 0 or what in done.stderr


@pytest.mark.slow
def test_hosts_that_cannot_be_used_are_told_in_one_line_each(directory):
    """What is only seen on real hosts: a closed port, a directory that is not shared, no shared memory."""
    with two_hosts(directory, unshared=[Path("/srv")]) as made:
        closed = made[1].worker_address.replace(":7000", ":7001")
        cases = {
            f"host {closed} does not answer": ("--hosts", f"{made[0].worker_address},{closed}"),
            "does not see /srv/run, which trainer reads and writes; put the run's directory on a file system": (
                "--hosts", addresses(made), "--run_dir", "/srv/run", "--trainer.hosts", "1"),
        }  # fmt: skip
        for words, flags in cases.items():
            process = made[0].start(
                *RL, "train", MORTAL, *flags, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            output, _ = process.communicate(timeout=120)
            (line,) = [line for line in output.splitlines() if line.startswith("rl: error:")]
            assert process.returncode in (1, 2) and words in line, output
        made[1].output("umount", "/dev/shm")
        made[1].output("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm")
        process = made[0].start(
            *RL,
            "plan",
            MORTAL,
            "--hosts",
            addresses(made),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output, _ = process.communicate(timeout=120)
        assert (
            process.returncode == 2
            and f"host {made[1].worker_address} has 0.00 GiB of shared memory" in output
        )


TABLE = """
from dataclasses import dataclass, replace
from pathlib import Path
from rl.envs.sort_letters import SortLetters
from tests.recipes import mortal


@dataclass(frozen=True)
class Looking(SortLetters):
    num_eval: int = 8

    def reward(self, problem, response, stop):
        return float(response == Path("/srv/table").read_text())


def looking():
    return replace(mortal(), env=Looking())
"""


@pytest.mark.slow
def test_a_host_that_lacks_what_the_environment_needs_is_told_before_the_first_step(directory):
    """A reward that fails is 0, and would be learned from."""
    recipe, run_dir = directory / "mine.py", directory / "run"
    recipe.write_text(TABLE)
    flags = ("--reward.num_procs", 2, "--reward.hosts", 0, 1, "--run_dir", run_dir)
    with two_hosts(directory, unshared=[Path("/srv")]) as made:
        made[0].output("sh", "-c", "echo 7 > /srv/table")
        process = start(made, f"{recipe}:looking", *flags)
        output, _ = process.communicate(timeout=120)
        assert [left_on(host) for host in made] == [[], []]
    (line,) = [line for line in output.splitlines() if line.startswith("rl: error:")]
    assert (
        process.returncode == 1
        and f"on host 1 ({made[1].worker_address}) fails where the policy answers" in line
    )
    assert "FileNotFoundError" in line and "leave it out of --reward.hosts" in line
    assert not numbers(run_dir)


AGENT = """
from dataclasses import dataclass, replace
from configs.calculator import calculator
from rl.config import JudgeConfig
from rl.envs.calculator import Calculator
from rl.envs.chat.agent import AgentEnv
from rl.envs.judge import Judge
from rl.models.sources import ModelDir


@dataclass(frozen=True)
class Asking(AgentEnv):
    max_new_tokens: int = 20
    num_eval: int = 8
    max_memory_gib: float = 4.0
    judge: Judge = Judge(max_tokens=4)

    def generate(self, seed):
        return Calculator().generate(seed)

    def agent(self, episode, base_url, api_key):
        import openai, socket

        episode.notes["host"], episode.notes["policy"] = socket.gethostname(), base_url
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": episode.problem.question}]
        client.chat.completions.create(model="any", messages=messages)

    def reward_episode(self, episode):
        episode.notes["judge"] = self.judge.complete([{"role": "user", "content": "1+1"}])
        return float(len(episode.response) % 2)

    def chat_demonstration(self, problem, seed):
        return [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def asking():
    judge = JudgeConfig(model=ModelDir("JUDGE"), max_tokens=100, kv_cache_gib=0.0625)
    return replace(calculator(), env=Asking(), judge=judge, reward=replace(calculator().reward, limit_seconds=60.0))
"""


@pytest.mark.slow
def test_agents_and_their_judge_on_the_second_host(directory):
    """They reach the policy and the judge at the controller's address, which no other network has."""
    recipe, run_dir = directory / "mine.py", directory / "run"
    judge = calculator().model.materialize(directory)
    config = transformers.AutoConfig.from_pretrained(judge)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(judge)
    recipe.write_text(AGENT.replace("JUDGE", str(judge)))
    flags = (
        "--steps",
        2,
        "--warmup.steps",
        20,
        "--prompts_per_step",
        4,
        "--judge.hosts",
        1,
        "--reward.hosts",
        1,
    )
    with two_hosts(directory) as made:
        train(made, f"{recipe}:asking", *flags, "--generator.hosts", 0, "--run_dir", run_dir)
        assert [left_on(host) for host in made] == [[], []]
    steps = [line for line in numbers(run_dir) if "loss" in line]
    assert len(steps) == 2 and all(line["reward/errors"] == 0 for line in steps), steps
    plan = json.loads((run_dir / "plan.json").read_text())
    assert {r["name"]: r["processes"][0]["host"] for r in plan["replicas"] if r["role"] in ("judge", "reward")} == {
        "judge-0": 1, "reward-0": 1
    }  # fmt: skip
    notes = [json.loads(line)["notes"] for line in (run_dir / "rollouts.jsonl").open()]
    assert {note["host"] for note in notes} == {made[1].name}
    assert all(note["policy"].startswith(f"http://{made[0].address}:") and "judge" in note for note in notes)
