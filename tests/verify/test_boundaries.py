"""A pipeline with compressed messages is the training of one process with the layer y = C(x) behind
each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import gpt
from train.runs import run_job, write_config

from hybridpar.config import Config
from hybridpar.verify import oracle as oracle_module
from hybridpar.verify import replay as replay_module
from hybridpar.verify.replay import replay
from hybridpar.verify.run import Disturbance, verify

INT4 = {"messages": "int4"}
INT8 = {"messages": "int8"}
DCT = {"messages": "dct"}


def make(
    compression: dict[str, Any], model: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Config:
    """4 layers, 70 features: a tile and six numbers of the next."""
    own = {
        "model": {"dropout": 0.1, **(model or {})},
        "compression": compression,
        "pipeline": {"num_microbatches": 4},
        "train": {"num_steps": 10},
        "optim": {"warmup_steps": 2, "clip_grad": 0.5},
    }
    return gpt((4, 70, 7, 11, 61), own, sections)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "compression",
    [
        INT4,
        DCT,
        INT8 | {"messages_backward": "int4"},
        DCT | {"messages_values": "bf16", "messages_kept": 0.3},
        {"messages": "bf16", "messages_backward": "none"},
        {"messages_backward": "int8"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("grid", "pipeline", "parallel"),
    [
        ({"pp": 2, "tp": 3}, {"schedule": "2bw", "recompute": "stage"}, {}),
        (
            {"pp": 2, "tp": 2},
            {"schedule": "interleaved", "recompute": "stage:0,3"},
            {"sequence": True},
        ),
        ({"pp": 3}, {"schedule": "pipedream", "split": (2, 3, 1)}, {}),
        ({"pp": 2, "dp": 2}, {"split_backward": True}, {"zero": 3}),
        ({"pp": 3}, {"schedule": "gpipe", "recompute": "all"}, {}),
        (
            {"pp": 2, "tp": 2},
            {"schedule": "2bw", "stage_layout": "v", "activations": "half", "split_backward": True},
            {},
        ),
        ({"pp": 3}, {"stage_layout": "v", "split_backward": True, "recompute": "stage"}, {}),
    ],
    ids=str,
)
def test_every_grid_and_schedule_equals_one_process(grid, pipeline, parallel, compression):
    report = verify(make(compression, pipeline=pipeline, parallel=parallel), grid, 3)
    assert report.ok, report.first_divergence


@pytest.mark.thorough
@pytest.mark.ranks
def test_a_step_that_is_not_finite_is_one_behind_a_codec_too():
    report = verify(
        make(DCT, pipeline={"schedule": "2bw"}), {"pp": 2}, 4, Disturbance(frozenset({1}), 3)
    )
    assert report.ok, report.first_divergence


@pytest.mark.ranks
def test_losses_of_messages_are_seen(monkeypatch: pytest.MonkeyPatch):
    """Without the layer in the one process the two trainings differ."""
    monkeypatch.setattr(oracle_module, "add_boundaries", lambda blocks, config: None)
    report = verify(make(INT8), {"pp": 2}, 1)
    assert report.first_divergence is not None
    assert report.worst["loss"].error > 1e-9
    alone = verify(make(INT8, pipeline={"split": (5, 1)}), {"pp": 2}, 1)
    assert alone.ok, "a head that is a stage of its own gets exact activations"


@pytest.mark.ranks
def test_a_step_of_a_run_is_replayed_with_its_codecs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In float64: where numbers round to another code the two differ by far more than by their
    order of summation."""
    run_job(
        2,
        "train",
        write_config(tmp_path),
        "--parallel.pp",
        "2",
        "--pipeline.split",
        "2",
        "2",
        "--train.dtype",
        "fp64",
        "--train.num_steps",
        "3",
        "--compression.messages",
        "int4",
    )
    folder = tmp_path / "runs" / "run"
    assert replay(folder, 3, print).agrees
    monkeypatch.setattr(replay_module, "add_boundaries", lambda blocks, config: None)
    assert not replay(folder, 3, print).agrees
