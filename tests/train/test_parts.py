"""The pieces of a run on their own: logs, clocks, traces, messages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridpar import ops
from hybridpar.config import Config
from hybridpar.errors import DataError
from hybridpar.flight import Record
from hybridpar.grid import Axis
from hybridpar.job import JobPlan
from hybridpar.runtime.recording import Event, Recording
from hybridpar.schedules.action import Action, Kind
from hybridpar.train.faults.errors import LostContactError, RankError, describe_failure
from hybridpar.train.forecasts.preview import stage_costs
from hybridpar.train.reporting import peak as peak_module
from hybridpar.train.reporting.log import RunLog
from hybridpar.train.reporting.peak import peak_flops
from hybridpar.train.reporting.plot import plot_loss, smooth
from hybridpar.train.reporting.progress import PlainReporter, Reporter
from hybridpar.train.reporting.run_metrics import BatchClock, read_metrics
from hybridpar.train.reporting.trace import (
    RankEvents,
    Recorder,
    draw_executed,
    executed,
    last_batches,
    write_trace,
)


def test_metrics_say_null_for_what_is_not_finite_and_forget_what_comes_after_a_resumed_step(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = RunLog(tmp_path, 0, Reporter(), writes=True)
    for step in range(1, 5):
        log.write(
            {
                "step": step,
                "loss": float("nan") if step == 2 else 1.5,
                "losses": {"a": float("inf")},
            }
        )
    log.close()
    assert read_metrics(path)[1] == {"step": 2, "loss": None, "losses": {"a": None}}
    path.write_text(path.read_text() + '{"step": 5, "loss"')
    log = RunLog(tmp_path, 3, Reporter(), writes=True)
    log.write({"step": 4, "loss": 9.0})
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [
        (1, 1.5),
        (2, None),
        (3, 1.5),
        (4, 9.0),
    ]
    RunLog(tmp_path, 0, Reporter(), writes=True)
    assert read_metrics(path) == []


def test_a_batch_lasts_until_the_next_begins() -> None:
    loader: Any = SimpleNamespace(
        first_sample=lambda index: index,
        num_targets=lambda batch: 1,
        microbatch=lambda batch, index: {},
    )
    clock = BatchClock(loader)
    start = time.perf_counter()
    clock.microbatch(0, 0)
    time.sleep(0.05)
    clock.microbatch(0, 1)
    clock.microbatch(1, 0)
    next_began = time.perf_counter()
    time.sleep(0.1)
    assert 0.05 <= clock.seconds(0) <= next_began - start
    assert clock.seconds(1) >= 0.1
    clock.stop()


@pytest.mark.parametrize("size", [1, 2, 3, 50, 2000])
def test_smoothing_keeps_a_constant_and_a_trend(size: int) -> None:
    np.testing.assert_allclose(smooth(np.full(size, 3.0)), 3.0)
    np.testing.assert_allclose(
        smooth(np.linspace(10, 0, size)), np.linspace(10, 0, size), atol=1e-9
    )


def test_the_smoothed_loss_does_not_lag_behind_and_is_smooth() -> None:
    steps = np.arange(1000)
    loss = 2.5 + 7 * np.exp(-steps / 12)
    noisy = loss + 0.1 * np.random.default_rng(0).standard_normal(1000)
    line = smooth(noisy)
    assert abs(line[30] - loss[30]) < 0.15
    assert np.abs(line - loss)[5:].max() < 0.35
    assert np.abs(line - loss)[100:-20].max() < 0.1 < np.abs(noisy - loss)[100:-20].max() / 2


def test_the_legend_names_what_each_line_ends_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    savefig = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, path: (drawn.append(self), savefig(self, path))
    )
    losses = 3 + np.array([0.5, -0.5] * 50)
    rows = [{"step": i, "loss": float(x)} for i, x in enumerate(losses)] + [
        {"step": 99, "val_loss": 3.25}
    ]
    plot_loss(rows, tmp_path / "loss.png", "a run")
    (axes,) = drawn[0].axes
    for line, text in zip(axes.get_lines()[1:], axes.get_legend().get_texts(), strict=True):
        assert f"{line.get_ydata()[-1]:.3f} at the end" in text.get_text()


@pytest.mark.full_report
def test_the_peak_is_measured_in_plausible_units() -> None:
    peak, source = peak_flops(Config(), torch.device("cpu"), Axis("world"))
    assert 1e6 < peak < 1e14
    assert "fp32" in source


@pytest.mark.full_report
def test_the_peak_is_that_of_the_fastest_product_of_a_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other work on the machine slows some down; a mean would be passed by training itself."""
    sizes = [1024]
    monkeypatch.setattr(peak_module, "_PROBE_SIZES", {"cpu": sizes})
    now, seconds = [0.0], iter([0.5, 0.002, 0.004, 0.001, 0.2, *[0.01] * 10_000])

    def product(*factors: Tensor) -> None:
        now[0] += next(seconds)

    monkeypatch.setattr(peak_module, "_PROBE_SECONDS", 1.0)
    monkeypatch.setattr(peak_module.matmul, "linear", product)
    monkeypatch.setattr(peak_module.time, "perf_counter", lambda: now[0])
    assert peak_flops(Config(), torch.device("cpu"), Axis("world"))[0] == pytest.approx(
        2 * max(sizes) ** 3 / 0.001
    )


def events_of(stage: int, *actions: tuple[Kind, int, float, float]) -> RankEvents:
    made = tuple(Event(Action(kind, stage, k), start, end) for kind, k, start, end in actions)
    return RankEvents(stage, f"rank {stage}", (0, 0), stage, made)


def two_stages() -> list[RankEvents]:
    """Stage 1 has posted its receives; it waits for F0 but not for F1."""
    first = events_of(
        0,
        (Kind.F, 0, 0.0, 0.5),
        (Kind.SEND_F, 0, 0.5, 0.51),
        (Kind.F, 1, 0.51, 1.0),
        (Kind.SEND_F, 1, 1.0, 1.01),
    )
    posts = events_of(1, (Kind.RECV_F, 0, 0.0, 0.1), (Kind.RECV_F, 1, 0.1, 0.2)).events
    forwards = (
        Event(Action(Kind.F, 1, 0), 0.2, 2.0, ((0.2, 0.6),)),
        Event(Action(Kind.F, 1, 1), 2.0, 3.0),
    )
    return [first, RankEvents(1, "rank 1", (0, 0), 1, (*posts, *forwards))]


def test_a_trace_has_actions_waits_transfers_and_arrows(tmp_path: Path) -> None:
    write_trace(two_stages(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = {(e["pid"], e["tid"], e["name"]): e for e in events if e["ph"] == "X"}
    assert {name for pid, tid, name in slices if (pid, tid) == (1, 0)} == {
        "RECV_F0@1",
        "RECV_F1@1",
        "F0@1",
        "F1@1",
        "idle: F0@1 waits for the activation",
    }
    idle = slices[1, 0, "idle: F0@1 waits for the activation"]
    assert (idle["ts"], idle["dur"]) == (0.2e6, pytest.approx(0.4e6))
    # on its way until it was seen to be there; where nobody waited, as long as where somebody did
    # (0.1 s)
    assert slices[0, 1, "SEND_F0@0"]["dur"] == pytest.approx(0.09e6)
    assert slices[0, 1, "SEND_F1@0"]["dur"] == pytest.approx(0.09e6)
    start, end = (next(e for e in events if e["ph"] == phase) for phase in "sf")
    assert (start["pid"], end["pid"]) == (0, 1)
    assert (start["ts"], end["ts"]) == (0.5e6, 0.6e6)


def test_a_send_that_waits_for_earlier_ones_was_sent_before_that() -> None:
    first, second = two_stages()
    send = Event(Action(Kind.SEND_F, 0, 0), 0.5, 0.9, ((0.51, 0.85),), own=0.01)
    timeline = executed([replace(first, events=(first.events[0], send, *first.events[2:])), second])
    assert (timeline.starts[0][1], timeline.returns[0][1], timeline.ends[0][1]) == (0.5, 0.51, 0.6)


def test_the_picture_shows_idle_time_and_transfers() -> None:
    svg = draw_executed(two_stages(), "as it ran")
    assert "as it ran" in svg
    assert "time in milliseconds" in svg
    assert 'width="1200"' in svg
    assert "SEND_F1@0: activation of micro-batch 1 on its way, 1000 to 1100" in svg
    timeline = executed(two_stages())
    assert timeline.busy(1) == pytest.approx(0.2 + 1.4 + 1.0)
    assert timeline.idle_share(1) == pytest.approx(0.4 / 3)


def test_reductions_and_gathers_end_when_they_were_seen_to() -> None:
    reduce = Action(Kind.REDUCE, 0, 0)
    norm = Action(Kind.NORM, 0, 0)
    update = Action(Kind.UPDATE, 0, 0, 1)
    rank = RankEvents(
        0,
        "rank 0",
        (0, 0),
        0,
        (
            Event(reduce, 0.0, 0.1, over=0.7),
            Event(norm, 0.8, 0.9, over=1.5),
            Event(update, 1.0, 2.0, ((1.0, 1.5),), over=2.5),
        ),
    )
    assert executed([rank]).ends[0] == [0.7, 1.5, 2.0]
    assert executed([rank], gathers=True).ends[0] == [0.7, 1.5, 2.5]


def test_pictures_show_the_last_batches_and_begin_at_0() -> None:
    first, second = two_stages()
    update = Event(Action(Kind.UPDATE, 1, 0, 1), 1.5, 1.8)
    late = RankEvents(1, "rank 1", (0, 0), 1, (*second.events[:3], update, second.events[3]))
    shown = last_batches([first, late], 0)
    assert [[str(e.action) for e in r.events] for r in shown] == [
        [str(e.action) for e in first.events],
        ["F1@1"],
    ]
    assert shown[1].events[0].start == 2.0
    assert last_batches([late], 0)[0].events[0].start == 0.0
    assert last_batches([first, late], 1) == [first, late]


class Executing:
    """The executor that a recorder sees."""

    def __init__(self, num_microbatches: int = 4):
        self.recording: Recording | None = None
        self.num_microbatches = num_microbatches
        self.transport = SimpleNamespace(device=torch.device("cpu"))
        self.stages = dict[int, Any]()

    def record(self, recording: Recording | None) -> None:
        self.recording = recording

    def run(self, recorder: Recorder, batches: range) -> list[int]:
        """Runs one action a batch; returns the batches that were recorded."""
        for batch in batches:
            recording = self.recording
            if recording is not None:
                recording.begin()
            recorder.after_step(batch + 1)
            if recording is not None:
                recording.end(Action(Kind.UPDATE, 0, batch))
        recorder.close()
        return [e.action.microbatch for e in recorder.events]


@pytest.mark.parametrize(
    ("num_batches", "num_microbatches", "skip", "expected"),
    [
        (30, 4, 0, range(13, 28)),
        (30, 4, 5, range(18, 33)),
        (6, 4, 0, range(12, 15)),
        (1, 4, 0, range(10, 10)),
        (40, 200, 0, range(13, 17)),
        (40, 5000, 0, range(13, 15)),
    ],
)
def test_the_recorder_takes_whole_batches_after_a_warm_up(
    num_batches: int, num_microbatches: int, skip: int, expected: range
) -> None:
    executor: Any = Executing(num_microbatches)
    recorder = Recorder(executor, 10, num_batches, skip=skip)
    assert (executor.recording is not None) == (num_batches == 1), (
        "only the shortest has no warm-up"
    )
    assert executor.run(recorder, range(10, 10 + num_batches)) == list(expected)
    assert executor.recording is None


def test_a_lost_neighbour_is_one_line_and_a_defect_keeps_its_traceback() -> None:
    gloo = RuntimeError(
        "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:7130"
    )
    doing = Record(
        5, 0.0, "training", True, "F", 1, 37, 2, who={"rank": 1, "axes": {"dp": [0, 1, 3]}}
    )
    lost = describe_failure(gloo, "rank 1", doing)
    assert isinstance(lost, LostContactError)
    assert str(lost) == "rank 1 lost contact with another rank during F37@1v2"
    lost = describe_failure(gloo, "rank 1", replace(doing, operation="recv", axis="pp", peer=0))
    assert (
        str(lost)
        == "rank 1 lost contact with rank 0 during F37@1v2, waiting for recv over pp with rank 0"
    )
    lost = describe_failure(gloo, "rank 1", replace(doing, operation="all_reduce", axis="dp"))
    assert str(lost) == (
        "rank 1 lost contact with another rank during F37@1v2, waiting for all_reduce over dp with "
        "ranks 0, 3"
    )
    lost = describe_failure(gloo, "rank 1", replace(doing, phase="connecting"))
    assert "; between hosts, GLOO_SOCKET_IFNAME (with GPUs NCCL_SOCKET_IFNAME) names" in str(lost)
    alone = describe_failure(DataError("corpus.bin: is damaged"), "rank 2")
    assert (str(alone), type(alone)) == ("rank 2: corpus.bin: is damaged", RankError)
    assert "ValueError: our mistake" in str(describe_failure(ValueError("our mistake"), "rank 3"))


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**50),
        lambda: [None] * 2**60,
        lambda: ops.rms_norm(torch.ones(1).expand(2**45, 64), torch.ones(64)),
    ],
    ids=["torch", "Python", "an operator"],
)
def test_memory_that_is_not_there_is_one_line(allocate: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    said = str(
        describe_failure(caught.value, "rank 1", Record(5, 0.0, "training", True, "F", 1, 37, 2))
    )
    assert said.startswith("rank 1 is out of memory during F37@1v2: ")
    assert "memory.limit" in said
    assert "\n" not in said


def test_other_lacks_of_memory_are_one_line() -> None:
    loader = "_image.so: failed to map segment from shared object"
    for error in (RuntimeError("could not create a primitive"), ImportError(loader)):
        assert str(describe_failure(error, "rank 1")).startswith(
            f"rank 1 is out of memory: {error}; a smaller"
        )
    for error in (
        RuntimeError("could not create a primitive descriptor for a matmul primitive"),
        ImportError(f"{loader}: Operation not permitted"),
    ):
        assert str(describe_failure(error, "rank 1")).startswith("rank 1 failed:\n")


def test_plain_lines_come_at_most_every_other_second(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = PlainReporter(100)
    row = {
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_s": 1e4,
        "step_ms": 3.0,
        "mfu": 0.5,
        "memory_mib": 9.0,
    }
    for step in range(1, 101):
        reporter.step({"step": step, **row})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "100/100"]
    assert "MFU 50.0 %" in lines[0]


def test_recomputed_layers_cost_their_stage_a_forward() -> None:
    from hybridpar.config import Config, ModelConfig, ParallelConfig, PipelineConfig

    parts = {"model": ModelConfig(num_layers=2), "parallel": ParallelConfig(pp=2)}
    plain = stage_costs(JobPlan(Config(**parts, pipeline=PipelineConfig(split=(2, 2)))))
    again = stage_costs(
        JobPlan(Config(**parts, pipeline=PipelineConfig(split=(2, 2), recompute="0")))
    )
    assert max(plain.forward) == 1
    assert [a - b for a, b in zip(again.backward, plain.backward, strict=True)] == pytest.approx(
        [plain.forward[0], 0]
    )
    whole = stage_costs(
        JobPlan(Config(**parts, pipeline=PipelineConfig(split=(2, 2), recompute="stage:1")))
    )
    assert [a - b for a, b in zip(whole.backward, plain.backward, strict=True)] == pytest.approx(
        [0, plain.forward[1]]
    )
