import json
from itertools import pairwise

import pytest

from hybridpar.schedules.action import Kind
from hybridpar.schedules.draw.perfetto import trace_entries, trace_json, waits
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate

COSTS = Costs(
    1, 2, update=0.5, reduce=2, norm=0.5, gather=0.25, latency=0.75, calls={Kind.SEND_F: 0.125}
)
TIMELINE = simulate(
    make_plan(ScheduleOptions("2bw", gather=True), PipelineShape(3, 4), 0, 3), COSTS
)
RANKS = {stage: (10 + stage, f"stage {stage}") for stage in range(3)}


@pytest.fixture(scope="module")
def entries():
    return json.loads(trace_json(trace_entries(TIMELINE, RANKS, per_second=1e3)))["traceEvents"]


def tracks(entries):
    """Slices by process and track, in order."""
    found = {}
    for e in entries:
        if e["ph"] == "X":
            found.setdefault((e["pid"], e["tid"]), []).append(e)
    return {key: sorted(slices, key=lambda e: (e["ts"], e["dur"])) for key, slices in found.items()}


def test_actions_and_idle_time_fill_the_first_track_of_each_rank(entries):
    for stage in range(3):
        slices = tracks(entries)[10 + stage, 0]
        assert {e["name"] for e in slices if e["cat"] != "idle"} == {
            str(a) for a in TIMELINE.plan[stage]
        }
        at = 0.0
        for e in slices:
            assert e["ts"] == pytest.approx(at)
            at = e["ts"] + e["dur"]
        idle = sum(e["dur"] for e in slices if e["cat"] == "idle") / 1e3
        end = TIMELINE.returns[stage][-1]
        assert idle == pytest.approx(end - TIMELINE.busy(stage))
        assert idle == pytest.approx(sum(w.end - w.start for w in waits(TIMELINE, stage)))


def test_concurrent_work_is_below_without_overlap(entries):
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    for (pid, tid), slices in tracks(entries).items():
        assert names[pid, tid] == ("communication" if tid else "actions")
        if tid:
            for one, following in pairwise(slices):
                assert one["ts"] + one["dur"] <= following["ts"] + 1e-6
    shown = {(e["pid"], e["name"]): e["dur"] / 1e3 for e in entries if e["ph"] == "X" and e["tid"]}
    assert shown[10, "SEND_F0@0"] == pytest.approx(0.75)
    assert shown[11, "gather of W1"] == pytest.approx(0.25)
    assert {name.rstrip("0123456789@") for _, name in shown} >= {
        "REDUCE",
        "NORM",
        "SEND_B",
        "RECV_F",
    }


def test_arrows_lead_from_sends_to_what_waits_for_them(entries):
    starts = {e["id"]: e for e in entries if e["ph"] == "s"}
    ends = {e["id"]: e for e in entries if e["ph"] == "f"}
    sends = sum(
        a.kind in (Kind.SEND_F, Kind.SEND_B) for actions in TIMELINE.plan.values() for a in actions
    )
    assert starts.keys() == ends.keys()
    assert len(starts) == sends == 2 * 2 * 12
    for number, start in starts.items():
        assert ends[number]["ts"] - start["ts"] >= 750 - 1e-6
        assert abs(ends[number]["pid"] - start["pid"]) == 1
