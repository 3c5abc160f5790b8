"""After the launch a run follows its Plan and its Learning: nobody reads the config any more."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from configs.quickstart import quickstart
from rl.config import TrainerConfig
from rl.config import settle as settling
from rl.config.learning import learning_of
from rl.config.run import RunConfig
from rl.controller import run as run_module
from rl.envs.sort_letters import SortLetters
from rl.models.layout import Layout
from rl.models.sources import TinyQwen3
from rl.observability.recorder import Recorder
from rl.observability.sinks import TrackingConfig
from rl.plan.cluster import Cluster, Host
from tests.config.test_settings_effect import small
from tests.controller.fakes import fake_actors, no_picture
from tests.controller.test_recovery import ALGORITHMS

MORE = {
    "hosts that may be lost": {"trainer": TrainerConfig(layout=Layout(shard=2), hosts=(0, 1), min_hosts=1)}
}


@pytest.mark.parametrize("name", [*ALGORITHMS, *MORE])
def test_a_run_goes_to_its_end_without_its_config(name, tmp_path, monkeypatch):
    config = small(**(ALGORITHMS | MORE)[name], tracking=TrackingConfig(sinks=()))
    launched = []

    @asynccontextmanager
    async def launch(plan, models, run_dir, env, timeline, engines_without=None):
        actors, _ = fake_actors(small(**ALGORITHMS.get(name, {})), run_dir)
        with monkeypatch.context() as gone:
            gone.setattr(RunConfig, "__getattribute__", lambda self, name: pytest.fail(f"read {name}"))
            gone.setattr(TinyQwen3, "config", lambda self: pytest.fail("read a model's config.json"))
            assert (engines_without is None) == (name not in MORE)
            if engines_without is not None:
                (trainer,) = engines_without([1])
                assert [process.host for process in trainer.processes] == [0]
            launched.append(True)
            yield actors

    if name in MORE:
        hosts = tuple(Host(8, 64.0, address=f"10.0.0.{number}:7000") for number in range(2))
        monkeypatch.setattr(settling, "cluster_of", lambda config: Cluster(hosts))
    monkeypatch.setattr(run_module, "launch", launch)
    monkeypatch.setattr(run_module, "give_way_often", lambda: None)
    monkeypatch.setattr(Recorder, "draw_curve", no_picture)
    asyncio.run(run_module.run_recipe("small", config, tmp_path))
    assert launched and (tmp_path / "checkpoints" / f"step-{config.steps}").is_dir()


def test_learning_has_no_setting_that_is_still_to_be_settled():
    """0 and empty stay only where they mean nothing else than themselves."""
    learning = learning_of(quickstart())
    assert learning.groups_per_part == quickstart().prompts_per_step and learning.num_parts == 1
    assert learning.warmup.lr == 3e-3 and learning.max_seq_len == 128
    assert isinstance(learning.env, SortLetters) and len(learning.scored_by) == 32
