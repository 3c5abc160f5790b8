"""Errors that a user can fix. Each message says what, the value, and the remedy."""


class ConfigError(Exception):
    """A run that cannot start as configured; the command line prints it and exits with code 2."""


class RunError(Exception):
    """A run that started and had to stop; the command line prints it and exits with code 1."""


class NewerVersion(ConfigError):
    """A file of ours is of a version that this one does not know: what is older is not to take its place."""


def check_version(path: object, version: object, known: int) -> None:
    """Raises NewerVersion."""
    if version != known:
        raise NewerVersion(
            f"{path} has version {version}, and this rl reads {known}; use the rl that wrote it"
        )


TERMINATED = 128 + 15
"""The exit code where SIGTERM had a run save a checkpoint and end."""
TOLD = "RL_TOLD"
"""The variable with the path of a file that is made then, for who cannot see the code."""


def exit_code(error: BaseException) -> int:
    """What `rl` ends with, as shells do: 130 after Ctrl-C, 143 after SIGTERM."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + int(next(iter(error.args), 2))
    return 2 if isinstance(error, ConfigError) else 1


class DamagedCheckpoint(RunError):
    """A checkpoint is not what was written: an older one may be good."""


class GeneratorFailed(RunError):
    """A generator's engine is broken; others may go on, and it may be started again."""


class WeightsUnreachable(RunError):
    """A version's weights are on a host that is gone, or are released. A later version may be reached."""


class EpisodeLost(Exception):
    """The process of an episode is gone, for no fault of the episode: it may begin again."""


class Unavailable(Exception):
    """What the environment needs is gone, for no fault of the policy's: the sample is dropped.

    Derive from it, with a `cause` of the infrastructure's in rl/causes.py.
    """

    cause = "server"


class BadReturn(Exception):
    """The environment's code returned what it must not."""

    cause = "type"


class EpisodeFailed(Exception):
    """An episode came to no reward. `cause`: a name of rl/causes.py, which says what comes of the sample."""

    def __init__(self, message: str, cause: str):
        super().__init__(message, cause)  # both, for pickling

    def __str__(self) -> str:
        return self.args[0]

    @property
    def cause(self) -> str:
        return self.args[1]


class NotFinite(RunError):
    """A loss or a gradient that is not a number. `metric` says which."""

    def __init__(self, message: str, metric: str):
        super().__init__(message, metric)  # both, for pickling

    def __str__(self) -> str:
        return self.args[0]

    @property
    def metric(self) -> str:
        return self.args[1]


def message_of(error: BaseException) -> str:
    """The error's own message on one line; empty where it has none, or its __str__ fails.

    Halves of surrogate pairs, which no log can hold, are escaped.
    """
    try:
        return " ".join(str(error).encode(errors="backslashreplace").decode().split())
    except Exception:
        return ""


def one_line(error: BaseException) -> str:
    """`KeyError: 'x'`: another's error within a message of ours."""
    return f"{type(error).__name__}: {message_of(error)}".rstrip()
