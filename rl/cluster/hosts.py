"""What the hosts of a run have, asked of the `rl worker` on each, before anything starts."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

from rl.cluster.link_speed import noise_here
from rl.cluster.machine import look_at_host, versions
from rl.errors import ConfigError
from rl.host_protocol import HostUnreachable, address_of, ask, parse_address, written
from rl.host_tls import is_on
from rl.observability.silence import break_silence
from rl.plan.cluster import GPU, Cluster, Host
from rl.weight_sync.remote_files import STREAMS

_SECONDS = 10.0
_PROBE_BYTES, _PROBE_LEAST, _PROBE_SECONDS = 2**27, 2**10, 60.0
_LINK_BYTES = 2**24
"""Of each link, before a run: a tenth of a second at a gigabit a second."""
_CLOCK_SECONDS = 30.0
"""By which a host's clock may differ: logs of several hosts are read side by side."""
_LEAST_SHARED_GIB = 0.05
_AT_ONCE = 32
"""Hosts that are asked: one that is gone takes ten seconds."""
_AS_LARGE = 0.99
"""Of what was planned: drivers keep a little of a GPU's memory for themselves, and not all the same."""


class ClockOff(ConfigError):
    """A host's, as it may be for a while after the host has booted."""


def host_addresses(text: str) -> list[str]:
    """Of the setting `hosts`, as their workers call themselves: with IP addresses. Raises ConfigError."""
    addresses, problems = list[str](), list[str]()
    for part in text.split(","):
        try:
            host, port = parse_address(part.strip())
            addresses.append(written(address_of(host), port))
        except ConfigError as error:
            problems.append(f"hosts={text!r}: {error}")
    if len({*addresses}) < len(addresses):
        problems.append(f"hosts={text!r} names a host twice; name each once")
    if problems:
        raise ConfigError("\n".join(problems))
    return addresses


def cluster_at(addresses: str) -> Cluster:
    """What a run may use: the hosts of the setting `hosts`; this one where it is empty.

    Raises ConfigError with a line for each host that cannot be used.
    """
    return look_at_hosts(addresses) if addresses else Cluster((look_at_host(),))


@lru_cache(maxsize=1)
def look_at_hosts(text: str) -> Cluster:
    """As they were when first asked. Raises ConfigError with a line for each host that cannot be used."""
    addresses = host_addresses(text)
    with break_silence("asking the hosts of the run"):
        hosts, problems = look_at_all(addresses)
        if not problems:
            hosts, problems = _with_links(hosts)
    if problems:
        raise ConfigError("\n".join(problems))
    return Cluster(tuple(hosts))


def look_at_all(addresses: Sequence[str]) -> tuple[list[Host], list[str]]:
    """Those that can be used, as they are now, and a line for each problem of the others."""
    hosts, problems = list[Host](), list[str]()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        looks = [threads.submit(look_at, address) for address in addresses]
    for look in looks:
        try:
            host = look.result()
            check_machine(host, hosts)
            hosts.append(host)
        except ConfigError as error:
            problems += str(error).splitlines()
    return hosts, problems


def _with_links(hosts: Sequence[Host]) -> tuple[list[Host], list[str]]:
    """Each with what comes from the first; and a line for each connection that a run needs and lacks."""
    ends = [pair for host in hosts[1:] for pair in ((hosts[0], host), (host, hosts[0]))]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        probes = threads.map(lambda pair: bandwidth(pair[0].address, pair[1].address, _PROBE_LEAST), ends)
        problems = [probe for probe in probes if isinstance(probe, str)]
    linked = [*hosts[:1]]
    for host in hosts[1:] if not problems else ():
        rate = bandwidth(hosts[0].address, host.address, _LINK_BYTES, STREAMS)
        if isinstance(rate, str):
            problems.append(rate)
        else:
            linked.append(replace(host, gb_per_s=rate))
    return linked, problems


def look_at(address: str) -> Host:
    """As it is now. Raises ConfigError, with a line for each problem."""
    began = time.time()
    try:
        answer, connection = ask(address, {"do": "look"}, _SECONDS)
    except HostUnreachable as error:
        raise ConfigError(str(error)) from error
    connection.close()
    try:
        clock = _of_clock(address, answer["time"] - (began + time.time()) / 2)
        if problems := _problems(address, answer):
            raise ConfigError("\n".join([*problems, *clock]))
        if clock:
            raise ClockOff(*clock)
        gpus = tuple(GPU(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in answer["gpus"])
        shared_gib, machine = float(answer["shared_gib"]), str(answer["machine"])
        num_cores, free_gib = answer["num_cores"], answer["free_gib"]
        bfloat16 = answer["bfloat16"]
        if not isinstance(bfloat16, bool | None):
            raise TypeError(f"bfloat16={bfloat16!r}")
        return Host(
            num_cores, free_gib, gpus, address, shared_gib=shared_gib, machine=machine, bfloat16=bfloat16
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"host {address} answers as another rl does ({error!r}); install the same on all hosts"
        ) from error


def check_machine(host: Host, others: Sequence[Host]) -> None:
    """Raises ConfigError where one of the others is the same machine: its GPUs would be counted twice."""
    for other in others:
        if host.machine and host.machine == other.machine:
            raise ConfigError(
                f"hosts {other.address} and {host.address} are one machine; name one of them, and start one "
                f"rl worker there"
            )


def check_as_planned(host: Host, planned: Host, needed_gib: float = 0.0) -> None:
    """Of a host that joins, or comes back. needed_gib: of its own memory, for the processes that it gets.

    Raises ConfigError.
    """
    pairs = list(zip(host.gpus, planned.gpus, strict=False))
    are_like = len(pairs) == len(planned.gpus) and all(
        gpu.capability == wanted.capability and gpu.gib > _AS_LARGE * wanted.gib for gpu, wanted in pairs
    )
    shared, of_plan = host.shared_gib or 0.0, planned.shared_gib or 0.0
    lacks_bfloat16 = bool(planned.bfloat16) and host.bfloat16 is False and not planned.gpus
    differences = [
        (host.num_cores < planned.num_cores, f"{host.num_cores} cores", f"{planned.num_cores}"),
        (not are_like, f"{len(host.gpus)} GPUs ({host})", f"{planned}"),
        (host.free_gib < needed_gib, f"{host.free_gib:.1f} GiB free", f"{needed_gib:.1f}"),
        (shared < _AS_LARGE * of_plan, f"{shared:.1f} GiB of shared memory", f"{of_plan:.1f}"),
        (lacks_bfloat16, "a CPU without instructions for bfloat16", "one with them"),
    ]
    for is_short, actual, wanted in differences:
        if is_short:
            raise ConfigError(
                f"host {host.address} cannot be used: it has {actual}, and the plan {wanted}; the run takes "
                f"one as it was planned"
            )


def _of_clock(address: str, offset: float) -> list[str]:
    if abs(offset) <= _CLOCK_SECONDS:
        return []
    way = "ahead of" if offset > 0 else "behind"
    return [f"host {address}'s clock is {abs(offset):.0f} s {way} this one's; set it (ntp)"]


def _problems(address: str, answer: dict[str, Any]) -> list[str]:
    problems, own_versions = [], versions()
    for package in sorted({*answer["versions"], *own_versions}):
        remote, local = (each.get(package, "none") for each in (answer["versions"], own_versions))
        if remote != local:
            again = ", and start rl worker again" if package == "rl" else ""
            problems.append(
                f"host {address} has {package} {remote}, and this one {local}; install the same on all "
                f"hosts{again}"
            )
    if (name := answer["address"]) != address:  # its processes would be looked for elsewhere
        remedy = f"name it so, or start rl worker --listen {address} there"
        problems.append(f"host {address} calls itself {name}; {remedy}")
    if answer["shared_gib"] < _LEAST_SHARED_GIB:
        problems.append(
            f"host {address} has {answer['shared_gib']:.2f} GiB of shared memory; mount a larger /dev/shm"
        )
    return problems


def bandwidth(source: str, target: str, num_bytes: int = _PROBE_BYTES, streams: int = 1) -> float | str:
    """GB/s over so many connections, as the target's worker measures it; or why there is none.

    They go to a port of the source that is any, as those of a run's processes are.
    """
    try:
        answer, connection = ask(source, {"do": "open"}, _SECONDS)
        with connection:
            return _measured(f"host {source}", answer["address"], target, num_bytes, streams)
    except HostUnreachable as error:
        return str(error)


def why_not_reached(own_address: str, addresses: Sequence[str]) -> list[str]:
    """A line for each host that does not reach this process at this address.

    By TLS nothing is tried: it takes a certificate for the address.
    """

    def why(address: str) -> str:
        try:
            rate = _measured("this host, where the run is started,", port, address, _PROBE_LEAST, 1)
        except HostUnreachable as error:
            return str(error)
        return rate if isinstance(rate, str) else ""

    if is_on():
        return []
    with noise_here(own_address) as port, ThreadPoolExecutor(_AT_ONCE) as threads:
        return [problem for problem in threads.map(why, addresses) if problem]


def _measured(name: str, port: str, target: str, num_bytes: int, streams: int) -> float | str:
    asked = {"do": "measure", "address": port, "count": num_bytes, "streams": streams}
    answer, connection = ask(target, asked, _PROBE_SECONDS)
    connection.close()
    if "unreachable" in answer:
        cause = str(answer["unreachable"]).partition(";")[0]
        ends = f"host {target} does not reach {name} at the port of a new process"
        return f"{ends} ({cause}); let hosts connect to each other on any port"
    return float(answer["size"] / answer["seconds"] / 1e9)
