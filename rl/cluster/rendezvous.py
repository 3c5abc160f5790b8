"""One `rl train` on each host, by torchrun, srun or a Kubernetes Job: the first is the controller.

Each starts an `rl worker` of its own and tells its address in a store; the first trains, evaluates, replays
or serves with all of them as --hosts, the others wait until it has ended.
"""

import errno
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from rl.cluster.group import PATIENCE, Group
from rl.errors import ConfigError, RunError, exit_code
from rl.host_protocol import address_of, listen, own_address, written
from rl.processes import INTERRUPTS, end_with_parent

_START_SECONDS = 300.0  # of an `rl worker`
_LOOK_SECONDS = 1.0
_STOP_SECONDS = 30.0
_SILENT_SECONDS = 600.0
"""Over what a link may be down for, and what it then takes to lease a host again."""
_OVER, _FIRST = "over", "first"
_MOST_NAMED = 8
_LOOPBACK = "127.0.0.1"


def run_as_group(group: Group, command: Callable[[str], int]) -> int:
    """The exit code, the same on all. command: with what to put into --hosts; called on the first host alone.

    Raises RunError where hosts do not come together, or the first is gone.
    """
    store = _store(group)
    with _own_worker(_own_address(group, store)) as address:
        store.set(f"host-{group.rank}", address)
        if group.rank:
            return _wait_for_end(store, group)
        try:
            code = command(",".join(_addresses(store, group)))
        except BaseException as error:
            _end_of_all(store, group, exit_code(error))
            raise
        _end_of_all(store, group, code)
        return code


def _store(group: Group) -> Any:
    from torch.distributed import PrefixStore, TCPStore

    is_master = group.rank == 0 and not group.has_store
    try:
        address, listener = _listener(group) if is_master else (group.address, None)
        store = TCPStore(
            address, group.port, is_master=is_master, wait_for_workers=False,
            timeout=timedelta(seconds=group.patience), master_listen_fd=listener,
        )  # fmt: skip
    except Exception as error:
        raise RunError(
            f"the first host's store at {group.address}:{group.port} is not reached ({error}); open its "
            f"port, set MASTER_ADDR and MASTER_PORT, or {PATIENCE} where hosts come later"
        ) from error
    return PrefixStore(f"rl-{group.name}", store)


def _listener(group: Group) -> tuple[str, int | None]:
    """An address of the first host's, and a socket that listens there alone.

    None: on all of its addresses, as it does not know which one others are told: its name is loopback here,
    or a service's, or still leads to another pod, whose place it takes, and whose store is not asked.
    Raises OSError.
    """
    if group.address == "localhost":  # as the first pod of a PyTorchJob is told; the others have its name
        return _LOOPBACK, None
    try:
        address = address_of(group.address)
        return address, listen(address, group.port).detach()
    except ConfigError:
        return _LOOPBACK, None
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return _LOOPBACK, None


def _addresses(store: Any, group: Group) -> list[str]:
    keys = [f"host-{rank}" for rank in range(group.size)]
    try:
        return [store.get(key).decode() for key in keys]
    except Exception as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        numbers = " ".join(map(str, missing[:_MOST_NAMED])) + " ..." * (len(missing) > _MOST_NAMED)
        raise RunError(
            f"{group.size - len(missing)} of {group.size} hosts are there after {group.patience:.0f} s; see "
            f"the output of rank {numbers}, or raise {PATIENCE} where hosts come later"
        ) from error


@contextmanager
def _own_worker(host: str) -> Iterator[str]:
    """Its address, host:port. One that dies is started again there; it ends with this process, however that
    ends."""
    worker, over = _start_worker(written(host, 0)), threading.Event()
    assert worker.stdout is not None
    is_there, _, _ = select.select([worker.stdout], [], [], _START_SECONDS)  # it writes whole lines
    address = worker.stdout.readline().strip().rpartition(" ")[2] if is_there else ""
    if not address:
        worker.kill()
        raise RunError("this host's rl worker did not start; see what is above")

    def keep() -> None:
        nonlocal worker
        while worker.wait() is not None and not over.wait(_LOOK_SECONDS):
            worker = _start_worker(address)

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield address
    finally:
        over.set()
        worker.send_signal(signal.SIGINT)
        keeper.join(_STOP_SECONDS)
        worker.kill()


def _begin_worker() -> None:
    """What a scheduler sends to all of a job is the first host's business, which needs this host to save."""
    end_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # by which it is ended; in a shell's background it is ignored
    for number in {*INTERRUPTS} - {signal.SIGINT}:
        signal.signal(number, signal.SIG_IGN)


def _start_worker(address: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "rl", "worker", "--listen", address]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_begin_worker,
    )


def _own_address(group: Group, store: Any) -> str:
    """Of this host, on the way to the first.

    Debian has a host's own name as 127.0.1.1: then the first learns from the second what others reach it by.
    """
    try:
        first = address_of(group.address)
    except ConfigError:
        if group.rank:
            raise
        return _told_address(store, group)
    if group.rank:
        store.set(_FIRST, first)
    elif ip_address(first).is_loopback:  # as others name it, who may be on other hosts
        return _told_address(store, group)
    return own_address(written(first, group.port))


def _told_address(store: Any, group: Group) -> str:
    try:
        return str(store.get(_FIRST).decode())
    except Exception as error:
        raise RunError(
            f"no other host is there after {group.patience:.0f} s; see the output of the other ranks, or "
            f"raise {PATIENCE} where hosts come later"
        ) from error


def _wait_for_end(store: Any, group: Group) -> int:
    """Signals are the first host's business: it saves a checkpoint, for which this host is needed."""
    for number in INTERRUPTS:
        signal.signal(number, lambda *_: None)
    asking, silent = _Asking(store, group), 0.0
    asking.start()
    while asking.code is None:
        if asking.is_gone or silent > _SILENT_SECONDS:
            raise RunError("the first host is gone; start the run again with --resume latest")
        before = asking.num_answers
        time.sleep(_LOOK_SECONDS)
        # In own looks, not by the clock: a job that is suspended hears nothing, and has not waited.
        silent = silent + _LOOK_SECONDS if asking.num_answers == before else 0.0
    return asking.code


class _Asking(threading.Thread):
    """Asks the first host whether the run is over, and with which code.

    In a thread: a host that is frozen, or has lost its power, leaves torch's store waiting for an answer.
    """

    def __init__(self, store: Any, group: Group):
        super().__init__(name="asks the first host", daemon=True)
        self._store, self._rank = store, group.rank
        self.code: int | None = None
        self.is_gone = False
        self.num_answers = 0

    def run(self) -> None:
        while self.code is None and not self.is_gone:
            try:
                if self._store.check([_OVER]):
                    code = int(self._store.get(_OVER))
                    self._store.set(f"ended-{self._rank}", "")
                    self.code = code
                self.num_answers += 1
            except Exception as error:  # torch's own kinds
                self.is_gone = "reset" in str(error) or "closed" in str(error)
            time.sleep(_LOOK_SECONDS)


def _end_of_all(store: Any, group: Group, code: int) -> None:
    """The store may be in this process: it stays until all have read it, or some are gone."""
    with suppress(Exception):
        store.set(_OVER, str(code))
        keys = [f"ended-{rank}" for rank in range(1, group.size)]
        store.wait(keys, timedelta(seconds=_STOP_SECONDS))
