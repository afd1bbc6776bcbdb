"""Weight versions and activations alive at once: measured on the running engine, against the plan's
bounds."""

from __future__ import annotations

import weakref

import pytest
import torch
from ranks import run_ranks

from hybridpar.config import from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.schedules.action import Kind
from hybridpar.train.engine import Engine


class Saved:
    """A tensor that autograd saved for some micro-batch's backward."""

    def __init__(self, tensor: torch.Tensor, microbatch: int):
        self.tensor = tensor
        self.microbatch = microbatch


def measure(schedule: str, p: int, m: int) -> tuple[int, int, int, int, int]:
    """On each rank: weight buffers, peak distinct versions held by graphs or newest, the plan's
    bound on them, peak micro-batches with saved activations, the plan's bound on them."""
    config = from_mapping(
        {
            "model": {
                "num_layers": 4,
                "hidden_size": 16,
                "num_heads": 2,
                "seq_length": 8,
                "vocab_size": 23,
            },
            "parallel": {"pp": p, "dp": 1},
            "pipeline": {"schedule": schedule, "num_microbatches": m},
            "train": {"micro_batch_size": 1},
        }
    )
    engine = Engine(JobPlan(config), ProcessGrid(pp=p), torch.device("cpu"))
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()
    current = [0]
    peaks = {"versions": 0, "activations": 0}
    in_flight: dict[int, int] = {}
    store = engine.state.weights
    table = engine.executor._table
    forward = table[Kind.F]
    backward = table[Kind.B]

    def observe() -> None:
        peaks["versions"] = max(peaks["versions"], len({*in_flight.values(), store.newest}))
        peaks["activations"] = max(peaks["activations"], len({s.microbatch for s in alive}))

    def spy_forward(action):
        current[0] = action.microbatch
        in_flight[action.microbatch] = action.version
        forward(action)
        observe()

    def spy_backward(action):
        backward(action)
        del in_flight[action.microbatch]
        observe()

    table[Kind.F], table[Kind.B] = spy_forward, spy_backward

    def pack(tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor, current[0])
        alive.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        engine.train(SyntheticLoader(config.model, 1, m), 12, lambda step: None)
    assert not alive, "a graph outlived the drain"
    rank = engine.grid.pp.rank
    buffers = len({buffer.tensors[0].data_ptr() for buffer in store.buffers})
    return (
        buffers,
        peaks["versions"],
        engine.schedule.max_live_versions(engine.shape, rank),
        peaks["activations"],
        engine.schedule.max_live_activations(engine.shape, rank),
    )


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(("p", "m"), [(3, 4), (4, 9)])
def test_2bw_keeps_exactly_two_versions(p: int, m: int) -> None:
    for rank, (buffers, versions, bound, activations, allowed) in enumerate(
        run_ranks(measure, p, "2bw", p, m)
    ):
        assert buffers == bound == 2, f"rank {rank}"
        # the last stage has nothing in flight when it makes a new version: between drains it uses
        # one buffer at a time
        assert versions == (1 if rank == p - 1 else 2), f"rank {rank}"
        assert activations == allowed == p - rank


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(("p", "m"), [(4, 1), (4, 2), (3, 4)])
def test_pipedream_keeps_a_version_for_each_batch_in_flight(p: int, m: int) -> None:
    for rank, (buffers, versions, bound, activations, allowed) in enumerate(
        run_ranks(measure, p, "pipedream", p, m)
    ):
        assert versions == buffers == bound <= p, f"rank {rank}"
        assert activations == allowed == p - rank
        if m == 1:
            assert versions == p - rank


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("schedule", "live"),
    [
        ("naive", lambda p, m, r: 1),
        ("gpipe", lambda p, m, r: m),
        ("1f1b", lambda p, m, r: min(p - r, m)),
    ],
)
@pytest.mark.parametrize("m", [2, 6])
def test_synchronous_schedules_keep_one_version(schedule: str, live, m: int) -> None:
    p = 4
    for rank, (buffers, versions, bound, activations, allowed) in enumerate(
        run_ranks(measure, p, schedule, p, m)
    ):
        assert buffers == versions == bound == 1
        assert activations == allowed == live(p, m, rank)
