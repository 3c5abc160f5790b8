"""TLS between hosts: whoever shows no certificate of the authority's is refused, by `rl worker` and by Monarch's processes."""

import asyncio
import os
import socket
import ssl
import subprocess
import sys

import pytest

from rl import host_tls
from rl.errors import ConfigError, WeightsUnreachable
from rl.host_protocol import HostUnreachable, ask
from rl.weight_sync import remote_files
from rl.weight_sync.remote_files import fetch_file
from tests.certificates import Authority, environment
from tests.cluster import test_host_agent
from tests.cluster.test_host_agent import a_lease, an_agent, shared

without_monarch = test_host_agent.without_monarch
HOME = "127.0.0.1"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def test_a_run_leases_a_host_and_fetches_its_files_by_tls(tmp_path, authority):
    version = bytes(range(256)) * 2**15  # 8 MiB: over several connections

    async def main():
        with environment(authority.variables("host", [HOME])):
            async with an_agent() as agent:
                lease = a_lease(agent.address, tmp_path)
                await lease.connect()
                file = shared(tmp_path) / "model-v1-rank0.bin"
                file.write_bytes(version)
                received = tmp_path / "received"
                count = await asyncio.to_thread(_fetched, agent.address, file, received)
                assert count == len(version) and received.read_bytes() == version
                await lease.close()

    asyncio.run(main())


def test_whoever_asks_can_be_stopped_by_shutting_down_its_socket(tmp_path, authority):
    """The socket that TLS wraps is none any more."""

    async def main():
        with environment(authority.variables("host", [HOME])):
            async with an_agent() as agent:
                seen = []
                _, connection = await asyncio.to_thread(ask, agent.address, {"do": "look"}, 10, seen.append)
                with connection:
                    assert seen[-1] is connection and seen[-1].fileno() >= 0

    asyncio.run(main())


def _fetched(address, file, received):
    """How many bytes came, into another file: a host that fetches one has it at the same path, which here is there."""

    def reserve(path, size, keep):
        received.write_bytes(bytes(size))

    fetch = remote_files._Fetch(address, "run", str(file), None)
    return fetch.into(str(received), reserve)


@pytest.mark.parametrize(
    ("theirs", "ours", "what"),
    [
        ("authority", None, "it sent no greeting: is RL_TLS_CERT set there, and not here?"),
        (None, "authority", "has no TLS with this one .*; set RL_TLS_CERT, RL_TLS_KEY, RL_TLS_CA on both"),
        ("authority", "stranger", "has no TLS with this one .*certificate verify failed"),
        ("elsewhere", "authority", "has no TLS with this one .*IP address mismatch"),
    ],
)
def test_who_has_no_certificate_or_another_is_refused_in_one_line(
    tmp_path, authority, monkeypatch, theirs, ours, what
):
    monkeypatch.setattr(test_host_agent.host_agent, "_HANDSHAKE_SECONDS", 0.5)
    (tmp_path / "other").mkdir()
    sets = {
        None: {},
        "authority": authority.variables("host", [HOME]),
        "elsewhere": authority.variables("elsewhere", ["10.0.0.9"]),
        "stranger": Authority(tmp_path / "other").variables("stranger", [HOME]),
    }

    async def main():
        with environment(sets[theirs]):
            async with an_agent() as agent:
                with environment(sets[ours]):
                    with pytest.raises(HostUnreachable, match=what) as error:
                        await asyncio.to_thread(ask, agent.address, {"do": "look"}, 5.0)
                    with pytest.raises(HostUnreachable, match=what):
                        await a_lease(agent.address, tmp_path).connect()
                    with pytest.raises(WeightsUnreachable, match=what):
                        await asyncio.to_thread(
                            fetch_file, agent.address, "run", str(tmp_path / "x-v1-r.bin"), None
                        )
                assert "\n" not in str(error.value)

    asyncio.run(main())


def test_who_knows_no_certificate_hears_nothing_of_a_host(tmp_path, authority):
    """Its server asks for one before it says a word."""
    stranger = Authority(tmp_path, "nobody").variables("nobody-host", [HOME])

    async def main():
        with environment(authority.variables("host", [HOME])):
            async with an_agent() as agent:
                return await asyncio.to_thread(heard, agent.address)

    def heard(address):
        host, port = address.rsplit(":", 1)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(stranger["RL_TLS_CERT"], stranger["RL_TLS_KEY"])
        with (
            pytest.raises(OSError),
            socket.create_connection((host, int(port)), 5) as plain,
            context.wrap_socket(plain) as connection,
        ):
            assert not connection.recv(1)
            raise ConnectionError("closed without a word")

    asyncio.run(main())


@pytest.mark.parametrize("missing", [*host_tls.VARIABLES])
def test_a_variable_that_is_missing_or_wrong_is_named(tmp_path, authority, missing):
    variables = authority.variables("host", [HOME])
    (tmp_path / "text.pem").write_text("no certificate")
    cases = (
        (
            {n: v for n, v in variables.items() if n != missing},
            f"{missing} is not set, and another of .* is; set all or none",
        ),
        (
            variables | {missing: str(tmp_path / "none.pem")},
            f"{missing}=.*none.pem is no file that can be read",
        ),
        (variables | {missing: str(tmp_path / "text.pem")}, "not a certificate, its key and an authority's"),
    )
    for wrong, what in cases:
        with environment(wrong), pytest.raises(ConfigError, match=what):
            host_tls.server_context()


WORKER = "from rl.cluster.environment import prepare_environment; prepare_environment(); from rl.cluster.monarch_worker import main; main()"
CONTROLLER = """
import asyncio, os, sys
from rl.cluster.environment import prepare_environment
prepare_environment()
from rl.host_tls import transport
from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint

class Echo(Actor):
    @endpoint
    async def echo(self, word): return word

async def main():
    enable_transport(transport("127.0.0.1:0"))
    mesh = attach_to_workers(ca="trust_all_connections", workers=[sys.argv[1]], name="m")
    echo = mesh.spawn_procs(per_host={"procs": 1}).spawn("echo", Echo)
    answer = await asyncio.wait_for(echo.echo.call("heard"), float(sys.argv[2]))
    print(next(iter(answer.values())), flush=True)
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.slow
def test_monarchs_processes_speak_tls_and_refuse_who_has_no_certificate(tmp_path, authority):
    (tmp_path / "other").mkdir()
    ours = {**os.environ, **authority.variables("host", [HOME])}
    stranger = {**os.environ, **Authority(tmp_path / "other").variables("stranger", [HOME])}
    command = [sys.executable, "-c", WORKER, HOME]
    worker = subprocess.Popen(command, env=ours, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = worker.stdout.readline().strip()
        assert "@tls://127.0.0.1:" in address

        def controller(env, address, seconds):
            words = [sys.executable, "-c", CONTROLLER, address, str(seconds)]
            return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)

        assert controller(ours, address, 60).stdout == "heard\n"
        assert controller(stranger, address, 15).stdout == ""
        plain = {name: value for name, value in os.environ.items() if name not in host_tls.VARIABLES}
        assert controller(plain, address.replace("tls://", "tcp://"), 15).stdout == ""
        assert controller(ours, address, 60).stdout == "heard\n"  # the worker is well
    finally:
        worker.kill()
        worker.wait()


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_passphrase(tmp_path, authority):
    """OpenSSL would ask at the terminal, and hold up the whole event loop."""
    with environment(authority.variables("host", [HOME], b"secret")):
        for context in (host_tls.server_context, host_tls.client_context):
            with pytest.raises(ConfigError, match="RL_TLS_KEY is encrypted; name one without a passphrase"):
                context()
