"""The answers of a constant room, and of one that a limit leaves beside other memory."""

from __future__ import annotations

from hybridpar.schedules.action import parse_actions
from hybridpar.schedules.passes.rooms import UNLIMITED, Room, Tide

ACTIONS = parse_actions("F0@0v0 B0@0v0")
OTHERS = {"F0@0v0": 30, "B0@0v0": 50}
NEEDED = list(zip(ACTIONS, (60, 20), strict=True))


def limit(most: int) -> Tide:
    return Tide(most, lambda: lambda action: OTHERS[str(action)])


def test_a_budget_is_for_the_state_alone() -> None:
    room = Room(100).beside(unsharded=10)
    assert list(map(room.follow(), ACTIONS)) == [90, 90]
    assert room.at_rest(available=90, copies=40, least=60) == 90
    assert room.can_hold(90)
    assert not room.can_hold(91)
    assert room.least(70, NEEDED) == 70
    assert room.excess(state=150, total=400) == 60
    assert room.excess(state=80, total=400) == 0


def test_a_limit_is_for_all_memory() -> None:
    room = limit(100).beside(unsharded=10)
    assert list(map(room.follow(), ACTIONS)) == [70, 50]
    assert room.at_rest(available=90, copies=20, least=60) == 70
    assert room.at_rest(available=90, copies=40, least=60) == 60
    assert room.can_hold(101)
    assert room.least(70, NEEDED) == 30 + 60
    assert room.excess(state=80, total=130) == 30
    assert room.excess(state=80, total=90) == 0


def test_unlimited_room_holds_any_state() -> None:
    room = UNLIMITED.beside(unsharded=10)
    assert room.can_hold(1 << 60)
    assert room.excess(state=1 << 60, total=1 << 61) == 0
