"""Errors that a user can mend. Each message says what, the value, and the remedy."""


class ConfigError(Exception):
    """A run that cannot start as configured; the command line prints it and exits with code 2."""


class RunError(Exception):
    """A run that started and had to stop; the command line prints it and exits with code 1."""
