"""The options of a schedule: what may be asked for, which weights are used then, and what it costs, simulated."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar.errors import ConfigError
from hybridpar.pipeline.plan.action import Kind
from hybridpar.pipeline.plan.check import check
from hybridpar.pipeline.plan.liveness import Live
from hybridpar.pipeline.plan.passes import make_plan
from hybridpar.pipeline.plan.schedules import SCHEDULES, WARMUPS, Sizes, make_schedule
from hybridpar.pipeline.plan.simulate import Costs, simulate


@st.composite
def options_of_2bw(draw, max_stages=8, max_microbatches=24):
    """Options that can run, and sizes that they can run on."""
    p, warmup = draw(st.integers(1, max_stages)), draw(st.sampled_from(list(WARMUPS)))
    ahead = (p - 1) * WARMUPS[warmup]
    m = draw(st.integers(max(ahead, 1), max(ahead, max_microbatches)))
    return {
        "warmup": warmup,
        "early_switch": draw(st.none() | st.integers(ahead - (p - 1), m - (p - 1))),
        "gradient_buffers": draw(st.sampled_from([0, 1, 2] if warmup == "depth" else [0, 2])),
        "sync_steps": draw(st.integers(0, 4)),
    }, Sizes(p, m)


def versions(schedule, sizes, stage, first_batch, num_batches):
    compute = schedule.compute_actions(sizes, stage, first_batch, num_batches)
    return {action.microbatch: action.version for action in compute if action.kind is Kind.F}


# What may be asked for


def test_no_options_is_the_schedule_of_the_table():
    assert all(make_schedule(name) == schedule for name, schedule in SCHEDULES.items())
    assert make_schedule("gpipe", gradient_buffers=1) == SCHEDULES["gpipe"]
    assert make_schedule("2bw", gradient_buffers=2) == SCHEDULES["2bw"]


OFF = {"warmup": "depth", "early_switch": None, "gradient_buffers": 0, "sync_steps": 0}


@pytest.mark.parametrize(
    ("name", "option", "value", "rule"),
    [
        ("gpipe", "warmup", "latency", "schedule gpipe has no such option, only 1f1b and 2bw"),
        ("2bw", "warmup", "width", "must be depth or latency or bandwidth"),
        ("1f1b", "warmup", "bandwidth", "must be depth or latency with schedule 1f1b"),
        ("1f1b", "early_switch", 0, "schedule 1f1b has no such option, only 2bw"),
        ("2bw", "early_switch", -1, "must be off or at least 0"),
        ("pipedream", "gradient_buffers", 2, "must be 0 or 1 with schedule pipedream"),
        ("2bw", "gradient_buffers", 3, "must be 0 or 1 or 2 with schedule 2bw"),
        ("2bw", "gradient_buffers", -1, "must be 0 or 1 or 2"),
        ("naive", "sync_steps", 5, "schedule naive has no such option, only 2bw and pipedream"),
        ("2bw", "sync_steps", -5, "must not be negative"),
    ],
)
def test_refused(name, option, value, rule):
    with pytest.raises(ConfigError) as error:
        make_schedule(name, **{option: value})
    (problem,) = error.value.problems
    assert (problem.field, problem.value) == (f"pipeline.{option}", value)
    assert problem.rule.startswith(rule)
    works = OFF[option]
    assert problem.suggestion == ("off" if works is None else str(works))
    make_schedule(name, **{option: works})


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as error:
        make_schedule("1f1b", warmup="latency", early_switch=1, sync_steps=2)
    assert [problem.field for problem in error.value.problems] == ["pipeline.early_switch", "pipeline.sync_steps"]
    with pytest.raises(ConfigError, match="zigzag"):
        make_schedule("zigzag")


def test_one_buffer_stops_what_a_longer_warmup_has_in_flight():
    with pytest.raises(ConfigError, match=r"gradient_buffers = 1: must be 0 or 2 .*'latency'"):
        make_schedule("2bw", warmup="latency", gradient_buffers=1)


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
        make_schedule("2bw", **options).check_sizes(Sizes(p, m))
    (problem,) = error.value.problems
    assert (problem.field, problem.suggestion) == (field, str(works))
    if field == "pipeline.num_microbatches":
        make_schedule("2bw", **options).check_sizes(Sizes(p, works))
    else:
        make_schedule("2bw", **options | {"early_switch": works}).check_sizes(Sizes(p, m))


# Which weights are used


@settings(deadline=None)
@given(options_of_2bw(), st.integers(0, 3), st.integers(1, 4), st.data())
def test_versions_of_2bw(setting, skipped, num_batches, data):
    """The rule, counted from 1 as in the paper: batch j uses W(j-2), from its micro-batch p-1+L+1 on W(j-1); what would
    be older than the end of the synchronous steps uses that."""
    options, sizes = setting
    p, m, floor, switch = sizes.num_stages, sizes.num_microbatches, options["sync_steps"], options["early_switch"]
    first = floor + skipped
    stage = data.draw(st.integers(0, p - 1))
    expected = {}
    for j in range(first + 1, first + num_batches + 1):
        for i in range(1, m + 1):
            fresh = switch is not None and i > p - 1 + switch
            expected[(j - 1) * m + i - 1] = max(j - 1 if fresh else j - 2, floor)
    assert versions(make_schedule("2bw", **options), sizes, stage, first, num_batches) == expected


@settings(deadline=None)
@given(options_of_2bw(), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_a_drain_changes_no_version(setting, ranges, data):
    options, sizes = setting
    schedule, floor = make_schedule("2bw", **options), options["sync_steps"]
    stage = data.draw(st.integers(0, sizes.num_stages - 1))
    drained, first = {}, floor
    for num_batches in ranges:
        check(make_plan(schedule, sizes, first, num_batches), sizes, schedule, first, num_batches)
        drained |= versions(schedule, sizes, stage, first, num_batches)
        first += num_batches
    assert drained == versions(schedule, sizes, stage, floor, sum(ranges))


def test_the_largest_early_switch_is_the_papers_rule():
    sizes, classic = Sizes(4, 9), make_schedule("2bw")
    assert make_plan(make_schedule("2bw", early_switch=6), sizes, 1, 4) == make_plan(classic, sizes, 1, 4)
    assert make_plan(make_schedule("2bw", early_switch=5), sizes, 1, 4) != make_plan(classic, sizes, 1, 4)


def test_synchronous_steps_come_first():
    """Before sync_steps a batch t uses W(t): the rule of the 1f1b that runs it."""
    schedule, sizes = make_schedule("2bw", sync_steps=3), Sizes(2, 2)
    assert [schedule.version(sizes, 1, 2 * t, 0) for t in range(7)] == [0, 1, 2, 3, 3, 4, 5]
    with pytest.raises(AssertionError, match="batch 2 runs as 1f1b"):
        schedule.compute_actions(sizes, 0, 2)
    pipedream = make_schedule("pipedream", sync_steps=3)
    assert list(versions(pipedream, sizes, 0, 3, 3).values()) == [3, 3, 3, 4, 4, 5]
    assert list(versions(pipedream, sizes, 1, 3, 3).values()) == [3, 3, 4, 4, 5, 5]


def test_delays():
    sizes = Sizes(4, 8)

    def of(name, **options):
        schedule = make_schedule(name, **options)
        return schedule.num_stale(sizes), schedule.slack(sizes), [schedule.mean_delay(sizes, r) for r in range(4)]

    for name in ("naive", "gpipe", "1f1b"):
        assert of(name) == (0, 0, [0, 0, 0, 0])
    assert of("1f1b", warmup="latency") == (0, 0, [0, 0, 0, 0])
    assert of("2bw") == of("2bw", sync_steps=9) == of("2bw", early_switch=5) == (8, 5, [1, 1, 1, 1])
    assert of("2bw", early_switch=1) == (4, 1, [0.5] * 4)
    assert of("2bw", early_switch=0) == (3, 0, [0.375] * 4)
    assert of("2bw", warmup="latency") == (8, 2, [1, 1, 1, 1])
    assert of("2bw", warmup="latency", early_switch=3, sync_steps=2) == (6, 0, [0.75] * 4)
    assert of("pipedream") == of("pipedream", sync_steps=4) == (3, 0, [3 / 8, 2 / 8, 1 / 8, 0])
    assert make_schedule("pipedream").mean_delay(Sizes(4, 2), 0) == 1.5
    assert make_schedule("2bw", early_switch=0).num_stale(Sizes(1, 4)) == 0


# That the plans are right


@settings(deadline=None, max_examples=80)
@given(options_of_2bw(), st.integers(0, 2), st.integers(1, 4), st.booleans(), st.booleans())
def test_every_plan_is_right(setting, skipped, num_batches, clip, gather):
    options, sizes = setting
    schedule, first = make_schedule("2bw", **options), options["sync_steps"] + skipped
    plan = make_plan(schedule, sizes, first, num_batches, clip=clip, gather=gather)
    report = check(plan, sizes, schedule, first, num_batches)
    ends = (Kind.NORM, Kind.UPDATE) if clip else (Kind.UPDATE,)  # one NORM under way at a time: stopping counts on it
    for actions in plan.values():
        assert [(a.kind, a.microbatch) for a in actions if a.kind in ends] == [
            (kind, batch) for batch in range(first, first + num_batches) for kind in ends]
    long_enough = num_batches * sizes.num_microbatches > schedule.warmup(sizes, 0)
    for rank, peak in enumerate(report.peaks):
        assert peak.versions <= 2
        assert peak.gradients <= (options["gradient_buffers"] or 2)
        if long_enough:
            assert peak.activations == schedule.max_live_activations(sizes, rank)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8), st.integers(1, 24), st.integers(0, 2), st.booleans())
def test_1f1b_may_run_ahead_too(p, m, first, clip):
    sizes, schedule = Sizes(p, m), make_schedule("1f1b", warmup="latency")
    report = check(make_plan(schedule, sizes, first, 3, clip=clip), sizes, schedule, first, 3)
    assert report.peaks == tuple(Live(min(2 * (p - 1 - r) + 1, m), 1, 1) for r in range(p))


@settings(deadline=None, max_examples=30)
@given(options_of_2bw(), st.booleans())
def test_updates_move_only_to_an_earlier_place(setting, clip):
    """`gather` changes nothing but where NORM and UPDATE stand, and each stands no later."""
    options, sizes = setting
    schedule, first = make_schedule("2bw", **options), options["sync_steps"]
    late, early = (make_plan(schedule, sizes, first, 3, clip=clip, gather=gather) for gather in (False, True))
    for rank in range(sizes.num_stages):
        fixed = [[a for a in plan[rank] if a.kind not in (Kind.NORM, Kind.UPDATE)] for plan in (late, early)]
        assert fixed[0] == fixed[1]
        for action in set(late[rank]):
            if action.kind is Kind.UPDATE:
                before = [plan[rank][: plan[rank].index(action)] for plan in (late, early)]
                computed = [sum(a.kind in (Kind.F, Kind.B) for a in actions) for actions in before]
                assert computed[1] <= computed[0]


# What it costs


def independent_starts(p, m, num_batches, run_ahead, switch, forward, backward, latency, update):
    """When each forward starts, by (stage, micro-batch): the dependencies of early-switch 2BW written down once more.
    Without a norm: W(v) is there `update` after the stage's last backward of batch v - 1."""
    total = m * num_batches
    orders = []
    for r in range(p):
        warmup = min(run_ahead * (p - 1 - r), total)
        order = [("F", k) for k in range(warmup)]
        for k in range(total - warmup):
            order += [("F", warmup + k), ("B", k)]
        orders.append(order + [("B", k) for k in range(total - warmup, total)])
    at, clock, ended, started, ready = [0] * p, [0.0] * p, {}, {}, {}
    while any(at[r] < len(orders[r]) for r in range(p)):
        progress = False
        for r in range(p):
            while at[r] < len(orders[r]):
                kind, k = orders[r][at[r]]
                batch, i = divmod(k, m)
                neighbour = r - 1 if kind == "F" else r + 1
                needs = [0.0 if not 0 <= neighbour < p else ended.get((kind, k, neighbour))]
                if kind == "F":
                    version = max(batch - 1 if i < p - 1 + switch else batch, 0)
                    needs.append(ready.get((version, r)) if version else 0.0)
                if None in needs:
                    break
                arrived = needs[0] + (latency if 0 <= neighbour < p else 0)
                start = max(clock[r], arrived, *needs[1:])
                clock[r] = ended[kind, k, r] = start + (forward if kind == "F" else backward)
                if kind == "F":
                    started[r, k] = start
                elif i == m - 1:
                    ready[batch + 1, r] = clock[r] + update
                at[r] += 1
                progress = True
        assert progress, "deadlock"
    return started


@settings(deadline=None, max_examples=60)
@given(options_of_2bw(6, 14), st.integers(1, 4), st.integers(1, 6), st.integers(0, 4), st.integers(0, 30))
def test_agrees_with_an_independent_simulation(setting, forward, backward, latency, reduce):
    options, sizes = setting
    p, m = sizes.num_stages, sizes.num_microbatches
    latency = min(latency, forward, backward) / 2  # a receive that is posted one action ahead is early enough for that
    schedule = make_schedule("2bw", warmup=options["warmup"], early_switch=options["early_switch"])
    plan = make_plan(schedule, sizes, 0, 4, clip=False)
    timeline = simulate(plan, Costs(forward, backward, latency=latency, reduce=reduce))
    starts = {
        (rank, action.microbatch): start
        for rank in plan
        for action, start in zip(plan[rank], timeline.starts[rank], strict=True) if action.kind is Kind.F
    }
    switch = m - p + 1 if options["early_switch"] is None else options["early_switch"]
    run_ahead = WARMUPS[options["warmup"]]
    assert starts == independent_starts(p, m, 4, run_ahead, switch, forward, backward, latency, reduce)


def relative_step(schedule, p, m, *, gather=False, **costs):
    """Steady-state step time over that of a pipeline that is never idle; a forward takes 1, a backward 2."""
    plan = make_plan(schedule, Sizes(p, m), 0, 12, gather=gather)
    return simulate(plan, Costs(**costs)).step_time(m) / (3 * m)


CPU = {"blocking_norm": True, "tied": True}  # the worst case: NORM blocks, and its REDUCE meets the other end


@pytest.mark.parametrize("where", [{}, CPU])
@pytest.mark.parametrize("m", [16, 32, 64])
def test_early_switch_by_one_costs_nothing(m, where):
    schedule = make_schedule("2bw", early_switch=1)
    assert relative_step(schedule, 8, m, reduce=1, norm=0.5, **where) == 1
    assert schedule.mean_delay(Sizes(8, m), 0) == 8 / m


@pytest.mark.parametrize("m", [32, 64])
def test_early_switch_by_nothing_waits_for_the_reduction(m):
    schedule = make_schedule("2bw", early_switch=0)
    assert relative_step(schedule, 8, m, reduce=1.5) == pytest.approx(1 + 1.5 / (3 * m))
    assert schedule.mean_delay(Sizes(8, m), 0) == 7 / m


@pytest.mark.parametrize("reduce", [1.5, 3, 6])
def test_a_later_switch_hides_a_longer_reduction(reduce):
    steps = [relative_step(make_schedule("2bw", early_switch=switch), 8, 32, reduce=reduce) for switch in range(5)]
    assert all(later <= earlier for earlier, later in pairwise(steps))
    assert steps[0] == pytest.approx(1 + reduce / 96)
    hidden = next(switch for switch in range(5) if switch * 3 >= reduce)
    assert steps[hidden] == 1


def test_one_pair_is_hidden_where_the_pipeline_is_just_full():
    assert relative_step(make_schedule("2bw"), 8, 8, reduce=3) == 1
    assert relative_step(make_schedule("2bw"), 8, 8, reduce=6) == pytest.approx(1.125)


@pytest.mark.parametrize(("p", "m", "pairs"), [(1, 4, 3), (1, 16, 15), (2, 8, 5), (4, 16, 11), (8, 16, 6), (8, 32, 22)])
def test_norm_leaves_the_slack_to_the_reduction(p, m, pairs):
    assert relative_step(make_schedule("2bw"), p, m, reduce=3 * pairs, norm=0.5, blocking_norm=True) == 1


@pytest.mark.parametrize("latency", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("early_switch", [None, 8])
def test_a_longer_warmup_hides_the_latency(latency, early_switch):
    for_latency = make_schedule("2bw", warmup="latency", early_switch=early_switch)
    for_depth = make_schedule("2bw", early_switch=early_switch)
    costs = {"latency": latency, "reduce": 0.5}
    assert relative_step(for_latency, 8, 32, **costs) == relative_step(for_latency, 8, 32, **costs, **CPU) == 1
    assert relative_step(for_depth, 8, 32, **costs) > 1 + 0.5 * latency


@pytest.mark.parametrize(("warmup", "costs"), [
    ("latency", {"latency": 1.5}), ("latency", {"transfer": 1.25, "latency": 0.25}),
    ("bandwidth", {"latency": 2}), ("bandwidth", {"transfer": 2.5, "latency": 0.5})])
def test_longer_warmups_hide_transfers_of_half_a_pair_and_of_a_whole_one(warmup, costs):
    """The most they can hide, and transfers longer than a forward: receives are posted early enough."""
    assert relative_step(make_schedule("2bw", warmup=warmup), 8, 64, **costs) == 1
    shorter = next(name for name, factor in WARMUPS.items() if factor == WARMUPS[warmup] - 1)
    assert relative_step(make_schedule("2bw", warmup=shorter), 8, 64, **costs) > 1.1


def test_a_longer_warmup_hides_latency_for_1f1b_too():
    depth, latency = (make_schedule("1f1b", warmup=warmup) for warmup in ("depth", "latency"))
    # one round trip a batch is left of one for every warm-up
    assert relative_step(latency, 8, 32, latency=0.5) == pytest.approx((39 * 3 + 2 * 7 * 0.5) / 96)
    assert relative_step(depth, 8, 32, latency=0.5) > relative_step(latency, 8, 32, latency=0.5) + 0.2


def test_one_gradient_buffer_waits_once_a_batch():
    """Less than a flush, which also fills the pipeline anew; all stages wait for stage 0 to end the batch."""
    one, two, flush = (
        relative_step(schedule, 8, 32, reduce=1, norm=0.5)
        for schedule in (make_schedule("2bw", gradient_buffers=1), make_schedule("2bw"), make_schedule("1f1b"))
    )
    assert two == 1
    assert one == pytest.approx(1 + (7 * 2 + 0.5) / 96)  # a backward runs up the pipeline; a forward hides the REDUCE
    assert flush == pytest.approx(1 + (7 * 3 + 1.5) / 96)


def test_an_update_takes_its_own_time_and_no_more():
    """No place for UPDATE is better: no stage of a balanced pipeline has a gap for it."""
    for options in ({}, {"early_switch": 2}, {"warmup": "latency"}):
        for gather in (False, True):
            schedule = make_schedule("2bw", **options)
            assert relative_step(schedule, 4, 16, reduce=1, update=0.75, gather=gather) == pytest.approx(1 + 0.75 / 48)
