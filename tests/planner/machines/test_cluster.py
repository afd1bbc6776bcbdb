"""cluster.toml, and estimated profiles."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planner import made

from hybridpar.config import ParallelConfig, TrainConfig, from_mapping
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis
from hybridpar.models.heads import LABELLED
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.cluster import (
    _DEVICE,
    _KEYS,
    _LEVEL,
    _LINK,
    count_parameters,
    estimate,
    machine_of,
    measured_machine,
    read_cluster,
)
from hybridpar.planner.machines.hardware import DEVICES, GIB, LINKS
from hybridpar.planner.machines.kernel_times import block_times
from hybridpar.planner.measuring.bench import Bench
from hybridpar.planner.measuring.profile_file import read_profile, write_profile
from hybridpar.prediction.work import block_kinds

GOOD = """
servers = 2
devices_per_server = 4
device = "a100-80gb"
inner = "nvlink3"
outer = { gbit_per_s = 100, latency_us = 7 }
outer_links = 2
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_names_and_numbers(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, GOOD))
    assert (cluster.num_devices, cluster.device.name, cluster.outer_links) == (8, "a100-80gb", 2)
    assert (cluster.outer.bandwidth, cluster.outer.latency) == (
        pytest.approx(12.5e9),
        pytest.approx(7e-6),
    )
    own = GOOD.replace('"a100-80gb"', "{ tflops = 100, memory_gib = 24, memory_gb_per_s = 900 }")
    assert read_cluster(write(tmp_path, own)).device.memory_bytes == 24 * 2**30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"a100-80gb"', '"a200"'), "device = 'a200': must be one of v100-16gb"),
        (
            ('"a100-80gb"', '"l40s"'),
            "or a table of any other: { tflops = .., memory_gib = .., memory_gb_per_s = .. }",
        ),
        (
            ('"a100-80gb"', "{ tflops = 1, memory_gib = 1.5, memory_gb_per_s = 9 }"),
            "memory_gib = 1.5: must be above",
        ),
        (('"nvlink3"', '"wire"'), "inner = 'wire': must be one of nvlink2"),
        (("servers = 2", "servers = -2"), "servers = -2: must be positive"),
        (("servers = 2\n", ""), "servers = None: is missing"),
        (("servers = 2", 'servers = "two"'), "servers = 'two': has the wrong type; try 2"),
        (("outer_links", "outer_link"), "outer_link = 2: unknown key"),
        (("latency_us = 7", "latency_us = -7"), "outer.latency_us = -7: must not be negative"),
        (("gbit_per_s = 100,", ""), "outer.gbit_per_s = None: is missing; try 25"),
        (("servers = 2", "servers ="), "is not valid TOML"),
        (
            ("servers = 2", "servers = 1000000"),
            "servers = 1000000: must give at most 100000 devices in all; this gives 4000000",
        ),
        (
            ("gbit_per_s = 100", "gbit_per_s = inf"),
            "outer.gbit_per_s = inf: must be positive, and at most 1e.09",
        ),
        (("latency_us = 7", "latency_us = nan"), "outer.latency_us = nan: must not be negative"),
    ],
)
def test_each_mistake_is_named(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    assert change[0] in GOOD
    with pytest.raises(ConfigError, match=message):
        read_cluster(write(tmp_path, GOOD.replace(*change)))


def test_racks_and_prices(tmp_path: Path) -> None:
    """16 devices in servers of 4, two servers a rack."""
    text = (
        GOOD.replace("servers = 2", "servers = 4\nprice = 1.8")
        + """
[[levels]]
groups = 2
link = { gbit_per_s = 8, share = 1.0 }
links = 3
"""
    )
    cluster = read_cluster(write(tmp_path, text))
    assert [(level.devices, level.link.bandwidth, level.links) for level in cluster.levels] == [
        (8, 1e9, 3)
    ]
    config = replace(
        made.config(), parallel=ParallelConfig(pp=2, dp=8), train=TrainConfig(dtype="bf16")
    )
    machine = machine_of(cluster, estimate(config, cluster))
    cost = StepCost(config, machine)
    message = 2 * config.train.micro_batch_size * 32 * 64
    # eight pipelines from rack to rack, on three links
    taken, latency, _ = cost.links[0]
    assert taken + latency == pytest.approx(10e-6 + 8 / 3 * message / 1e9)
    assert cost.price == pytest.approx(1.8 * 16 / 3600 * 1e6 / cost.tokens_per_s)
    with pytest.raises(ConfigError, match=r"levels\[0\].groups = None: is missing"):
        read_cluster(write(tmp_path, text.replace("groups = 2\n", "")))


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    text = """
nodes = 2
devices_per_server = 0
device = { tflops = 100, memory = 24, memory_gb_per_s = 900 }
inner = "nvlink9"
outer = { gbit_per_s = 100, latncy_us = 7 }

[[levels]]
group = 2
link = "wire"

[[others]]
servers = -1
device = "a200"
"""
    with pytest.raises(ConfigError) as caught:
        read_cluster(write(tmp_path, text))
    found = {
        problem.field.removeprefix("cluster.toml: "): problem.suggestion
        for problem in caught.value.problems
    }
    assert found == {
        "nodes": "servers",
        "devices_per_server": "8",
        "device.memory": "memory_gib",
        "inner": "nvlink2",
        "outer.latncy_us": "latency_us",
        "levels[0].group": "groups",
        "levels[0].link": "infiniband-hdr",
        "others[0].servers": "2",
        "others[0].device": "a100-80gb",
    }
    assert "nodes = 2: unknown key. Keys: servers, " in str(caught.value)
    assert "did you mean servers?" in str(caught.value)


PAGE = (Path(__file__).parents[3] / "docs/clusters.md").read_text()


def test_the_examples_of_the_page_are_clusters(tmp_path: Path) -> None:
    first, device, link, racks = re.findall(r"^```ini\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    cluster = read_cluster(write(tmp_path, first))
    assert (cluster.num_devices, cluster.outer_links, cluster.outer.name) == (
        128,
        8,
        "infiniband-ndr",
    )
    without = {
        key: re.sub(f"^{key} = .*\n", "", first, flags=re.MULTILINE) for key in ("device", "outer")
    }
    assert read_cluster(write(tmp_path, without["device"] + device)).device.name == "rtx 4090"
    assert read_cluster(
        write(tmp_path, without["outer"] + link)
    ).outer.back_bandwidth == pytest.approx(1e8 / 8)
    cluster = read_cluster(write(tmp_path, first + racks))
    assert (cluster.num_servers, cluster.levels[0].devices, cluster.levels[0].links) == (20, 32, 2)


def test_the_page_has_every_key_and_every_name() -> None:
    keys = [
        re.findall(r"^\| `\[*(\w+)\]*` \|", part, re.MULTILINE) for part in PAGE.split("\n## ")[1:]
    ]
    known = (_KEYS, _DEVICE, _LINK, _LEVEL)
    assert [sorted(found) for found in keys if found] == [sorted(names) for names in known]
    for name in (*DEVICES, *LINKS):
        assert f"`{name}`" in PAGE


def test_several_servers_need_a_link(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="outer = None: missing: it is the link between the 2 servers"
    ):
        read_cluster(
            write(tmp_path, GOOD.replace("outer = { gbit_per_s = 100, latency_us = 7 }\n", ""))
        )


def test_estimates_are_those_of_the_hardware_tables(tmp_path: Path) -> None:
    config = replace(made.config(), train=TrainConfig(dtype="bf16"))
    cluster = read_cluster(write(tmp_path, GOOD))
    profile = estimate(config, cluster)
    assert profile.estimated
    assert profile.tp_degrees == [1, 2, 4]
    for tp, b in ((1, 1), (2, 8)):
        times = block_times(config.model, b, cluster.device, tp)
        assert profile.block("layer", tp, b).forward == pytest.approx(times[1].forward)
        assert profile.block("head", tp, b).backward == pytest.approx(times[-1].backward)
    assert profile.block("layer", 2, 1).forward_messages == (2 * 32 * 64,) * 2
    bert = estimate(replace(config, model=replace(config.model, kind="bert")), cluster, (3,))
    labelled = 3 * round(LABELLED["bert"] * 32)  # rows: the head has no others
    assert bert.block("head", 4, 3).forward_messages == (4 * labelled,) * 3
    assert bert.block("head", 4, 3).backward_messages == (2 * labelled * 64,)
    with pytest.raises(
        ConfigError, match=r"train.dtype = 'fp32': estimated profiles support bf16 and fp16 only"
    ):
        estimate(made.config(), cluster)
    with pytest.raises(
        ConfigError,
        match="ranks = 9: must be at most 8, the number of devices in the cluster; try 8",
    ):
        machine_of(cluster, profile, 9)


def test_parameters_are_those_of_the_blocks() -> None:
    h = 64
    v = 128
    whole, half = (count_parameters(made.MODEL, tp) for tp in (1, 2))
    assert whole["embedding"] == v * h + 32 * h
    assert whole["layer"] == 12 * h * h + 13 * h
    assert whole["head"] == v * h + 2 * h
    assert half["layer"] < whole["layer"] < 2 * half["layer"]


def test_a_measured_machine_has_links_for_all_its_ranks() -> None:
    config = made.config()
    profile = made.profile(config, cores=2)
    assert measured_machine(profile, 4).devices_per_server == 8
    with pytest.raises(ConfigError, match="was measured with one rank"):
        measured_machine(replace(profile, links={}), 2)
    with pytest.raises(
        ConfigError,
        match="ranks = 9: must be at most 8, the number of ranks in the profile, unless a "
        "--cluster",
    ):
        measured_machine(made.profile(config), 9)
    assert StepCost(config, measured_machine(profile, 1)).step_time > 0


def test_experts_are_planned_for(tmp_path: Path) -> None:
    """More experts of the same size cost more weights and router, and hardly more operations."""
    cluster = read_cluster(write(tmp_path, GOOD))
    sizes = {"num_experts": 4, "hidden_size": 1024, "expert_ffn_hidden_size": 2048}
    few = from_mapping({"model": sizes, "train": {"dtype": "bf16"}}, made.config())
    many = from_mapping({"model": {"num_experts": 16}}, few)
    times = [block_times(c.model, 64, cluster.device)[1].forward for c in (few, many)]
    assert times[0] < times[1]
    assert count_parameters(many.model, 1)["layer"] > 1.5 * count_parameters(few.model, 1)["layer"]
    machine = machine_of(cluster, estimate(few, cluster))
    assert StepCost(few, machine).step_time > 0


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_by_its_numbers_is_the_device_by_its_name(tmp_path: Path, name: str) -> None:
    known = DEVICES[name]
    numbers = (
        f"{{ tflops = {1e-12 * known.peak_flops}, memory_gib = {known.memory_bytes / GIB}, "
        f"memory_gb_per_s = {1e-9 * known.memory_bandwidth} }}"
    )
    named, numbered = (
        read_cluster(write(tmp_path, GOOD.replace('"a100-80gb"', device))).device
        for device in (f'"{name}"', numbers)
    )
    assert numbered == named


def test_numbers_of_no_known_device_are_taken_as_they_are(tmp_path: Path) -> None:
    table = "{ tflops = 165, memory_gib = 24, memory_gb_per_s = 1008, launch_us = 40 }"
    device = read_cluster(write(tmp_path, GOOD.replace('"a100-80gb"', table))).device
    assert (device.matmul_share, device.launch) == (0.6, pytest.approx(40e-6))
    like = "{ tflops = 312, memory_gib = 80, memory_gb_per_s = 1935, matmul_share = 0.5 }"
    given = read_cluster(write(tmp_path, GOOD.replace('"a100-80gb"', like))).device
    assert given == replace(DEVICES["a100-80gb"], matmul_share=0.5)


KINDS_OF = {
    "experts": (
        {"num_experts": 4, "expert_ffn_hidden_size": 2048, "moe_layers": "01"},
        ("layer", "experts"),
    ),
    "windows": ({"window": 64, "window_pattern": "110"}, ("layer with window", "layer")),
    "both": (
        {"num_experts": 4, "moe_layers": "011", "window": 64, "window_pattern": "01"},
        ("layer", "experts with window", "experts", "layer with window"),
    ),
    "no rotary": (
        {"position": "rotary", "rotary_pattern": "1110"},
        ("layer", "layer without rotary"),
    ),
}


@pytest.mark.parametrize(("model", "kinds"), KINDS_OF.values(), ids=KINDS_OF)
def test_layers_that_differ_are_kinds_of_their_own(
    tmp_path: Path, model: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    """Estimated, kept in a profile's file, and added up by stage."""
    cluster = read_cluster(write(tmp_path, GOOD))
    sizes = {"num_layers": 6, "hidden_size": 512, "num_heads": 4, "seq_length": 4096} | model
    config = from_mapping(
        {"model": sizes, "train": {"dtype": "bf16"}, "parallel": {"pp": 2, "tp": 2}}, made.config()
    )
    found = block_kinds(config.model)
    assert tuple(dict.fromkeys(found[1:-1])) == kinds
    profile = estimate(config, cluster)
    write_profile(profile, tmp_path / "profile.json")
    read = read_profile(tmp_path / "profile.json").blocks
    assert read.keys() == profile.blocks.keys()
    cost = StepCost(config, machine_of(cluster, profile))
    each = [profile.block(kind, 2, 2).forward for kind in found]
    total = sum(stage.forward for stage in cost.stages)
    assert total >= sum(each)
    if "window" in model:
        inside, outside = (profile.block(kind, 1, 2) for kind in ("layer with window", "layer"))
        working, longer = (c.forward - c.forward_idle for c in (inside, outside))
        assert working < 0.9 * longer
        assert inside.parameters == outside.parameters
    if "moe_layers" in model:
        assert (
            count_parameters(config.model, 1)["experts"]
            > count_parameters(config.model, 1)["layer"]
        )
    small = from_mapping({"model": {"hidden_size": 32, "seq_length": 128}}, config)
    small = replace(small, parallel=ParallelConfig(dp=1))
    assert set(Bench(small, 1, Axis("tp"), torch.device("cpu")).kinds) == set(found)
