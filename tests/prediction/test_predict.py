"""Predicted peaks: what the walk along the plan adds up to, and that the allocator measures the
same in running ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from hybridpar.config import (
    UNCOMPRESSED,
    Config,
    MemoryConfig,
    ParallelConfig,
    from_mapping,
    load_toml,
)
from hybridpar.data.loader import BatchLoader
from hybridpar.data.synthetic import SyntheticSamples
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.models.build import DTYPES, Recomputation
from hybridpar.nn import matmul, moe
from hybridpar.prediction import Footprints, MemoryWatch, StageMemory, measure, predict, table
from hybridpar.prediction.footprint import Buffers, Footprint, trace_stage
from hybridpar.prediction.predict import _Pipeline, default_device
from hybridpar.prediction.walk import RecordedWalk
from hybridpar.schedules.passes.lowering import lower
from hybridpar.schedules.schedule_table import SCHEDULES, PipelineShape
from hybridpar.schedules.simulate.send_window import min_send_window
from hybridpar.state.residency.tiered import TieredMemory
from hybridpar.train.engine import Engine

CPU = torch.device("cpu")
CONFIGS = Path(__file__).parent.parent.parent / "scripts" / "configs"
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
SCHEDULE_NAMES = ("gpipe", "1f1b", "2bw")


BASE = from_mapping(
    {  # 4.2 million parameters: large enough that scratch space of kernels does not matter
        "model": {
            "num_layers": 4,
            "hidden_size": 256,
            "num_heads": 4,
            "seq_length": 128,
            "vocab_size": 4096,
        },
        "parallel": {"tp": 1, "pp": 1, "dp": 1},
        "pipeline": {"num_microbatches": 4},
        "train": {"micro_batch_size": 4, "num_steps": 4, "device": "cpu"},
    }
)


def make(tp: int = 1, pp: int = 1, dp: int = 1, **sections: dict[str, Any]) -> Config:
    grid = {"tp": tp, "pp": pp, "dp": dp, **sections.pop("parallel", {})}
    return from_mapping({"parallel": grid, **sections}, BASE)


# -- the walk

NOTHING = Footprint(
    weights=0,
    master=0,
    gradients=0,
    optimizer=0,
    kept=0,
    input=0,
    output=0,
    message=0,
    received=0,
    returned=0,
    returning=0,
    forward=0,
    first_backward=0,
    backward=0,
    norm=0,
    update=0,
)


def walked(schedule: str, p: int, m: int, stage: int, footprint: Footprint) -> StageMemory:
    walk = RecordedWalk({stage: [footprint]}, PipelineShape(p, m))
    return walk.peak(lower(schedule, PipelineShape(p, m), stage, 0, 6))


@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 5), (4, 4), (4, 9)])
def test_activations_are_those_in_flight(schedule: str, p: int, m: int) -> None:
    for stage in range(p):
        found = walked(
            schedule, p, m, stage, replace(NOTHING, kept=10, first_backward=1, backward=1)
        )
        assert found.in_flight == SCHEDULES[schedule].max_live_activations(
            PipelineShape(p, m), stage
        )
        assert (found.activations, found.transient) == (10 * found.in_flight, 1)
        assert found.during.startswith("B")


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_each_action_counts_on_top_of_what_is_there(schedule: str) -> None:
    large = replace(NOTHING, weights=7, kept=10)
    assert walked(schedule, 4, 4, 1, replace(large, norm=1000)).during.startswith("NORM")
    assert walked(schedule, 4, 4, 1, replace(large, update=1000)).during.startswith("UPDATE")
    first = walked(schedule, 4, 4, 1, replace(large, first_backward=1000)).during
    assert first.startswith("B")
    assert int(first[1 : first.index("@")]) % 4 == 0, "the first of a batch"
    forward = walked(schedule, 4, 4, 1, replace(large, forward=1000))
    assert forward.during.startswith("F")
    assert forward.total == 7 + 1000 + 10 * forward.in_flight
    # the micro-batch that runs forward is not among those that keep anything yet
    assert forward.in_flight == SCHEDULES[schedule].max_live_activations(PipelineShape(4, 4), 1) - 1


@pytest.mark.parametrize(
    ("schedule", "pipeline"),
    [
        ("gpipe", {}),
        ("1f1b", {"split_backward": True, "zero_bubble": True}),
        ("interleaved", {}),
        ("1f1b", {"stage_layout": "v", "activations": "half", "split_backward": True}),
    ],
)
def test_two_long_batches_of_a_pipeline_that_drains_reach_the_peak(
    schedule: str, pipeline: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Footprints()
    for m in (16, 24):
        job = JobPlan(
            make(
                pp=4,
                model={"num_layers": 8, "hidden_size": 32, "seq_length": 8, "vocab_size": 64},
                pipeline={"schedule": schedule, "num_microbatches": m, **pipeline},
                train={"num_steps": 10},
            )
        )
        found = predict(job, trace=trace)
        with monkeypatch.context() as patch:
            patch.setattr(_Pipeline, "_num_batches", lambda self, rank: 6)
            assert predict(job, trace=trace) == found
    assert _Pipeline(job, CPU, trace)._num_batches(0) == 2


def sent(part: int, whole: int) -> dict[str, int]:
    """PipelineShape of messages of which a rank sends `part`."""
    return {
        "input": whole,
        "message": whole,
        "received": part,
        "returned": part,
        "returning": part,
        "output": part,
    }


def test_recorded_micro_batches_keep_their_memory_from_the_update() -> None:
    """None of a micro-batch's 25 is the update's, which takes 7; if that takes more than all of it,
    all is added."""
    footprint = replace(
        NOTHING, kept=5, forward=10, first_backward=20, backward=20, norm=3, update=7
    )
    for update, most, graphs in ((7, 25, 7), (40, 40, 25)):
        memory = walked("1f1b", 1, 2, 0, replace(footprint, update=update))
        assert (memory.total, memory.graphs) == (most, graphs)
    # three in flight of 25 each, where 35 are needed otherwise; of four on two places two have
    # memory as ever
    assert [walked(*of, footprint).graphs for of in (("1f1b", 4, 8, 1), ("gpipe", 2, 4, 0))] == [
        3 * 25 + 7 - 35,
        2 * 25 + 30 - 40,
    ]
    on, off = (make(train={"device": "cuda", "cuda_graphs": on}) for on in (True, False))
    recorded = predict(JobPlan(on))[0]
    plain = predict(JobPlan(off))[0]
    assert recorded == replace(plain, graphs=recorded.graphs)
    assert recorded.needed == plain.needed + recorded.graphs > plain.needed == plain.total
    assert {
        predict(JobPlan(config))[0].graphs
        for config in (off, make(), make(pp=2, train={"device": "cuda"}))
    } == {0}
    grid = make(pp=2, train={"device": "cuda", "graph_grids": True})
    assert (two := predict(JobPlan(grid))[0]).in_flight == 2
    assert two.graphs == two.transient > 0, "which each place has of its own"
    assert "more for CUDA graphs" in table([recorded])
    virtual = make(
        pp=2, train={"device": "cuda", "graph_grids": True}, pipeline={"schedule": "interleaved"}
    )
    assert predict(JobPlan(virtual))[0].graphs > 0


def test_messages() -> None:
    """Inputs count with the activations; posted receives, outputs and unfinished sends as
    communication."""
    found = walked("1f1b", 4, 12, 1, replace(NOTHING, **sent(1, 1), backward=1))
    assert found.activations == found.in_flight == 3
    assert found.communication == min_send_window(4) + 2, (
        "receives: the gradient of this one, the next input"
    )
    alone = walked("1f1b", 1, 12, 0, replace(NOTHING, **sent(1, 1), backward=1))
    assert (alone.activations, alone.communication) == (0, 0)


def test_messages_that_are_slices() -> None:
    """A taken message is whole; posted, waiting and sent is one slice of each."""
    found = walked("1f1b", 4, 12, 1, replace(NOTHING, **sent(1, 10), backward=1))
    assert (found.activations, found.communication) == (30, min_send_window(4) + 1 + 10)
    forward = walked("1f1b", 4, 12, 1, replace(NOTHING, **sent(1, 10), forward=100))
    assert forward.during.startswith("F")
    assert (forward.activations, forward.communication) == (20, min_send_window(4) + 1 + 10)


def test_a_stage_of_tensor_parallel_ranks_sends_a_part_of_its_output() -> None:
    """The first of three ranks has 87 of 260 numbers."""
    config = make(
        pp=2,
        model={"hidden_size": 20, "num_heads": 5, "seq_length": 13},
        train={"micro_batch_size": 1},
    )
    sizes = {}
    for tp in (1, 2, 3):
        footprint = trace_stage(
            replace(config, parallel=ParallelConfig(tp, 2, 1)),
            range(1, 3),
            Recomputation(),
            Buffers(1, 1),
            CPU,
        )
        sizes[tp] = (footprint.message, footprint.received, footprint.output)
    assert sizes == {1: (1040, 1040, 1040), 2: (1040, 520, 520), 3: (1040, 4 * 87, 4 * 87)}


# -- the footprint


def parameters(config: Config) -> int:
    return sum(p.numel() for p in Engine(JobPlan(config), ProcessGrid(), CPU).stage.parameters())


def test_static_bytes_by_kind() -> None:
    """fp32: 4 bytes a parameter each; bf16: 2 for each version, 4 for the rest. Parameters align to
    64 bytes."""
    n = parameters(make())
    (fp32,) = predict(JobPlan(make()))
    assert (fp32.weights, fp32.master, fp32.gradients, fp32.optimizer) == (4 * n, 0, 4 * n, 8 * n)
    (bf16,) = predict(
        JobPlan(make(train={"dtype": "bf16"}, pipeline={"schedule": "2bw"}, optim={"name": "sgd"}))
    )
    assert (bf16.weights, bf16.master, bf16.gradients, bf16.optimizer) == (
        4 * n,
        4 * n,
        8 * n,
        4 * n,
    )
    assert predict(JobPlan(make(optim={"name": "lamb"})))[0].optimizer == 8 * n
    assert predict(JobPlan(make(optim={"name": "sgd", "momentum": 0.0})))[0].optimizer == 0


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_2bw_adds_a_copy_of_the_weights_and_a_gradient_buffer(dtype: str) -> None:
    for flush, double in zip(
        *(
            predict(JobPlan(make(pp=4, train={"dtype": dtype}, pipeline={"schedule": schedule})))
            for schedule in ("1f1b", "2bw")
        ),
        strict=True,
    ):
        assert double.weights == 2 * flush.weights
        assert double.gradients == 2 * flush.gradients
        assert (double.master, double.optimizer) == (flush.master, flush.optimizer)


def test_zero_splits_optimizer_and_master_over_the_ranks_that_sum_the_gradient() -> None:
    """Tied embeddings lie on two stages, whose replicas together are four."""
    settings = {"train": {"dtype": "bf16"}}
    whole = predict(JobPlan(make(pp=2, dp=2, **settings)))
    split = predict(JobPlan(make(pp=2, dp=2, parallel={"zero": 1}, **settings)))
    tied = 4096 * 256
    for stage, (a, b) in enumerate(zip(whole, split, strict=True)):
        assert (a.weights, a.gradients) == (b.weights, b.gradients)
        rest = a.master // 4 - tied
        assert b.master == pytest.approx(4 * (tied / 4 + rest / 2), abs=200), stage
        assert b.optimizer == pytest.approx(2 * b.master, abs=200)


def test_recomputation_trades_what_is_kept_for_what_comes_on_top() -> None:
    none, layers, stage = (
        predict(
            JobPlan(make(pp=2, model=DROPOUT, pipeline={"schedule": "gpipe", "recompute": text}))
        )
        for text in ("none", "all", "stage")
    )
    # tokens and labels
    message = 4 * 128 * 256 * 4
    ids = 2 * 4 * 128 * 8
    for before, again, whole in zip(none, layers, stage, strict=True):
        assert whole.activations < again.activations < before.activations
        assert again.transient < whole.transient, "the whole stage is kept again in its backward"
        assert max(again.total, whole.total) < before.total
        assert before.static == again.static == whole.static
    each = message + ids
    assert stage[1].activations == pytest.approx(stage[1].in_flight * each, rel=0.001), (
        "nothing but its input"
    )
    assert stage[0].activations == pytest.approx(stage[0].in_flight * ids, rel=0.01), (
        "which are ids on the first"
    )
    assert (
        predict(JobPlan(make(pp=2, pipeline={"recompute": "stage:0"})))[1]
        == predict(JobPlan(make(pp=2)))[1]
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("model", "widths"),
    [
        ({}, 2 * 256 + 4 * 256),
        ({"activation": "swiglu", "norm": "rms_norm", "ffn_hidden_size": 700}, 2 * 256 + 700),
    ],
)
def test_selective_recomputation_keeps_all_but_outputs_of_norms_and_activations(
    model: dict[str, Any], widths: int
) -> None:
    config = {"pp": 2, "model": {"num_layers": 4, **DROPOUT, **model}}
    plain, selective = (
        predict(
            JobPlan(
                make(**config, pipeline={"schedule": "gpipe", "split": [3, 3], "recompute": text})
            )
        )
        for text in ("none", "selective")
    )
    tokens = 4 * 128
    fp32 = 4
    for before, after in zip(plain, selective, strict=True):
        of_two_layers = (before.activations - after.activations) / after.in_flight
        assert of_two_layers == 2 * tokens * widths * fp32
        assert after.total < before.total


def test_equal_stages_of_which_one_recomputes_differ() -> None:
    plain, one = (
        predict(JobPlan(make(pp=6, pipeline={"split": [1] * 6, "recompute": text})))
        for text in ("none", "selective:2")
    )
    assert [a == b for a, b in zip(plain, one, strict=True)] == [
        True,
        True,
        True,
        False,
        True,
        True,
    ]


def test_stages_that_are_equal_but_for_their_place_differ_by_what_is_in_flight() -> None:
    first, *middle, last = predict(
        JobPlan(make(pp=6, pipeline={"num_microbatches": 8, "split": [1, 1, 1, 1, 1, 1]}))
    )
    assert len({stage.static for stage in middle}) == 1
    flights = [stage.in_flight for stage in middle]
    assert flights == [5, 4, 3, 2]
    steps = {a.activations - b.activations for a, b in pairwise(middle)}
    assert len(steps) == 1
    assert (first.in_flight, first.activations) == (5, 5 * 4 * 128 * 8), (
        "an embedding keeps ids alone"
    )
    assert last.in_flight == 1


@pytest.mark.thorough
def test_many_micro_batches_and_large_models_take_no_longer() -> None:
    """100 billion parameters, 512 micro-batches, 32 stages: nothing is allocated, and equal stages
    are run once."""
    config = make(
        pp=32,
        model={"num_layers": 126, "hidden_size": 8192, "num_heads": 64, "seq_length": 2048},
        pipeline={"num_microbatches": 512, "schedule": "2bw"},
        train={"dtype": "bf16"},
    )
    with measure(CPU) as meter:
        stages = predict(JobPlan(config))
        assert meter.read().peak < 2**20
    assert sum(stage.master for stage in stages) > 4 * 100e9


def test_an_early_switch_among_many_micro_batches_is_predicted() -> None:
    """Fewer micro-batches stand for many; those on older weights are among them."""
    late = make(pp=2, pipeline={"num_microbatches": 64, "schedule": "2bw", "early_switch": 60})
    off = make(pp=2, pipeline={"num_microbatches": 64, "schedule": "2bw"})
    assert [stage.total for stage in predict(JobPlan(late))] == [
        stage.total for stage in predict(JobPlan(off))
    ]


def test_the_table_has_a_row_for_each_stage() -> None:
    lines = table(predict(JobPlan(make(pp=3)))).splitlines()
    assert [line.split()[0] for line in lines] == ["stage", "0", "1", "2"]
    assert len({len(line) for line in lines}) == 1


# -- for GPUs, from a machine that need not have one

GIB = 2**30


@pytest.fixture
def fast_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        matmul, "_has_fast_instructions", lambda dtype: True
    )  # else a CPU's need copies in float32


@pytest.fixture(scope="module")
def footprints() -> Footprints:
    """Remembers what few layers take."""
    return Footprints()


@pytest.mark.thorough
@pytest.mark.usefixtures("fast_products")
def test_the_copy_for_checkpoints_is_not_in_a_gpus_memory() -> None:
    """GPT 2.2B on 8 V100 of 16 GB; the paper's figure 7 shows 11.3 GB for its own code."""
    config = load_toml(CONFIGS / "gpt_2b2_paper.toml")
    config = replace(
        config,
        parallel=replace(config.parallel, pp=8, dp=1),
        pipeline=replace(config.pipeline, split=(6, 5, 5, 5, 5, 5, 2, 1)),
    )
    first = predict(JobPlan(replace(config, train=replace(config.train, device="cuda"))))[0]
    assert first.total / 2**20 == pytest.approx(11_418, rel=0.02)
    assert (first.checkpoint, first.host) == (0, first.weights + first.master + first.optimizer)
    on_cpu = predict(JobPlan(replace(config, train=replace(config.train, device="cpu"))))[0]
    assert on_cpu.total / 2**20 == pytest.approx(18_067, rel=0.02)
    assert (on_cpu.checkpoint, on_cpu.host) == (first.host, 0)


@pytest.mark.thorough(keep=1)
@pytest.mark.usefixtures("fast_products")
@pytest.mark.parametrize("paper", ["", "_paper"])
@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("gpt_345m", (1, 4, 2)),
        ("gpt_1b3", (1, 4, 2)),
        ("gpt_2b2", (1, 8, 1)),
        ("gpt_3b8", (1, 16, 4)),
        ("gpt_3b8", (4, 8, 2)),
        ("bert_large", (1, 4, 2)),
    ],
    ids=str,
)
def test_our_configurations_fit_where_they_say(
    name: str, grid: tuple[int, int, int], paper: str, footprints: Footprints
) -> None:
    """GPUs of 16 GB, of which a context, communicators and fragments take up to 2."""
    path = CONFIGS / f"{name}{paper}.toml"
    tp, pp, dp = grid
    where = [f"PP={pp} DP={dp}", f"PP={pp}."][dp == 1]
    assert (f"TP={tp} " if tp > 1 else "") + where in path.read_text()
    assert "GPUs of 16 GB" in path.read_text()
    config = from_mapping(
        {"parallel": {"tp": tp, "pp": pp, "dp": dp}, "train": {"device": "cuda"}}, load_toml(path)
    )
    assert max(stage.total for stage in predict(JobPlan(config), trace=footprints)) < 14e9


@pytest.mark.usefixtures("fast_products")
def test_a_gpu_takes_what_was_measured_on_one() -> None:
    """GPT 1.3B on an H200, its allocator's peak (benchmarks/results/gpu_single_1.3B.json)."""
    config = make(
        model={
            "num_layers": 24,
            "hidden_size": 2048,
            "num_heads": 16,
            "seq_length": 2048,
            "vocab_size": 50304,
            "tie_embeddings": False,
        },
        pipeline={"num_microbatches": 1},
        train={"dtype": "bf16", "device": "cuda", "save_interval": 2},
    )
    (stage,) = predict(JobPlan(config))
    assert stage.total / GIB == pytest.approx(36.73, rel=0.02)
    assert stage.host / GIB == pytest.approx(18.5, rel=0.02)


def test_prediction_for_another_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        found = {
            device: default_device(make(train={"device": device})).type
            for device in ("auto", "cpu", "cuda")
        }
        assert found == {"auto": "cuda" if there else "cpu", "cpu": "cpu", "cuda": "cuda"}


# -- against the allocator


def small(**sections: Any) -> Config:
    """A million parameters, so that a run takes a second; scratch space of kernels is still little
    beside them."""
    model = {"hidden_size": 128, "seq_length": 64, "vocab_size": 2048, **sections.pop("model", {})}
    return make(model=model, **sections)


def peak_of_run(config: Config) -> tuple[int, int]:
    """This rank's stage, and the most that its allocator has handed out from before the engine is
    built; with what the tiers of a budget have had of the system at most."""
    parallel = config.parallel
    grid = ProcessGrid(sizes_of(parallel))
    loader = BatchLoader(
        SyntheticSamples(config.model, padding=False, packed=config.data.is_packed),
        micro_batch_size=config.train.micro_batch_size,
        num_microbatches=config.pipeline.num_microbatches,
        dp_rank=grid.dp.rank,
        dp_size=grid.dp.size,
    )
    with measure(CPU) as meter:
        engine = Engine(JobPlan(config), grid, CPU)
        engine.train(loader, config.train.num_steps, lambda step: None)
    memory = engine.state.memory
    peak = meter.read().peak
    if isinstance(memory, TieredMemory):
        peak += memory.tiers.traffic.peak
        memory.close()
    return grid.pp.rank, peak


def agree(config: Config, tolerance: float = 0.05) -> None:
    predicted = predict(JobPlan(config))
    parallel = config.parallel
    for rank, (stage, peak) in enumerate(run_ranks(peak_of_run, parallel.num_ranks, config)):
        assert predicted[stage].total == pytest.approx(peak, rel=tolerance), (
            f"rank {rank}, stage {stage}"
        )


NEOX = {"position": "rotary", "rotary_fraction": 0.25, "parallel_residual": True}
BF16 = {"train": {"dtype": "bf16"}}
DOUBLE = {"schedule": "2bw"}
SPLIT = {"split_backward": True}
RUNS: list[
    dict[str, Any]
] = [  # most kinds of events are compared to the byte in memory_behaviour/test_memory_trace.py
    {"model": {"kind": "bert", **DROPOUT}, **BF16},
    {
        "pp": 2,
        "model": {"kind": "bert", **DROPOUT},
        "pipeline": {"schedule": "gpipe", "recompute": "all", **SPLIT},
    },
    {"pp": 2, "model": DROPOUT, "pipeline": {"schedule": "2bw", "virtual_stages": 2, **SPLIT}},
    {
        "pp": 2,
        "model": {"kind": "bert", **DROPOUT},
        "pipeline": {"recompute": "selective:1", **DOUBLE},
    },
    {"pp": 2, "tp": 2, "optim": {"name": "lamb"}, "pipeline": DOUBLE},
    {"pp": 2, "optim": {"staleness": "prediction"}, "pipeline": DOUBLE},
    {"pp": 2, "optim": {"staleness": "extrapolation"}, "pipeline": DOUBLE},
    {"pp": 3, "pipeline": {"gradient_buffers": 1, **DOUBLE}, "train": {"num_steps": 8}},
    {
        "pp": 3,
        "pipeline": {"schedule": "pipedream", "num_microbatches": 1},
        "train": {"num_steps": 8},
    },
    {"pp": 2, "dp": 2, "parallel": {"zero": 1}, "pipeline": DOUBLE, "optim": {"name": "muon"}},
    {"pp": 2, "model": {**NEOX, **DROPOUT}, "pipeline": DOUBLE},
    {"pp": 2, "train": {"dtype": "bf16", "gradient_dtype": "bf16"}, "pipeline": DOUBLE},
]


@pytest.mark.thorough(keep=2)
@pytest.mark.ranks
@pytest.mark.parametrize("sections", RUNS, ids=str)
def test_runs(sections: dict[str, Any]) -> None:
    agree(small(**sections))


EXPERTS = {
    "num_experts": 8,
    "router_topk": 2,
    "expert_ffn_hidden_size": 128,
    "activation": "swiglu",
    "bias": False,
    "router_bias_rate": 0.01,
}


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "sections",
    [
        {"pp": 2, "model": EXPERTS, "pipeline": DOUBLE},
        {"model": EXPERTS, "pipeline": {"recompute": "all"}},
        {"tp": 2, "model": EXPERTS | {"shared_expert_ffn_hidden_size": 64}, **BF16},
        {"pp": 2, "model": EXPERTS | {"moe_layers": "01"}, "pipeline": SPLIT},
    ],
    ids=str,
)
def test_experts_at_the_load_that_comes(sections: dict[str, Any]) -> None:
    """Random tokens are not balanced; the rows of all experts together are as many."""
    agree(small(**sections))


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 3])
def test_experts_of_a_rank(zero: int) -> None:
    """10 %: a rank keeps the rows that come, and random tokens are not balanced."""
    agree(small(dp=2, parallel={"ep": 2, "zero": zero}, model=EXPERTS), tolerance=0.1)


@pytest.mark.thorough
@pytest.mark.ranks
def test_memory_has_a_bound_whatever_routers_choose() -> None:
    """All tokens visit the first two experts, which one of two ranks has: twice the balanced load.
    Half of it is a second round, whose activations are computed again. 3 %: Gloo's thread holds a
    message until a moment after it has arrived."""
    model = EXPERTS | {"num_layers": 4, "seq_length": 256}
    config = small(dp=2, parallel={"ep": 2}, model=model, memory={"expert_load": 1.0})
    bound = predict(JobPlan(config))[0].total
    unbounded = replace(config, memory=replace(config.memory, expert_load=0.0))
    (_, full), _ = run_ranks(peak_at_the_first_experts, 2, unbounded)
    assert full > 1.1 * bound
    for _, peak in run_ranks(peak_at_the_first_experts, 2, config):
        assert peak <= 1.03 * bound


def peak_at_the_first_experts(config: Config) -> tuple[int, int]:
    def choose(scores: Tensor, options: Any, bias: Tensor | None = None) -> moe.Routing:
        experts = torch.arange(options.topk).expand(len(scores), -1).contiguous()
        return moe.Routing(experts, scores.gather(1, experts))

    moe.choose = choose
    return peak_of_run(config)


def test_activations_of_a_v_are_even_over_ranks() -> None:
    """V-Half holds 5 of the 8 micro-batches of 2bw's first rank, on every rank; with the ends of
    the model 0.64."""

    def activations(**pipeline: Any) -> list[int]:
        model = {"num_layers": 16, "hidden_size": 32, "seq_length": 32, "vocab_size": 64}
        return [
            rank.activations
            for rank in predict(
                JobPlan(
                    make(
                        pp=8,
                        model=model,
                        pipeline={
                            "schedule": "2bw",
                            "split_backward": True,
                            "num_microbatches": 9,
                            **pipeline,
                        },
                    )
                )
            )
        ]

    one = activations(split=(3, *[2] * 6, 3))
    two = activations(split=(2, *[1] * 14, 2), stage_layout="v", activations="half")
    assert max(two) <= 0.65 * max(one)
    assert min(two) >= 0.9 * max(two)


@pytest.mark.thorough
@pytest.mark.ranks
def test_sequence_parallelism() -> None:
    sections: dict[str, Any] = {"model": {"kind": "bert"} | DROPOUT, "pipeline": DOUBLE}
    split = small(tp=2, pp=2, parallel={"sequence": True}, **sections)
    agree(split)
    for less, more in zip(
        predict(JobPlan(split)), predict(JobPlan(small(tp=2, pp=2, **sections))), strict=True
    ):
        assert less.activations < more.activations
        assert less.total < more.total


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallelism_keeps_a_part_of_what_every_rank_kept(tp: int) -> None:
    """A layer keeps the outputs of both its norms and the sum between them, besides its input, the
    stage's own."""
    more, less = (
        trace_stage(
            make(tp=tp, model=DROPOUT, parallel={"sequence": on}),
            range(1, 2),
            Recomputation(),
            Buffers(1, 1),
            CPU,
        )
        for on in (False, True)
    )
    u = 4 * 128 * 256 * 4
    assert more.kept - less.kept == pytest.approx(3 * u * (tp - 1) / tp, rel=0.02)
    assert (less.message, less.received) == (u // tp, u // tp)
    assert (more.message, more.received) == (u, u // tp)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_heavy_messages(schedule: str) -> None:
    """Few weights, and large activations in slices, of full size. Gloo's threads may let go of a
    gathered one late."""
    agree(
        make(
            tp=2,
            pp=2,
            model={"vocab_size": 64, "num_layers": 2},
            train={"micro_batch_size": 8},
            pipeline={"schedule": schedule},
        )
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("zero", "pp", "pipeline", "blocks"),
    [
        (0, 1, {"schedule": "1f1b", "num_microbatches": 4}, 4),
        (0, 2, {**DOUBLE, **SPLIT}, 4),
        (1, 2, {"schedule": "1f1b", "num_microbatches": 6}, 3),
        (3, 1, {"schedule": "1f1b", "num_microbatches": 6}, 2),
        (2, 2, {"schedule": "1f1b", "num_microbatches": 4, **SPLIT}, 4),
        (0, 2, {"schedule": "interleaved", "num_microbatches": 4}, 4),
        (0, 2, {"schedule": "gpipe", "num_microbatches": 4}, 1),
    ],
    ids=str,
)
def test_gradients_that_wait_as_factors(
    zero: int, pp: int, pipeline: dict[str, Any], blocks: int
) -> None:
    config = small(
        pp=pp,
        dp=2,
        parallel={"zero": zero},
        pipeline=pipeline,
        **BF16,
        compression={
            "gradients": "sbpca",
            "gradients_smallest": 100,
            "gradients_blocks": blocks,
        },
    )
    agree(config)
    plain = predict(JobPlan(replace(config, compression=UNCOMPRESSED)))
    for more, less in zip(predict(JobPlan(config)), plain, strict=True):
        assert more.gradients < less.gradients or zero > 1


def test_factors_are_held_by_block() -> None:
    """Factors take the same however many blocks there are, one for each micro-batch. Blocks of
    two hold one micro-batch's more, of which some are gone when the second one's activations are most.
    """

    def peak(num_microbatches: int, blocks: int) -> int:
        config = small(
            dp=2,
            pipeline={"schedule": "1f1b", "num_microbatches": num_microbatches},
            compression={
                "gradients": "sbpca",
                "gradients_smallest": 100,
                "gradients_blocks": blocks,
            },
        )
        return predict(JobPlan(config))[0].total

    assert peak(4, 4) == peak(8, 8)
    of_microbatch = (peak(8, 2) - peak(8, 4)) / 2
    assert of_microbatch / 2 < peak(8, 4) - peak(8, 8) <= of_microbatch


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize("gradients", ["powersgd", "sbpca"])
def test_shares_of_compressed_gradients(gradients: str) -> None:
    """sbpca has none to share: what it keeps of gradients is of embeddings, norms and biases."""
    config = small(
        dp=2,
        parallel={"zero": 2},
        pipeline={"schedule": "2bw"},
        compression={"gradients": gradients},
        model={"tie_embeddings": False, "vocab_size": 256},
    )
    agree(config)
    less, more = (
        predict(JobPlan(replace(config, parallel=replace(config.parallel, zero=n))))[0]
        for n in (2, 1)
    )
    if gradients == "sbpca":
        plain = predict(JobPlan(replace(config, compression=UNCOMPRESSED)))[0]
        assert less.gradients == more.gradients < plain.gradients / 2
    else:
        assert less.gradients < 0.95 * more.gradients


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("zero", "pp", "pipeline", "dtype"),
    [(2, 1, {}, "fp32"), (3, 2, {"schedule": "2bw"}, "bf16")],
    ids=str,
)
def test_shared_gradients_and_weights(
    zero: int, pp: int, pipeline: dict[str, Any], dtype: str
) -> None:
    """Two parts of a stage are whole at a time: where it has no more, as the last one here, nothing
    is saved."""
    sections: dict[str, Any] = {
        "pipeline": pipeline,
        "train": {"dtype": dtype},
        "model": {"tie_embeddings": False},
    }
    split = small(pp=pp, dp=2, parallel={"zero": zero}, **sections)
    agree(split)
    for less, more in zip(
        predict(JobPlan(split)),
        predict(JobPlan(small(pp=pp, dp=2, parallel={"zero": 1}, **sections))),
        strict=True,
    ):
        assert less.total < more.total or (pp > 1 and less.total == more.total)
        assert less.gradients == pytest.approx(more.gradients / 2, rel=0.001)
        assert less.weights == pytest.approx(more.weights / (1 + (zero > 2)), rel=0.001)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(("zero", "tied"), [(1, False), (3, True)])
def test_the_replica_that_has_most(zero: int, tied: bool) -> None:
    """LAMB's parameters are not cut, and embeddings are much of this model: the last replica has
    one, or one more."""
    config = small(
        dp=3,
        parallel={"zero": zero},
        optim={"name": "lamb"},
        model={"num_layers": 2, "vocab_size": 4096, "tie_embeddings": tied},
    )
    peaks = [peak for _, peak in run_ranks(peak_of_run, 3, config)]
    assert predict(JobPlan(config))[0].total == pytest.approx(peaks[2], rel=0.02)
    assert max(peaks[:2]) < 0.95 * peaks[2], peaks


@pytest.mark.thorough
@pytest.mark.ranks
def test_shares_in_a_file(tmp_path: Path) -> None:
    """A tied weight's sum ends early where a tier makes room by it; some gradients of a backward
    are new, others not."""
    split = small(dp=2, parallel={"zero": 3}, pipeline={"schedule": "1f1b"}, **BF16)
    config = replace(split, memory=MemoryConfig(budget=7 << 20, folder=str(tmp_path)))
    assert predict(JobPlan(config))[0].total < predict(JobPlan(split))[0].total - (4 << 20)
    agree(config, tolerance=0.02)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_packed_documents(position: str) -> None:
    """First keys and positions of a micro-batch are kept once, by all layers together."""
    packed = small(
        pp=2,
        model={"position": position},
        data={"packing": "stream"},
        pipeline={"schedule": "2bw"},
    )
    agree(packed, tolerance=0.02)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    "sections",
    [
        {"pp": 2, "model": {"position": "rotary"} | DROPOUT, "pipeline": {"schedule": "2bw"}},
        {"tp": 2, "parallel": {"zero": 1, "sequence": True}, "data": {"packing": "stream"}},
        {"parallel": {"cp_comm": "ring"}, "model": {"position": "rotary"}},
        {"parallel": {"cp_comm": "ulysses"}, "data": {"packing": "stream"}},
    ],
    ids=str,
)
def test_samples_shared_by_ranks(sections: dict[str, Any]) -> None:
    """Each rank keeps half of everything, and with gathers the keys and values of all."""
    parallel = {"cp": 2} | sections.pop("parallel", {})
    shared = small(parallel=parallel, **sections)
    agree(shared, tolerance=0.02)
    parallel = replace(shared.parallel, cp=1)
    for less, more in zip(
        predict(JobPlan(shared)), predict(JobPlan(replace(shared, parallel=parallel))), strict=True
    ):
        assert less.activations < 0.7 * more.activations


def watched(config: Config) -> Any:
    parallel = config.parallel
    grid = ProcessGrid(pp=parallel.pp, dp=parallel.dp)
    watch = MemoryWatch(JobPlan(config), CPU)
    loader = BatchLoader(
        SyntheticSamples(config.model, padding=False),
        micro_batch_size=4,
        num_microbatches=4,
        dp_rank=grid.dp.rank,
        dp_size=grid.dp.size,
    )
    engine = Engine(JobPlan(config), grid, CPU)
    engine.train(watch.loader(loader), config.train.num_steps, lambda step: None)
    return watch.compare(grid)


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_run_is_watched_until_its_peak() -> None:
    config = small(pp=2, dp=2, pipeline={"schedule": "2bw"}, train={"num_steps": 9})
    first, *others = run_ranks(watched, 4, config)
    assert all(comparison == first for comparison in others)
    assert first.predicted == tuple(stage.total for stage in predict(JobPlan(config)))
    assert first.measured == pytest.approx(first.predicted, rel=0.05)
    assert str(first).startswith("peak memory of a process on stage ")
    assert first.as_json()["measured"] == list(first.measured)


def test_every_dtype_of_the_configuration_has_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        matmul, "_has_fast_instructions", lambda dtype: True
    )  # else some need copies in float32
    monkeypatch.setattr(
        matmul, "_onednn", lambda: matmul._OneDNN(math.inf, math.inf)
    )  # else float32 needs more
    totals = {dtype: predict(JobPlan(make(train={"dtype": dtype})))[0].total for dtype in DTYPES}
    assert totals["fp64"] == pytest.approx(2 * totals["fp32"], rel=0.01)
    assert totals["fp16"] == pytest.approx(totals["bf16"], rel=0.01)
