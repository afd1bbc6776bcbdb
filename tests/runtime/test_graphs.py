"""Micro-batches as CUDA graphs: the same losses and weights, to the bit, as run kernel by
kernel."""

from __future__ import annotations

import runpy
from collections import Counter
from dataclasses import dataclass, replace
from io import StringIO
from logging import StreamHandler, getLogger
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
from fake_cuda import Event, Graph, Stream
from ranks import run_ranks
from torch import Tensor

from hybridpar.config import Config, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.runtime import graphs
from hybridpar.runtime.graphs import MicroBatchGraphs, recorder, unsupported
from hybridpar.runtime.stage import Stage
from hybridpar.state.gradients import GradientAccumulator
from hybridpar.state.layout import Bucket, FlatLayout
from hybridpar.state.reduction.reducer import GradientReducer
from hybridpar.state.residency.chunks import Buffer
from hybridpar.train.batches.source import LoaderSource
from hybridpar.train.engine import Engine

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def make(**sections: dict[str, Any]) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 64,
                "num_heads": 4,
                "seq_length": 40,
                "vocab_size": 97,
                **sections.get("model", {}),
            },
            "parallel": {"dp": 1, **sections.get("parallel", {})},
            "pipeline": {"num_microbatches": 3, **sections.get("pipeline", {})},
            "train": {"micro_batch_size": 2, "num_steps": 20, **sections.get("train", {})},
            "optim": {"lr": 1e-2, "clip_grad": 1.0, **sections.get("optim", {})},
            "memory": sections.get("memory", {}),
            "compression": sections.get("compression", {}),
            "kernels": sections.get(
                "kernels", {"attention": "triton"}
            ),  # not cuDNN, which adds in any order
        }
    )


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "bf16": {"train": {"dtype": "bf16"}},
    "fp32": {"train": {"dtype": "fp32"}},
    "fp8": {"train": {"dtype": "bf16", "fp8": True}},
    "fp16, the scale backs off": {"train": {"dtype": "fp16"}, "optim": {"loss_scale": 2.0**24}},
    "one micro-batch": {"pipeline": {"num_microbatches": 1}, "train": {"dtype": "bf16"}},
    "2bw": {"pipeline": {"schedule": "2bw"}, "train": {"dtype": "bf16"}},
    "split backward": {"pipeline": {"split_backward": True}, "train": {"dtype": "bf16"}},
    "gpipe": {"pipeline": {"schedule": "gpipe"}, "train": {"dtype": "bf16"}},
    "dropout": {"model": {"dropout": 0.2, "attention_dropout": 0.1}, "train": {"dtype": "bf16"}},
    "dropout, recomputation": {
        "model": {"dropout": 0.2, "attention_dropout": 0.1},
        "pipeline": {"recompute": "all"},
        "train": {"dtype": "bf16"},
    },
    "recomputation": {"pipeline": {"recompute": "all"}, "train": {"dtype": "bf16"}},
    "llama-like": {
        "model": {
            "norm": "rms_norm",
            "activation": "swiglu",
            "position": "rotary",
            "tie_embeddings": False,
            "num_kv_heads": 2,
            "logits_chunk": 32,
        },
        "train": {"dtype": "bf16"},
    },
    "bert": {
        "model": {"kind": "bert", "sentence_head": "nsp", "dropout": 0.1},
        "train": {"dtype": "bf16"},
    },
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpu) for name in SETTINGS])
def test_replayed_steps_are_those_run_kernel_by_kernel(name: str) -> None:
    sections = SETTINGS[name]
    plain = make(**sections | {"train": {**sections["train"], "cuda_graphs": False}})
    expected_losses, expected = train(Engine(JobPlan(plain), ProcessGrid(), CUDA))
    engine = Engine(JobPlan(make(**sections)), ProcessGrid(), CUDA)
    losses, weights = train(engine)
    assert engine.executor.graphs is not None
    assert engine.executor.graphs.num_replayed > 0
    assert losses == expected_losses
    for key, weight in expected.items():
        assert torch.equal(weights[key], weight), key


@pytest.fixture(autouse=True)
def _rows_of_heads_as_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over as many rows of BERT's head, so equal bits."""
    monkeypatch.setattr(
        "hybridpar.train.engine.LoaderSource",
        lambda *args, **options: LoaderSource(*args, **options | {"fixed_shapes": len(args) == 3}),
    )


def train(engine: Engine, num_batches: int = 7) -> tuple[list[float], dict[str, Tensor]]:
    """In two stretches, with an evaluation between them; the losses and what training has made."""
    loader = SyntheticLoader(engine.config.model, 2, engine.config.pipeline.num_microbatches)
    losses: list[float] = []
    engine.train(loader, 4, lambda step: losses.append(step.loss))
    losses.append(sum(engine.evaluate(loader, 1).values()))
    engine.train(loader, num_batches - 4, lambda step: losses.append(step.loss))
    return losses, {name: tensor.cpu() for name, tensor in engine.state.tensors().items()}


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", SETTINGS)
def test_replays_take_nothing_from_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on the CPU that run again the operators that they saw: with the tensors of then."""
    config = make(**SETTINGS[name] | {"kernels": {}})
    expected_losses, expected = train(Engine(JobPlan(config), ProcessGrid(), CPU))
    fake_cuda.install(monkeypatch)
    engine = Engine(JobPlan(config), ProcessGrid(), CPU)
    recording = engine.executor.graphs = MicroBatchGraphs(
        engine.job, {0: engine.stage}, engine.state.gradients, CPU, (), engine.grid
    )
    losses, weights = train(engine)
    assert recording.num_replayed > 0
    assert losses == expected_losses
    for key, weight in expected.items():
        assert torch.equal(weights[key], weight), key


@pytest.mark.thorough
def test_replicas_sum_what_is_final_beside_the_replay() -> None:
    (expected, *_), _ = run_ranks(replicas, 2, False)
    for losses, num_replayed, num_final in run_ranks(replicas, 2, True):
        assert losses == expected
        assert num_replayed == 40 - 2  # the first of each kind
        assert len(num_final) > 10 * 4
        assert max(n for n in num_final if n < 1) < 0.6  # others follow


@pytest.mark.thorough
def test_replicas_of_virtual_stages_sum_what_several_graphs_make_final() -> None:
    """A bucket has gradients of both stages of a rank, and of backwards to inputs and to
    weights."""
    sections = {
        "model": {"hidden_size": 32, "seq_length": 16},
        "parallel": {"pp": 2, "dp": 2, "zero": 1},
        "pipeline": {"schedule": "1f1b", "stage_layout": "v", "split_backward": True},
    }
    expected = run_ranks(replicas, 4, False, sections)
    for (plain, *_), (losses, num_replayed, num_final) in zip(
        expected, run_ranks(replicas, 4, True, sections), strict=True
    ):
        assert losses == plain
        assert num_replayed > 0
        assert len(num_final) >= 8  # of 10 batches


def replicas(
    replay: bool, sections: dict[str, dict[str, Any]] | None = None
) -> tuple[list[float], int, list[float]]:
    """Losses of 10 batches of 4 on two replicas; how many micro-batches were replayed; and of each
    sum of gradients that began behind an event, the share of the buffer that was final then: of a
    batch's first; 1 of others."""
    sections = sections or {"parallel": {"dp": 2, "zero": 1}}
    config = make(
        **sections
        | {"pipeline": {"num_microbatches": 4, **sections.get("pipeline", {})}, "kernels": {}}
    )
    grid = ProcessGrid(pp=config.parallel.pp, dp=2)
    num_final = list[float]()
    buckets = FlatLayout.buckets
    start = GradientReducer._start

    def start_checked(self: GradientReducer, bucket: Bucket, buffer: Buffer, *way: Any) -> Any:
        assert Event.awaited is not None or Stream.current is not beside(), "it waits for no event"
        if Event.awaited is not None:
            then = Event.awaited.seen
            now = Event.watched.tensors[0]
            span = slice(bucket.start, bucket.stop)
            assert torch.equal(then[span], buffer[span]), "summed before it was final"
            first = self._next == 0  # later ones find what Gloo has summed meanwhile
            num_final.append(float((then == now).sum()) / len(now) if first else 1.0)
        return start(self, bucket, buffer, *way)

    def beside() -> Stream:
        return engine.executor.graphs._beside  # type: ignore[union-attr, return-value]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            FlatLayout, "buckets", lambda self, num_bytes, *group: buckets(self, 2**14, *group)
        )
        engine = Engine(JobPlan(config), grid, CPU)
        if replay:
            fake_cuda.install(patch)
            patch.setattr(GradientReducer, "_start", start_checked)
            Event.watched = engine.state.gradients.buffers[0]
            stages = {stage: whole for stage, (whole,) in engine.executor.stages.items()}
            engine.executor.graphs = MicroBatchGraphs(
                engine.job,
                stages,
                engine.state.gradients,
                CPU,
                engine.state.reducer.summed_beside,
                grid,
            )
        losses: list[float] = []
        loader = SyntheticLoader(config.model, 2, 4, grid.dp.rank, grid.dp.size)
        engine.train(loader, 10, lambda step: losses.append(step.loss))
    return losses, engine.executor.graphs.num_replayed if engine.executor.graphs else 0, num_final


TP = {"parallel": {"tp": 2, "sequence": True}}
PP = {"parallel": {"pp": 2}, "pipeline": {"schedule": "2bw", "recompute": "all"}}
Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Trained:
    """Results of a rank's training: losses of 5 batches, sums of the weights, calls over tp; and
    how it was captured."""

    losses: list[float]
    sums: list[float]
    calls: dict[str, int]
    num_replayed: int = 0
    num_captures: int = 0
    log: str = ""


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("sections", [TP, PP], ids=["tp", "pp"])
def test_ranks_of_a_grid_replay_what_they_compute_and_send(sections: Sections) -> None:
    """To the bit, with as many messages, but for one sum over tp for each capture."""
    plain = run_ranks(train_grid, 2, sections, False)
    for expected, found in zip(plain, run_ranks(train_grid, 2, sections, True), strict=True):
        assert (found.losses, found.sums) == (expected.losses, expected.sums)
        agreed = {"all_reduce": found.num_captures} if "tp" in sections["parallel"] else {}
        assert found.calls == Counter(expected.calls) + Counter(agreed)
        assert found.num_replayed >= 9  # of 15: with two buffers of both there are many kinds


def gallery() -> list[Sections]:
    """Settings of all plans of docs/all_schedules.md, on two ranks."""
    script = Path(__file__).parents[2] / "scripts" / "schedule_gallery.py"
    found = []
    for _, schedule, options in runpy.run_path(str(script))["SCHEDULES"]:
        split = "zero_bubble" in options or "stage_layout" in options
        model = {
            "num_layers": 6 if options.get("virtual_stages") == 4 else 2,
            "hidden_size": 32,
            "seq_length": 16,
        }
        found.append(
            {
                "model": model,
                "parallel": {"pp": 2},
                "pipeline": {
                    "schedule": schedule,
                    "num_microbatches": 4,
                    **options,
                    **({"split_backward": True} if split else {}),
                },
            }
        )
    return found


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("number", range(len(gallery())))
def test_every_plan_of_the_gallery_is_replayed(number: int) -> None:
    for expected, found in run_ranks(train_both, 2, gallery()[number]):
        assert (found.losses, found.sums) == (expected.losses, expected.sums)
        assert found.num_replayed > 0
        assert not found.log


def train_both(sections: Sections) -> list[Trained]:
    return [train_grid(sections, replay) for replay in (False, True)]


def train_grid(
    sections: Sections,
    replay: bool,
    broken: tuple[int, int, int] | None = None,
    synchronizes: bool = False,
) -> Trained:
    """Train on a grid of 2 ranks.

    Args:
        broken: a rank, which of its captures breaks, and at which operator.
        synchronizes: captures with torch.cuda.graph.
    """
    config = make(
        **sections
        | {
            "kernels": {},
            "model": {**sections.get("model", {}), "dropout": 0.1, "attention_dropout": 0.1},
        }
    )
    grid = ProcessGrid(tp=config.parallel.tp, pp=config.parallel.pp)
    lines = StringIO()
    handler = StreamHandler(lines)
    getLogger("hybridpar.runtime.graphs").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        engine = Engine(JobPlan(config), grid, CPU)
        if replay:
            fake_cuda.install(patch, f"{sections}{broken}")
            stages = {stage: whole for stage, (whole,) in engine.executor.stages.items()}
            engine.executor.graphs = MicroBatchGraphs(
                engine.job, stages, engine.state.gradients, CPU, (), grid
            )
        if broken is not None and grid.world.rank == broken[0]:
            Graph.breaks = lambda *place: place == broken[1:]
        if synchronizes:
            patch.setattr(
                graphs,
                "capture",
                lambda graph, pool, stream: torch.cuda.graph(
                    graph, pool, stream, capture_error_mode="thread_local"
                ),
            )
        losses: list[float] = []
        engine.train(
            SyntheticLoader(config.model, 2, engine.shape.num_microbatches),
            5,
            lambda step: losses.append(step.loss),
        )
        if replay:
            assert not Graph.allocator.underway, (
                "the allocator still routes to the pool of a capture"
            )
            failures = 0 if broken is None or grid.world.rank != broken[0] else 1
            assert not Graph.generator.state.is_capturing, "random numbers would be refused"
            assert sum(Graph.allocator.pools.values()) == Graph.number - failures
    getLogger("hybridpar.runtime.graphs").removeHandler(handler)
    sums = [float(x.double().sum()) for x in engine.state.tensors().values()]
    recorder = engine.executor.graphs
    found = Trained(losses, sums, dict(grid.tp.traffic.calls))
    return (
        found
        if recorder is None
        else replace(
            found,
            num_replayed=recorder.num_replayed,
            num_captures=recorder.num_captures,
            log=lines.getvalue(),
        )
    )


V = {
    "model": {"hidden_size": 32, "seq_length": 16},
    "parallel": {"pp": 2},
    "pipeline": {
        "schedule": "1f1b",
        "stage_layout": "v",
        "split_backward": True,
        "num_microbatches": 4,
    },
}
BROKEN: dict[str, tuple[Sections, tuple[tuple[int, int], ...]]] = {
    "tp": (TP, ((1, 20), (2, 20), (3, 20), (4, 20))),
    "pp": (PP, ((1, 20), (2, 20), (4, 20))),
    "pp-1f1b": (PP | {"pipeline": {}}, ((2, 20), (3, 20), (4, 20))),
    "v": (V, ((1, 3), (2, 3), (3, 3), (4, 3), (5, 3), (6, 3), (7, 3))),
}
"""Settings, and which captures of the second rank break, at which operator: forwards, backwards to
inputs and to weights, before and after others have worked."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", BROKEN)
def test_a_capture_that_fails_on_one_rank_is_undone(name: str) -> None:
    """All go on to the same bits."""
    sections, numbers = BROKEN[name]
    ranks = run_ranks(train_broken, 2, sections, numbers)
    for expected, *found in ranks:
        for one in found:
            assert (one.losses, one.sums) == (expected.losses, expected.sums)
    for number, first, second in zip(numbers, ranks[0][1:], ranks[1][1:], strict=True):
        assert (
            "RuntimeError: CUDA error: operation not permitted when stream is capturing"
            in second.log
        )
        assert "previous error" not in second.log
        assert second.num_captures == number[0]
        assert ("on another rank of tp" in first.log) == (name == "tp")
        assert (first.num_captures == number[0]) == (name == "tp")


def train_broken(sections: Sections, numbers: tuple[tuple[int, int], ...]) -> list[Trained]:
    """Train without graphs, and with each of these captures broken on rank 1."""
    return [
        train_grid(sections, False),
        *(train_grid(sections, True, (1, *number)) for number in numbers),
    ]


def test_graphs_of_micro_batches_in_flight_are_replayed_after_a_capture_has_failed() -> None:
    """The first rank has two in flight. The backward of the older one is captured by then; that of
    the newer one fails.

    A failed capture leaves a mark on the generator's state, which all graphs share. The first graph
    that is given back takes the workspaces of cuBLAS along.
    """
    sections = {"parallel": {"pp": 2}, "pipeline": {"num_microbatches": 4}}
    expected, found = (
        run_ranks(train_grid, 2, sections, *how) for how in ((False,), (True, (0, 6, 20)))
    )
    assert "a capture failed" in found[0].log
    for plain, one in zip(expected, found, strict=True):
        assert (one.losses, one.sums) == (plain.losses, plain.sums)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw"])
def test_a_capture_that_synchronizes_the_device_stands_still(schedule: str) -> None:
    """The stand-in waits for posted receives as NCCL's do; torch.cuda.graph, with which we captured
    once, waits so."""
    sections = {"parallel": {"pp": 2}, "pipeline": {"schedule": schedule, "num_microbatches": 4}}
    assert all(found.num_replayed > 0 for found in run_ranks(train_grid, 2, sections, True))
    with pytest.raises(Exception, match="Deadlock"):
        run_ranks(train_grid, 2, sections, True, None, True)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"parallel": {"pp": 2}}, "graph_grids"),
        ({"parallel": {"tp": 2}}, "graph_grids"),
        ({"parallel": {"pp": 2, "tp": 2}, "train": {"graph_grids": True}}, None),
        (
            {
                "parallel": {"tp": 2},
                "train": {"graph_grids": True, "share_gpus": True},
            },
            "the host's hands",
        ),
        (
            {
                "parallel": {"pp": 2},
                "train": {"graph_grids": True},
                "pipeline": {"schedule": "interleaved", "virtual_stages": 2},
            },
            None,
        ),
        (
            {
                "parallel": {"pp": 2},
                "train": {"graph_grids": True},
                "pipeline": {"stage_layout": "v", "split_backward": True},
            },
            None,
        ),
        ({"pipeline": {"split_backward": True}}, None),
        ({"memory": {"budget": 2**20}}, "comes back elsewhere"),
        (
            {"memory": {"offload_activations": 2}, "pipeline": {"schedule": "gpipe"}},
            "comes back elsewhere",
        ),
        ({"memory": {"offload_activations": [0]}, "pipeline": {"schedule": "gpipe"}}, None),
        ({"memory": {"offload_activations": 2}}, None),
        ({"memory": {"host_optimizer": True}}, None),
        ({"model": {"kind": "bert"}}, None),
        ({"model": {"dropout": 0.1, "attention_dropout": 0.1}}, None),
        ({}, None),
    ],
)
def test_unrecordable_settings(sections: dict[str, dict[str, Any]], reason: str | None) -> None:
    found = unsupported(JobPlan(make(**sections)))
    assert found is None if reason is None else reason in str(found)


def test_ranks_that_keep_their_activations_are_recorded() -> None:
    config = make(
        parallel={"pp": 4},
        train={"graph_grids": True},
        pipeline={"num_microbatches": 8},
        memory={"offload_activations": [2, 0, 9, 0]},
    )
    assert [unsupported(JobPlan(config), rank) is None for rank in range(4)] == [
        False,
        True,
        True,
        True,
    ]
    assert unsupported(JobPlan(config)) is not None
    assert (
        unsupported(
            JobPlan(
                make(
                    parallel={"pp": 2},
                    train={"graph_grids": True},
                    memory={"offload_activations": [0, 0]},
                )
            )
        )
        is None
    )


def test_says_why_nothing_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    no_gradients = GradientAccumulator(FlatLayout({}, torch.float32))
    with caplog.at_level("INFO"):
        assert (
            recorder(
                JobPlan(make(parallel={"tp": 2})),
                {0: Stage({})},
                no_gradients,
                CUDA,
                [],
                ProcessGrid(),
            )
            is None
        )
    assert "without CUDA graphs: with pp, cp or tp they have not run on a GPU" in caplog.text
