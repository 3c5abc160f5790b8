"""What a command does not read keeps it from nothing: its flags could not change that either."""

from dataclasses import replace

import pytest

from configs.quickstart import quickstart
from rl.config import JudgeConfig, ReferenceConfig
from rl.config.validate import validate
from rl.loss.kl import KL
from rl.models.layout import Layout
from rl.models.sources import ModelDir, TinyQwen3
from tests.plans import AMPLE

GONE = ModelDir("/nowhere")
CASES = [
    (
        {"kl": KL(coef=0.1), "reference": ReferenceConfig(model=GONE)},
        ("train", "replay"),
    ),  # a teacher that is gone
    ({"reference": ReferenceConfig(layout=Layout(shard=2))}, ("train", "replay")),  # which nothing asks for
    ({"judge": JudgeConfig(model=TinyQwen3("abc"))}, ("train", "eval")),  # which nobody would ask
]


@pytest.mark.parametrize(("changes", "refused"), CASES)
def test_a_command_is_refused_for_what_it_reads_alone(changes, refused):
    config = replace(quickstart(), **changes)
    for command in ("train", "eval", "replay"):
        assert bool(validate(config, cluster=AMPLE, command=command)) == (command in refused), command
