import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.items import READ, UPDATE, WRITE, plans

from hybridpar.schedules.action import PER_ITEM, Action, Kind, parse_actions
from hybridpar.schedules.draw.perfetto import trace_entries, waits
from hybridpar.schedules.draw.svg import draw_svg
from hybridpar.schedules.passes.fast_tier import FastTiers
from hybridpar.schedules.passes.residency import Access, Pool, add_residency
from hybridpar.schedules.passes.rooms import Room
from hybridpar.schedules.simulate.copy_engines import MIB
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.hosts import HostEngines
from hybridpar.schedules.simulate.simulator import StuckError, simulate

SWEEP = "FETCH0@0 F0@0v0 RELEASE0@0 FETCH1@0 F0@0.1v0 B0@0.1v0 RELEASE1@0 FETCH0@0 B0@0v0"


def run(text, mode=READ, room=1, **costs):
    """One rank whose parts have an item of a MiB each; a forward takes 0.5, a backward 1 for each
    part."""
    pool = Pool(
        lambda action: [] if action.kind in PER_ITEM else [Access(action.part, mode)],
        [MIB] * 3,
        Room(room * MIB),
    )
    return simulate({0: parse_actions(text)}, Costs(**costs), {0: [pool]})


def stalled(timeline, rank):
    return sum(stall for _, _, stall in timeline.item_waits(rank))


def starts(timeline):
    return {str(action): start for action, start, _ in timeline.shown(0)}


def test_a_part_waits_for_its_item():
    timeline = run(SWEEP, fetch=3.0, release=7.0)  # nothing was changed: no release takes time
    assert [start for action, start, _ in timeline.shown(0) if action.kind not in PER_ITEM] == [
        3,
        6.5,
        7,
        11,
    ]
    assert timeline.makespan == 12
    assert stalled(timeline, 0) == 9
    assert stalled(timeline.scaled(2), 0) == 18
    assert simulate({0: parse_actions(SWEEP)}).makespan == 3, "no transfer, no wait"


def test_changed_items_are_written_before_their_room_is_taken():
    timeline = run(SWEEP, UPDATE, fetch=3.0, release=2.0)
    shown = starts(timeline)
    assert (shown["RELEASE0@0"], shown["FETCH1@0"], shown["F0@0.1v0"]) == (3.5, 5.5, 8.5)
    fetch = next(step for step, action in enumerate(timeline.plan[0]) if str(action) == "FETCH1@0")
    assert timeline.stalls[0][fetch] == 2
    assert timeline.ends[0][fetch] == 8.5
    own = run(SWEEP, UPDATE, fetch=3.0, release=2.0, calls={Kind.FETCH: 0.5, Kind.RELEASE: 0.25})
    assert own.busy(0) == timeline.busy(0) + 3 * 0.5 + 2 * 0.25, (
        "what moves take of the rank's own time"
    )


def test_new_items_wait_for_their_room():
    timeline = run("FETCH0@0 F0@0v0 RELEASE0@0 F0@0.1v0", WRITE, fetch=3.0, release=2.0)
    assert starts(timeline)["F0@0.1v0"] == 5.5


def test_the_engines_work_at_once_and_each_in_order():
    timeline = run(
        "FETCH0@0 FETCH1@0 F0@0v0 RELEASE0@0 F0@0.1v0 RELEASE1@0",
        UPDATE,
        room=2,
        fetch=1.0,
        release=4.0,
    )
    times = {str(action): (start, end) for action, start, end in timeline.shown(0)}
    assert times["FETCH1@0"] == (1, 2)
    assert times["F0@0v0"] == (1, 1.5)
    assert times["RELEASE0@0"] == (1.5, 5.5)
    assert times["F0@0.1v0"] == (2, 2.5)
    assert times["RELEASE1@0"] == (5.5, 9.5)


def test_items_with_room_arrive_while_others_leave():
    text = "FETCH0@0 F0@0v0 RELEASE0@0 FETCH1@0 FETCH2@0 F0@0.1v0 F0@0.2v0"
    shown = starts(run(text, UPDATE, room=2, fetch=1.0, release=4.0))
    left = shown["RELEASE0@0"]
    assert [shown[move] - left for move in ("FETCH1@0", "FETCH2@0")] == pytest.approx([0, 4])
    shown = starts(
        run("FETCH0@0 F0@0v0 RELEASE0@0 FETCH0@0 F0@0v0", UPDATE, room=3, fetch=1.0, release=4.0)
    )
    assert shown["FETCH0@0"] == 6, "not before it has left, whatever room there is"


def test_spare_room_hides_moves():
    """Six parts, of which two or three are there at a time, each changed: a read and a write beside
    every action."""
    actions = [Action(Kind.F, 0, 0, 0, part) for _ in range(8) for part in range(6)]

    def time(room, spare):
        pool = Pool(
            lambda action: [Access(action.part, UPDATE)],
            [MIB] * 6,
            Room(room * MIB),
            spare=spare * MIB,
        )
        plan = {0: tuple(add_residency(actions, [pool]))}
        return simulate(plan, Costs(6.0, fetch=1.0, release=1.0), {0: [pool]}).makespan

    assert time(3, 0) > 48 + 8 * 2  # parts of a forward take 1 each
    assert time(3, 2) <= 48 + 2


def test_a_host_makes_one_of_many_groups_while_others_are_copied():
    engines = HostEngines((1.0, 1.0, 1.0), [1.0] * 2000)
    engines.send(0.0)
    assert engines.begin(0.0) == pytest.approx(1 + 2 / 2000)
    assert engines.ready(0) == pytest.approx(3 / 2000)
    engines.send(5.0)
    assert engines.ready(1999) == pytest.approx(1 + 2 / 2000), "of the batch that was begun"


def test_a_missing_fetch_is_waited_for_forever():
    with pytest.raises(StuckError, match=r"F0@0\.1v0: item 1 is not in the fast tier"):
        run("FETCH0@0 F0@0v0 F0@0.1v0")


@given(plans(), st.floats(0, 1), st.floats(0, 1))
def test_costs_of_moves(made, fetch, release):
    """Free moves take no time, others only add; engines do one thing at a time; waits are those of
    actions."""
    _, _, plan, pools = made
    free = simulate(plan, Costs(update=1.0), pools)
    assert free.makespan == simulate(plan, Costs(update=1.0)).makespan
    assert not any(free.stalls.values())
    timeline = simulate(plan, Costs(update=1.0, fetch=fetch * MIB, release=release * MIB), pools)
    assert timeline.makespan >= free.makespan
    for rank in plan:
        tier = FastTiers(pools[rank])
        written = 0
        for action in plan[rank]:
            written += (
                action.kind is Kind.RELEASE
                and tier.is_changed(action.microbatch)
                and pools[rank][0].num_bytes[action.microbatch]
            )
            tier.follow(action)
        fetched = sum(
            pools[rank][0].num_bytes[a.microbatch] for a in plan[rank] if a.kind is Kind.FETCH
        )
        for kind, taken in ((Kind.FETCH, fetch * fetched), (Kind.RELEASE, release * written)):
            moves = [
                (start, end)
                for action, start, end in timeline.shown(rank)
                if action.kind is kind and end > start
            ]
            assert sum(end - start for start, end in moves) == pytest.approx(taken)
            assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(moves))
        assert stalled(timeline, rank) <= timeline.makespan - timeline.busy(rank) + 1e-9


def test_pictures_show_moves_and_waits():
    timeline = run(SWEEP, UPDATE, fetch=3.0, release=2.0)
    picture = draw_svg(timeline)
    assert "<title>FETCH1@0: fetch of item 1 on its way, 5.5 to 8.5</title>" in picture
    assert "<title>RELEASE0@0: release of item 0 on its way, 3.5 to 5.5</title>" in picture
    assert "<title>F0@0.1v0 waits for the slow tier, 3.5 to 8.5</title>" in picture
    assert ">fetched, released<" in picture
    assert ">waits for the slow tier<" in picture
    plain = draw_svg({0: parse_actions("F0@0v0 B0@0v0")})
    assert "fetched" not in plain
    assert "slow tier" not in plain
    assert next(one.name for one in waits(timeline, 0)) == "idle: F0@0v0 waits for the slow tier"
    entries = json.loads(json.dumps(list(trace_entries(timeline, {0: (0, "rank 0")}))))
    tracks = {
        entry["args"]["name"]: entry["tid"] for entry in entries if entry["name"] == "thread_name"
    }
    assert set(tracks) == {"actions", "fetch", "release"}
    move = next(
        entry
        for entry in entries
        if entry["name"] == "FETCH1@0" and entry["tid"] == tracks["fetch"]
    )
    assert (move["ts"], move["dur"], move["args"]) == (5.5e6, 3e6, {"item": 1})
    part = next(entry for entry in entries if entry["name"] == "F0@0.1v0")
    assert part["args"] == {"micro-batch": 0, "part": 1, "weights": 0}
