"""The proof at the start of a run: of the plan that runs, or of a smaller one that stands for
it."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hybridpar.config import from_mapping
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.schedules.action import Kind
from hybridpar.schedules.passes import lowering as passes
from hybridpar.schedules.proof.check import PlanError
from hybridpar.schedules.proof.prove import _MOST, _num_batches, enough
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import SCHEDULES, WARMUPS, PipelineShape, make_schedule


def make(schedule, pp, m, **pipeline):
    return from_mapping(
        {
            "model": {"num_layers": max(4, 2 * pp)},
            "parallel": {"pp": pp, "dp": 1},
            "pipeline": {"schedule": schedule, "num_microbatches": m, **pipeline},
        }
    )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_small_plans_are_proven_themselves(schedule, split):
    (report,) = JobPlan(make(schedule, 4, 12, split_backward=split)).prove()
    assert (report.schedule, report.shape.num_ranks, report.shape.num_microbatches) == (
        schedule,
        4,
        12,
    )
    assert report.num_batches >= 2


def test_synchronous_steps_are_proven_too():
    before, after = JobPlan(make("2bw", 2, 4, sync_steps=7)).prove()
    assert (before.schedule, before.first_batch) == ("1f1b", 0)
    assert (after.schedule, after.first_batch) == ("2bw", 7)


@st.composite
def large(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    p = draw(st.integers(1, 200))
    m = draw(st.integers(1, 3000))
    chunks = draw(st.integers(2, 6)) if name == "interleaved" else 1
    options = {}
    if name == "2bw":
        options["warmup"] = draw(st.sampled_from(list(WARMUPS)))
        options["early_switch"] = draw(st.none() | st.integers(0, 2500))
    return name, options, p, m, chunks


@given(large())
def test_a_small_plan_that_can_run_stands_for_a_large_one(setting):
    name, options, p, m, chunks = setting
    try:
        sizes = PipelineShape(p, m, chunks)
        schedule = make_schedule(ScheduleOptions(name, **options))
        schedule.check_shape(sizes)
    except ConfigError:
        assume(False)
    small, few = enough(schedule, sizes)
    small.check_shape(few)
    assert few.num_microbatches <= m
    assert few.num_ranks <= p
    assert few.num_stages * few.num_microbatches * _num_batches(small, few) <= _MOST
    assert m < p or few.num_microbatches >= few.num_ranks, "as full as the large one"


@pytest.mark.thorough
@given(large())
def test_large_plans_are_proven(setting):
    name, options, p, m, chunks = setting
    try:
        make_schedule(ScheduleOptions(name, **options)).check_shape(PipelineShape(p, m, chunks))
    except ConfigError:
        assume(False)
    if chunks > 1:
        options = options | {"virtual_stages": chunks}
    if options.get("early_switch", 0) is None:
        del options["early_switch"]
    assert JobPlan(make(name, p, m, **options)).prove()


def test_a_wrong_plan_is_refused(monkeypatch):
    right = passes.lower

    def without_a_receive(*args, **options):
        return (
            a for a in right(*args, **options) if not (a.kind is Kind.RECV_B and a.microbatch == 5)
        )

    monkeypatch.setattr(passes, "lower", without_a_receive)
    with pytest.raises(PlanError, match="RECV_B5@0 is missing"):
        JobPlan(make("1f1b", 2, 4)).prove()
