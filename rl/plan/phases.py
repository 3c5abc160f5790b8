"""Pass: who is on its devices in which phase, and what that leaves of its memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from rl.plan.dealing import Member
from rl.plan.demand import Demand
from rl.plan.memory import Memory
from rl.plan.roles import ROLES, RoleName
from rl.plan.types import PHASES, Notes, Phase, Stay

Presence = Literal["whole", "suspended"]
Presences = Mapping[Phase, Mapping[RoleName, Presence]]

_KEPT = ("overhead",)
"""Parts of a suspended process's memory that stay on its device. What leaves goes to the host."""


def presences(demand: Demand, roles: Sequence[RoleName], notes: Notes) -> Presences:
    if demand.sharing != "by_turns":
        return {phase: dict.fromkeys(roles, "whole") for phase in PHASES}
    if demand.overlap:
        notes.problem(
            "placement=by_turns does not go with max_offpolicy_steps or stream_groups, with which generators "
            "and trainer work at the same time; set both to 0, or placement to auto",
        )
    return {phase: {role: _presence(role, phase) for role in roles} for phase in PHASES}


def _presence(role: RoleName, phase: Phase) -> Presence:
    works = ROLES[role].works
    return "whole" if works is None or phase in works else "suspended"


def stays(started: Sequence[Member], present: Presences) -> tuple[Stay, ...]:
    def whole(phase: Phase) -> tuple[str, ...]:
        return tuple(member.name for member in started if present[phase][member.role] == "whole")

    return tuple(Stay(phase, whole(phase)) for phase in PHASES)


def by_phase(whole: Mapping[RoleName, Memory], present: Presences) -> dict[RoleName, dict[Phase, Memory]]:
    """Of each process of a role, on its device."""
    return {
        role: {phase: remaining(memory, present[phase][role]) for phase in PHASES}
        for role, memory in whole.items()
    }


def remaining(memory: Memory, presence: Presence) -> Memory:
    if presence == "whole":
        return memory
    kept = {part: size for part, size in memory.parts.items() if part in _KEPT}
    kept |= {"weights": memory.kept} if memory.kept else {}
    kept |= {"checkpoint": memory.staged} if "checkpoint" in memory.parts else {}
    return replace(memory, parts=kept)
