"""Footprints of many layers from those of few are those of the stage itself."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from custom_models import CustomGPT

from hybridpar.config import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from hybridpar.job import JobPlan
from hybridpar.models.build import Recomputation
from hybridpar.prediction import Footprints, layers, predict
from hybridpar.prediction.footprint import Buffers, trace_stage

CPU = torch.device("cpu")
MODEL = ModelConfig(
    num_layers=9, hidden_size=48, num_heads=3, seq_length=24, vocab_size=257, dropout=0.1
)
CASES = {
    "custom": Config(model=CustomGPT(depth=9)),
    "gpt": Config(model=MODEL),
    "bf16 tp": Config(
        model=MODEL,
        parallel=ParallelConfig(tp=2),
        train=TrainConfig(dtype="bf16", micro_batch_size=3),
    ),
    "bert": Config(model=replace(MODEL, kind="bert", tie_embeddings=False)),
    "muon": Config(model=replace(MODEL, position="rotary"), optim=OptimConfig(name="muon")),
}


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("blocks", [range(0, 6), range(2, 8), range(5, 11), range(10, 11)])
@pytest.mark.parametrize("recompute", ["none", "layers", "whole"])
def test_equals_the_traced_stage(name: str, blocks: range, recompute: str) -> None:
    config = replace(CASES[name], parallel=replace(CASES[name].parallel, pp=2, dp=1))
    layers = frozenset(n for n in blocks if 0 < n < 10)
    again = {
        "none": Recomputation(),
        "layers": Recomputation(layers),
        "whole": Recomputation(frozenset(blocks), whole=True),
    }[recompute]
    buffers = Buffers(2, 2)
    few = asdict(Footprints()(config, blocks, again, buffers, CPU))
    traced = asdict(trace_stage(config, blocks, again, buffers, CPU))
    (
        few.pop("norm"),
        traced.pop("norm"),
    )  # scratch of a reduction: a few kilobytes, not even in the layers
    assert few == traced


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("recompute", ["none", "all", "0-1,5", "stage:1"])
def test_predictions_are_those_without(zero: int, recompute: str) -> None:
    config = Config(
        model=MODEL,
        parallel=ParallelConfig(1, 3, 2, zero),
        pipeline=PipelineConfig(
            schedule="2bw", num_microbatches=6, recompute=recompute, split=(5, 4, 2)
        ),
    )
    footprints = Footprints()
    for _ in range(2):
        totals = [stage.total for stage in predict(JobPlan(config), trace=footprints)]
        assert totals == pytest.approx(
            [stage.total for stage in predict(JobPlan(config))], rel=0.002
        )


def test_rough_footprints_are_near() -> None:
    footprints = Footprints()
    config = replace(
        CASES["gpt"],
        train=TrainConfig(micro_batch_size=5),
        parallel=ParallelConfig(pp=2, dp=2, zero=1),
    )
    for blocks in (range(0, 6), range(2, 9), range(5, 11)):
        rough, traced = (
            asdict(f(config, blocks, Recomputation(), Buffers(2, 2), CPU))
            for f in (footprints.rough, trace_stage)
        )
        for name in ("weights", "gradients", "optimizer", "kept", "message", "forward"):
            assert rough[name] == pytest.approx(traced[name], rel=0.05), name


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", ["gpt", "bf16 tp"])
@pytest.mark.parametrize("recompute", ["none", "selective", "whole"])
def test_split_backwards_tell_what_whole_ones_take(
    name: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; on a CPU the first of a batch may take something else."""
    blocks = range(1, 5)
    gpu = torch.device("cuda")
    buffers = Buffers(1, 1)
    known = Footprints()
    again = {
        "none": Recomputation(),
        "selective": Recomputation(selective=frozenset(blocks)),
        "whole": Recomputation(frozenset(blocks), whole=True),
    }[recompute]
    config = replace(CASES[name], parallel=replace(CASES[name].parallel, pp=2, dp=1))
    split = replace(config, pipeline=replace(config.pipeline, split_backward=True))
    traced = asdict(Footprints().rough(config, blocks, again, buffers, gpu))
    known.rough(split, blocks, again, buffers, gpu)
    monkeypatch.delattr(layers, "trace_stage")
    derived = asdict(known.rough(config, blocks, again, buffers, gpu))
    traced.pop("norm"), derived.pop("norm")
    assert derived == traced
