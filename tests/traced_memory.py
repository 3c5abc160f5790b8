"""What a piece of code allocates, measured by tracemalloc in a forked child.

A process of pytest has threads that libraries started. Up to CPython 3.12.8 and 3.13.1 `tracemalloc.stop` crashes
where one of them allocates (https://github.com/python/cpython/issues/128679). The child has one thread, and ends
without `stop`.
"""

import gc
import os
import pickle
import signal
import traceback
import tracemalloc
from collections.abc import Callable

LIMIT_SECONDS = 60


def traced_memory(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that what `work()` returns still takes, and the most that was allocated while it ran."""
    read, write = os.pipe()
    if not (child := os.fork()):
        _measure(work, write)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        sent = file.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the measured process ended with status {status}; its error is above"
    return pickle.loads(sent)


def _measure(work: Callable[[], object], write: int) -> None:
    code = 1
    try:
        signal.alarm(LIMIT_SECONDS)
        gc.freeze()  # else what pytest left behind is collected meanwhile, and its finalizers are measured too
        tracemalloc.start()
        kept = work()
        os.write(write, pickle.dumps(tracemalloc.get_traced_memory()))
        del kept
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
