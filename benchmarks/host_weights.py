"""Weights from one host to another, beside a raw socket: `python -m benchmarks.host_weights [--write]`.

Two hosts of tests/hosts/namespaces.py, with real TCP between them. In each round a version's file of 512 MiB is
fetched by `fetch_file`, as a generator's process does, and the same bytes by plain sockets, with as many streams:
`sendfile` on one side and `recv_into` mapped shared memory on the other. Needs root.
"""

import argparse
import asyncio
import itertools
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.pages import machine, spread, write_page

MIB = 512
STREAMS = (1, 4, 8)
RATES = ("", "1gbit")
"""Of the link: what the machine gives, or as much as that by a token bucket (tc tbf)."""
NOTES = """A fetch that is as fast as the raw socket has the ratio 1. Both write into shared memory that is new each time. Both hosts share
the machine's cores, so the unlimited rate is that of its cores, not of a network; at 1 Gbit/s the link is the limit. Copies: bytes that came into
the host over bytes of the version, while three of its processes fetched it at the same time."""


def serve(address: str, shared: str) -> None:
    """On the source: a lease that is kept, and raw senders. Prints the run's name and the raw port."""
    from rl.cluster.leases import Lease
    from rl.host_protocol import MARK

    async def main() -> None:
        run_dir = Path(shared + ".run")
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / MARK).write_text("run")
        lease = Lease(address, "run", run_dir, Path(shared), 60.0)
        await lease.connect()
        path = Path(shared) / "model-v1-rank0.bin"
        path.write_bytes(os.urandom(2**20) * MIB)
        listener = socket.create_server((address.partition(":")[0], 0), backlog=64)
        threading.Thread(target=_send, args=(listener, path), daemon=True).start()
        print(json.dumps({"path": str(path), "port": listener.getsockname()[1]}), flush=True)
        await lease.run()

    asyncio.run(main())


def _send(listener: socket.socket, path: Path) -> None:
    def one(connection: socket.socket) -> None:
        with connection, path.open("rb") as file:
            begin, count = (int(word) for word in connection.recv(100).split())
            connection.sendfile(file, begin, count)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=one, args=(connection,), daemon=True).start()


def receive(how: str, address: str, path: str, streams: int, port: int) -> None:
    """On the other host: prints the seconds."""
    from rl.weight_sync import remote_files
    from rl.weight_sync.shared_memory import _reserve

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).unlink(missing_ok=True)
    began = time.perf_counter()
    if how == "fetch":
        remote_files.STREAMS = streams
        remote_files.fetch_file(address, "run", path, lambda file, size, _: _reserve(file, size))
    else:
        _raw(address.partition(":")[0], port, path, streams, _reserve)
    print(time.perf_counter() - began, flush=True)


def _raw(host: str, port: int, path: str, streams: int, reserve) -> None:
    size = MIB * 2**20
    reserve(path, size)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped, memoryview(mapped) as view:

        def one(begin: int, end: int) -> None:
            with socket.create_connection((host, port)) as connection, view[begin:end] as target:
                connection.sendall(f"{begin} {end - begin}".encode())
                count = 0
                while count < len(target):
                    count += connection.recv_into(target[count:])

        bounds = [size * i // streams for i in range(streams + 1)]
        threads = [threading.Thread(target=one, args=pair) for pair in itertools.pairwise(bounds)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main() -> None:
    from tests.hosts.namespaces import hosts, worker

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write docs/host_weights.md")
    options = parser.parse_args()
    machine()
    rows = [["link", "streams", "fetch, GB/s", "raw socket, GB/s", "ratio", "copies"]]
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as directory,
        hosts(2) as (source, target),
        worker(source, Path(directory) / "worker.log"),
    ):
        shared = f"/dev/shm/rl-{os.getuid()}/1-bench"
        this = [sys.executable, "-m", "benchmarks.host_weights"]
        server = source.start(
            *this, "serve", source.worker_address, shared, stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        said = json.loads(server.stdout.readline())

        def run(how: str, streams: int) -> float:
            words = [how, source.worker_address, said["path"], str(streams), str(said["port"])]
            return float(target.output(*this, "receive", *words))

        for rate in RATES:
            if rate:
                limit = ["tc", "qdisc", "add", "dev", f"{source.name}-in", "root", "tbf", "rate", rate]
                source.output(*limit, "burst", "1mb", "latency", "50ms")
            for streams in STREAMS if not rate else (4,):
                fetched, raw = [], []
                for i in range(options.rounds if not rate else 2):
                    for how, seconds in (
                        (("fetch", fetched), ("raw", raw)) if i % 2 else (("raw", raw), ("fetch", fetched))
                    ):
                        seconds.append(MIB * 2**20 / 1e9 / run(how, streams))
                ratios = [a / b for a, b in zip(fetched, raw, strict=True)]
                copies = _copies(source, target, this, said) if not rate and streams == 4 else ""
                rows.append(
                    [
                        rate or "not limited",
                        str(streams),
                        spread(fetched),
                        spread(raw),
                        spread(ratios),
                        copies,
                    ]
                )
                print(rows[-1], flush=True)
        server.kill()
        server.wait()
    if options.write:
        command = f"python -m benchmarks.host_weights --rounds {options.rounds} --write"
        write_page("host_weights", "Weights between hosts", command, rows, NOTES)


def _copies(source, target, this: list[str], said: dict) -> str:
    """While three processes fetch at the same time."""

    def received() -> int:
        return int(target.output("cat", f"/sys/class/net/{target.name}-in/statistics/rx_bytes"))

    target.output("rm", "-f", said["path"])
    script = (
        "import sys; from rl.weight_sync.remote_files import fetch_file; from rl.weight_sync.shared_memory import _reserve; "
        "fetch_file(sys.argv[1], 'run', sys.argv[2], lambda file, size, _: _reserve(file, size))"
    )
    target.output("mount", "-t", "sysfs", "sysfs", "/sys")
    before = received()
    words = [this[0], "-c", script, source.worker_address, said["path"]]
    started = [target.start(*words) for _ in range(3)]
    assert all(process.wait(60) == 0 for process in started)
    return f"{(received() - before) / (MIB * 2**20):.2f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    elif sys.argv[1:2] == ["receive"]:
        receive(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    else:
        main()
