"""Micro-batches as CUDA graphs: the same losses and weights, to the bit, as run kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hybridpar.config import Config, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid, Traffic
from hybridpar.pipeline.run.graphs import MicroBatchGraphs, recorder, unsupported
from hybridpar.pipeline.run.stage import Stage
from hybridpar.state.chunks import Buffer
from hybridpar.state.gradients import GradientAccumulator
from hybridpar.state.layout import Bucket, FlatLayout
from hybridpar.state.reducer import GradientReducer
from hybridpar.train.engine import Engine
from hybridpar.train.source import LoaderSource

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def make(**sections: dict[str, Any]) -> Config:
    return from_mapping({
        "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_length": 40, "vocab_size": 97,
                  **sections.get("model", {})},
        "parallel": {"dp": 1, **sections.get("parallel", {})},
        "pipeline": {"num_microbatches": 3, **sections.get("pipeline", {})},
        "train": {"micro_batch_size": 2, "num_steps": 20, **sections.get("train", {})},
        "optim": {"lr": 1e-2, "clip_grad": 1.0, **sections.get("optim", {})},
        "memory": sections.get("memory", {}), "compression": sections.get("compression", {}),
        "kernels": sections.get("kernels", {"attention": "triton"}),  # not cuDNN, which adds in any order
    })


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "bf16": {"train": {"dtype": "bf16"}},
    "fp32": {"train": {"dtype": "fp32"}}, "fp8": {"train": {"dtype": "bf16", "fp8": True}},
    "fp16, the scale backs off": {"train": {"dtype": "fp16"}, "optim": {"loss_scale": 2.0**24}},
    "one micro-batch": {"pipeline": {"num_microbatches": 1}, "train": {"dtype": "bf16"}},
    "2bw": {"pipeline": {"schedule": "2bw"}, "train": {"dtype": "bf16"}},
    "gpipe": {"pipeline": {"schedule": "gpipe"}, "train": {"dtype": "bf16"}},
    "dropout": {"model": {"dropout": 0.2, "attention_dropout": 0.1}, "train": {"dtype": "bf16"}},
    "dropout, recomputation": {"model": {"dropout": 0.2, "attention_dropout": 0.1}, "pipeline": {"recompute": "all"},
                               "train": {"dtype": "bf16"}},
    "recomputation": {"pipeline": {"recompute": "all"}, "train": {"dtype": "bf16"}},
    "llama-like": {"model": {"norm": "rms_norm", "activation": "swiglu", "position": "rotary", "tie_embeddings": False,
                             "num_kv_heads": 2, "logits_chunk": 32}, "train": {"dtype": "bf16"}},
    "bert": {"model": {"kind": "bert", "sentence_head": "nsp", "dropout": 0.1}, "train": {"dtype": "bf16"}},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_gpu) for name in SETTINGS])
def test_replayed_steps_are_those_run_kernel_by_kernel(name: str) -> None:
    sections = SETTINGS[name]
    plain = make(**sections | {"train": {**sections["train"], "cuda_graphs": False}})
    expected_losses, expected = train(Engine(plain, ProcessGrid(), CUDA))
    engine = Engine(make(**sections), ProcessGrid(), CUDA)
    losses, weights = train(engine)
    assert engine.executor.graphs is not None
    assert engine.executor.graphs.num_replayed > 0
    assert losses == expected_losses
    for key, weight in expected.items():
        assert torch.equal(weights[key], weight), key


@pytest.fixture(autouse=True)
def _rows_of_heads_as_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over as many rows of BERT's head, so equal bits."""
    monkeypatch.setattr("hybridpar.train.engine.LoaderSource", lambda *args, fixed_shapes=False: LoaderSource(
        *args, fixed_shapes=len(args) == 3))


def train(engine: Engine, num_batches: int = 7) -> tuple[list[float], dict[str, Tensor]]:
    """In two stretches, with an evaluation between them; the losses and what training has made."""
    loader = SyntheticLoader(engine.config.model, 2, engine.config.pipeline.num_microbatches)
    losses: list[float] = []
    engine.train(loader, 4, lambda step: losses.append(step.loss))
    losses.append(sum(engine.evaluate(loader, 1).values()))
    engine.train(loader, num_batches - 4, lambda step: losses.append(step.loss))
    return losses, {name: tensor.cpu() for name, tensor in engine.state.tensors().items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_replayed_takes_nothing_from_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on the CPU, by graphs that run again the operators that they saw: with the tensors of then."""
    config = make(**SETTINGS[name] | {"kernels": {}})
    expected_losses, expected = train(Engine(config, ProcessGrid(), CPU))
    stand_in(monkeypatch)
    engine = Engine(config, ProcessGrid(), CPU)
    graphs = engine.executor.graphs = MicroBatchGraphs(
        engine.stage, engine.state.gradients, config.pipeline.num_microbatches, CPU)
    losses, weights = train(engine)
    assert graphs.num_replayed > 0
    assert losses == expected_losses
    for key, weight in expected.items():
        assert torch.equal(weights[key], weight), key


def test_replicas_sum_what_is_final_beside_the_replay() -> None:
    (expected, *_), _ = run_ranks(replicas, 2, False)
    for losses, num_replayed, num_final in run_ranks(replicas, 2, True):
        assert losses == expected
        assert num_replayed == 40 - 2  # the first of each kind
        assert len(num_final) > 10 * 4
        assert max(n for n in num_final if n < 1) < 0.6  # others follow


def replicas(replay: bool) -> tuple[list[float], int, list[float]]:
    """Losses of 10 batches of 4 on two replicas; how many micro-batches were replayed; and of each sum of gradients
    that began behind an event, the share of the buffer that was final then: of a batch's first; 1 of others."""
    config = make(parallel={"dp": 2, "zero": 1}, pipeline={"num_microbatches": 4}, kernels={})
    grid, num_final = ProcessGrid(dp=2), list[float]()
    buckets, start = FlatLayout.buckets, GradientReducer._start

    def start_checked(self: GradientReducer, bucket: Bucket, buffer: Buffer, *way: Any) -> Any:
        if Event.awaited is not None:
            then, now = Event.awaited.seen, Event.watched.tensors[0]
            span = slice(bucket.start, bucket.stop)
            assert torch.equal(then[span], buffer[span]), "summed before it was final"
            first = self._next == 0  # later ones find what Gloo has summed meanwhile
            num_final.append(float((then == now).sum()) / len(now) if first else 1.0)
        return start(self, bucket, buffer, *way)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatLayout, "buckets", lambda self, num_bytes, *group: buckets(self, 2**14, *group))
        engine = Engine(config, grid, CPU)
        if replay:
            stand_in(patch)
            patch.setattr(GradientReducer, "_start", start_checked)
            Event.watched = engine.state.gradients.buffers[0]
            engine.executor.graphs = MicroBatchGraphs(
                engine.stage, engine.state.gradients, 4, CPU, engine.state.reducer.summed_beside)
        losses: list[float] = []
        loader = SyntheticLoader(config.model, 2, 4, grid.dp.rank, grid.dp.size)
        engine.train(loader, 10, lambda step: losses.append(step.loss))
    return losses, engine.executor.graphs.num_replayed if engine.executor.graphs else 0, num_final


@pytest.mark.parametrize("sections", [
    {"parallel": {"tp": 2, "sequence": True}},
    {"parallel": {"pp": 2}, "pipeline": {"schedule": "2bw", "recompute": "all"}},
], ids=["tp", "pp"])
def test_ranks_of_a_grid_replay_what_they_compute_and_send(sections: dict[str, dict[str, Any]]) -> None:
    """To the bit, with as many messages."""
    expected = run_ranks(a_grid, 2, sections, False)
    for (*plain, _), (*same, num_replayed) in zip(expected, run_ranks(a_grid, 2, sections, True), strict=True):
        assert same == plain
        assert num_replayed >= 9  # of 15: with two buffers of both there are many kinds


def a_grid(sections: dict[str, dict[str, Any]], replay: bool) -> tuple[list[float], dict[str, int], list[float], int]:
    """Losses of 5 batches, calls over tp, sums of the weights; and how many micro-batches were replayed."""
    config = make(**sections | {"kernels": {}, "model": {"dropout": 0.1, "attention_dropout": 0.1}})
    grid = ProcessGrid(tp=config.parallel.tp, pp=config.parallel.pp)
    with pytest.MonkeyPatch.context() as patch:
        engine = Engine(config, grid, CPU)
        if replay:
            stand_in(patch)
            parallel, (stage,) = config.parallel, engine.executor.stages.values()
            engine.executor.graphs = MicroBatchGraphs(
                stage[0], engine.state.gradients, engine.sizes.num_microbatches, CPU, (), parallel.pp,
                grid.tp.traffic if parallel.tp > 1 else None)
        losses: list[float] = []
        engine.train(SyntheticLoader(config.model, 2, engine.sizes.num_microbatches), 5,
                     lambda step: losses.append(step.loss))
    sums = [float(x.double().sum()) for x in engine.state.tensors().values()]
    return losses, dict(grid.tp.traffic.calls), sums, engine.executor.graphs.num_replayed if replay else 0


class Event:
    """torch.cuda.Event, which a replay records where a graph has it: it sees what `watched` holds then."""

    watched: Buffer
    awaited: Event | None = None
    """By the stream that is current."""

    def __init__(self, external: bool):
        assert external, "an event of a capture alone"

    def record(self) -> None:
        assert Graph.recording is not None
        Graph.recording.calls.append((self.see, (), {}, None))

    def see(self) -> None:
        self.seen = self.watched.tensors[0].clone()


class Graph(TorchDispatchMode):
    """What torch.cuda.CUDAGraph is on a GPU: nothing has happened when recording ends; replay does it."""

    recording: Graph | None = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, x in zip(op._schema.arguments, args, strict=False):
            if argument.is_write:
                self._written += [(y, y.clone()) for y in tree_leaves(x)]
        out = op(*args, **kwargs)
        self.calls.append((op, args, kwargs, out))
        return out

    @torch.no_grad()
    def end(self) -> None:
        for x, before in reversed(self._written):
            x.data.copy_(before)  # no new version for autograd

    @torch.no_grad()
    def replay(self) -> None:
        opaque: dict[int, Tensor] = {}  # oneDNN's, which nothing can be copied into
        for op, args, kwargs, out in self.calls:
            args, kwargs = tree_map(lambda x: opaque.get(id(x), x), (args, kwargs))
            held = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for x, new in zip(tree_leaves(out), tree_leaves(op(*args, **kwargs)), strict=True):
                if isinstance(new, torch.ScriptObject):  # communication
                    Work.unbox(new).wait()
                elif isinstance(x, Tensor) and x.layout is not torch.strided:
                    opaque[id(x)] = new
                elif isinstance(x, Tensor) and storage(x) not in held:
                    x.data.copy_(new)


def storage(x: Tensor) -> int | None:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else None


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def record(graph: Graph, **options: object) -> Iterator[None]:
        Graph.recording = graph
        with graph:
            yield
        graph.end()

    class Stream:
        device = CPU

        def __init__(self, device: torch.device = CPU) -> None: ...
        def wait_stream(self, other: Stream) -> None: ...

        def wait_event(self, event: Event) -> None:
            Event.awaited = event

    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        Event.awaited = None
        yield
        Event.awaited = None

    for name, value in {"Stream": Stream, "current_stream": Stream, "stream": stream, "CUDAGraph": Graph,
                        "graph": record, "Event": Event, "graph_pool_handle": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize(("sections", "reason"), [
    ({"parallel": {"pp": 2}}, "graph_grids"), ({"parallel": {"tp": 2}}, "graph_grids"),
    ({"parallel": {"pp": 2, "tp": 2}, "train": {"graph_grids": True}}, None),
    ({"parallel": {"tp": 2}, "train": {"graph_grids": True}, "compression": {"tensor": "int8"}}, "the host's hands"),
    ({"parallel": {"pp": 2}, "train": {"graph_grids": True}, "pipeline": {"schedule": "interleaved", "chunks": 2}},
     "take turns"),
    ({"pipeline": {"split_backward": True}}, "split_backward"), ({"memory": {"budget": 2**20}}, "comes back elsewhere"),
    ({"memory": {"offload_activations": 2}, "pipeline": {"schedule": "gpipe"}}, "comes back elsewhere"),
    ({"memory": {"offload_activations": [0]}, "pipeline": {"schedule": "gpipe"}}, None),
    ({"memory": {"offload_activations": 2}}, None), ({"memory": {"host_optimizer": True}}, None),
    ({"model": {"kind": "bert"}}, None), ({"model": {"dropout": 0.1, "attention_dropout": 0.1}}, None),
    ({}, None),
])
def test_what_cannot_be_recorded(sections: dict[str, dict[str, Any]], reason: str | None) -> None:
    found = unsupported(make(**sections))
    assert found is None if reason is None else reason in str(found)


def test_ranks_that_keep_their_activations_are_recorded() -> None:
    config = make(parallel={"pp": 4}, train={"graph_grids": True}, pipeline={"num_microbatches": 8},
                  memory={"offload_activations": [2, 0, 9, 0]})
    assert [unsupported(config, rank) is None for rank in range(4)] == [False, True, True, True]
    assert unsupported(config) is not None
    assert unsupported(make(parallel={"pp": 2}, train={"graph_grids": True}, memory={"offload_activations": [0, 0]})
                       ) is None


def test_says_why_nothing_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    no_gradients = GradientAccumulator(FlatLayout([], [], torch.float32))
    with caplog.at_level("INFO"):
        assert recorder(make(parallel={"tp": 2}), Stage({}), no_gradients, CUDA, [], Traffic()) is None
    assert "without CUDA graphs: with pp or tp they have not run on a GPU" in caplog.text
