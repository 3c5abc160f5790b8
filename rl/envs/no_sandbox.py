"""NoSandbox: this machine cannot isolate code, with what would let it."""

from pathlib import Path

from rl.errors import RunError, Unavailable

_SETTINGS = {
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),  # Ubuntu from 23.10 on
    "kernel.unprivileged_userns_clone": ("0", "1"),  # Debian up to 10
    "user.max_user_namespaces": ("0", "15000"),
}
"""Name in sysctl -> the value that forbids what the sandbox needs, and one that allows it."""


class NoSandbox(RunError, Unavailable):
    """This machine cannot isolate code; there is no way around it that isolates less."""

    cause = "sandbox"


def why_not(stderr: str, settings: Path = Path("/proc/sys")) -> str:
    """What the program that isolates code wrote, and the remedy. settings: where the kernel shows its own."""
    return f"this machine does not isolate code ({' '.join(stderr.split())[:200]}); {_remedy(settings)}"


def _remedy(settings: Path) -> str:
    changes = []
    for name, (forbids, allows) in _SETTINGS.items():
        path = settings / name.replace(".", "/")
        if path.exists() and path.read_text().strip() == forbids:
            changes.append(f"sysctl {name}={allows}")
    if changes:
        return f"allow user namespaces: {', '.join(changes)}"
    return "allow user namespaces; in a container: docker run --security-opt seccomp=unconfined"
