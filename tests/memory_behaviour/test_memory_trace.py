"""Predicted memory events are those that a run records; and peak where predicted memory does, to
the byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from train.runs import run_job, write_config

from benchmarks.user_models import Images
from hybridpar.comm.ranks import run_on_ranks
from hybridpar.config import Config, from_mapping, load_toml
from hybridpar.errors import ConfigError
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.job import JobPlan
from hybridpar.memory_behaviour.analysis.behaviour import analyse
from hybridpar.memory_behaviour.analysis.excerpt import Times, retimed, simulated_times
from hybridpar.memory_behaviour.events import Category, Header, Span, What, lives
from hybridpar.memory_behaviour.recording import memory_trace
from hybridpar.memory_behaviour.recording.extended_trace import NotAlikeError, Stretch, extend
from hybridpar.memory_behaviour.recording.memory_trace import (
    EngineRecorder,
    SampleLoader,
    predict_timed_trace,
    predict_trace,
)
from hybridpar.memory_behaviour.trace_file import read_trace
from hybridpar.prediction import StageMemory, predict
from hybridpar.prediction.predict import batches_to_peak
from hybridpar.schedules.action import Action
from hybridpar.schedules.passes.lowering import lower
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.train.engine import Engine
from hybridpar.train.forecasts.preview import preview
from hybridpar.validate import resolve

CPU = torch.device("cpu")
MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 15, "vocab_size": 96}
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
SPLIT = {"split_backward": True}
STAGE = {"recompute": "stage"}

CASES: list[tuple[dict[str, Any], ...]] = [
    # parallel, pipeline, model, train, and other sections where there are any
    ({}, {"recompute": "all"}, DROPOUT, {"dtype": "bf16"}),
    ({"pp": 2}, {"schedule": "gpipe", "recompute": "1"}, {}, {}),
    ({"pp": 2}, {"schedule": "1f1b"}, {"kind": "bert", **DROPOUT}, {}),
    ({"pp": 2}, {"schedule": "2bw", **SPLIT}, {"logits_chunk": 10}, {}),
    ({"pp": 2}, {"schedule": "pipedream"}, {"tie_embeddings": False, **DROPOUT}, {"dtype": "bf16"}),
    ({"pp": 2}, {"schedule": "interleaved", **STAGE}, {}, {}),
    (
        {"tp": 2, "sequence": True},
        {"recompute": "selective", **SPLIT},
        {"kind": "bert", **DROPOUT},
        {"dtype": "bf16"},
    ),
    ({"tp": 2, "sequence": True}, STAGE, DROPOUT, {}),
    ({"dp": 2, "pp": 2, "zero": 1}, {"schedule": "interleaved", **SPLIT}, {}, {"dtype": "bf16"}),
    ({"pp": 2}, {"zero_bubble": True, **SPLIT}, DROPOUT, {}),
    (
        {"pp": 2},
        {"schedule": "2bw"},
        {},
        {},
        {"compression": {"messages": "int8", "messages_backward": "bf16"}},
    ),
    (
        {"pp": 2},
        {"schedule": "2bw", "stage_layout": "v", "activations": "half", **SPLIT, **STAGE},
        {},
        {},
    ),
    ({"tp": 2, "pp": 2}, {"schedule": "2bw"}, {}, {}, {"compression": {"messages": "dct"}}),
    ({"dp": 2, "zero": 2}, {}, {}, {"dtype": "bf16"}),
    ({"dp": 2, "pp": 2, "zero": 3}, {"schedule": "2bw", **SPLIT}, DROPOUT, {"dtype": "bf16"}),
    (
        {"pp": 3},
        {"schedule": "2bw"},
        {"num_layers": 3},
        {},
        {"memory": {"offload_activations": [2, 1, 0]}},
    ),
    (
        {"dp": 2, "zero": 3},
        {},
        {},
        {},
        {"compression": {"gradients": "int8", "gradients_smallest": 100}},
    ),
    (
        {"dp": 2, "pp": 2},
        {"schedule": "2bw", **SPLIT},
        {},
        {"dtype": "bf16"},
        {"compression": {"gradients": "powersgd", "gradients_rank": 2, "gradients_smallest": 100}},
    ),
    ({}, {}, {}, {"dtype": "bf16"}, {"memory": {"host_optimizer": True}}),
    (
        {"dp": 2},
        {"schedule": "2bw"},
        {"tie_embeddings": False},
        {},
        {"memory": {"host_optimizer": True}},
    ),
]
ALIKE = [(CASES[2], 18), (CASES[1], 25), (CASES[3], 26), (CASES[4], 25), (CASES[5], 41)]
"""Cases whose batches are long enough to be extended, and their micro-batches: 1f1b, gpipe, 2bw,
pipedream, interleaved."""
SHARED: list[tuple[dict[str, Any], ...]] = [  # of which only the peak is compared
    (
        {"dp": 2, "zero": 3},
        {"schedule": "gpipe", **SPLIT},
        {"tie_embeddings": False},
        {"dtype": "bf16"},
    ),
    ({"dp": 2, "pp": 2, "zero": 3}, {"schedule": "interleaved", **SPLIT, **STAGE}, {}, {}),
    (
        {"dp": 2, "pp": 2, "zero": 3},
        {"schedule": "2bw", "stage_layout": "v", "activations": "half", **SPLIT},
        {},
        {},
    ),
    (
        {"dp": 2, "tp": 2, "pp": 2, "zero": 3},
        {"recompute": "selective"},
        DROPOUT,
        {"dtype": "bf16"},
    ),
    ({"dp": 3, "zero": 3}, {**SPLIT}, {"kind": "bert", "logits_chunk": 10}, {"dtype": "bf16"}),
]


def config_of(case: tuple[dict[str, Any], ...], num_microbatches: int = 4) -> Config:
    parallel, pipeline, model, train, *more = case
    num_ranks = parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("dp", 1)
    plain = {
        "model": MODEL | model,
        "parallel": parallel,
        "pipeline": {"num_microbatches": num_microbatches} | pipeline,
        "train": {"micro_batch_size": 2, "num_steps": 10, "device": "cpu"} | train,
    }
    return resolve(from_mapping(plain | (more[0] if more else {})), num_ranks)


def record(config: Config, steps: int) -> list[Span]:
    """The events of the first steps on this rank."""
    torch.set_num_threads(1)
    spans: list[Span] = []
    engine = Engine(JobPlan(config), ProcessGrid(sizes_of(config.parallel)), CPU)
    loader = SampleLoader(config)
    recorder = EngineRecorder(engine, spans.append)
    with recorder.active():
        engine.train(recorder.loader(loader), steps, lambda result: None)
    recorder.close()
    engine.moves.activations.tier.close()
    return spans


def told(spans: list[Span]) -> tuple[list[tuple[object, ...]], set[int]]:
    """All that is to be equal: events without times; and of blocks that a thread may still hold, of
    Gloo's collectives or one that has read it from a file, where they were given back, to a step.
    What ZeRO's plan gives back is not."""
    names = {e.block: e.name for s in spans for e in s.events if e.what is What.MALLOC}
    held = {
        e.block
        for s in spans
        for e in s.events
        if e.op.startswith("c10d::") and e.op not in _MESSAGES
    }
    held -= {block for block in held if names[block].startswith(("weights", "gradients"))}
    held |= {block for block, name in names.items() if name == "activations"}
    events = [
        (s.step, s.action, *e._replace(time=0.0))
        for s in spans
        for e in s.events
        if e.what is not What.FREE or e.block not in held
    ]
    freed = {e.block for s in spans for e in s.events if e.what is What.FREE and e.block in held}
    return events, freed


_MESSAGES = ("c10d::send", "c10d::recv_")


def assert_peak(predicted: list[Span], stage: StageMemory, tolerance: float = 0.0) -> None:
    """The trace's peak is that of predicted memory, to the byte, apart from losses and norms.
    tolerance: of messages of compressed gradients the prediction has the room, and not what
    encoding takes."""
    numbers = {
        life.block: life.num_bytes for life in lives(predicted) if life.category is Category.OTHER
    }
    now = peak = 0
    for event in (e for span in predicted for e in span.events if e.block not in numbers):
        now += event.num_bytes * ((event.what is What.MALLOC) - (event.what is What.FREE))
        peak = max(peak, now)
    assert peak == pytest.approx(stage.total - stage.checkpoint, rel=tolerance, abs=0)
    assert max(numbers.values()) < 100


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_trace_equals_a_recorded_one_and_its_peak_the_predicted_memory(
    case: tuple[dict[str, Any], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where activations go
    config = config_of(case, 3)
    num_ranks = config.parallel.num_ranks
    steps = max(3, batches_to_peak(JobPlan(config)))
    measured = run_on_ranks(record, num_ranks, config, steps)
    each = num_ranks // config.parallel.pp
    peaks = dict(
        zip(range(0, num_ranks, each), predict(JobPlan(config)), strict=True)
    )  # of the first rank of each stage
    for rank in sorted({*peaks, num_ranks - 1}):
        _, predicted = predict_trace(config, rank, steps=steps)
        if rank in peaks:
            assert_peak(predicted, peaks[rank], 0.03 * config.feeds_back)
        (events, freed), (expected, also) = told(measured[rank]), told(predicted)
        for i, (one, other) in enumerate(zip(events, expected, strict=False)):
            assert one == other, (rank, i)
        assert len(events) == len(expected)
        moving = {
            span.action[:4]
            for span in predicted
            for e in span.events
            if e.what is What.FREE and e.name == ""
        }
        assert ("EVIC" in moving) == (rank == 0 and config.memory.num_away != 0)
        assert ("RELE" in moving) == (config.parallel.zero > 2)
        last = {
            life.block for life in lives(predicted) if life.born_step == steps
        }  # which may be on its way still
        assert freed <= also <= freed | last


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("case", SHARED, ids=str)
def test_memory_shared_by_replicas_peaks_as_predicted(case: tuple[dict[str, Any], ...]) -> None:
    config = config_of(case, 3)
    each = config.parallel.num_ranks // config.parallel.pp
    for rank, stage in enumerate(predict(JobPlan(config))):
        assert_peak(
            predict_trace(config, rank * each, steps=max(3, batches_to_peak(JobPlan(config))))[1],
            stage,
        )


def in_full(config: Config, rank: int, times: Times, steps: int) -> tuple[Header, list[Span]]:
    """The trace of all micro-batches."""
    header, spans = predict_trace(config, rank, steps=steps)
    return header, list(retimed(spans, times))


def compared_stretches(
    config: Config, steps: int, monkeypatch: pytest.MonkeyPatch
) -> list[Stretch]:
    """Compare the trace of each stage with the trace of all micro-batches; return what was
    extended."""
    traced: list[Stretch] = []

    def noted(*args: Any) -> list[Span]:
        spans = extend(*args)
        traced.append(args[3])
        return spans

    monkeypatch.setattr(memory_trace, "extend", noted)
    each = config.parallel.num_ranks // config.parallel.pp
    for rank in range(0, config.parallel.num_ranks, each):
        times = simulated_times(preview(JobPlan(config), steps).timeline, rank // each)
        found = predict_timed_trace(config, rank, times, steps=steps)
        assert found == in_full(config, rank, times, steps)
    return traced


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "m"), ALIKE, ids=str)
def test_a_long_trace_is_a_short_one_extended(
    case: tuple[dict[str, Any], ...], m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Event by event, block by block, on every stage."""
    config = config_of(case, m)
    traced = compared_stretches(config, 3, monkeypatch)
    assert len(traced) == config.parallel.pp
    assert all(stretch.short < stretch.long == m for stretch in traced)


@pytest.mark.parametrize(
    ("case", "m"),
    [
        (({"pp": 2}, {"schedule": "1f1b", "zero_bubble": True, **SPLIT}, {}, {}), 6),
        # with sequence parallelism the first norm makes an index that later ones use
        (({"pp": 2, "tp": 2, "sequence": True}, {"schedule": "1f1b"}, {}, {}), 6),
        pytest.param(CASES[5], 41, marks=pytest.mark.thorough),
        pytest.param(CASES[8], 8, marks=pytest.mark.thorough),
        pytest.param(({"dp": 2}, {"schedule": "gpipe"}, {}, {}), 3, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_equal_batches_of_a_pipeline_that_drains_are_traced_once(
    case: tuple[dict[str, Any], ...], m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(case, m)
    traced = compared_stretches(config, 5, monkeypatch)
    assert [stretch.batches for stretch in traced] == [(3, 5)] * config.parallel.pp


@pytest.mark.thorough
def test_short_batches_and_state_that_moves_are_traced_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_trace, "extend", lambda *_: pytest.fail("it was extended"))
    for case, m in ((CASES[2], 4), (({"dp": 2, "zero": 3}, {}, {}, {}), 14)):
        config = config_of(case, m)
        assert predict_timed_trace(config, 0, {}) == in_full(config, 0, {}, 2)


def test_a_trace_whose_micro_batches_differ_is_not_extended() -> None:
    """An equal plan, but the operators of one micro-batch in between are others."""
    config = config_of(CASES[2], 12)
    done: list[Action] = []
    _, spans = predict_trace(config, steps=2, done=done)
    long = list(lower(JobPlan(config).schedule, PipelineShape(2, 40), 0, 0, 2))
    stretch = Stretch(12, 40, 4, 1)
    assert extend(spans, done, long, stretch, {})
    (place,) = [i for i, span in enumerate(spans) if span.action.startswith("F5@")]
    other = [event._replace(op="aten::other") for event in spans[place].events]
    changed = [*spans[:place], replace(spans[place], events=other), *spans[place + 1 :]]
    with pytest.raises(NotAlikeError, match=r"F.* differs from micro-batch to micro-batch"):
        extend(changed, done, long, stretch, {})
    with pytest.raises(NotAlikeError, match="another action"):
        extend(spans, done, [*long[:50], *long[60:]], stretch, {})


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("gradients", ["dct", "sbpca"])
def test_gradients_whose_numbers_decide_are_not_predicted(gradients: str) -> None:
    config = config_of(({"dp": 2}, {}, {}, {}, {"compression": {"gradients": gradients}}))
    with pytest.raises(ConfigError, match=r"depend on the values .*try powersgd"):
        predict_trace(config)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(("name", "size", "share"), [("alexnet", 63, 0.15), ("resnet18", 32, 0.25)])
def test_models_of_users_repeat_from_iteration_1_on_and_are_predicted(
    name: str, size: int, share: float
) -> None:
    """Shapes that Li et al. (ISPASS 2021) trained, thin ones. share: what intermediates are of the
    peak at batch 8, at least. Clipped gradients would have events of their own."""

    def config(batch: int) -> Config:
        return resolve(
            replace(
                from_mapping(
                    {
                        "pipeline": {"num_microbatches": 1},
                        "optim": {"name": "sgd", "clip_grad": 0.0},
                        "train": {"micro_batch_size": batch, "device": "cpu"},
                    }
                ),
                model=Images(name, 4, size),
            ),
            1,
        )

    def intermediates(spans: list[Span]) -> float:
        peak = analyse(spans).peak
        plain = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER, Category.BATCH)
        return 1 - sum(peak.by_category.get(category, 0) for category in plain) / peak.num_bytes

    predicted = predict_trace(config(8), steps=3)[1]
    assert analyse(predicted).stable_from == 2  # steps count from 1, iterations from 0
    assert told(record(config(8), 3))[0] == told(predicted)[0]
    assert share < intermediates(predicted) < intermediates(predict_trace(config(64), steps=2)[1])


def test_each_weight_gradient_and_moment_has_intervals_of_its_own() -> None:
    """A step reads a weight in F0, B0, F1, B1 and UPDATE, and its gradient in B0, B1, NORM and
    UPDATE: over two steps these are 9 and 7 intervals, and 1 of each moment."""
    config = config_of(({}, {}, {"num_layers": 1, "tie_embeddings": False}, {}), 2)
    predicted = predict_trace(config, steps=2)[1]
    found = Counter(
        after.tensor for life in lives(predicted) for _, after in life.intervals() if after.tensor
    )
    weight = "blocks.1.mlp.up.weight"
    expected = {"weights/0/{}": 9, "gradients/0/{}": 7}
    expected |= {"optimizer/{}.exp_avg": 1, "optimizer/{}.exp_avg_sq": 1}
    assert {name: found[name.format(weight)] for name in expected} == expected
    engine = Engine(JobPlan(config), ProcessGrid(), CPU)
    parameters = engine.state.placements
    assert set(found) == {name.format(parameter) for name in expected for parameter in parameters}
    # flat buffers hold the parameters one after the other, each once
    sizes = {
        (event.name, event.num_bytes)
        for span in predicted
        for event in span.events
        if event.name.startswith("weights/")
    }
    elements = sum(leaf.numel() for leaf in engine.state.weights.leaves[0].values())
    assert sum(num_bytes for _, num_bytes in sizes) == 4 * elements


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recording_changes_no_number(dtype: str) -> None:
    config = config_of(({}, {"recompute": "1"}, DROPOUT, {"dtype": dtype}))
    loader = SampleLoader(config)
    plain, recorded = (Engine(JobPlan(config), ProcessGrid(), CPU) for _ in range(2))
    plain.train(loader, 4, lambda result: None)
    recorder = EngineRecorder(recorded, lambda span: None)
    with recorder.active():
        recorded.train(recorder.loader(loader), 2, lambda result: None)
    recorder.close()
    recorded.train(loader, 2, lambda result: None)
    expected = plain.state.tensors()
    for name, tensor in recorded.state.tensors().items():
        assert torch.equal(tensor, expected[name]), name


def stand_at_dispatch() -> tuple[bool, bool]:
    """Whether an observer in C++ does, and one in Python."""
    return torch._C._dispatch_tls_is_dispatch_key_included(
        "Fake"
    ), _get_current_dispatch_mode() is not None


def test_off_leaves_nothing_behind() -> None:
    config = config_of(({}, {}, {}, {}))
    engine = Engine(JobPlan(config), ProcessGrid(), CPU)
    recorder = EngineRecorder(engine, lambda span: None)
    with recorder.active():
        engine.train(recorder.loader(SampleLoader(config)), 1, lambda result: None)
        assert engine.executor.listeners
        assert any(stand_at_dispatch())
    recorder.close()
    assert not engine.executor.listeners
    assert not any(stand_at_dispatch())
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for block in engine.stage.blocks.values()
        for module in block.modules()
    )


@pytest.mark.thorough
def test_a_batch_of_another_size_is_another_trace() -> None:
    config = config_of(({}, {}, {}, {}))
    larger = replace(config, train=replace(config.train, micro_batch_size=3))
    assert told(predict_trace(config)[1]) != told(predict_trace(larger)[1])


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_run_writes_what_is_predicted(tmp_path: Path) -> None:
    path = write_config(tmp_path, "1f1b")
    grid = {"pp": 1, "dp": 2, "zero": 3}
    flags = [f"--parallel.{key}={value}" for key, value in grid.items()]
    run_job(
        2, "train", path, *flags, "--train.record_memory=4", "--train.save_interval=0"
    )  # evaluates after 3 of 6
    config = resolve(from_mapping({"parallel": grid}, load_toml(path)), 2)
    for rank in range(2):
        header, spans = read_trace(tmp_path / "runs" / "run" / "memory" / f"rank{rank}.jsonl")
        measured = list(spans)
        assert (header.rank, header.predicted) == (rank, False)
        assert header.place == {"pp": 0, "dp": rank, "tp": 0}
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(measured))
        expected = told(predict_trace(config, rank, steps=3)[1])[0]  # whose end is a drain, too
        assert told(measured)[0][: len(expected)] == expected
        assert {span.step for span in measured if span.action.startswith("UPDATE")} == {1, 2, 3, 4}
