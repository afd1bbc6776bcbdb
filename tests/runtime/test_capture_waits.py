"""Plans that a capture that waits would bring to a stand, on ranks whose receives are kernels that
wait."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from device_model import Wait, captures, stuck

from hybridpar.schedules.action import Kind, Plan
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.proof.check import check
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, Schedule, make_schedule

ROOT = Path(__file__).parents[2]
GALLERY = runpy.run_path(str(ROOT / "scripts" / "schedule_gallery.py"))


def gallery_plan(title: str, p: int, m: int) -> tuple[Plan, Schedule, PipelineShape]:
    """Four batches of a plan of docs/all_schedules.md."""
    ((name, options),) = [
        (name, options) for other, name, options in GALLERY["SCHEDULES"] if other == title
    ]
    schedule = make_schedule(ScheduleOptions(name, **options))
    sizes = GALLERY["sizes_for"](options, name, p, m)
    return GALLERY["plan_for"](schedule, sizes, 4), schedule, sizes


@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (4, 13)])
@pytest.mark.parametrize("title", [title for title, _, _ in GALLERY["SCHEDULES"]])
def test_no_plan_of_the_gallery_stands_still_where_a_capture_does_not_wait(
    title: str, p: int, m: int
) -> None:
    """Or waits for the stream that computes, as ranks of tp do to agree, and forwards of custom
    models to compare."""
    plan, schedule, sizes = gallery_plan(title, p, m)
    window = check(plan, sizes, schedule).send_window
    for rank, actions in plan.items():
        assert captures(actions, schedule, sizes, rank, p), "nothing is captured"
    assert stuck(plan, schedule, sizes, Wait.NOTHING, window=window) == {}
    assert stuck(plan, schedule, sizes, Wait.STREAM, window=window) == {}
    assert stuck(plan, schedule, sizes, Wait.STREAM, window=window, where=lambda action: True) == {}


@pytest.mark.parametrize(
    ("name", "p", "stands_still"),
    [
        ("1f1b", 2, True),
        ("gpipe", 2, True),
        ("2bw", 2, True),
        ("1f1b", 4, True),
        ("gpipe", 4, False),
        ("2bw", 4, True),
    ],
)
def test_a_capture_that_waits_for_the_device_stands_still(
    name: str, p: int, stands_still: bool
) -> None:
    """A capture like torch.cuda.graph's, which first synchronizes the device."""
    schedule = make_schedule(ScheduleOptions(name))
    sizes = PipelineShape(p, 2 * p)
    plan = make_plan(schedule, sizes, 0, 4)
    left = stuck(plan, schedule, sizes, Wait.DEVICE)
    assert sorted(left) == (list(range(p)) if stands_still else [])


def test_the_device_model_finds_what_stands_still_on_a_device() -> None:
    """The first rank sends its first activation behind the backward that follows from it."""
    schedule = make_schedule(ScheduleOptions("1f1b"))
    sizes = PipelineShape(2, 4)
    plan = {rank: list(actions) for rank, actions in make_plan(schedule, sizes).items()}
    assert stuck(plan, schedule, sizes, Wait.NOTHING) == {}
    sent = next(action for action in plan[0] if action.kind is Kind.SEND_F)
    late = next(action for action in plan[0] if action.kind is Kind.B)
    plan[0].remove(sent)
    plan[0].insert(plan[0].index(late) + 1, sent)
    assert sorted(stuck(plan, schedule, sizes, Wait.NOTHING)) == [0, 1]


SAFE_TO_LOAD = {"GPipe", "1F1B", "PipeDream", "2BW", "2BW, longer warm-up", "2BW, interleaved"}


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize("title", [title for title, _, _ in GALLERY["SCHEDULES"]])
def test_kernels_that_are_loaded_in_the_first_batch_can_bring_a_plan_to_a_stand(title: str) -> None:
    """If loading waits for the device. So train/autotuning/warm_up.py has them loaded before.

    Forwards load at the first micro-batch. Backwards load at two: the first one writes gradients,
    others add to them.
    """
    stands_still = []
    for p in (2, 4):
        plan, schedule, sizes = gallery_plan(title, p, 2 * p)
        window = check(plan, sizes, schedule).send_window
        left = stuck(
            plan,
            schedule,
            sizes,
            Wait.DEVICE,
            window=window,
            where=lambda action: action.microbatch < (1 if action.kind is Kind.F else 2),
        )
        stands_still.append(bool(left))
    assert any(stands_still) is (title not in SAFE_TO_LOAD)
