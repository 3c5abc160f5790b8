"""What the controller warns of, as deaths and restarts: on stderr, and in progress.log."""

import logging
from collections.abc import Callable

_LOGGER = logging.getLogger("rl")


class WarningLog(logging.Handler):
    """While it is attached, hands what `rl`'s loggers warn of to `write`, a line with date and time each.

    begin_line: called before one is printed, too.
    """

    def __init__(self, write: Callable[[str], None], begin_line: Callable[[], None] = lambda: None):
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%F %T"))
        self._write = write
        self._begin_line = begin_line
        # By itself Python prints a warning only where no logger has a handler.
        on_stderr = None if logging.getLogger().handlers else logging.lastResort
        self._handlers = [self] if on_stderr is None else [self, on_stderr]

    def emit(self, record: logging.LogRecord) -> None:
        self._begin_line()
        self._write(self.format(record))

    def attach(self) -> None:
        """Not by addHandler: Monarch's writes `[actor=<root>]` before each message, once for each handler."""
        _LOGGER.handlers += self._handlers

    def detach(self) -> None:
        for handler in self._handlers:
            _LOGGER.removeHandler(handler)
