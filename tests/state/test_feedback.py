"""The unsent part of replicas' gradients: saved, resumed to the bit, handed on to other grids,
predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.grids import engines, fill, load_all
from engines import start
from ranks import run_ranks
from state.test_compression import DCT, PCA, POWER, make
from torch import Tensor

from hybridpar import checkpoint
from hybridpar.checkpoint.folders import begin, publish
from hybridpar.checkpoint.format.manifest import TrainingState
from hybridpar.checkpoint.format.part import Part, is_writer
from hybridpar.checkpoint.save import make_manifest
from hybridpar.config import UNCOMPRESSED, Config, from_mapping
from hybridpar.errors import ConfigError
from hybridpar.memory_behaviour.recording.memory_trace import predict_trace
from hybridpar.models.build import Recomputation
from hybridpar.prediction.footprint import Buffers, trace_stage
from hybridpar.validate import problems
from hybridpar.verify.run import verify


def save(config: Config, folder: Path) -> dict[str, Tensor]:
    engine, samples = start(config)
    engine.train(samples, 3, lambda step: None)
    checkpoint.save(folder, engine, "corpus")
    engine.train(samples, 3, lambda step: None)
    return {key: x.clone() for key, x in engine.state.tensors().items()}


def resume(config: Config, folder: Path) -> dict[str, Tensor]:
    engine, samples = start(config)
    assert checkpoint.resume(folder, engine, "corpus", print) == 3
    engine.train(samples, 3, lambda step: None)
    return {key: x.clone() for key, x in engine.state.tensors().items()}


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("compression", "parallel"),
    [
        (DCT | {"gradients_period": 100}, {"dp": 2}),
        (PCA, {"dp": 2}),
        (POWER | {"gradients_values": "int4"}, {"dp": 2, "tp": 2, "zero": 1}),
        (DCT, {"dp": 2, "zero": 3}),
    ],
    ids=str,
)
def test_a_run_goes_on_to_the_bit(
    tmp_path: Path, compression: dict[str, Any], parallel: dict[str, int]
) -> None:
    config = make(compression, parallel)
    there, here = (
        run_ranks(do, config.parallel.num_ranks, config, tmp_path) for do in (save, resume)
    )
    for one, other in zip(there, here, strict=True):
        assert one.keys() == other.keys()
        assert any(key.startswith(("learned/", "basis/")) and x.any() for key, x in one.items())
        assert all(torch.equal(x, other[key]) for key, x in one.items())


def own_feedback(root: Path, config: Config) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint in which every rank has not sent something of its own, and the sum of that by
    parameter."""
    aside = begin(root, 5)
    written = []
    total = {}
    for engine in engines(config):
        fill(engine, 5)
        for key, x in engine.state.tensors().items():
            if key.startswith("feedback/"):
                x.copy_(
                    torch.randint(
                        -99,
                        99,
                        x.shape,
                        generator=torch.Generator().manual_seed(
                            engine.grid.rank - engine.grid.tp.rank
                        ),
                    )
                )  # exact in any order, and equal on all of tp
                slot = engine.state.whole_slots[key.partition("/")[2]]
                add(total, slot, x)
        if is_writer(engine):
            written.append(Part.of(engine).write(aside))
    return publish(
        aside, make_manifest(config, "corpus", TrainingState.of(engine.state_meta()), written)
    ), total


def add(total: dict[str, Tensor], slot: Any, x: Tensor) -> None:
    """Adds a rank's part of a parameter to the global one; of copies along tp, the first."""
    name = slot.placement.tied or slot.name
    shard = slot.placement.shard
    whole = total.setdefault(name, torch.zeros(slot.placement.shape))
    if shard is not None:
        whole.index_add_(shard.dim, shard.index(slot.rank), x)
    elif slot.place["tp"] == 0:
        whole += x


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dp": 2}, {"dp": 4}),
        ({"dp": 4, "pp": 2}, {"dp": 2, "tp": 2}),
        ({"dp": 2, "tp": 3}, {"dp": 3, "pp": 2}),
        ({"dp": 4, "zero": 3}, {"dp": 3, "zero": 2}),
        ({"dp": 3, "pp": 2}, {"dp": 3, "pp": 2}),
    ],
    ids=str,
)
def test_replicas_hand_on_the_sum_of_what_they_have_not_sent(
    tmp_path: Path, before: dict[str, int], after: dict[str, int]
) -> None:
    folder, wanted = own_feedback(tmp_path, make(DCT, before))
    found: dict[str, Tensor] = {}
    for engine in load_all(folder, make(DCT, after)):
        for key, x in engine.state.tensors().items():
            if key.startswith("feedback/"):
                add(found, engine.state.whole_slots[key.partition("/")[2]], x)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(x, found[name]) for name, x in wanted.items())


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 2])
def test_memory_is_predicted(zero: int) -> None:
    config = make(POWER, {"dp": 2, "zero": zero})
    predicted = trace_stage(config, range(4), Recomputation(), Buffers(2, 2), torch.device("cpu"))
    there, plain, elements = run_ranks(num_bytes, 2, config)[0]
    assert there == {name: getattr(predicted, name) for name in there}
    # what was not sent, now and next; besides, messages and what was learned
    assert 4 * elements <= there["optimizer"] - plain["optimizer"] < 5 * elements
    # gradients of two batches, which become it, and half of their sum, besides room for one
    # parameter; not:
    if zero:
        # half of both
        assert 6 * elements < there["gradients"] - plain["gradients"] < 11 * elements
    else:
        assert 4 * elements < there["gradients"] - plain["gradients"] < 8 * elements


def num_bytes(config: Config) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes of the state with compression and without, and how many elements are compressed."""
    (engine, samples), (plain, _) = start(config), start(replace(config, compression=UNCOMPRESSED))
    engine.train(samples, 2, lambda step: None)
    plain.state.allocate()
    compression = engine.state.compression
    assert compression.packed
    return (
        engine.state.num_bytes(),
        plain.state.num_bytes(),
        sum(x.numel() for x in compression.feedback.kept.values()),
    )


def test_one_replica_has_no_feedback() -> None:
    assert start(make(DCT, {}))[0].state.compression.packed == frozenset()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"parallel": {"sites": 2}}, "not supported with parallel.sites = 2"),
        (
            {"memory": {"budget": 10**9}, "parallel": {"dp": 2, "zero": 2}},
            "not supported with memory.budget = 1000000000 and parallel.zero = 2",
        ),
        (
            {"compression": DCT | {"gradients_values": "int8"}},
            'not supported with compression.gradients = "dct", only with "powersgd"',
        ),
    ],
    ids=str,
)
def test_conflicting_settings_are_said(sections: dict[str, Any], said: str) -> None:
    config = from_mapping({"compression": DCT} | sections)
    found = [str(problem) for problem in problems(config, config.parallel.num_ranks)]
    assert any("compression.gradients" in text and said in text for text in found), found


def test_one_process_that_has_no_replicas_says_so() -> None:
    config = make(DCT, {"dp": 2})
    with pytest.raises(
        ConfigError,
        match=r"compression\.gradients = 'dct': .*the one-process run uses all of "
        r"them; try none",
    ):
        verify(config, {"dp": 2})
    with pytest.raises(
        ConfigError,
        match=r"compression\.gradients = 'dct': not supported: its memory events depend",
    ):
        predict_trace(config)
