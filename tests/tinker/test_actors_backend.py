"""What the server's calls become, on stand-ins for the actors."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.errors import RunError
from rl.tinker.actors_backend import ActorsBackend
from rl.tinker.backend import ModelsLost


def test_a_model_that_a_busy_engine_does_not_remove_goes_with_the_engine():
    """What is given up on as too slow goes on; the next call waits behind it, and ends no server."""
    restarts = []

    class Trainer:
        async def remove_adapter(self, model):
            raise RunError("trainer did not finish remove_adapter within 600 s")

    class Revival:
        async def restart(self, death):
            restarts.append(str(death))

    async def publish_base_again():
        restarts.append("published")

    actors = SimpleNamespace(trainer=Trainer(), revival=Revival(), publish_base_again=publish_base_again)
    with pytest.raises(ModelsLost, match="started again"):
        asyncio.run(ActorsBackend(actors, "base", 64, 128).remove("m"))
    assert restarts == ["trainer did not finish remove_adapter within 600 s", "published"]
