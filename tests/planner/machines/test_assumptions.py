"""Assumptions that `plan` states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from planner import made

from hybridpar.config import TrainConfig
from hybridpar.planner.machines.assumptions import assumption_lines
from hybridpar.planner.machines.cluster import estimated, measured_machine, read_cluster

SERVERS = """
servers = 4
devices_per_server = 8
device = "h100-80gb"
inner = "nvlink4"
outer = "infiniband-ndr"
"""


def said(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    config = replace(made.config(), train=TrainConfig(dtype="bf16"))
    return "\n".join(assumption_lines(estimated(config, read_cluster(path))))


def test_one_link_a_server_is_said_where_the_file_is_silent(tmp_path: Path) -> None:
    assert (
        "outer_links is left out, so a server has one infiniband-ndr link, which its 8 devices "
        "share; with a link "
        "for each device: outer_links = 8"
    ) in said(tmp_path, SERVERS)
    given = said(tmp_path, SERVERS + "outer_links = 8\n")
    assert "left out" not in given
    assert "the 8 devices of a server share its 8 infiniband-ndr links (outer_links)" in given
    alone = SERVERS.replace("servers = 4", "servers = 1").replace('outer = "infiniband-ndr"\n', "")
    assert "outer_links" not in said(tmp_path, alone)


def test_levels_have_one_link_where_the_file_is_silent(tmp_path: Path) -> None:
    level = '[[levels]]\ngroups = 2\nlink = "infiniband-hdr"\n'
    assert "levels[0].links is left out, so the 16 devices of a group share one" in said(
        tmp_path, SERVERS + level
    )
    assert "levels[0].links" not in said(tmp_path, SERVERS + level + "links = 4\n")


def test_shares_of_links_kernels_and_memory_are_said(tmp_path: Path) -> None:
    lines = said(tmp_path, SERVERS)
    assert "nvlink4 at 80% of 3,600 Gbit/s" in lines
    assert "infiniband-ndr at 90% of 400 Gbit/s and 5 us" in lines
    assert "h100-80gb: large matrix products at 82% of 989 TFLOP/s (matmul_share)" in lines
    assert "memory: training may take 75.4 of 80 GiB" in lines
    assert "overlap with kernels" in lines
    other = '[[others]]\nservers = 2\ndevice = "a100-80gb"\n'
    assert "a100-80gb: large matrix products" in said(tmp_path, SERVERS + other)
    assert "slower than the fastest by 5%" in said(tmp_path, "stragglers = 0.05\n" + SERVERS)


def test_only_memory_of_a_measured_machine_is_assumed() -> None:
    config = made.config()
    (line,) = assumption_lines(measured_machine(made.profile(config)))
    assert line.startswith("memory: ")


def test_a_card_without_bf16_is_said(tmp_path: Path) -> None:
    lines = said(tmp_path, SERVERS.replace("h100-80gb", "v100-16gb"))
    assert "v100-16gb has no products in bf16, so its times are for fp16" in lines
    assert "bf16" not in said(tmp_path, SERVERS)
