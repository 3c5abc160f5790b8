"""What the controller warns of, as deaths and restarts: on stderr, and in progress.log."""

import logging
from collections.abc import Callable
from types import TracebackType

_LOGGER = logging.getLogger("rl")


class WarningLog(logging.Handler):
    """While it is entered, hands what `rl`'s loggers warn of to `write`, a line with date and time each."""

    def __init__(self, write: Callable[[str], None]):
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%F %T"))
        self._write = write
        # By itself Python prints a warning only where no logger has a handler.
        self._on_stderr = None if logging.getLogger().handlers else logging.lastResort

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))

    def __enter__(self) -> "WarningLog":
        for handler in (self, self._on_stderr):
            if handler is not None:
                _LOGGER.addHandler(handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handler in (self, self._on_stderr):
            if handler is not None:
                _LOGGER.removeHandler(handler)
