"""Every role has what the passes look up by its name."""

from typing import get_args

from rl.plan.demand import Demand
from rl.plan.roles import ENGINE_ROLES, ROLES, RoleName
from rl.plan.sections import TrainerConfig


def test_each_role_has_its_row():
    assert list(ROLES) == list(get_args(RoleName))
    assert ENGINE_ROLES == ("trainer", "critic", "reference")


def test_a_trainer_alone_starts_nobody_else():
    demand = Demand("train", TrainerConfig())
    assert {name: role.size(demand) for name, role in ROLES.items() if role.size(demand)} == {
        "trainer": (1, 1)
    }
    assert [role.max_restarts(demand) for role in ROLES.values()] == [3, 0, 3, 3, 0, 0]
