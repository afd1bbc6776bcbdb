"""A rank's kernels run before ranks depend on each other, and training is as without that."""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks

from hybridpar.config import Config, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.prediction.fake_neighbours import silent_grid
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import COMPUTE, Kind
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.train.autotuning import warm_up as module
from hybridpar.train.autotuning.warm_up import is_needed, warm_up
from hybridpar.train.engine import Engine

CPU = torch.device("cpu")
GALLERY = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "schedule_gallery.py"))
SCHEDULES: dict[str, dict[str, Any]] = {
    title: {
        "schedule": name,
        **options,
        **({"split_backward": True} if options.keys() & {"zero_bubble", "stage_layout"} else {}),
    }
    for title, name, options in GALLERY["SCHEDULES"]
}


def make(pipeline: dict[str, Any], pp: int = 2, **sections: dict[str, Any]) -> Config:
    return from_mapping(
        {
            "model": {
                "num_layers": 4 * pp,
                "hidden_size": 16,
                "num_heads": 2,
                "seq_length": 8,
                "vocab_size": 31,
                "dropout": 0.1,
                **sections.get("model", {}),
            },
            "parallel": {"tp": 1, "pp": pp, "dp": 1, **sections.get("parallel", {})},
            "pipeline": {"num_microbatches": 4 * pp, **pipeline},
            "train": {"micro_batch_size": 1, "num_steps": 20, **sections.get("train", {})},
            "optim": {"lr": 1e-2, **sections.get("optim", {})},
            "memory": sections.get("memory", {}),
            "compression": sections.get("compression", {}),
        }
    )


def warmed(config: Config, rank: int, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Kind, int]]:
    """How often each kind of action of each stage was executed, on a rank whose neighbours do not
    exist."""
    done: Counter[tuple[Kind, int]] = Counter()

    def watched(actions: Iterator[Action]) -> Iterator[Action]:
        for action in actions:
            done[action.kind, action.stage] += 1
            yield action

    monkeypatch.setattr(module, "Engine", partial(Engine, wrap_plan=watched))
    warm_up(config, silent_grid(config, rank), CPU, lambda make: make())
    return done


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("title", SCHEDULES)
def test_every_kernel_of_a_schedule_is_launched(
    title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each computation twice and more: the first one of a batch writes gradients, later ones add to
    them."""
    config = make(SCHEDULES[title])
    for rank in range(2):
        done = warmed(config, rank, monkeypatch)
        stages = set(PipelineShape.of(config).stages_of(rank))
        assert {stage for kind, stage in done if kind in COMPUTE} == stages
        for stage in stages:
            assert done[Kind.F, stage] >= 2
            assert done[Kind.B, stage] + done[Kind.I, stage] >= 2
            assert done[Kind.I, stage] == done[Kind.W, stage]
        assert sum(number for (kind, _), number in done.items() if kind is Kind.UPDATE) == 2, (
            "two batches"
        )


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"tp": 2, "sequence": True}},
        {"parallel": {"dp": 2, "zero": 1}},
        {"parallel": {"dp": 2, "zero": 3}},
        {"train": {"dtype": "bf16"}, "memory": {"host_optimizer": True}},
        {"memory": {"budget": 110_000}},
        {"train": {"dtype": "fp16"}},
        {"compression": {"messages": "dct", "messages_kept": 0.5}},
        {"parallel": {"dp": 2}, "compression": {"gradients": "powersgd"}},
        {"optim": {"name": "muon"}},
        {"parallel": {"sites": 2}},
        {"model": {"kind": "bert", "sentence_head": "nsp"}},
        {"memory": {"offload_activations": "auto"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["auto", "2bw"])
def test_every_kind_of_job_can(
    schedule: str,
    sections: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = {"folder": str(tmp_path), **sections.get("memory", {})}
    config = make({"schedule": schedule}, **{**sections, "memory": memory})
    done = warmed(config, 0, monkeypatch)
    assert done[Kind.F, 0] > 2
    assert any(kind is Kind.UPDATE for kind, _ in done)


def test_only_receives_on_gpus_need_it() -> None:
    cuda = torch.device("cuda")
    for pp, via_host, device, expected in (
        (2, False, cuda, True),
        (1, False, cuda, False),
        (2, True, cuda, False),
        (2, False, CPU, False),
    ):
        grid: Any = SimpleNamespace(pp=SimpleNamespace(size=pp, via_host=via_host))
        assert is_needed(grid, device) is expected


@pytest.mark.ranks
def test_training_is_as_without_it() -> None:
    assert run_ranks(losses, 2, True) == run_ranks(losses, 2, False)


def losses(warm: bool) -> list[float]:
    config = make(SCHEDULES["2BW"], model={"attention_dropout": 0.1})
    grid = ProcessGrid(pp=2)
    if warm:
        warm_up(config, grid, CPU, lambda make: make())
    engine = Engine(JobPlan(config), grid, CPU)
    found = list[float]()
    engine.train(SyntheticLoader(config.model, 1, 8), 3, lambda step: found.append(step.loss))
    return [*found, *(float(x.double().sum()) for x in engine.state.tensors().values())]
