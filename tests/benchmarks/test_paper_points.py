"""`hybridpar check --cluster` on the machines of PipeDream-2BW's figures: the costs that benchmarks.paper
simulates the paper's systems with are our planner's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.paper_points import READ
from benchmarks.paper_systems import Setting
from hybridpar.config import Config, from_mapping, load_toml
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.cluster import estimated
from hybridpar.planner.machines.hardware import DEVICES, LINKS, Cluster
from hybridpar.validate import resolve

ROOT = Path(__file__).parents[2]


def configuration(setting: Setting, *, own_split: bool) -> Config:
    """The paper's GPT on the grid of a setting; by default equal numbers of layers on all stages."""
    layers = setting.model.num_layers // setting.depth
    split = [layers + 1, *[layers] * (setting.depth - 2), layers + 1]
    config = from_mapping(
        {
            "parallel": {"pp": setting.depth, "dp": setting.width},
            "pipeline": {
                "num_microbatches": setting.num_microbatches,
                "recompute": "all" if setting.recompute else "none",
                "split": [] if own_split else split,
            },
            "train": {"micro_batch_size": setting.micro_batch, "dtype": "fp16"},
        },
        load_toml(ROOT / "scripts" / "configs" / "gpt_1b3_paper.toml"),
    )
    return resolve(config, setting.depth * setting.width)


def speed(setting: Setting, *, own_split: bool = False) -> float:
    """Sequences a second."""
    config = configuration(setting, own_split=own_split)
    cluster = Cluster(
        DEVICES["v100-16gb"], 8, setting.servers, LINKS["nvlink2"], LINKS["ethernet-25"]
    )
    return setting.batch / StepCost(config, estimated(config, cluster)).step_time


@pytest.mark.thorough
def test_one_server_is_as_read_off_figure_12() -> None:
    """The split is the paper's, which puts the head on top of the last stage's layers."""
    for recompute in (True, False):
        points = {
            s: read for s, read in READ.items() if s.servers == 1 and s.recompute == recompute
        }
        speeds = [speed(setting) for setting in points]
        assert speeds == sorted(speeds)
        for found, read in zip(speeds, points.values(), strict=True):
            assert found == pytest.approx(read, rel=0.2)


def test_eight_servers_are_as_read_off_figure_8() -> None:
    """Micro-batches of one are slow, and on the deeper pipeline slowest."""
    points = {setting: read for setting, read in READ.items() if setting.servers == 8}
    speeds = {setting: speed(setting, own_split=True) for setting in points}
    assert sorted(points, key=points.__getitem__) == sorted(speeds, key=speeds.__getitem__)
    for setting, read in points.items():
        assert speeds[setting] == pytest.approx(read, rel=0.2)
