"""The search against all configurations there are, its memory, its reasons, and its plan."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from planner import made
from rich.console import Console

from hybridpar.config import Config, load_toml
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.planner.costs.candidate_memory import MemoryCheck
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.cluster import estimate, machine_of
from hybridpar.planner.machines.hardware import Cluster, find_device, find_link
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.searching import bound
from hybridpar.planner.searching import plan_report as report
from hybridpar.planner.searching import search as searching
from hybridpar.planner.searching.candidates import Candidate, Request, balanced, candidates, grids
from hybridpar.planner.searching.search import STALE_GAIN, search
from hybridpar.prediction import predict
from hybridpar.schedules.simulate.predict import predict_timeline
from hybridpar.validate import problems

CONFIGS = Path(__file__).parents[3] / "scripts" / "configs"


def known(
    monkeypatch: pytest.MonkeyPatch, config: Config, on: Machine, request: Request
) -> list[Candidate]:
    """All candidates; searches take these, so that each is simulated once."""
    every = list(candidates(config, on, request))
    monkeypatch.setattr(
        searching, "candidates", lambda *_: [Candidate(one.config, one.cost) for one in every]
    )
    return every


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_finds_the_fastest_of_all(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(made.config(schedule=schedule, m=16, b=1), parallel=made.ParallelConfig(dp=0))
    on = made.any_grid(config, memory=1e11)
    every = known(monkeypatch, config, on, Request())
    every += [
        balanced(replace(one.config, parallel=replace(one.config.parallel, zero=1)), on)
        for one in every
        if one.config.parallel.dp > 1
    ]
    fastest = min(one.cost.step_time for one in every)
    result = search(config, on, Request(top=3))
    # ZeRO-1 is not preferred where it gains less than two hundredths
    assert result.ranked[0].cost.step_time == pytest.approx(fastest, rel=0.02)
    times = [one.cost.step_time for one in result.ranked]
    assert all(earlier <= 1.02 * later for earlier, later in pairwise(times))
    assert all(one.least_time <= one.cost.step_time * (1 + 1e-9) for one in every)


@pytest.mark.thorough
@pytest.mark.parametrize("latency", [0.1, 4.0])
def test_round_trips_bound_and_change_nothing_else(
    latency: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over slow links the time that micro-batches are on their way is the best bound; the search
    finds the same."""
    config = replace(made.config(schedule="2bw", m=24, b=1), parallel=made.ParallelConfig(dp=0))
    profile = made.profile(config, layer=1.0, head=2.0, update=0.3, degrees=(1, 2, 4))
    on = made.machine(
        config, 4, made=profile, inner=made.link(latency=latency, bandwidth=1e6), memory=1e11
    )
    request = Request(schedules=("2bw",), top=4)
    every = known(monkeypatch, config, on, request)
    assert all(one.least_time <= one.cost.step_time * (1 + 1e-9) for one in every)
    slow = [
        one
        for one in every
        if one.cost.pp == 4
        and one.is_stale
        and one.config.pipeline.warmup == "depth"
        and one.config.pipeline.stage_layout == "loop"
    ]
    found = [(one.config, one.cost.step_time) for one in search(config, on, request).ranked]
    tight = [one.least_time > 0.9 * one.cost.step_time for one in slow]
    monkeypatch.setattr(bound, "_round_trips", lambda *_: 0.0)
    assert found == [(one.config, one.cost.step_time) for one in search(config, on, request).ranked]
    assert all(tight)


@pytest.mark.thorough
def test_deep_pipelines_with_a_long_warm_up_are_simulated_in_part() -> None:
    """Fewer micro-batches than that warm-up has in flight cannot be: of 7 stages 18."""
    config = made.config(pp=7, m=400, b=1, schedule="2bw")
    config = replace(config, pipeline=replace(config.pipeline, warmup="bandwidth"))
    cost = balanced(config, made.any_grid(config, 7)).cost
    walked = predict_timeline(cost.schedule_options, cost.shape, cost.costs).step_time(400)
    assert cost.simulated(cost.costs) == pytest.approx(walked, rel=1e-3)


@pytest.mark.parametrize(("update", "first"), [(1.0, 0), (6.0, 1)])
def test_zero_is_preferred_where_it_gains_more_than_predictions_err(
    update: float, first: int
) -> None:
    config = replace(made.config(m=16, b=1), parallel=made.ParallelConfig(dp=4))
    profile = made.profile(config, layer=1.0, update=update)
    result = search(
        config, made.machine(config, 4, made=profile, memory=1e11), Request(keep={"dp": 4}, top=8)
    )
    times = {
        zero: min(one.cost.step_time for one in result.ranked if one.config.parallel.zero == zero)
        for zero in (0, 1)
    }
    assert times[1] < times[0]
    assert (times[1] < 0.98 * times[0]) == bool(first)
    assert result.ranked[0].config.parallel.zero == first


def test_given_settings_stay() -> None:
    config = replace(made.config(m=16, b=1), parallel=made.ParallelConfig(dp=0))
    assert grids(config, made.any_grid(config), {"pp": 2}) == [(1, 2, 2), (2, 2, 1)]
    assert {
        one.grid for one in search(config, made.any_grid(config), Request(keep={"tp": 2})).ranked
    } <= {(2, 1, 2), (2, 2, 1)}


def big(dp: int = 0) -> Config:
    """Two samples of activations take more than the weights."""
    config = made.config(m=16, b=2, num_layers=10, hidden_size=96, seq_length=256)
    return replace(config, parallel=made.ParallelConfig(dp=dp))


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("devices", "keep", "megabytes"),
    [(8, {"pp": 4}, 30), (8, {"pp": 4}, 10), (4, {}, 14), (4, {}, 24)],
)
def test_memory_of_candidates_that_lose_is_not_estimated(
    devices: int, keep: dict[str, int], megabytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate whose grid is not traced yet is simulated first; the search finds the same."""
    config = big()
    on = made.any_grid(config, devices, memory=megabytes * 1e6 + 1.5 * 2**30)
    request = Request(keep=keep, batch_size=16, top=1)
    estimated: list[StepCost] = []
    fits = MemoryCheck.fits
    monkeypatch.setattr(
        MemoryCheck, "fits", lambda self, cost: estimated.append(cost) or fits(self, cost)
    )
    found = search(config, on, request)
    num_estimated = len(estimated)
    monkeypatch.setattr(MemoryCheck, "knows", lambda *_: True)
    whole = search(config, on, request)
    assert [one.config for one in found.ranked] == [one.config for one in whole.ranked]
    assert whole.ranked
    assert num_estimated < len(estimated) - num_estimated


@pytest.mark.thorough
def test_recomputes_and_splits_by_memory() -> None:
    config = big()
    plain = replace(
        config,
        parallel=made.ParallelConfig(1, 2, 1),
        pipeline=replace(config.pipeline, split=(6, 6)),
    )
    most = max(stage.total for stage in predict(JobPlan(plain)))
    tight = made.any_grid(config, 2, memory=0.6 * most / 0.96 + 1.5 * 2**30)
    request = Request(keep={"tp": 1, "pp": 2}, micro_batches=(2,), top=2)
    result = search(config, tight, request)
    chosen = result.ranked[0]
    assert chosen.config.pipeline.recompute != "none"
    assert max(stage.total for stage in predict(JobPlan(chosen.config))) <= tight.memory_limit
    assert [stage.total for stage in chosen.memory or []] == pytest.approx(
        [stage.total for stage in predict(JobPlan(chosen.config))], rel=0.01
    )
    assert not MemoryCheck(tight.memory_limit).fits(StepCost(plain, tight))


@pytest.mark.thorough
def test_stages_are_recomputed_whole_where_layers_keep_too_much() -> None:
    config = made.config(pp=2, m=64, b=1, schedule="gpipe", num_layers=4)
    whole = replace(config, pipeline=replace(config.pipeline, recompute="stage"))
    most = max(stage.total for stage in predict(JobPlan(whole)))
    tight = made.machine(config, 2, memory=1.2 * most / 0.96 + 1.5 * 2**30)
    found = MemoryCheck(tight.memory_limit).recomputed(Candidate(config, StepCost(config, tight)))
    assert found is not None
    assert found.config.pipeline.recompute.startswith("stage")
    assert found.peak <= tight.memory_limit


@pytest.mark.thorough
def test_cheap_outputs_are_recomputed_if_that_is_enough() -> None:
    """A layer's forward takes 1 s, what is cheap of it `remake`: of ten layers less than one layer
    more, or more."""
    config = replace(big(), parallel=made.ParallelConfig(1, 1, 1))
    most, selective = (
        max(
            stage.total
            for stage in predict(
                JobPlan(replace(config, pipeline=replace(config.pipeline, recompute=text)))
            )
        )
        for text in ("none", "selective")
    )
    assert selective < 0.9 * most
    for remake, chosen in ((0.02, True), (0.9, False)):
        profile = made.profile(config, layer=1.0, remake=remake)
        tight = made.machine(config, 1, made=profile, memory=1.01 * selective / 0.96 + 1.5 * 2**30)
        found = search(config, tight, Request(keep={"tp": 1, "pp": 1}, micro_batches=(2,))).ranked
        assert (found[0].config.pipeline.recompute == "selective") == chosen
        assert found[0].peak <= tight.memory_limit


@pytest.mark.thorough
def test_says_what_does_not_fit_and_what_would() -> None:
    config = big()
    smallest = min(
        max(
            s.total
            for s in predict(
                JobPlan(
                    replace(
                        config,
                        parallel=made.ParallelConfig(1, pp, 1),
                        pipeline=replace(config.pipeline, recompute="all"),
                    )
                )
            )
        )
        for pp in (4,)
    )
    tight = made.any_grid(config, 4, memory=1.15 * smallest / 0.96 + 1.5 * 2**30)
    result = search(config, tight, Request(keep={"tp": 1}, micro_batches=(2,), top=9))
    assert result.ranked
    failed = [one for one in result.failed if one.grid[1] == 1]
    assert failed
    assert "recomputation is not enough" in failed[0].reason
    assert "pp=4 would fit" in failed[0].reason
    nothing = search(
        config, made.any_grid(config, 4, memory=1.5 * 2**30 + 1e6), Request(micro_batches=(2,))
    )
    assert not nothing.ranked
    assert len(nothing.failed) == nothing.considered


def test_unplannable_settings_are_said() -> None:
    config = replace(made.config(m=7, b=1), parallel=made.ParallelConfig(dp=0))
    with pytest.raises(
        ConfigError,
        match=r"parallel.pp = 16: must be at most 8, the number of the model's blocks; try 8",
    ):
        search(config, made.any_grid(config, 16), Request(keep={"pp": 16}))
    with pytest.raises(
        ConfigError, match=r"parallel.tp = 16: must be at most model.num_heads = 4; try 4"
    ):
        search(config, made.any_grid(config, 16), Request(keep={"tp": 16}))
    with pytest.raises(ConfigError, match=r"ranks = 3: no grid with pp=2 has this many .*; try 2"):
        search(config, made.any_grid(config, 3), Request(keep={"pp": 2}))
    with pytest.raises(
        ConfigError,
        match=r"batch_size = 7: no grid of 4 devices with dp=4 divides this batch .*; try 16",
    ):
        search(config, made.any_grid(config), Request(keep={"dp": 4}))
    assert search(config, made.any_grid(config), Request(keep={"dp": 4}, batch_size=16)).considered
    with pytest.raises(ConfigError, match="batch_size = -1: must be positive"):
        search(config, made.any_grid(config), Request(batch_size=-1))


def test_the_plan_is_a_configuration_that_says_what_to_expect(tmp_path: Path) -> None:
    config = replace(made.config(m=16, b=1), parallel=made.ParallelConfig(dp=0))
    result = search(config, made.any_grid(config, memory=1e10), Request())
    best = result.ranked[0]
    (tmp_path / "plan.toml").write_text(report.plan_toml(best))
    plan = load_toml(tmp_path / "plan.toml")
    assert problems(plan, 4) == []
    assert plan.plan.step_ms == pytest.approx(1e3 * best.cost.step_time)
    assert len(plan.plan.memory_mib) == plan.parallel.pp
    assert replace(plan, plan=Config().plan) == best.config


def test_parts_add_up_and_the_report_is_plain_data() -> None:
    config = replace(made.config(m=16, b=1), parallel=made.ParallelConfig(dp=0))
    result = search(config, made.any_grid(config, memory=1e10), Request())
    for one in result.ranked:
        parts = report.parts_of(one.cost)
        whole = sum(
            (
                parts.compute,
                parts.tensor,
                parts.optimizer,
                parts.reduction,
                parts.transfers,
                parts.bubble,
            )
        )
        assert whole == pytest.approx(one.cost.step_time, rel=0.1)
    plain = json.loads(json.dumps(report.as_json(result)))
    assert plain["ranked"][0]["step_ms"] == pytest.approx(1e3 * result.ranked[0].cost.step_time)
    assert report.table(result).row_count == len(result.ranked)


PIPELINE = Request(keep={"tp": 1, "pp": 4}, micro_batches=(1,), top=4, split_backward=False)


def test_interleaves_where_that_makes_the_bubble_smaller() -> None:
    """Over free links more chunks are better, if blocks allow them; the plan can run and comes out
    as it is drawn."""
    config, on = made.even(1e11)
    result = search(config, on, PIPELINE)
    times = {one.config.pipeline.num_virtual_stages: one.cost.step_time for one in result.ranked}
    assert times.keys() == {1, 2, 3, 4}
    best = result.ranked[0].config
    assert (best.pipeline.schedule, best.pipeline.num_virtual_stages, best.pipeline.split) == (
        "interleaved",
        4,
        (1,) * 16,
    )
    assert times[4] == pytest.approx(8 * 12 + 6, rel=1e-3), (
        "a rank's four layers, and the bubble of three ranks"
    )
    assert times[2] < times[1]
    planned = report.planned(result.ranked[0])
    assert problems(planned, 4) == []
    assert len(planned.plan.memory_mib) == 4
    assert "interleaved (4 stages a rank)" in report.describe(best)


def test_interleaving_pays_for_its_messages() -> None:
    """Each takes as long as a layer's forward: twice as many for two chunks, and the last rank's to
    the first."""
    config, _ = made.even(1e11)
    profile = made.profile(config)
    slow = made.machine(
        config, 4, made=profile, inner=made.link(latency=6.0, bandwidth=1e9), memory=1e11
    )
    assert search(config, slow, PIPELINE).ranked[0].config.pipeline.schedule == "1f1b"


@pytest.mark.thorough
def test_chunks_count_with_what_they_hold_in_memory() -> None:
    """More is in flight: where just 1f1b fits as it is, the others are recomputed or left out."""
    config, plenty = made.even(1e11)
    peaks = {
        one.config.pipeline.num_virtual_stages: one.peak
        for one in search(config, plenty, PIPELINE).ranked
    }
    assert peaks[1] < min(peaks[2], peaks[3], peaks[4])
    limit = 1.02 * peaks[1]
    _, tight = made.even(limit / 0.96 + 1.5 * 2**30)
    assert tight.memory_limit == pytest.approx(limit)
    found = search(config, tight, PIPELINE)
    for one in found.ranked:
        assert max(stage.total for stage in predict(JobPlan(one.config))) <= limit
        assert (
            one.config.pipeline.num_virtual_stages == 1 or one.config.pipeline.recompute != "none"
        )
    assert any(one.config.pipeline.num_virtual_stages == 1 for one in found.ranked)


# -- what is preferred though it is not the fastest


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("m", "chosen"), [(8, "2bw"), (64, "1f1b")])
def test_old_gradients_are_taken_for_a_gain_only(m: int, chosen: str) -> None:
    """The bubble of two stages is 1 / m of the work: 12 % of 8 micro-batches, 1.6 % of 64."""
    config, on = made.stale(0.0)
    config = replace(config, pipeline=replace(config.pipeline, num_microbatches=m, early_switch=1))
    request = Request(
        keep={"tp": 1, "pp": 2},
        micro_batches=(1,),
        top=9,
        schedules=("2bw", "1f1b"),
        split_backward=False,
    )
    result = search(config, on, request)
    times = {
        name: min(
            one.cost.step_time for one in result.ranked if one.config.pipeline.schedule == name
        )
        for name in ("2bw", "1f1b")
    }
    assert times["2bw"] < times["1f1b"]
    assert (times["2bw"] * (1 + STALE_GAIN) < times["1f1b"]) == (chosen == "2bw")
    best = result.ranked[0].config
    assert best.pipeline.schedule == chosen
    assert (best.optim.name, best.optim.staleness) == (
        "muon",
        "extrapolation" if chosen == "2bw" else "none",
    )
    assert (best.pipeline.early_switch == 1) == (chosen == "2bw")
    assert problems(best, 2) == []
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(report.table(result))
    said = " ".join(console.export_text().split())
    assert ("above the validation loss of 1f1b, by 18.5 %" in said) == any(
        one.is_stale for one in result.ranked
    )


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("top", [1, 5])
def test_a_plan_that_nearly_fills_the_memory_must_be_faster_than_predictions_err(
    quick: bool, top: int
) -> None:
    """Two samples at once gain 1 %, or a tenth, and take more."""
    for gain, chosen in ((0.01, 1), (0.1, 2)):
        config = made.config(dp=1, m=16, b=1, num_layers=10, hidden_size=96, seq_length=256)
        profile = made.profile(config, sizes=(1, 2))
        faster = {
            key: replace(
                cost, forward=cost.forward * (1 - gain), backward=cost.backward * (1 - gain)
            )
            if key[2] == 2
            else cost
            for key, cost in profile.blocks.items()
        }
        profile = replace(profile, blocks=faster)
        request = Request(keep={"tp": 1, "pp": 1}, schedules=("1f1b",), quick=quick, top=top)
        (plenty, *_) = search(
            config, made.machine(config, 1, made=profile, memory=1e11), request
        ).ranked
        assert plenty.config.train.micro_batch_size == 2
        memory = plenty.peak / 0.95 / 0.96 + 1.5 * 2**30
        (best, *_) = search(
            config, made.machine(config, 1, made=profile, memory=memory), request
        ).ranked
        assert best.config.train.micro_batch_size == chosen
        assert best.memory is not None


@pytest.mark.thorough
def test_plans_for_gpus_that_are_not_here() -> None:
    """2.2B on 8 V100: what checkpoints are written from is in host memory, and would not fit beside
    the rest."""
    config = load_toml(CONFIGS / "gpt_2b2_paper.toml")
    cluster = Cluster(find_device("v100-16gb"), 8, 1, find_link("nvlink2"), find_link("nvlink2"))
    on = machine_of(cluster, estimate(config, cluster, (8,)))
    request = Request(
        keep={"pp": 8}, micro_batches=(8,), schedules=("2bw",), top=1, split_backward=False
    )
    (best,) = search(config, on, request).ranked
    assert (
        best.peak <= on.memory_limit < max(stage.total + stage.host for stage in best.memory or ())
    )
    assert not any(stage.checkpoint for stage in best.memory or ())
    hardware = replace(on.profile.hardware, host_memory=4e9)
    short = replace(on, profile=replace(on.profile, hardware=hardware), measured=True)
    result = search(config, short, request)
    assert not result.ranked
    assert "checkpoint.asynchronous = false saves them" in result.failed[0].reason
    waits = replace(config, checkpoint=replace(config.checkpoint, asynchronous=False))
    assert search(waits, short, request).ranked


def test_a_faster_plan_behind_the_first_says_why() -> None:
    """2bw has no bubble, and must be 5 % faster than 1f1b: with many micro-batches it is less."""
    config = made.config(pp=2, m=64, b=1)
    on = made.machine(config, 2)
    stale = replace(config, pipeline=replace(config.pipeline, schedule="2bw"))
    first, second = (Candidate(one, StepCost(one, on)) for one in (config, stale))
    faster = first.cost.step_time / second.cost.step_time - 1
    assert 0 < faster < STALE_GAIN
    result = searching.Result([first, second], [], 2, 1e12)
    assert report.reasons(result) == [
        f"2: {faster:.1%} faster than 1, but old gradients must make it 5.0% faster"
    ]
    full = searching.Result([first, first], [], 2, 1e12)
    assert report.reasons(full) == []


def test_no_plan_is_shown_twice() -> None:
    """Two candidates without recomputation may lead to the same one with it."""
    config = made.config(pp=2, m=8, b=1)
    cost = StepCost(config, made.machine(config, 2, memory=1e12))
    twice = searching._Search(
        [Candidate(config, cost), Candidate(config, cost)], 1e12, Request(quick=True)
    )
    assert [one.config for one in twice.verified()] == [config]


@pytest.mark.thorough
def test_64_v100s_get_more_than_one_sample_a_micro_batch() -> None:
    """Launches take longer than the kernels of one sample (PipeDream-2BW, figure 8)."""
    config = load_toml(CONFIGS / "gpt_1b3_paper.toml")
    servers = Cluster(
        find_device("v100-16gb"), 8, 8, find_link("nvlink2"), find_link("ethernet-25")
    )
    on = machine_of(servers, estimate(config, servers))
    request = Request({"tp": 1, "pp": 4, "dp": 16}, 2048, ("2bw",), top=1, quick=True)
    best = search(config, on, request).ranked[0]
    assert best.config.train.micro_batch_size >= 4
