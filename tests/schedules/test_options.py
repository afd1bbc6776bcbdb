"""The options of a schedule: what may be asked for, which weights are used then, and that plans are
right."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import ConfigError
from hybridpar.schedules.action import Kind
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.proof.check import check
from hybridpar.schedules.proof.liveness import Live
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import (
    SCHEDULES,
    WARMUPS,
    PipelineShape,
    find_schedule,
    make_schedule,
)


@st.composite
def options_of_2bw(draw, max_stages=8, max_microbatches=24):
    """Options that can run, and sizes that they can run on."""
    p = draw(st.integers(1, max_stages))
    warmup = draw(st.sampled_from(list(WARMUPS)))
    ahead = (p - 1) * WARMUPS[warmup]
    m = draw(st.integers(max(ahead, 1), max(ahead, max_microbatches)))
    return {
        "warmup": warmup,
        "early_switch": draw(st.none() | st.integers(ahead - (p - 1), m - (p - 1))),
        "gradient_buffers": draw(st.sampled_from([0, 1, 2] if warmup == "depth" else [0, 2])),
        "sync_steps": draw(st.integers(0, 4)),
    }, PipelineShape(p, m)


def versions(schedule, sizes, stage, first_batch, num_batches):
    compute = schedule.compute_actions(sizes, stage, first_batch, num_batches)
    return {action.microbatch: action.version for action in compute if action.kind is Kind.F}


# What may be asked for


def test_no_options_is_the_schedule_of_the_table():
    assert all(
        make_schedule(ScheduleOptions(name)) == schedule for name, schedule in SCHEDULES.items()
    )
    for name, buffers in (("gpipe", 1), ("2bw", 2)):
        assert SCHEDULES[name].num_gradient_buffers == buffers
        made = make_schedule(ScheduleOptions(name, gradient_buffers=buffers))
        assert made == SCHEDULES[name].with_options(gradient_buffers=buffers)


OFF = {"warmup": "depth", "early_switch": None, "gradient_buffers": 0, "sync_steps": 0}


@pytest.mark.parametrize(
    ("name", "option", "value", "rule"),
    [
        ("gpipe", "warmup", "latency", "not supported with schedule gpipe, only with 1f1b and 2bw"),
        ("2bw", "warmup", "width", "must be depth or latency or bandwidth"),
        ("1f1b", "warmup", "bandwidth", "must be depth or latency with schedule 1f1b"),
        ("1f1b", "early_switch", 0, "not supported with schedule 1f1b, only with 2bw"),
        ("2bw", "early_switch", -1, "must be off or at least 0"),
        ("pipedream", "gradient_buffers", 2, "must be 0 or 1 with schedule pipedream"),
        ("2bw", "gradient_buffers", 3, "must be 0 or 1 or 2 with schedule 2bw"),
        ("2bw", "gradient_buffers", -1, "must be 0 or 1 or 2"),
        (
            "naive",
            "sync_steps",
            5,
            "not supported with schedule naive, only with 2bw and pipedream",
        ),
        ("2bw", "sync_steps", -5, "must not be negative"),
    ],
)
def test_refused(name, option, value, rule):
    with pytest.raises(ConfigError) as error:
        make_schedule(ScheduleOptions(name, **{option: value}))
    (problem,) = error.value.problems
    assert (problem.field, problem.value) == (f"pipeline.{option}", value)
    assert problem.rule.startswith(rule)
    works = OFF[option]
    assert problem.suggestion == ("off" if works is None else str(works))
    make_schedule(ScheduleOptions(name, **{option: works}))


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as error:
        make_schedule(ScheduleOptions("1f1b", warmup="latency", early_switch=1, sync_steps=2))
    assert [problem.field for problem in error.value.problems] == [
        "pipeline.early_switch",
        "pipeline.sync_steps",
    ]
    with pytest.raises(ConfigError, match="zigzag"):
        make_schedule(ScheduleOptions("zigzag"))


def test_one_buffer_stops_what_a_longer_warmup_has_in_flight():
    with pytest.raises(ConfigError, match=r"gradient_buffers = 1: must be 0 or 2 .*'latency'"):
        make_schedule(ScheduleOptions("2bw", warmup="latency", gradient_buffers=1))


@pytest.mark.parametrize(
    ("p", "m", "options", "field", "works"),
    [
        (4, 2, {}, "pipeline.num_microbatches", 3),
        (4, 5, {"warmup": "latency"}, "pipeline.num_microbatches", 6),
        (4, 8, {"warmup": "bandwidth"}, "pipeline.num_microbatches", 9),
        (4, 8, {"early_switch": 6}, "pipeline.early_switch", 1),
        (4, 8, {"early_switch": 2, "warmup": "latency"}, "pipeline.early_switch", 4),
        (4, 8, {"early_switch": 6, "warmup": "latency"}, "pipeline.early_switch", 4),
    ],
)
def test_sizes(p, m, options, field, works):
    with pytest.raises(ConfigError) as error:
        make_schedule(ScheduleOptions("2bw", **options)).check_shape(PipelineShape(p, m))
    (problem,) = error.value.problems
    assert (problem.field, problem.suggestion) == (field, str(works))
    if field == "pipeline.num_microbatches":
        make_schedule(ScheduleOptions("2bw", **options)).check_shape(PipelineShape(p, works))
    else:
        make_schedule(ScheduleOptions("2bw", **options | {"early_switch": works})).check_shape(
            PipelineShape(p, m)
        )


# Which weights are used


@settings(deadline=None)
@given(options_of_2bw(), st.integers(0, 3), st.integers(1, 4), st.data())
def test_versions_of_2bw(setting, skipped, num_batches, data):
    """The rule, counted from 1 as in the paper: batch j uses W(j-2), from its micro-batch p-1+L+1
    on W(j-1); what would be older than the end of the synchronous steps uses that."""
    options, sizes = setting
    p = sizes.num_stages
    m = sizes.num_microbatches
    floor = options["sync_steps"]
    switch = options["early_switch"]
    first = floor + skipped
    stage = data.draw(st.integers(0, p - 1))
    expected = {}
    for j in range(first + 1, first + num_batches + 1):
        for i in range(1, m + 1):
            fresh = switch is not None and i > p - 1 + switch
            expected[(j - 1) * m + i - 1] = max(j - 1 if fresh else j - 2, floor)
    assert (
        versions(make_schedule(ScheduleOptions("2bw", **options)), sizes, stage, first, num_batches)
        == expected
    )


@settings(deadline=None)
@given(options_of_2bw(), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_a_drain_changes_no_version(setting, ranges, data):
    options, sizes = setting
    schedule = make_schedule(ScheduleOptions("2bw", **options))
    floor = options["sync_steps"]
    stage = data.draw(st.integers(0, sizes.num_stages - 1))
    drained = {}
    first = floor
    for num_batches in ranges:
        drained |= versions(schedule, sizes, stage, first, num_batches)
        first += num_batches
    assert drained == versions(schedule, sizes, stage, floor, sum(ranges))


def test_the_largest_early_switch_is_the_papers_rule():
    sizes = PipelineShape(4, 9)
    classic = make_schedule(ScheduleOptions("2bw"))
    assert make_plan(
        make_schedule(ScheduleOptions("2bw", early_switch=6)), sizes, 1, 4
    ) == make_plan(classic, sizes, 1, 4)
    assert make_plan(
        make_schedule(ScheduleOptions("2bw", early_switch=5)), sizes, 1, 4
    ) != make_plan(classic, sizes, 1, 4)


def test_synchronous_steps_come_first():
    """Before sync_steps a batch t uses W(t): the rule of the 1f1b that runs it."""
    schedule = make_schedule(ScheduleOptions("2bw", sync_steps=3))
    sizes = PipelineShape(2, 2)
    assert [schedule.version(sizes, 1, 2 * t, 0) for t in range(7)] == [0, 1, 2, 3, 3, 4, 5]
    with pytest.raises(AssertionError, match="batch 2 runs as 1f1b"):
        schedule.compute_actions(sizes, 0, 2)
    pipedream = make_schedule(ScheduleOptions("pipedream", sync_steps=3))
    assert list(versions(pipedream, sizes, 0, 3, 3).values()) == [3, 3, 3, 4, 4, 5]
    assert list(versions(pipedream, sizes, 1, 3, 3).values()) == [3, 3, 4, 4, 5, 5]


def test_delays():
    sizes = PipelineShape(4, 8)

    def of(name, **options):
        schedule = make_schedule(ScheduleOptions(name, **options))
        return (
            schedule.num_stale(sizes),
            schedule.slack(sizes),
            [schedule.mean_delay(sizes, r) for r in range(4)],
        )

    for name in ("naive", "gpipe", "1f1b"):
        assert of(name) == (0, 0, [0, 0, 0, 0])
    assert of("1f1b", warmup="latency") == (0, 0, [0, 0, 0, 0])
    assert of("2bw") == of("2bw", sync_steps=9) == of("2bw", early_switch=5) == (8, 5, [1, 1, 1, 1])
    assert of("2bw", early_switch=1) == (4, 1, [0.5] * 4)
    assert of("2bw", early_switch=0) == (3, 0, [0.375] * 4)
    assert of("2bw", warmup="latency") == (8, 2, [1, 1, 1, 1])
    assert of("2bw", warmup="latency", early_switch=3, sync_steps=2) == (6, 0, [0.75] * 4)
    assert of("pipedream") == of("pipedream", sync_steps=4) == (3, 0, [3 / 8, 2 / 8, 1 / 8, 0])
    assert make_schedule(ScheduleOptions("pipedream")).mean_delay(PipelineShape(4, 2), 0) == 1.5
    assert make_schedule(ScheduleOptions("2bw", early_switch=0)).num_stale(PipelineShape(1, 4)) == 0


# That the plans are right


@given(options_of_2bw(), st.integers(0, 2), st.integers(1, 4), st.booleans(), st.booleans())
def test_every_plan_is_right(setting, skipped, num_batches, clip, gather):
    options, sizes = setting
    schedule = make_schedule(ScheduleOptions("2bw", **options))
    first = options["sync_steps"] + skipped
    plan = make_plan(
        find_schedule(schedule).with_options(clip=clip, gather=gather), sizes, first, num_batches
    )
    report = check(plan, sizes, schedule, range(first, first + num_batches))
    ends = (
        (Kind.NORM, Kind.UPDATE) if clip else (Kind.UPDATE,)
    )  # one NORM under way at a time: stopping counts on it
    for actions in plan.values():
        assert [(a.kind, a.microbatch) for a in actions if a.kind in ends] == [
            (kind, batch) for batch in range(first, first + num_batches) for kind in ends
        ]
    long_enough = num_batches * sizes.num_microbatches > schedule.warmup(sizes, 0)
    for rank, peak in enumerate(report.peaks):
        assert peak.versions <= 2
        assert peak.gradients <= (options["gradient_buffers"] or 2)
        if long_enough:
            assert peak.activations == schedule.max_live_activations(sizes, rank)


@given(st.integers(1, 8), st.integers(1, 24), st.integers(0, 2), st.booleans())
def test_1f1b_may_run_ahead_too(p, m, first, clip):
    sizes = PipelineShape(p, m)
    schedule = make_schedule(ScheduleOptions("1f1b", warmup="latency"))
    report = check(
        make_plan(find_schedule(schedule).with_options(clip=clip), sizes, first, 3),
        sizes,
        schedule,
        range(first, first + 3),
    )
    assert report.peaks == tuple(Live(min(2 * (p - 1 - r) + 1, m), 1, 1) for r in range(p))


@given(options_of_2bw(), st.booleans())
def test_updates_move_only_to_an_earlier_place(setting, clip):
    """`gather` changes nothing but where NORM and UPDATE stand, and each stands no later."""
    options, sizes = setting
    schedule = make_schedule(ScheduleOptions("2bw", **options))
    first = options["sync_steps"]
    late, early = (
        make_plan(find_schedule(schedule).with_options(clip=clip, gather=gather), sizes, first, 3)
        for gather in (False, True)
    )
    for rank in range(sizes.num_stages):
        fixed = [
            [a for a in plan[rank] if a.kind not in (Kind.NORM, Kind.UPDATE)]
            for plan in (late, early)
        ]
        assert fixed[0] == fixed[1]
        for action in set(late[rank]):
            if action.kind is Kind.UPDATE:
                before = [plan[rank][: plan[rank].index(action)] for plan in (late, early)]
                computed = [sum(a.kind in (Kind.F, Kind.B) for a in actions) for actions in before]
                assert computed[1] <= computed[0]
