"""A real Slurm whose nodes are hosts of tests/hosts/namespaces.py. `python -m tests.hosts.slurm COMMAND ...` runs a
command with it, as on a login node. `install()` needs Debian's packages: slurm-wlm and munge.

A signal other than KILL reaches a node's task, and not what that has started, as with the usual proctrack/cgroup.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.hosts.namespaces import Host, hosts

_SECONDS = 60.0
_CONF = """
ClusterName=test
SlurmctldHost={name}({address})
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def install() -> None:
    """Debian's packages, where they are not there."""
    if shutil.which("slurmctld") and shutil.which("munged"):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "slurm-wlm", "munge"]):
        subprocess.run(["apt-get", *words], check=True, capture_output=True, env=environment)


@contextmanager
def slurm(made: list[Host], directory: Path) -> Iterator[dict[str, str]]:
    """The environment in which srun, sbatch and scancel work."""
    name, address = socket.gethostname().partition(".")[0], made[0].address.rpartition(".")[0] + ".254"
    (directory / "state").mkdir(parents=True)
    nodes = "\n".join(
        f"NodeName=n{host.number} NodeAddr={host.address} NodeHostname={host.name} Port=17001 CPUs=2 RealMemory=4000"
        for host in made
    )
    conf = directory / "slurm.conf"
    conf.write_text(_CONF.format(name=name, address=address, directory=directory, nodes=nodes))
    # Daemons are where not every user's PATH looks.
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    subprocess.run(["install", "-d", "-o", "munge", "/run/munge"], check=True)
    started = []
    with (directory / "daemons.log").open("ab") as log:
        how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
        try:
            munge = ["runuser", "-u", "munge", "--", "munged", "--foreground", "--force"]
            started.append(subprocess.Popen(munge, env=environment, **how))
            _wait(lambda: Path("/run/munge/munge.socket.2").exists())
            started.append(subprocess.Popen(["slurmctld", "-D", "-f", str(conf)], env=environment, **how))
            for host in made:
                words = ["slurmd", "-D", "-f", str(conf), "-N", f"n{host.number}"]
                started.append(subprocess.Popen(host.command(*words), env=environment, **how))
            _wait(lambda: _output(environment, "sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(made)))
            yield environment
        finally:
            for process in reversed(started):
                process.terminate()
            for process in started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()


def _output(environment: dict[str, str], *words: str) -> str:
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False).stdout.strip()


def _wait(holds) -> None:
    end = time.monotonic() + _SECONDS
    while not holds():
        assert time.monotonic() < end, "Slurm did not start"
        time.sleep(0.2)


def main() -> None:
    install()
    with (
        tempfile.TemporaryDirectory(prefix="rl-slurm-", dir="/var/tmp") as directory,
        hosts(2) as made,
        slurm(made, Path(directory)) as environment,
    ):
        code = subprocess.run(sys.argv[1:], env=environment, check=False).returncode
        if code:
            print(*(path.read_text()[-3000:] for path in Path(directory).glob("*.log")), sep="\n---\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
