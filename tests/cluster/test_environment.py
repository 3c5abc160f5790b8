import os
import subprocess
import sys

import pytest

from rl.cluster.environment import engine_environment, prepare_environment

_PAGES = 16 * 2**20 // 4096
_FAULTS_OF_A_BLOCK = """
import resource, threading

def take():
    return len(b"x" * (16 * 2**20))

def freed_by_another_thread():
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()

freed_by_another_thread()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
take()
freed_by_another_thread()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the settings are glibc's")
def test_a_process_that_trains_keeps_the_memory_that_it_frees() -> None:
    def faults(environment: dict[str, str]) -> int:
        command = [sys.executable, "-c", _FAULTS_OF_A_BLOCK]
        return int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)

    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    assert faults(plain | engine_environment(1)) < _PAGES / 10
    assert faults(plain) > _PAGES / 2  # without them the same program takes new pages


@pytest.mark.skipif(sys.platform != "linux", reason="lo is Linux's name for it")
def test_collectives_listen_on_the_loopback_interface_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    prepare_environment()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and os.environ["NCCL_SOCKET_IFNAME"] == "eth1"
