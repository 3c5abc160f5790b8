"""Launchers: on which host meshes the processes of a plan's replicas are spawned."""

from typing import Any, Protocol


class Launcher(Protocol):
    """A value: `attach` before each start of a replica, `close` once no process is left."""

    async def attach(self, name: str, hosts: tuple[int, ...]) -> Any:
        """Monarch's host mesh for the processes of a mesh called `name`.

        hosts: of each of its processes, its host's number in the plan's cluster.
        """

    async def close(self) -> None: ...


class ThisHost:
    """All of them here."""

    async def attach(self, name: str, hosts: tuple[int, ...]) -> Any:
        from monarch.actor import this_host

        assert not any(hosts), "a plan for one host"
        return this_host()

    async def close(self) -> None:
        pass
