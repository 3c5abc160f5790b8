"""Processes that torchrun, srun or a Kubernetes Job starts: which is the controller, and how the others end."""

import multiprocessing
import multiprocessing.resource_tracker
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from rl import cli
from rl.cluster import group as groups
from rl.cluster import rendezvous
from rl.cluster.group import Group, group_of
from rl.cluster.rendezvous import run_as_group
from rl.controller import evaluate, replay
from rl.errors import ConfigError, RunError
from rl.host_protocol import ask
from tests.ports import free_port

SIGNAL = signal.signal
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "17",
        "SLURM_STEP_NODELIST": "n[0-1]", "SLURM_STEP_ID": "0"}  # fmt: skip
# Of Slurm 22, in the script of sbatch --ntasks 4 --nodes 1.
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4",
         "SLURM_JOB_NODELIST": "n0", "SLURM_JOB_ID": "1"}  # fmt: skip


def test_a_process_that_was_started_alone_is_in_no_group():
    for environment in ({}, {"WORLD_SIZE": "1", "RANK": "0"}, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
                        {"SLURM_NTASKS": "4"}, BATCH):  # fmt: skip
        assert group_of(environment) is None


def test_an_attempt_of_torchruns_does_not_read_the_one_before():
    assert group_of(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"}).name == "3"


def test_the_first_hosts_store_listens_on_its_address_alone():
    address, file = rendezvous._listener(Group(0, 2, "127.0.0.1", 0))
    with socket.socket(fileno=file) as listener:
        assert address == listener.getsockname()[0] == "127.0.0.1"
    # Of a service, whose address no host has, and of a PyTorchJob's first pod.
    for name in ("192.0.2.1", "localhost"):
        assert rendezvous._listener(Group(0, 2, name, 0)) == ("127.0.0.1", None)


def test_a_pod_in_the_place_of_another_asks_its_own_store(monkeypatch):
    """Their name still leads to the one before, whose store has all hosts, and what becomes of its run."""
    of_before = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(rendezvous, "address_of", lambda name: "192.0.2.1")
    group = Group(0, 2, "127.0.0.1", free_port(), patience=5)
    made = []

    def store(address, port, **how):
        made.append(address)
        return TCPStore("127.0.0.1", of_before.port if address == "rl-0.rl" else port, **how)

    monkeypatch.setattr("torch.distributed.TCPStore", store)
    of_before.set("rl-0/host-1", "10.0.0.2:7000")
    assert not rendezvous._store(replace(group, address="rl-0.rl")).check(["host-1"])
    assert made == ["127.0.0.1"]


def test_torchrun_names_the_first_hosts_store():
    assert group_of(TORCHRUN) == Group(1, 2, "10.0.0.1", 29500)
    assert group_of(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).has_store
    with pytest.raises(ConfigError, match="one process on each host.*--nproc-per-node 1"):
        group_of(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"})
    assert (
        group_of(TORCHRUN).patience == 300
        and group_of(TORCHRUN | {"RL_HOSTS_SECONDS": "3600"}).patience == 3600
    )
    assert group_of(SRUN | {"MASTER_ADDR": "10.0.0.1", "RL_HOSTS_SECONDS": "7"}).patience == 7
    with pytest.raises(ConfigError, match="WORLD_SIZE is set and RANK, MASTER_PORT not"):
        group_of({"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"})


@pytest.mark.parametrize(
    ("base", "name", "text"),
    [("torchrun", "WORLD_SIZE", "x"), ("torchrun", "RANK", ""), ("torchrun", "MASTER_PORT", "tcp://10.0.0.1:29500"),
     ("srun", "SLURM_NTASKS", "2(x3)"), ("srun", "SLURM_PROCID", ""), ("srun", "MASTER_PORT", "port")],
)  # fmt: skip
def test_a_variable_that_is_no_number_is_named(base, name, text):
    environment = {"torchrun": TORCHRUN, "srun": SRUN | {"MASTER_ADDR": "10.0.0.1"}}[base]
    with pytest.raises(ConfigError, match=re.escape(f"{name}={text!r} is no number; set it as")):
        group_of(environment | {name: text})
    assert group_of({"WORLD_SIZE": ""}) is None


def test_sruns_first_node_is_asked_of_slurm(monkeypatch):
    said = {"hostnames": "n0\nn1\n", "node": "NodeName=n0 Arch=x NodeAddr=10.0.0.7 NodeHostName=n0"}
    monkeypatch.setattr(groups, "_output", lambda *words: said[words[2]])
    assert group_of(SRUN) == Group(1, 2, "10.0.0.7", 20_017, name="17.0")
    assert group_of(SRUN | {"MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "5"}) == Group(
        1, 2, "10.9.9.9", 5, name="17.0"
    )
    with pytest.raises(ConfigError, match="one process on each host.*--ntasks-per-node 1"):
        group_of(SRUN | {"SLURM_NTASKS": "4"})
    # The step's tasks count, and not the allocation's, which a shell of salloc keeps.
    of_step = {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}
    assert group_of(SRUN | of_step) == Group(1, 2, "10.0.0.7", 20_017, name="17.0")
    beside = group_of(SRUN | {"SLURM_STEP_ID": "1"})  # another step, on the same nodes
    assert (beside.port, beside.name) == (21_014, "17.1")
    assert group_of(SRUN | of_step | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}) is None
    by_hand = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1", "SLURM_PTY_PORT": "44152"}
    monkeypatch.setattr(groups, "_has_terminal", lambda: True)
    assert group_of(SRUN | by_hand) is None  # in the shell of `srun -n 8 --pty bash`
    monkeypatch.setattr(groups, "_has_terminal", lambda: False)  # a task of what such a shell starts
    assert group_of(SRUN | {"SLURM_PTY_PORT": "44152"}) == Group(1, 2, "10.0.0.7", 20_017, name="17.0")
    said["node"] = "nothing"
    with pytest.raises(ConfigError, match=r"'n\[0-1\]' has no address .*; set MASTER_ADDR"):
        group_of(SRUN)


def test_who_has_a_terminal_has_one_in_the_background_too():
    code = "from rl.cluster.group import _has_terminal; print(_has_terminal())"
    command = [sys.executable, "-c", code]
    alone = subprocess.run(command, start_new_session=True, capture_output=True, text=True, check=True)
    assert alone.stdout == "False\n"
    own, other = os.openpty()
    with_one = f"import os, pty, subprocess, sys; os.setsid(); import fcntl, termios; fcntl.ioctl({other}, termios.TIOCSCTTY, 0); "
    with_one += f"subprocess.run({command!r}, stdin=subprocess.DEVNULL, check=True)"
    shell = [sys.executable, "-c", with_one]
    done = subprocess.run(shell, pass_fds=[other], capture_output=True, text=True, check=True)
    os.close(own)
    os.close(other)
    assert done.stdout == "True\n"


@contextmanager
def own_worker(host):
    yield f"{host}:7000"


def rank(group, answers, code, dies, seconds=5.0):
    """dies: by this signal; 0: it does not. seconds: for which hosts wait for each other."""
    rendezvous._own_worker, rendezvous._LOOK_SECONDS, rendezvous._START_SECONDS = own_worker, 0.1, seconds
    rendezvous._own_address = lambda group, store: f"10.0.0.{group.rank + 1}"
    rendezvous._STOP_SECONDS = rendezvous._SILENT_SECONDS = seconds
    group = replace(group, patience=seconds)

    def train(hosts):
        answers.put((group.rank, hosts))
        if dies:
            time.sleep(1.0)
            os.kill(os.getpid(), dies)
        if isinstance(code, BaseException):
            raise code
        return code

    try:
        answers.put((group.rank, run_as_group(group, train)))
    except (RunError, ConfigError, KeyboardInterrupt) as error:
        answers.put((group.rank, str(error)))


class FakeStore:
    """torch's, within one process."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def set(self, key, value):
        with self._changed:
            self._values[key] = str(value).encode()
            self._changed.notify_all()

    def check(self, keys):
        return all(key in self._values for key in keys)

    def wait(self, keys, timeout):
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise TimeoutError

    def get(self, key):
        self.wait([key], timedelta(seconds=rendezvous._START_SECONDS))
        return self._values[key]


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """Ranks are threads, which may not handle signals."""
    for name in (
        "_own_worker",
        "_own_address",
        "_store",
        "_LOOK_SECONDS",
        "_START_SECONDS",
        "_STOP_SECONDS",
        "_SILENT_SECONDS",
    ):
        monkeypatch.setattr(rendezvous, name, getattr(rendezvous, name))
    monkeypatch.setattr(rendezvous.signal, "signal", lambda *_: None)


def together(code=0, ranks=(0, 1, 2), seconds=5.0):
    """Rank -> what it said, in order."""
    answers, store = queue.Queue(), FakeStore()
    rendezvous._store = lambda group: store
    threads = [
        threading.Thread(target=rank, args=(Group(i, 3, "127.0.0.1", 1), answers, code, 0, seconds))
        for i in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return by_rank(answers)


def by_rank(answers):
    said = {}
    while not answers.empty():
        number, answer = answers.get()
        said.setdefault(number, []).append(answer)
    return said


HOSTS = "10.0.0.1:7000,10.0.0.2:7000,10.0.0.3:7000"


@pytest.mark.parametrize("code", [0, 2])
def test_the_first_trains_on_all_hosts_and_all_end_as_it_does(code):
    assert together(code) == {0: [HOSTS, code], 1: [code], 2: [code]}


@pytest.mark.parametrize(
    ("error", "code"),
    [(RunError("it failed"), 1), (ConfigError("it failed"), 2), (KeyboardInterrupt(), 130),
     (KeyboardInterrupt(signal.SIGTERM), 143)],
)  # fmt: skip
def test_where_the_first_fails_all_do_with_its_code(error, code):
    """Slurm's script queues a job again that ends with 143: on every host, or one of them hides it."""
    assert together(error) == {0: [HOSTS, str(error)], 1: [code], 2: [code]}


COMMANDS = {
    "eval": (evaluate, "evaluate", ["model", "quickstart"]),
    "replay": (replay, "replay", ["runs/one", "--step", "3"]),
    "serve": (cli, "_serve", ["model"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_other_commands_run_once_too_on_all_hosts(name, monkeypatch):
    """Each process did all of it: two evaluations beside each other in one directory."""
    module, function, words = COMMANDS[name]
    called, groups = [], []
    monkeypatch.setattr(module, function, lambda arguments: called.append(arguments) or 0)
    monkeypatch.setattr(rendezvous, "run_as_group", lambda group, run: groups.append(group) or run(HOSTS))
    assert cli._dispatch([name, *words]) == 0 and called == [words] and not groups
    for variable, value in TORCHRUN.items():
        monkeypatch.setenv(variable, value)
    assert cli._dispatch([name, *words]) == 0 and called[1:] == [[*words, "--hosts", HOSTS]]
    assert groups == [group_of(TORCHRUN)]
    assert cli._dispatch([name, "--help"]) == 0 and called[2:] == [["--help"]] and len(groups) == 1


def test_a_first_host_whose_name_is_its_own_loopback_learns_its_address_from_others(monkeypatch):
    """As /etc/hosts of Debian has it: 127.0.1.1 node1."""
    seen_by = {0: ConfigError("node1 is 127.0.1.1"), 1: "127.0.0.1"}

    def address_of(host):
        answer = seen_by[threading.current_thread().rank]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(rendezvous, "address_of", address_of)
    monkeypatch.setattr(rendezvous, "_START_SECONDS", 5.0)
    store, addresses = FakeStore(), {}

    def run(number):
        addresses[number] = rendezvous._own_address(Group(number, 2, "node1", 1), store)

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for number, thread in enumerate(threads):
        thread.rank = number
        thread.start()
    for thread in threads:
        thread.join(10)
    assert addresses == {0: "127.0.0.1", 1: "127.0.0.1"}
    monkeypatch.setattr(rendezvous, "_START_SECONDS", 0.1)
    threading.current_thread().rank = 0
    with pytest.raises(RunError, match="no other host is there after 0 s; see the output of the other ranks"):
        rendezvous._own_address(Group(0, 2, "node1", 1, patience=0.1), FakeStore())


@pytest.mark.parametrize("dies", [signal.SIGKILL, signal.SIGSTOP])
def test_where_the_first_is_killed_or_frozen_the_others_end(dies):
    """The kernel of a frozen host still takes what it is sent: no call to its store ends by itself."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    answers = context.Queue()
    processes = [
        context.Process(target=rank, args=(Group(i, 2, "127.0.0.1", port), answers, 0, dies)) for i in (0, 1)
    ]
    for process in processes:
        process.start()
    processes[1].join(60)
    assert not processes[1].is_alive()
    processes[0].kill()
    processes[0].join(60)
    said = by_rank(answers)
    answers.close()
    multiprocessing.resource_tracker._resource_tracker._stop()  # a process, which other tests would see
    assert said[0] == ["10.0.0.1:7000,10.0.0.2:7000"]
    assert "the first host is gone; start the run again with --resume latest" in said[1][0]


class Clock:
    """Of a job that is suspended for 1,000 s at each look."""

    def __init__(self):
        self._now = 0.0

    def monotonic(self):
        self._now += 1000.0
        return self._now

    def sleep(self, seconds):
        time.sleep(seconds / 100)


def test_a_job_that_was_suspended_has_not_waited(monkeypatch):
    store, group = FakeStore(), Group(1, 2, "127.0.0.1", 1)
    monkeypatch.setattr(rendezvous, "time", Clock())
    threading.Timer(1.0, lambda: store.set("over", 0)).start()
    assert rendezvous._wait_for_end(store, group) == 0


def test_a_link_that_is_down_for_a_minute_and_a_half_ends_nothing(monkeypatch):
    """Then the first host leases this one again."""

    class Cut(FakeStore):
        def check(self, keys):
            if time.monotonic() < until:
                raise ConnectionError("timed out")
            return super().check(keys)

    until, store = time.monotonic() + 1.5, Cut()
    monkeypatch.setattr(rendezvous, "time", Clock())  # a second is 10 ms
    store.set("over", 0)
    assert rendezvous._wait_for_end(store, Group(1, 2, "127.0.0.1", 1)) == 0


def test_a_first_host_that_is_told_its_loopback_learns_its_address_from_others(monkeypatch):
    """torchrun's --master-addr is 127.0.0.1 on node 0, unless it is given."""
    store = FakeStore()
    store.set("first", "10.0.0.1")
    assert rendezvous._own_address(Group(0, 2, "127.0.0.1", 1), store) == "10.0.0.1"


def test_a_host_that_never_comes_is_named():
    said = together(ranks=(0, 1), seconds=1.0)
    assert "2 of 3 hosts are there after 1 s; see the output of rank 2" in said[0][0] and said[1] == [1]
    said = together(ranks=(0, 2), seconds=1.0)
    assert "2 of 3 hosts are there after 1 s; see the output of rank 1" in said[0][0] and said[2] == [1]


def test_a_worker_that_dies_is_started_again_at_its_address(monkeypatch):
    asked, started = [], []

    def start(address):
        asked.append(address)
        script = "import time; print('rl worker: listening on 10.0.0.9:77', flush=True); time.sleep(600)"
        started.append(subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True))
        return started[-1]

    monkeypatch.setattr(rendezvous, "_start_worker", start)
    monkeypatch.setattr(rendezvous, "_LOOK_SECONDS", 0.05)
    with rendezvous._own_worker("127.0.0.1") as address:
        assert address == "10.0.0.9:77"
        for life in (1, 2):
            started[-1].kill()
            end = time.monotonic() + 20
            while len(started) == life:
                assert time.monotonic() < end
                time.sleep(0.02)
    assert asked == ["127.0.0.1:0", address, address]
    assert all(process.wait(10) is not None for process in started)
    for process in started:
        process.stdout.close()


def test_a_worker_of_a_jobs_own_ends_with_the_run_and_not_by_what_the_job_is_sent(monkeypatch):
    monkeypatch.setattr(rendezvous.signal, "signal", SIGNAL)
    with rendezvous._own_worker("127.0.0.1") as address:
        (worker,) = [c for c in psutil.Process().children() if "worker" in c.cmdline()]
        for number in (signal.SIGTERM, signal.SIGHUP):
            worker.send_signal(number)
        time.sleep(0.5)
        ask(address, {"do": "look"}, 10.0)[1].close()
    worker.wait(10)


def test_a_worker_that_does_not_start_ends_the_run(monkeypatch):
    failed = subprocess.Popen(["true"], stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(rendezvous, "_start_worker", lambda address: failed)
    with (
        pytest.raises(RunError, match="this host's rl worker did not start"),
        rendezvous._own_worker("127.0.0.1"),
    ):
        pass
    failed.wait()
    failed.stdout.close()


def test_a_worker_that_hangs_at_its_start_ends_the_run(monkeypatch):
    hung = subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(rendezvous, "_start_worker", lambda address: hung)
    monkeypatch.setattr(rendezvous, "_START_SECONDS", 0.2)
    with (
        pytest.raises(RunError, match="this host's rl worker did not start"),
        rendezvous._own_worker("127.0.0.1"),
    ):
        pass
    assert hung.wait(10) == -signal.SIGKILL
    hung.stdout.close()


def test_a_first_node_without_an_address_is_named(monkeypatch):
    monkeypatch.setattr(
        groups, "_output", lambda *words: "n1\nn2\n" if "hostnames" in words else "NodeName=n1"
    )
    with pytest.raises(
        ConfigError, match=r"'n\[1-2\]' has no address \(scontrol names none\); set MASTER_ADDR"
    ):
        groups._first_node({"SLURM_STEP_NODELIST": "n[1-2]"})
