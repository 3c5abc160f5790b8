"""The process that Monarch starts a run's processes from, on a host that is not the controller's."""

import os
import sys
import threading
import time

from rl.host_protocol import listen, written
from rl.host_tls import transport
from rl.processes import PARENT, Reaper, adopt_orphans, allow_many_files, end_with_parent

TIMEOUTS = {"message_delivery_timeout": "1h", "channel_reconnect_timeout": "1h"}
"""A link that is cut for a minute and heals loses nothing: messages wait. Deaths are seen by other means."""
_REAP_SECONDS = 5.0


def main() -> None:
    """Print by which address Monarch reaches it, and serve until it is killed. Argument: this host's."""
    end_with_parent()
    adopt_orphans()
    allow_many_files()
    from monarch.actor import run_worker_loop_forever
    from monarch.config import configure
    from monarch.job import new_service_proc_id

    (host,) = sys.argv[1:]
    os.environ[PARENT] = str(os.getpid())
    configure(**TIMEOUTS)
    with listen(host) as listener:
        place = written(host, listener.getsockname()[1])
    # A fresh port and a fresh identity: a controller that knew an earlier one keeps its closed link to it.
    address = f"{new_service_proc_id()}@{transport(place)}"
    threading.Thread(target=_reap, daemon=True).start()
    print(address, flush=True)
    run_worker_loop_forever(address=address, ca="trust_all_connections")


def _reap() -> None:
    reaper = Reaper()
    while True:
        reaper.reap()
        time.sleep(_REAP_SECONDS)


if __name__ == "__main__":
    main()
