"""The simulator against the PipeDream-2BW paper: its speed-ups, its memory, its throughputs."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from benchmarks.blocking_simulation import BlockingSimulation
from benchmarks.paper import (
    CLAIMS,
    FIGURES,
    GPT,
    MEMORY,
    SYSTEMS,
    TOLERANCE,
    Speeds,
    check,
    simulated_speeds,
)
from benchmarks.paper_points import MISSED, READ, STATEMENTS, speed
from benchmarks.paper_systems import (
    MICRO_BATCH,
    UPDATE_TRAFFIC,
    Machine,
    Setting,
    fits,
    flush_interval,
    memory_bytes,
    pipeline_costs,
    stage_time,
    throughput,
)
from hybridpar.models.cost import forward_flops_per_token
from hybridpar.planner.machines.hardware import DEVICES, Cluster, Link
from hybridpar.planner.machines.kernel_times import (
    MEGATRON_2020,
    BlockTime,
    activation_bytes,
    block_times,
)
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import PipelineShape, find_schedule
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.simulator import simulate


@pytest.fixture(scope="module")
def speeds() -> Speeds:
    return simulated_speeds(Machine(), GPT)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "i", range(len(CLAIMS)), ids=[f"{claim.name}, {claim.place}" for claim in CLAIMS]
)
def test_stated_speed_ups(speeds: Speeds, i: int) -> None:
    one = check(speeds)[i]
    assert abs(one.error) < TOLERANCE, (
        f"{one.simulated:.2f} at {one.setting.name}, stated {one.claim.stated}"
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("text", STATEMENTS)
def test_claims_about_figures_8_and_12(text: str) -> None:
    assert STATEMENTS[text]() == (text != MISSED)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("setting", READ, ids=lambda s: f"{s.name} d={s.depth} b={s.micro_batch}")
def test_points_of_figures_8_and_12(setting: Setting) -> None:
    """Read by eye, good for a tenth; the simulator's error may be another tenth."""
    assert speed(setting) == pytest.approx(READ[setting], rel=0.2)


def test_order_of_the_points_of_figures_8_and_12() -> None:
    curves: dict[tuple[int, bool], list[float]] = {}
    for setting in READ:
        curves.setdefault((setting.servers, setting.recompute), []).append(speed(setting))
    for curve in curves.values():
        assert curve == sorted(curve)


def test_throughputs_of_the_figure(speeds: Speeds) -> None:
    """Read by eye, good for a tenth; the median of 30 is as near as that."""
    errors = [
        abs(speeds[s][system] / read - 1)
        for s in GPT
        for system, read in zip(SYSTEMS, FIGURES[s], strict=True)
    ]
    assert statistics.median(errors) < 0.1


def test_one_gpu() -> None:
    """'About 45 TFLOPS on a 355M-parameter GPT model' (section 5), which the fit has not seen."""
    machine = Machine()
    model = replace(GPT[0].model, num_layers=24, hidden_size=1024, num_heads=16)
    layers, device = range(1, 25), machine.cluster(1, machine.ring_gbit).device
    step = sum(
        stage_time(
            block_times(model, MICRO_BATCH, device, kernels=MEGATRON_2020), range(26), layers
        )
    )
    step += device.memory_time(UPDATE_TRAFFIC * 355e6)
    forward = forward_flops_per_token(model)
    flops = MICRO_BATCH * model.seq_length * (3 * sum(forward) + sum(forward[i] for i in layers))
    assert flops / step == pytest.approx(45e12, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("system", "schedule"), [("inter-layer", "naive"), ("flush", "1f1b"), ("2bw", "2bw")]
)
def test_on_one_server_the_plain_simulator_says_the_same(system: str, schedule: str) -> None:
    """Nothing is shared there, and posting receives right before their use makes exchanges
    block."""
    setting = GPT[0]
    machine = Machine()
    m = 1 if system == "inter-layer" else setting.num_microbatches
    costs = pipeline_costs(setting, machine, system)
    if system == "2bw":  # its update is in REDUCE, which takes no time of the rank here
        costs = replace(costs, update=costs.reduce, reduce=0.0)
    link = machine.cluster(1, machine.ring_gbit).inner
    costs = replace(
        costs, transfer=link.transfer_time(activation_bytes(setting.model, MICRO_BATCH))
    )
    num_batches = 4 if schedule == "2bw" else 1
    plan = make_plan(
        replace(find_schedule(schedule).with_options(clip=system != "2bw"), receive_ahead=0),
        PipelineShape(setting.depth, m),
        0,
        num_batches,
    )
    timeline = simulate(plan, costs)
    step = timeline.step_time(m) if num_batches > 1 else timeline.makespan
    assert m * MICRO_BATCH / step == pytest.approx(throughput(setting, system, machine), rel=0.01)


@pytest.mark.parametrize(
    ("half_duplex", "period"), [(False, 1 + 2 + 2 * 2), (True, 1 + 2 + 2 * 2 * 2)]
)
def test_blocking_exchanges_add_to_the_period(half_duplex: bool, period: float) -> None:
    """A rank pays for both exchanges of a micro-batch, and for both directions where they share the
    card."""
    card = Link("", 1.0, 0.0, 1.0, half_duplex=half_duplex)
    network = Cluster(DEVICES["v100-16gb"], 1, 4, card, card).network([[0], [1], [2], [3]], 2.0)
    plan = make_plan(replace(find_schedule("2bw"), receive_ahead=0), PipelineShape(4, 4), 0, 12)
    timeline = BlockingSimulation(plan, Costs(1, 2, network=network)).timeline()
    assert timeline.step_time(4) == pytest.approx(4 * period)


def test_a_blocking_reduction_takes_the_ranks_time() -> None:
    plan = make_plan(ScheduleOptions("2bw", clip=False), PipelineShape(1, 2), 0, 6)
    costs = Costs(1, 2, reduce=5)
    assert simulate(plan, costs).step_time(2) == pytest.approx(6)
    assert BlockingSimulation(plan, costs).timeline().step_time(2) == pytest.approx(11)


@pytest.mark.parametrize("setting", MEMORY, ids=lambda s: s.name)
def test_memory_of_the_figures(setting: Setting) -> None:
    m = setting.num_microbatches
    for system, read in zip(SYSTEMS, MEMORY[setting], strict=True):
        assert fits(setting, system, m) == (read is not None)
        if read is not None:
            assert 1e-9 * memory_bytes(setting, system, m) == pytest.approx(read, rel=0.2), system


def test_gpipe_room() -> None:
    """'For GPT, only a batch size of 32 fits in memory', while BERT's 64 do (appendix B.1)."""
    assert flush_interval(Setting("gpt", "2.2b", 1, 8, 64)) * 8 == 32
    assert flush_interval(Setting("bert", "2.2b", 1, 8, 64)) * 8 == 64


def test_all_layers_are_in_one_stage() -> None:
    for setting in FIGURES:
        blocks = [block for stage in setting.stages() for block in stage]
        assert blocks == list(range(setting.model.num_blocks))
        assert setting.num_microbatches >= setting.depth  # as 2bw needs


def test_recomputation_adds_a_forward() -> None:
    times = (BlockTime(1, 2), BlockTime(3, 5), BlockTime(7, 11))
    assert stage_time(times, range(1, 3))[:2] == (10, 16)
    assert stage_time(times, range(1, 3), recomputed=[0, 1])[:2] == (10, 19)
