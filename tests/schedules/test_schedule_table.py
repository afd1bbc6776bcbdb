from inspect import cleandoc
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.errors import ConfigError
from hybridpar.schedules import schedule_table as schedules
from hybridpar.schedules.action import Kind
from hybridpar.schedules.draw.draw_text import draw
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import (
    SCHEDULES,
    PipelineShape,
    find_schedule,
    make_schedule,
)
from hybridpar.schedules.simulate.simulator import Costs, simulate


def is_in_the_pages_drawing(drawn):
    """Whether the comment of the module draws the same: what a schedule is, for people and for this
    test."""
    return "*" in drawn and drawn in cleandoc(schedules.__doc__.replace("\n    ", "\n"))


@pytest.mark.parametrize(
    ("name", "num_batches"), [("naive", 1), ("gpipe", 2), ("1f1b", 2), ("2bw", 3), ("pipedream", 3)]
)
def test_staircase(name, num_batches):
    assert is_in_the_pages_drawing(
        draw(
            make_plan(
                find_schedule(name).with_options(clip=name != "pipedream"),
                PipelineShape(3, 3),
                0,
                num_batches,
            )
        )
    )


@pytest.mark.parametrize(
    ("option", "num_stages", "num_batches", "transfer"),
    [
        ({"early_switch": 0}, 3, 3, 0),
        ({"warmup": "depth"}, 2, 2, 1),
        ({"warmup": "latency"}, 2, 3, 1),
    ],
)
def test_staircase_of_an_option(option, num_stages, num_batches, transfer):
    plan = make_plan(
        make_schedule(ScheduleOptions("2bw", **option)),
        PipelineShape(num_stages, 3),
        0,
        num_batches,
    )
    assert is_in_the_pages_drawing(draw(simulate(plan, Costs(transfer=transfer))))


def versions(name, sizes, stage, num_batches, first_batch=0):
    compute = SCHEDULES[name].compute_actions(sizes, stage, first_batch, num_batches)
    return [action.version for action in compute if action.kind is Kind.F]


def test_versions():
    sizes = PipelineShape(3, 3)
    for stage in range(3):
        assert versions("1f1b", sizes, stage, 3) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert versions("2bw", sizes, stage, 4) == [
            0,
            0,
            0,
            0,
            0,
            0,
            1,
            1,
            1,
            2,
            2,
            2,
        ]  # batches 0 and 1 use W(0)
    assert versions("pipedream", sizes, 0, 3) == [0, 0, 0, 0, 0, 1, 1, 1, 2]
    assert versions("pipedream", sizes, 1, 3) == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert versions("pipedream", sizes, 2, 3) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_versions_after_a_drain():
    sizes = PipelineShape(3, 3)
    for stage in range(3):
        assert versions("1f1b", sizes, stage, 2, first_batch=3) == [3, 3, 3, 4, 4, 4]
        assert versions("2bw", sizes, stage, 2, first_batch=3) == [
            2,
            2,
            2,
            3,
            3,
            3,
        ]  # draining changes no version
    assert versions("pipedream", sizes, 0, 2, first_batch=3) == [
        3,
        3,
        3,
        3,
        3,
        4,
    ]  # draining applied all updates
    assert versions("pipedream", sizes, 2, 2, first_batch=3) == [3, 3, 3, 4, 4, 4]


def test_paper_figure_2():
    """arXiv 2006.09503, figure 2 (p = m = 4, counted from 1): input 9 is the first to use W(4),
    their name of W1."""
    schedule = SCHEDULES["2bw"]
    sizes = PipelineShape(4, 4)
    assert [schedule.version(sizes, 3, k, 0) for k in (6, 7, 8, 11, 12)] == [0, 0, 1, 1, 2]


SIZES = st.builds(PipelineShape, st.integers(1, 16), st.integers(1, 64))


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from(["depth", "latency"]),
    SIZES,
    st.integers(0, 5),
    st.data(),
)
def test_endless_begins_like_finite(name, warmup, sizes, first_batch, data):
    schedule = make_schedule(
        ScheduleOptions(name, warmup=warmup if "warmup" in SCHEDULES[name].accepts else "depth")
    )
    if schedule.needs_full_pipeline:
        sizes = PipelineShape(
            sizes.num_stages, max(sizes.num_microbatches, schedule.warmup(sizes, 0))
        )
    stage = data.draw(st.integers(0, sizes.num_stages - 1))
    finite = list(schedule.compute_actions(sizes, stage, first_batch, 3))
    warmup = 0 if schedule.flush else min(schedule.warmup(sizes, stage), len(finite) // 2)
    before_drain = len(finite) - warmup
    endless = islice(schedule.compute_actions(sizes, stage, first_batch), before_drain)
    assert list(endless) == finite[:before_drain]


def test_2bw_needs_a_full_pipeline():
    with pytest.raises(ConfigError) as error:
        SCHEDULES["2bw"].compute_actions(
            PipelineShape(4, 2), 0
        )  # at once, not when the first action is asked for
    (problem,) = error.value.problems
    assert (problem.field, problem.value, problem.suggestion) == (
        "pipeline.num_microbatches",
        2,
        "3",
    )
    for name in SCHEDULES.keys() - {"2bw"}:
        SCHEDULES[name].check_shape(PipelineShape(4, 2))


@pytest.mark.parametrize(
    ("p", "m", "field"), [(0, 1, "parallel.pp"), (1, 0, "pipeline.num_microbatches")]
)
def test_bad_sizes(p, m, field):
    with pytest.raises(ConfigError) as error:
        PipelineShape(p, m)
    assert error.value.problems[0].field == field


def test_find_schedule():
    assert find_schedule("2bw") is find_schedule(SCHEDULES["2bw"])
    with pytest.raises(ConfigError, match=r"pipeline\.schedule = 'gpip'"):
        find_schedule("gpip")


def test_bounds():
    sizes = PipelineShape(4, 8)
    assert [[s.max_live_activations(sizes, r) for r in range(4)] for s in SCHEDULES.values()] == [
        [1, 1, 1, 1],
        [8, 8, 8, 8],
        [4, 3, 2, 1],
        [7, 5, 3, 1],
        [4, 3, 2, 1],
        [4, 3, 2, 1],
    ]
    assert [s.max_live_versions(sizes, 0) for s in SCHEDULES.values()] == [1, 1, 1, 1, 2, 2]
    assert [SCHEDULES["pipedream"].max_live_versions(PipelineShape(4, 1), r) for r in range(4)] == [
        4,
        3,
        2,
        1,
    ]
    assert SCHEDULES["2bw"].max_live_versions(PipelineShape(1, 1), 0) == 2
    assert SCHEDULES["1f1b"].max_live_activations(PipelineShape(4, 2), 0) == 2
