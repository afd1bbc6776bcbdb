"""V-shaped pipelines: bubbles and memory against known ones and torch's own orders, versions, and
what is refused."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.orders.test_zero_bubble import COSTS, costs_of

from hybridpar.config import from_mapping
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.schedules.action import Action, Kind
from hybridpar.schedules.draw.draw_text import draw
from hybridpar.schedules.orders import vee
from hybridpar.schedules.passes.lowering import add_communication, add_updates, make_plan
from hybridpar.schedules.proof.check import CheckReport, PlanError, check
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, Schedule, find_schedule, make_schedule
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate
from hybridpar.validate import problems

ORDERS = ("full", "half", "min")


def on_v(name: str, activations: str, **options: Any) -> Schedule:
    return make_schedule(
        ScheduleOptions(name, stage_layout="v", activations=activations, **options)
    )


def proven(schedule: Schedule, p: int, m: int, num_batches: int = 2, **options: Any) -> CheckReport:
    sizes = PipelineShape(p, m, 2, "v")
    return check(
        make_plan(
            find_schedule(schedule).with_options(split=True, **options), sizes, 0, num_batches
        ),
        sizes,
        schedule,
    )


def bubble(schedule: Schedule, p: int, m: int, f: float, i: float, w: float) -> float:
    """Share of the work of a batch that drains."""
    plan = make_plan(find_schedule(schedule).with_options(split=True), PipelineShape(p, m, 2, "v"))
    return simulate(plan, costs_of(f, i, w, 2)).makespan / (m * (f + i + w)) - 1


def peak(report: CheckReport) -> float:
    """The most that a rank holds, in micro-batches of a whole rank."""
    return max(live.activations for live in report.peaks) / 2


def test_stages_of_each_rank() -> None:
    for p in range(2, 9):
        sizes = PipelineShape(p, 1, 2, "v")
        held = [list(sizes.stages_of(rank)) for rank in range(p)]
        assert held == [[rank, 2 * p - 1 - rank] for rank in range(p)]
        assert [sizes.rank_of(stage) for stage in range(2 * p)] == [*range(p), *reversed(range(p))]
        assert [sizes.link(stage, 1) for stage in range(2 * p)] == [
            *range(p - 1),
            None,
            *reversed(range(p - 1)),
            None,
        ]
        assert sizes.peer(p - 1, 1) is sizes.peer(p, -1) is None
        assert (
            PipelineShape.found({stage: sizes.rank_of(stage) for stage in range(2 * p)}, p) == sizes
        )
    wave = PipelineShape(3, 1, 4, "v")
    assert [wave.rank_of(stage) for stage in range(12)] == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]
    assert [wave.stages_of(rank) for rank in range(3)] == [
        [0, 5, 6, 11],
        [1, 4, 7, 10],
        [2, 3, 8, 9],
    ]
    assert [wave.link(stage, 1) for stage in range(12)] == [
        0,
        1,
        None,
        1,
        0,
        None,
        0,
        1,
        None,
        1,
        0,
        None,
    ]
    assert PipelineShape.found({stage: wave.rank_of(stage) for stage in range(12)}, 3) == wave


@given(st.integers(2, 9), st.integers(1, 27), st.sampled_from(ORDERS))
def test_every_plan_is_right(p: int, m: int, activations: str) -> None:
    """Whatever m: also of less micro-batches than ranks. No rank holds more than is said."""
    report = proven(on_v("1f1b", activations), p, m)
    assert peak(report) <= {"full": p, "half": p // 2 + 1, "min": p / 3 + 1.5}[activations]


@given(st.integers(2, 8), st.integers(0, 3), st.sampled_from(vee.ENDLESS), st.booleans())
def test_two_versions_are_enough(p: int, more: int, activations: str, gather: bool) -> None:
    """From as many micro-batches on as are in flight; with fewer, the error names the least."""
    schedule = on_v("2bw", activations)
    least = schedule.warmup(PipelineShape(p, 1, 2, "v"), 0)
    if activations == "half":
        assert least == (p if p % 2 else p + 1)
    else:
        assert least <= 2 * p / 3 + 1.4
    report = proven(schedule, p, least + more, 4, gather=gather)
    assert max(live.versions for live in report.peaks) == 2
    with pytest.raises(
        ConfigError, match=rf"pipeline.num_microbatches = {least - 1}: .*; try {least}$"
    ):
        schedule.check_shape(PipelineShape(p, least - 1, 2, "v"))


def test_fewer_micro_batches_would_need_a_third_version() -> None:
    """Refused schedules are those that `check` finds wrong: their pipeline would wait for
    itself."""
    schedule = replace(on_v("2bw", "half"), needs_full_pipeline=False)
    with pytest.raises(PlanError):
        proven(schedule, 4, 4, 5)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("p", "activations", "held", "periods"),
    [
        (4, "half", 3.0, (1, 1, 1)),
        (8, "half", 5.0, (1, 1, 1)),
        (5, "half", 3.0, (1, 1, 1)),
        (4, "min", 2.0, (1, 1.2, 1.098)),
        (8, "min", 4.0, (1, 1.2, 1.098)),
    ],
)
def test_2bw_has_no_steady_bubble(
    p: int, activations: str, held: float, periods: tuple[float, ...]
) -> None:
    """At the memory of V-Half, for any of these costs; 1f1b's first rank holds p. Source: simulated
    apart, in slots."""
    schedule = on_v("2bw", activations)
    m = 2 * p
    plan = make_plan(
        find_schedule(schedule).with_options(split=True), PipelineShape(p, m, 2, "v"), 0, 8
    )
    for (f, i, w), period in zip(COSTS, periods, strict=False):
        assert simulate(plan, costs_of(f, i, w, 2)).step_time(m) / (
            m * (f + i + w)
        ) == pytest.approx(period, abs=6e-4)
    assert peak(proven(schedule, p, m, 4)) == held


@pytest.mark.parametrize(
    ("p", "m", "shares"), [(4, 8, (6.2, 7.5, 6.9, 12.5)), (8, 32, (3.6, 4.4, 4.0))]
)
def test_bubbles_of_full(p: int, m: int, shares: tuple[float, ...]) -> None:
    schedule = on_v("1f1b", "full")
    for costs, share in zip(COSTS, shares, strict=False):
        assert 100 * bubble(schedule, p, m, *costs) == pytest.approx(share, abs=0.06)
    assert peak(proven(schedule, p, m)) == p


@pytest.mark.parametrize(
    ("p", "m", "activations", "held", "share"),
    [
        (4, 8, "half", 3.0, 10.4),
        (4, 8, "min", 2.0, 22.9),
        (8, 32, "half", 5.0, 8.9),
        (8, 32, "min", 4.0, 13.0),
    ],
)
def test_bubbles_where_less_is_held(
    p: int, m: int, activations: str, held: float, share: float
) -> None:
    """Bubbles of the authors' own search, or smaller (V-Min, p = 8: 14.1), at the memory of the
    pattern."""
    schedule = on_v("1f1b", activations)
    assert 100 * bubble(schedule, p, m, 1, 1, 1) == pytest.approx(share, abs=0.06)
    assert peak(proven(schedule, p, m)) == held


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_formula_of_full(p: int) -> None:
    """(p-1)F/2 where all take as long, from m = 2p on. Source: ZB-V, arXiv 2401.10241, section
    6."""
    for m in (2 * p, 2 * p + 1, 3 * p + 2, 4 * p):
        assert bubble(on_v("1f1b", "full"), p, m, 1, 1, 1) * 3 * m == pytest.approx((p - 1) / 2), m


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (8, 2), (2, 4), (4, 4), (6, 4), (3, 6)])
def test_bubble_of_few_micro_batches_and_of_more_turns(p: int, v: int) -> None:
    """(p-1)F/v at m = p, of which torch's ZB-V takes twice as much with v = 2, and with v > 2 from
    2p on, too; at the memory of 1f1b's first rank, and without a deadlock where transfers of a turn
    queue."""
    schedule = make_schedule(ScheduleOptions("1f1b", stage_layout="v", virtual_stages=v))
    for m in (p,) if v == 2 else (p, 2 * p, 2 * p + 1, 3 * p + 2):
        sizes = PipelineShape(p, m, v, "v")
        found = simulate(
            make_plan(find_schedule(schedule).with_options(split=True), sizes), costs_of(1, 1, 1, v)
        ).makespan
        assert found - 3 * m == pytest.approx((p - 1) / v), m
        report = check(
            make_plan(find_schedule(schedule).with_options(split=True), sizes, 0, 2),
            sizes,
            schedule,
        )
        assert max(live.activations for live in report.peaks) <= p * v


@given(st.integers(2, 5), st.integers(1, 11), st.sampled_from([4, 6]))
def test_every_plan_of_more_turns_is_right(p: int, m: int, v: int) -> None:
    schedule = make_schedule(ScheduleOptions("1f1b", stage_layout="v", virtual_stages=v))
    sizes = PipelineShape(p, m, v, "v")
    report = check(
        make_plan(find_schedule(schedule).with_options(split=True, gather=True), sizes, 0, 2),
        sizes,
        schedule,
    )
    assert max(live.activations for live in report.peaks) <= p * v


TORCH = {
    Kind.F: "FORWARD",
    Kind.I: "BACKWARD_INPUT",
    Kind.W: "BACKWARD_WEIGHT",
    Kind.B: "FULL_BACKWARD",
}


def torch_order(
    name: str, p: int, m: int, chunks: int = 2
) -> dict[int, list[tuple[Kind, int, int]]]:
    """The order of one of torch's schedules, by rank; of two actions that it overlaps, one after
    the other."""
    theirs = importlib.import_module("torch.distributed.pipelining.schedules")
    kinds = {getattr(theirs, attribute): kind for kind, attribute in TORCH.items()}
    rounds = max(1, m // p)
    found = {}
    for rank in range(p):
        made = object.__new__(getattr(theirs, name))
        made.pp_group_size = p
        made.rank = rank
        made._n_microbatches = m
        made.n_local_stages = chunks
        made._num_stages = made.num_stages = p * chunks
        made._stages = [None] * chunks
        made.number_of_rounds = rounds
        made.microbatches_per_round = m // rounds
        actions = [
            one
            for action in made._calculate_single_rank_operations(rank)
            if action is not None
            for one in (action.sub_actions or (action,))
        ]
        found[rank] = list(
            _split((kinds[a.computation_type], a.stage_index, a.microbatch_index) for a in actions)
        )
    return found


def _split(steps: Iterator[tuple[Kind, int, int]]) -> Iterator[tuple[Kind, int, int]]:
    for kind, stage, k in steps:
        yield from ((part, stage, k) for part in ((Kind.I, Kind.W) if kind is Kind.B else (kind,)))


def as_plan(
    order: dict[int, list[tuple[Kind, int, int]]], schedule: Schedule, sizes: PipelineShape
) -> dict[int, Any]:
    return {
        rank: tuple(
            add_communication(
                add_updates(
                    [Action(kind, stage, k, 0) for kind, stage, k in steps], schedule, sizes
                ),
                sizes,
            )
        )
        for rank, steps in order.items()
    }


@pytest.mark.parametrize(
    ("name", "least"), [("ScheduleZBVZeroBubble", 1), ("ScheduleDualPipeV", 2)]
)
@pytest.mark.parametrize("p", [2, 4, 6])
def test_no_worse_than_orders_of_torch(name: str, least: int, p: int) -> None:
    """Theirs are right by our check, and not faster than ours with as much memory."""
    ours = on_v("1f1b", "full")
    for m in (p, 2 * p, 3 * p + 1):
        if m < least * p:
            continue
        sizes = PipelineShape(p, m, 2, "v")
        plan = as_plan(torch_order(name, p, m), ours, sizes)
        held = [0] * p
        for rank, actions in plan.items():
            now = 0
            for action in actions:
                now += (action.kind is Kind.F) - (action.kind is Kind.W)
                held[rank] = max(held[rank], now)
        if name == "ScheduleZBVZeroBubble":  # DualPipeV holds one stage's more than ours may
            assert check(plan, sizes, ours).num_actions
        assert max(held) >= max(live.activations for live in proven(ours, p, m).peaks)
        for costs in COSTS[:3]:
            theirs = simulate(plan, costs_of(*costs, 2)).makespan
            found = simulate(
                make_plan(find_schedule(ours).with_options(split=True), sizes), costs_of(*costs, 2)
            ).makespan
            assert found <= theirs + 1e-9, (m, costs)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 6)])
def test_our_interleaved_is_no_worse_than_torchs(p: int, m: int) -> None:
    ours = make_schedule(ScheduleOptions("interleaved", zero_bubble=True))
    sizes = PipelineShape(p, m, 2)
    plan = as_plan(torch_order("ScheduleInterleavedZeroBubble", p, m), ours, sizes)
    for costs in COSTS:
        theirs = simulate(plan, costs_of(*costs, 2)).makespan
        assert simulate(make_plan(ours, sizes), costs_of(*costs, 2)).makespan <= theirs + 1e-9


@given(st.integers(2, 12), st.sampled_from(vee.ENDLESS))
def test_pattern_has_one_thing_in_a_slot(p: int, activations: str) -> None:
    """And what a step needs is done in an earlier slot, on whichever rank. Slots are the order of
    plans."""
    sizes = PipelineShape(p, 1, 2, "v")
    for rank in range(p):
        slots = vee.slots(activations, p, rank)
        assert len({slot % vee.PERIOD for slot in slots.values()}) == vee.PERIOD
        steps = list(vee.pattern(sizes, rank, activations, 3, 9))
        assert sorted(steps, key=lambda step: vee.slot_of(sizes, activations, step)) == steps
        assert len(set(steps)) == len(steps) == 9 * len(slots)

    def slot(kind: Kind, stage: int) -> int:
        return vee.slot_of(sizes, activations, (kind, stage, 0))

    for stage in range(2 * p):
        assert stage == 0 or slot(Kind.F, stage - 1) < slot(Kind.F, stage)
        assert slot(Kind.F, stage) < slot(Kind.I, stage) < slot(Kind.W, stage)
        assert stage == 2 * p - 1 or slot(Kind.I, stage + 1) < slot(Kind.I, stage)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("sync_steps", [0, 2])
@pytest.mark.parametrize("activations", vee.ENDLESS)
def test_large_runs_are_proven_by_smaller_ones(activations: str, sync_steps: int) -> None:
    config = from_mapping(
        {
            "model": {"num_layers": 30},
            "parallel": {"pp": 12, "dp": 1},
            "pipeline": {
                "schedule": "2bw",
                "stage_layout": "v",
                "split_backward": True,
                "activations": activations,
                "num_microbatches": 80,
                "sync_steps": sync_steps,
            },
        }
    )
    reports = JobPlan(config).prove()
    assert len(reports) == 1 + (sync_steps > 0)
    assert max(live.versions for live in reports[-1].peaks) == 2


def test_picture() -> None:
    plan = make_plan(
        find_schedule(on_v("1f1b", "full")).with_options(split=True), PipelineShape(2, 3, 2, "v")
    )
    assert draw(simulate(plan, Costs(1, 2))) == "\n".join(
        (
            "rank 0  F0- F1- F2- F0b I0b W0b F1b I1b W1b B0----- F2b I2b W2b B1----- B2-----    *",
            "rank 1      F0- F0b F1- F1b B0b---- F2- I0- W0- F2b B1b---- I1- I2b I2- W1- W2b W2-*",
        )
    )


@pytest.mark.parametrize(
    ("pipeline", "field", "works"),
    [
        ({"split_backward": False}, "pipeline.split_backward", "true"),
        ({"schedule": "gpipe"}, "pipeline.stage_layout", "loop"),
        ({"schedule": "2bw"}, "pipeline.activations", "half"),
        (
            {"schedule": "2bw", "activations": "half", "num_microbatches": 2},
            "pipeline.num_microbatches",
            "3",
        ),
        (
            {"schedule": "2bw", "activations": "half", "gradient_buffers": 1},
            "pipeline.gradient_buffers",
            "0",
        ),
        (
            {"schedule": "2bw", "activations": "half", "early_switch": 1},
            "pipeline.early_switch",
            "off",
        ),
        (
            {"schedule": "2bw", "activations": "half", "early_switch": "auto"},
            "pipeline.early_switch",
            "off",
        ),
        ({"warmup": "latency"}, "pipeline.warmup", "depth"),
        ({"zero_bubble": True}, "pipeline.zero_bubble", "false"),
        ({"stage_layout": "loop", "activations": "half"}, "pipeline.activations", "full"),
        ({"virtual_stages": 3}, "pipeline.virtual_stages", "0"),
        ({"virtual_stages": 4, "activations": "half"}, "pipeline.virtual_stages", "0"),
        (
            {"virtual_stages": 4, "schedule": "2bw", "activations": "half"},
            "pipeline.virtual_stages",
            "0",
        ),
    ],
    ids=str,
)
def test_orders_that_cannot_run_are_named(pipeline: dict[str, Any], field: str, works: str) -> None:
    config = from_mapping(
        {
            "parallel": {"pp": 2, "dp": 1},
            "pipeline": {
                "stage_layout": "v",
                "split_backward": True,
                "num_microbatches": 4,
                **pipeline,
            },
        }
    )
    found = {problem.field: problem for problem in problems(config, 2)}
    assert field in found, found
    assert works in str(found[field].suggestion)
