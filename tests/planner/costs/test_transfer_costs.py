"""Candidates whose state moves: their costs, when the search takes them, and what it says then."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner import made

from hybridpar.config import Config, OptimConfig
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.measuring.profile import StateSpeeds
from hybridpar.planner.searching import plan_report as report
from hybridpar.planner.searching.candidates import Request
from hybridpar.planner.searching.search import Result, search
from hybridpar.prediction import Footprints, predict
from hybridpar.schedules.action import Kind
from hybridpar.schedules.proof.check import PlanError, check
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.simulate.copy_engines import MIB
from hybridpar.train.forecasts.tier_forecast import forecast
from hybridpar.validate import problems

LARGE = {"hidden_size": 128, "seq_length": 8, "tie_embeddings": False}
"""A model whose state is most of its memory."""


def machine(
    base: Config,
    devices: int = 2,
    *,
    memory: float = 1e9,
    update: float = 0.0,
    bandwidth: float = 1e9,
    cores: int = 8,
    layer: float = 1.0,
) -> Machine:
    """A CPU with cores for all, whose links and file move 1 MiB in so little time as `bandwidth`
    says."""
    profile = made.profile(base, layer=layer, update=update, cores=cores, degrees=(1,))
    profile = replace(profile, state=StateSpeeds(1e7, 1e9, bandwidth, bandwidth / 2))
    return made.machine(
        base, devices, made=profile, inner=made.link(bandwidth=bandwidth), memory=memory
    )


TRACED = Footprints()


def peak(config: Config) -> int:
    return max(stage.total for stage in predict(JobPlan(config), trace=TRACED))


# -- costs


def bytes_of_gradients(cost: StepCost) -> int:
    """Return the accesses of the unsharded chunks of the first rank."""
    assert cost.moves is not None
    accesses = cost.moves.ghosts[0].accesses(cost.shape)
    return sum(accesses.num_bytes[i] for i in accesses.reduced)


def test_gathers_and_sums_take_a_step_what_the_link_says() -> None:
    """A step of ZeRO-3 over a link so slow that nothing hides it takes the time of its bytes: gpipe
    moves each block's weights twice, and sums its gradients once."""
    base = made.config(dp=2, m=4, b=1, zero=3, schedule="gpipe", **LARGE)
    on = machine(base, bandwidth=1e4, layer=1e-6)
    cost = StepCost(base, on)
    gradients = bytes_of_gradients(cost)
    least = 3 * gradients / 1e4 / 2  # a gather or a scatter is half of a ring
    assert least * 0.6 < cost.step_time < 1.1 * least
    sweeping = replace(base, pipeline=replace(base.pipeline, schedule="1f1b"))
    assert StepCost(sweeping, on).step_time > 2.5 * cost.step_time  # once for each micro-batch


def test_moves_beside_computing_take_the_ranks_own_time() -> None:
    """Though the link is fast, gpipe's step is longer by a gather of all weights for the forwards,
    and for the backwards, and by a sum of all gradients."""
    base = made.config(dp=2, m=4, b=1, zero=3, schedule="gpipe", **LARGE)
    on = machine(base, bandwidth=1e12)
    on = replace(
        on, profile=replace(on.profile, hardware=replace(on.profile.hardware, devices_per_host=2))
    )
    free = StepCost(base, on)
    gradients = bytes_of_gradients(free) / 2**30
    for speeds, times in (({"gathered_work": 100.0}, 2), ({"summed_work": 100.0}, 1)):
        taken = replace(on, profile=replace(on.profile, state=replace(on.profile.state, **speeds)))
        longer = StepCost(base, taken).step_time - free.step_time
        kept = 0.35 * (times > 1)  # of the weights, between forwards and backwards
        assert (
            (times - kept) * 100.0 * gradients
            <= longer * 1.001
            <= 1.002 * times * 100.0 * gradients
        )


def test_a_fast_link_hides_what_replicas_share() -> None:
    plain = made.config(dp=2, m=4, zero=1, **LARGE)
    on = machine(plain, bandwidth=1e12)
    for zero in (2, 3):
        split = replace(plain, parallel=replace(plain.parallel, zero=zero))
        assert StepCost(split, on).step_time == pytest.approx(
            StepCost(plain, on).step_time, rel=1e-3
        )


def test_a_budget_costs_what_does_not_hide_behind_compute() -> None:
    base = made.config(m=4, b=1, schedule="gpipe", **LARGE)
    state = predict(JobPlan(base))[0].state
    times = []
    for share in (2.0, 0.7, 0.5):
        config = replace(base, memory=replace(base.memory, budget=int(share * state)))
        cost = StepCost(config, machine(base, 1, bandwidth=1e5))
        times.append(cost.step_time)
    whole = StepCost(base, machine(base, 1)).step_time
    assert times[0] == pytest.approx(whole, rel=1e-6)  # all is in memory
    assert whole < times[1] < times[2]
    assert (
        times[1] - whole <= 3 * state / 1e5 * 2
    )  # weights twice, and the rest once, there and back


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("zero", [2, 3])
def test_shares_in_a_file_cost_both_kinds_of_moves(zero: int) -> None:
    base = made.config(dp=2, m=4, b=1, zero=zero, schedule="gpipe", **LARGE)
    on = machine(base, bandwidth=1e6)
    least = forecast(JobPlan(replace(base, memory=replace(base.memory, budget=1 << 30)))).least
    roomy, tight = (
        StepCost(replace(base, memory=replace(base.memory, budget=budget)), on)
        for budget in (1 << 30, least)
    )
    assert roomy.step_time == pytest.approx(
        StepCost(base, on).step_time, rel=0.01
    )  # updated in parts
    assert tight.step_time > 1.1 * roomy.step_time
    assert tight.moves is not None
    (ghost,), schedule_options = tight.moves.ghosts, ScheduleOptions.of(base)
    pools = {0: ghost.pools(tight.shape)}
    first = ghost.accesses(tight.shape).first
    assert not any(map(pools[0][-1].has, range(first)))
    plan = {0: tuple(ghost.moved(schedule_options, tight.shape, 2))}
    check(plan, tight.shape, "gpipe", pools=pools)
    without = [
        action
        for action in plan[0]
        if action.kind is not Kind.FETCH or action.microbatch not in range(first, first + 4)
    ]
    with pytest.raises(PlanError, match=r"item \d+ is not in the fast tier"):
        check({0: tuple(without)}, tight.shape, "gpipe", pools=pools)


@pytest.mark.parametrize(("cores", "hides"), [(8, True), (1, False)])
def test_cpu_time_of_a_file_is_the_ranks_own_where_cores_are_few(cores: int, hides: bool) -> None:
    base = made.config(m=4, b=1, schedule="gpipe", **LARGE)
    config = replace(
        base, memory=replace(base.memory, budget=int(0.7 * predict(JobPlan(base))[0].state))
    )
    on = machine(base, 1, bandwidth=1e6, cores=cores)
    times = []
    for work in (
        0.0,
        1000.0,
        None,
    ):  # of a second that the disk takes for a GiB; None: all of it is
        state = replace(on.profile.state, read_work=work, written_work=work)
        times.append(
            StepCost(config, replace(on, profile=replace(on.profile, state=state))).step_time
        )
    free, busy, unknown = times
    if hides:
        assert unknown == busy == free
    else:
        assert unknown > busy > free


@pytest.mark.parametrize(
    ("cores", "hides", "optim"),
    [(8, True, OptimConfig()), (1, False, OptimConfig(name="own", spec="optim.rules:Lion"))],
)
def test_a_host_hides_only_where_cores_are_idle(
    cores: int, hides: bool, optim: OptimConfig
) -> None:
    plain = replace(made.config(m=6, b=1, schedule="2bw", **LARGE), optim=optim)
    on = machine(plain, 1, update=1.0, cores=cores)
    number = StepCost(plain, on).ranks[0].parameters
    on = replace(
        on, profile=replace(on.profile, state=StateSpeeds(updated=number / 8.0, copied=1e12))
    )
    hosted = StepCost(replace(plain, memory=replace(plain.memory, host_optimizer=True)), on)
    plain_s = StepCost(plain, on).step_time
    host_s = hosted.step_time
    update = StepCost(plain, on).ranks[0].update
    if hides:
        assert host_s == pytest.approx(plain_s - update, rel=1e-6)
    else:
        assert plain_s - update + 1.0 < host_s


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"memory": {"budget": 1 << 30}}, "memory.budget"),
        ({"memory": {"host_optimizer": True}}, "memory.host_optimizer"),
    ],
)
def test_immovable_state_has_no_costs(changes: dict[str, dict[str, object]], field: str) -> None:
    base = made.config(dp=2, m=4)
    config = replace(
        base, **{name: replace(getattr(base, name), **keys) for name, keys in changes.items()}
    )
    with pytest.raises(ConfigError, match=f"{field} = .*; this machine has cuda"):
        StepCost(config, made.machine(base, 2))
    unknown = replace(machine(base), profile=replace(machine(base).profile, state=StateSpeeds()))
    with pytest.raises(ConfigError, match=f"{field} = .* has no costs in this profile"):
        StepCost(config, unknown)


def test_zero_3_costs_more_on_gpus_than_zero_1() -> None:
    base = made.config(dp=2, m=4)
    one, three = (
        StepCost(
            replace(base, parallel=replace(base.parallel, zero=zero)), made.machine(base, 2)
        ).step_time
        for zero in (1, 3)
    )
    assert one < three


def test_a_host_that_keeps_muons_matrices_has_no_costs() -> None:
    base = replace(made.config(m=4), optim=OptimConfig(name="muon"))
    config = replace(base, memory=replace(base.memory, host_optimizer=True))
    with pytest.raises(
        ConfigError, match=r"optim.name = 'muon': has no estimated costs .*; try adamw"
    ):
        StepCost(config, machine(base))


# -- the search


def found(
    base: Config, on: Machine, keep: dict[str, int] | None = None, schedules: tuple[str, ...] = ()
) -> Result:
    free = replace(base, parallel=replace(base.parallel, dp=0))
    return search(
        free,
        on,
        Request(
            batch_size=base.global_batch_size,
            keep=keep or {"pp": 1, "tp": 1},
            schedules=schedules,
            top=3,
            micro_batches=(base.train.micro_batch_size,),
        ),
    )


@pytest.mark.thorough
def test_gradients_and_weights_are_split_where_nothing_else_fits() -> None:
    """Less and less memory: ZeRO goes up as it must, and no further, and the report says what
    ZeRO-1 would need."""
    base = made.config(dp=2, m=4, b=1, **LARGE)
    peaks = [
        peak(
            replace(
                base,
                parallel=replace(base.parallel, zero=zero),
                pipeline=replace(base.pipeline, recompute="stage"),
            )
        )
        for zero in range(4)
    ]
    assert peaks == sorted(peaks, reverse=True)
    for zero in (1, 2, 3):
        on = machine(base, memory=(peaks[zero] + (peaks[zero - 1] - peaks[zero]) / 2) / 0.9)
        result = found(base, on, schedules=("1f1b",))
        best = result.ranked[0]
        assert best.config.parallel.zero == zero
        assert best.peak <= on.memory_limit
        assert not problems(best.config, 2)
        if zero > 1:
            assert f"ZeRO-{zero}, as with ZeRO-1 a process needs" in report.reasons(result)[0]
            assert f"ZeRO-{zero}" in report.describe(best.config)
    accelerators = made.machine(base, 2, memory=1.5 * 2**30 + peaks[3] + (peaks[2] - peaks[3]) / 2)
    assert not found(base, accelerators, schedules=("1f1b",)).ranked  # where it cannot run


@pytest.mark.thorough
def test_blocks_go_one_by_one_over_a_slow_link() -> None:
    base = made.config(dp=2, m=2, b=1, **{**LARGE, "seq_length": 4})
    split = replace(
        base,
        parallel=replace(base.parallel, zero=3),
        pipeline=replace(base.pipeline, schedule="gpipe", recompute="none"),
    )
    on = machine(base, memory=1.02 * peak(split) / 0.9, bandwidth=1e5)
    assert found(base, on).ranked[0].config.pipeline.schedule == "gpipe"


def test_state_goes_to_a_file_only_where_nothing_fits() -> None:
    base = made.config(m=4, b=1, **LARGE)
    state = predict(JobPlan(base))[0].state
    assert not found(base, machine(base, 1), {}).ranked[0].config.memory.budget
    on = machine(base, 1, memory=0.9 * state / 0.9)
    result = found(base, on, {})
    best = result.ranked[0]
    assert 0 < best.config.memory.budget < state
    assert best.config.memory.budget % MIB == 0
    assert best.peak <= on.memory_limit
    assert "nothing fits but with state in a file" in report.reasons(result)[0]
    without = replace(on, profile=replace(on.profile, state=StateSpeeds()))
    assert not found(base, without, {}).ranked


@pytest.mark.thorough
def test_shares_go_to_a_file_where_it_is_slower_than_links() -> None:
    """Each process has less in its file of the state that replicas share."""
    base = made.config(dp=2, m=4, b=1, **LARGE)
    on = machine(base, memory=7e6 / 0.9)
    on = replace(on, profile=replace(on.profile, state=StateSpeeds(1e7, 1e9, 1e5, 1e5)))
    result = found(base, on, schedules=("1f1b",))
    best = result.ranked[0]
    assert best.config.parallel.zero == 3
    assert best.peak <= on.memory_limit
    assert forecast(JobPlan(best.config)).least <= best.config.memory.budget
    assert "with state in a file" in report.reasons(result)[0]
    assert len({one.config for one in result.ranked}) == len(result.ranked)


def test_a_host_updates_where_that_is_faster() -> None:
    base = made.config(m=6, b=1, schedule="2bw", **LARGE)
    on = machine(base, 1, update=1.0)
    taken = found(base, on, {}, ("2bw",))
    assert taken.ranked[0].config.memory.host_optimizer
    assert "faster than without" in taken.ranked[0].because
    slow = replace(on, profile=replace(on.profile, state=StateSpeeds(updated=100.0, copied=1e9)))
    assert not found(base, slow, {}, ("2bw",)).ranked[0].config.memory.host_optimizer
    assert not found(base, on, {}, ("1f1b",)).ranked[0].config.memory.host_optimizer  # no slack
