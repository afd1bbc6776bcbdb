"""Reading and writing graphs, and what is said of those that cannot be."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hybridpar.errors import ConfigError, DataError
from hybridpar.placement import make_workload, read_workload, workload_document, write_workload

from .graphs import document, paper_graph, random_document

GOOD = document(3, [(0, 1), (1, 2)], cost=[0.5, 0.25, 0.0])


def _set(path: str, value: Any) -> Callable[[dict], None]:
    def change(target: Any) -> None:
        *parents, last = [int(x) if x.isdigit() else x for x in path.split(".")]
        for key in parents:
            target = target[key]
        target[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("maxFPGAs", 0), "maxFPGAs = 0: must be 1 to"),
        (_set("maxFPGAs", 1.5), "maxFPGAs = 1.5: must be an integer"),
        (_set("maxCPUs", -1), "maxCPUs = -1"),
        (_set("maxSizePerFPGA", 0), "maxSizePerFPGA = 0: must be above 0"),
        (_set("maxSizePerFPGA", float("nan")), "maxSizePerFPGA = nan"),
        (_set("nodes", []), "nodes = .*: must hold at least one node"),
        (_set("nodes", 5), "nodes = 5: must be a JSON array"),
        (_set("nodes.1", None), r"nodes\[1\] = None: must be a JSON object"),
        (_set("nodes.1.id", 0), r"nodes\[1\].id = 0: is the id of nodes\[0\] too; .*; try"),
        (_set("nodes.1.id", "1"), r"nodes\[1\].id = '1': must be an integer"),
        (_set("nodes.2.cpuLatency", -1.0), r"nodes\[2\].cpuLatency = -1.0: must be 0 or more"),
        (_set("nodes.2.fpgaLatency", float("nan")), r"nodes\[2\].fpgaLatency = nan"),
        (_set("nodes.2.fpgaLatency", float("inf")), r"nodes\[2\].fpgaLatency = inf"),
        (_set("nodes.2.fpgaLatency", 10**400), r"nodes\[2\].fpgaLatency = 1000"),
        (_set("nodes.2.fpgaLatency", None), r"nodes\[2\].fpgaLatency = None: must be a number"),
        (_set("nodes.2.size", "large"), r"nodes\[2\].size = 'large': must be a number"),
        (
            _set("nodes.2.supportedOnFpga", 2),
            r"nodes\[2\].supportedOnFpga = 2: must be true, false",
        ),
        (_set("nodes.0.colorClass", 1.0), r"nodes\[0\].colorClass = 1.0"),
        (
            _set("nodes.0.isBackwardNode", True),
            r"edges\[0\] = '0 -> 1': leads from a backward node",
        ),
        (_set("edges.0.sourceId", 9), r"edges\[0\].sourceId = 9: must be the id of a node"),
        (_set("edges.0.destId", [0]), r"edges\[0\].destId = \[0\]"),
        (_set("edges.0.destId", 0), r"edges = '0 -> 0': is a cycle"),
        (_set("edges.1.destId", 0), r"edges = '(0 -> 1 -> 0|1 -> 0 -> 1)': is a cycle"),
        (_set("edges.0.cost", -0.5), r"edges\[0\].cost = -0.5"),
        (
            _set("edges.1.sourceId", 0),
            r"edges\[1\].cost = 0.25: another edge from node 0 costs 0.5",
        ),
    ],
)
def test_bad_values_are_named(change: Callable[[dict], None], message: str) -> None:
    bad = copy.deepcopy(GOOD)
    change(bad)
    with pytest.raises(ConfigError, match=message):
        make_workload(bad)


def test_all_that_is_wrong_is_said_at_once() -> None:
    bad = copy.deepcopy(GOOD)
    bad["nodes"][0]["size"] = bad["nodes"][1]["size"] = -1
    with pytest.raises(ConfigError) as caught:
        make_workload(bad)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04K\x01.", b"[" * 100_000, b"\xff\xfe"])
def test_files_that_are_no_json(content: bytes, tmp_path) -> None:
    (path := tmp_path / "graph.json").write_bytes(content)
    with pytest.raises(DataError, match=r"graph\.json"):
        read_workload(path)


def test_files_that_are_not_there(tmp_path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_workload(tmp_path / "none.json")


def test_all_is_written_again(tmp_path) -> None:
    for seed in range(20):
        given = random_document(np.random.default_rng(seed), training=seed % 2 == 0)
        for i, node in enumerate(given["nodes"]):
            node |= {"name": f"layer {i}", "layerId": i // 2}
        for edge in given["edges"]:
            edge["size"] = 3.5
        write_workload(make_workload(given), tmp_path / "graph.json")
        assert json.loads((tmp_path / "graph.json").read_text()) == given
        assert workload_document(read_workload(tmp_path / "graph.json")) == given


def test_the_papers_files_are_written_again(tmp_path) -> None:
    path = paper_graph("bert_l-3_training")
    write_workload(read_workload(path), tmp_path / "graph.json")
    assert json.loads((tmp_path / "graph.json").read_text()) == json.loads(path.read_text())


def test_nodes_without_a_colour_have_one_each() -> None:
    given = document(3, [(0, 1)])
    given["nodes"][1]["colorClass"] = 7
    assert len(set(make_workload(given).colour.tolist())) == 3


def test_blocks_share_a_device_with_all_their_colours() -> None:
    """Nodes 0 and 3 have one colour, so blocks 7 and 9 go together."""
    w = make_workload(
        document(4, [(0, 1), (1, 2), (2, 3)], colorClass=[1, 2, 3, 1], layerId=[7, 7, 8, 9])
    )
    assert w.blocks is not None
    assert w.blocks.tolist() == [7, 7, 8, 9]
    colour = w.in_blocks().colour.tolist()
    assert colour[0] == colour[1] == colour[3] != colour[2]
    for bad in ([0, 1, 2, None], [0, 1, 2, "x"], [0, 1, 2, True], [0, 1, 2, 10**30]):
        with pytest.raises(
            ConfigError, match=r"nodes\[3\].layerId = .*: must be the number of a block"
        ):
            make_workload(document(4, [(0, 1)], layerId=bad)).in_blocks()
