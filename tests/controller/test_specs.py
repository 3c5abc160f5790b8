"""What a config's settings become in the specs of its processes."""

from dataclasses import replace

import pytest

from rl.cluster.machine import this_machine
from rl.controller.config import GeneratorConfig
from rl.controller.device_defaults import by_device
from rl.controller.specs import actor_specs
from tests.controller.test_settings_effect import small

ROWS = [
    ({}, "overlap", False),
    ({"max_offpolicy_steps": 1}, "overlap", True),
    ({"stream_groups": 1}, "overlap", True),
    ({}, "share_devices", False),
    ({"placement": "shared"}, "share_devices", True),
    ({"generator": GeneratorConfig(updates="in_flight")}, "in_flight_updates", True),
    ({"generator": GeneratorConfig(updates="drain")}, "in_flight_updates", False),
    ({"generator": GeneratorConfig(num_replicas=3)}, "num_generators", 3),
]


@pytest.mark.parametrize(("changes", "field", "value"), ROWS)
def test_a_setting_reaches_the_specs(changes, field, value, tmp_path):
    config = by_device(replace(small(), **changes), this_machine())
    assert getattr(actor_specs(config, tmp_path, tmp_path), field) == value
