"""Activations in a file, where the search proposes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner import made

from hybridpar.job import JobPlan
from hybridpar.planner.measuring.profile import StateSpeeds
from hybridpar.planner.searching.candidates import Candidate, Request
from hybridpar.planner.searching.plan_report import describe
from hybridpar.planner.searching.search import search
from hybridpar.prediction import predict

CONFIG = made.config(
    pp=2, m=6, b=2, schedule="gpipe", num_layers=4, hidden_size=64, seq_length=256, vocab_size=64
)


def best(speed: float, limit: float) -> Candidate:
    """Costs of a machine whose file has that speed; a forward of a layer takes 2 seconds there."""
    profile = replace(
        made.profile(CONFIG, remake=0.5, cores=16),
        state=StateSpeeds(read=speed, written=speed, read_work=0.0, written_work=0.0),
    )
    on = made.machine(CONFIG, 2, made=profile, memory=limit)
    (found,) = search(
        CONFIG,
        on,
        Request(
            keep={"tp": 1, "pp": 2},
            micro_batches=(2,),
            top=1,
            split_backward=False,
            schedules=("gpipe",),
        ),
    ).ranked
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("speed", [1e9, 1e3])
def test_activations_leave_rather_than_being_computed_twice(speed: float) -> None:
    """Over a file that is fast enough; a slow one would take longer than computing them again."""
    plenty = best(speed, 1e11)
    assert plenty.config.pipeline.recompute == "none"
    assert plenty.config.memory.num_away == 0
    away = replace(plenty.config, memory=replace(plenty.config.memory, offload_activations=6))
    least, most = (
        max(stage.total for stage in predict(JobPlan(one))) for one in (away, plenty.config)
    )
    assert least < 0.8 * most
    tight = best(speed, 1.2 * least)
    assert tight.peak <= tight.cost.machine.memory_limit
    if speed > 1e6:
        assert tight.config.pipeline.recompute == "none"
        assert tight.cost.step_time == pytest.approx(plenty.cost.step_time, rel=0.01)
        assert "faster than recomputation" in tight.because
        assert "micro-batches in a file" in describe(tight.config)
    else:
        assert tight.config.pipeline.recompute != "none"
        assert tight.config.memory.num_away == 0
