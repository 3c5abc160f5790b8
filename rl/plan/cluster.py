"""What there is to run on: hosts with their cores, memory and GPUs. Plain data."""

import re
from collections import Counter
from dataclasses import dataclass, replace

from rl.errors import ConfigError

_CAPABILITIES = {
    "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "A6000": (8, 6), "L4": (8, 9), "L40S": (8, 9),
    "RTX4090": (8, 9), "H100": (9, 0), "H200": (9, 0), "B200": (10, 0), "RTX5090": (12, 0),
}  # fmt: skip
_VISIBLE = 0.985  # a card sold with 80 GB shows 79.6 GiB, one with 24 GB 23.6, one with 141 GB 139.8
_MOST_GB = 1000  # of a GPU
_MOST_GPUS = 8192
_CORES, _FREE_GIB = 16, 128.0  # of a host, for each of its GPUs, where hosts are stood in for
USABLE = 0.92
"""The share of a GPU's memory that is planned with, as vLLM's."""


@dataclass(frozen=True)
class GPU:
    """One GPU. `gib`: its memory in all. `capability`: the compute capability, as (9, 0) for an H100.

    visible: what its host calls it in CUDA_VISIBLE_DEVICES: a number, or a UUID.
    """

    name: str
    gib: float
    capability: tuple[int, int]
    visible: str = ""


@dataclass(frozen=True)
class Host:
    """One host, as far as a run may use it. `free_gib`: of its own memory, not the GPUs'.

    address: host:port at which its `rl worker` listens; empty: the host of the controller. may_join: it is
    not there when the run starts; its address is known once it is. gb_per_s: from the first host to this one.
    shared_gib: what its /dev/shm holds in all. machine: the same for hosts that share its memory; empty: not
    known. bfloat16: whether its CPU has the instructions with which torch multiplies it. None: not known.
    """

    num_cores: int
    free_gib: float
    gpus: tuple[GPU, ...] = ()
    address: str = ""
    may_join: bool = False
    gb_per_s: float | None = None
    shared_gib: float | None = None
    machine: str = ""
    bfloat16: bool | None = None

    def __str__(self) -> str:
        later = " that may join" if self.may_join else ""
        if not self.gpus:
            return f"{self.num_cores} cores with {self.free_gib:.0f} GiB free{later}"
        return f"{len(self.gpus)} x {self.gpus[0].name} of {self.gpus[0].gib:.1f} GiB{later}"


@dataclass(frozen=True)
class Cluster:
    """The hosts of a run. The first has the controller."""

    hosts: tuple[Host, ...]

    def with_joining(self, count: int) -> "Cluster":
        """And so many hosts that may join, each taken to be as the last."""
        gpus = tuple(replace(gpu, visible=str(number)) for number, gpu in enumerate(self.hosts[-1].gpus))
        joining = replace(self.hosts[-1], gpus=gpus, address="", may_join=True, machine="")
        return Cluster((*self.hosts, *(joining,) * count))

    @property
    def devices(self) -> tuple[tuple[int, int], ...]:
        """(host, GPU) of each GPU, in the order in which they are dealt out."""
        return tuple((h, g) for h, host in enumerate(self.hosts) for g in range(len(host.gpus)))

    @property
    def gpus(self) -> tuple[GPU, ...]:
        return tuple(gpu for host in self.hosts for gpu in host.gpus)

    def __str__(self) -> str:
        kinds = Counter(map(str, self.hosts))
        if len(kinds) == 1:
            (one,) = kinds
            return one if len(self.hosts) == 1 else f"{len(self.hosts)} hosts, each {one}"
        return (
            f"{len(self.hosts)} hosts: {', '.join(f'{count} with {kind}' for kind, count in kinds.items())}"
        )


def parse_cluster(text: str, here: Host) -> Cluster:
    """ "8xH100-80": eight H100 of 80 GB each; "2 x 8xH100-80": two such hosts; "cpu": this host without GPUs.

    Raises ConfigError.
    """
    if text == "cpu":
        return Cluster((replace(here, gpus=()),))
    match = re.fullmatch(r"(?:(\d{1,4}) x )?(?:(\d{1,4})x)?([A-Za-z]\w*)-(\d{1,4})", text)
    if (
        match is None
        or 0 in (int(match[1] or 1), int(match[2] or 1))
        or match[3].upper() not in _CAPABILITIES
    ):
        raise ConfigError(
            f"--cluster {text!r} is not understood; write 8xH100-80 (number, kind, GB), '2 x 8xH100-80' for "
            f"two such hosts, or cpu; kinds: {', '.join(_CAPABILITIES)}"
        )
    name = match[3].upper()
    if not 0 < int(match[4]) <= _MOST_GB:
        raise ConfigError(f"--cluster {text!r}: no GPU has {match[4]} GB; write its memory, as 8xH100-80")
    count = int(match[2] or 1)
    if count * int(match[1] or 1) > _MOST_GPUS:
        raise ConfigError(f"--cluster {text!r} has over {_MOST_GPUS:,} GPUs; write fewer")
    gib, capability = int(match[4]) * _VISIBLE, _CAPABILITIES[name]
    gpus = tuple(GPU(name, gib, capability, str(number)) for number in range(count))
    return Cluster((Host(_CORES * count, _FREE_GIB * count, gpus),) * int(match[1] or 1))
