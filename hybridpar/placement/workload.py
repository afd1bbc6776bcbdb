"""Graphs of operators, the devices to place them on, and their JSON files.

Source of model and format: Tarnawski et al., "Efficient Algorithms for Device Assignment of DNN
Graph Operators", NeurIPS 2020 (arXiv 2006.16423), section 3 and appendix D. Their files call every
accelerator an FPGA.

Units: times in the file's unit (milliseconds in the paper's files), sizes in bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from hybridpar.checkpoint.format.files import write_text
from hybridpar.errors import DataError, config_error
from hybridpar.placement.fields import Checker
from hybridpar.reading import nearest_path, read_limited

MAX_FILE_BYTES = 256 * 2**20
MAX_DEVICES = 10_000
OBJECTIVES = ("serial", "overlapped", "gpipe")
"""serial       the largest load; a device computes and transfers by turns
overlapped   the largest load, where transfers run beside computing
gpipe        the largest forward load plus the largest backward load: forward and backward of a batch
             come one after the other, as in GPipe"""
COST_TOLERANCE = (
    1e-6  # by which the costs of one node's edges may differ, as in the authors' reader
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True)
class Workload:
    """An acyclic graph of n operators, with k accelerators and l CPUs. `make_workload` creates and
    checks it.

    Shapes: all arrays are [n], by position in the file; `edges` [m, 2] holds positions of source
    and destination.
    """

    ids: tuple[int, ...]
    cpu_time: Floats
    accelerator_time: Floats
    size: Floats
    """Bytes on an accelerator; CPUs have no limit."""
    supported: Bools
    """Whether an accelerator can run each node."""
    backward: Bools
    colour: Ints
    """Colour class of each node; nodes of one class must share a device."""
    edges: Ints
    transfer_time: Floats
    """Time to move a node's output between an accelerator and host memory; 0 if nothing reads
    it."""
    memory: float
    """Bytes of one accelerator."""
    num_accelerators: int
    num_cpus: int
    node_extra: tuple[Mapping[str, Any], ...] = field(repr=False)
    """Further fields of each node in the file (colorClass if present, name, layerId, ...), kept for
    writing."""
    edge_extra: tuple[Mapping[str, Any], ...] = field(repr=False)
    objective: str = "serial"
    """One of OBJECTIVES; files do not have it."""

    @property
    def num_nodes(self) -> int:
        return len(self.ids)

    @property
    def room(self) -> float:
        """Limit on the sum of sizes on an accelerator: its memory, plus a tolerance for the order
        of addition.

        A sum of integers is exact, so it is below this limit only if it is within the memory.
        """
        return min(self.memory * (1 + 1e-12), self.memory + 0.5)

    @property
    def training(self) -> bool:
        return bool(self.backward.any())

    def with_devices(
        self,
        *,
        num_accelerators: int | None = None,
        num_cpus: int | None = None,
        memory: float | None = None,
    ) -> Workload:
        """Return this graph for other devices. Raises: ConfigError if they are not valid."""
        document = workload_document(self)
        for key, value in (
            ("maxFPGAs", num_accelerators),
            ("maxCPUs", num_cpus),
            ("maxSizePerFPGA", memory),
        ):
            if value is not None:
                document[key] = value
        return make_workload(document)

    @property
    def blocks(self) -> Ints | None:
        """The block of each node (its `layerId`), or None if not all nodes have one."""
        found = [extra.get("layerId") for extra in self.node_extra]
        return np.array(found, np.int64) if all(map(_is_number, found)) else None

    def in_blocks(self) -> Workload:
        """Return this graph with all nodes of a block on one device. Raises: ConfigError if a node
        has no block."""
        if (blocks := self.blocks) is None:
            extra = self.node_extra
            at = next(i for i, x in enumerate(extra) if not _is_number(x.get("layerId")))
            raise config_error(
                f"nodes[{at}].layerId",
                extra[at].get("layerId"),
                "must be the number of a block",
                "0",
            )
        colour, block = (
            np.unique(x, return_inverse=True)[1].ravel() for x in (self.colour, blocks)
        )
        # group by colours, then by blocks, because connected nodes share a device
        first = int(colour.max()) + 1
        count = first + int(block.max()) + 1
        pairs = csr_array((np.ones(len(colour)), (colour, first + block)), shape=(count, count))
        return replace(self, colour=connected_components(pairs)[1][colour].astype(np.int64))


def _is_number(block: object) -> bool:
    return type(block) is int and abs(block) < MAX_INT


# -- checks


def cycle(num_nodes: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the nodes of one cycle in order, or [] if the graph is acyclic."""
    edges = list(edges)
    left = set(range(num_nodes)).difference(order_of(num_nodes, edges))
    before: dict[int, list[int]] = {v: [] for v in left}
    for u, v in edges:
        if u in left and v in left:
            before[v].append(u)
    if not left:
        return []
    node = min(left)
    walk: dict[
        int, int
        # every remaining node has a remaining predecessor, so walking backwards must close a cycle
    ] = {}
    while node not in walk:
        walk[node] = len(walk)
        node = before[node][0]
    return list(walk)[walk[node] :][::-1]


def order_of(num_nodes: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return a topological order, depth first, so that nodes that feed each other are near.

    The order is shorter than `num_nodes` if there is a cycle.
    """
    after: list[list[int]] = [[] for _ in range(num_nodes)]
    missing = [0] * num_nodes
    for u, v in edges:
        after[u].append(v)
        missing[v] += 1
    ready = [v for v in range(num_nodes) if not missing[v]]
    order: list[int] = []
    while ready:
        u = ready.pop()
        order.append(u)
        for v in after[u]:
            missing[v] -= 1
            if not missing[v]:
                ready.append(v)
    return order


# -- JSON files

NODE_KEYS = ("id", "supportedOnFpga", "cpuLatency", "fpgaLatency", "isBackwardNode", "size")
EDGE_KEYS = ("sourceId", "destId", "cost")
MAX_INT = 2**62


def read_document(path: str | Path) -> Any:
    """Return the content of a JSON file. Raises: DataError if it is not JSON, or larger than 256
    MiB."""
    path = Path(path)
    try:
        return json.loads(read_limited(path, MAX_FILE_BYTES))
    except OSError as error:
        near = nearest_path(path)
        raise DataError(
            f"{path}: cannot be read ({error.strerror})" + (near and f"; try {near}")
        ) from error
    except (ValueError, RecursionError) as error:
        what = f"{path}: is not JSON ({error or type(error).__name__})"
        raise DataError(
            f"{what}; try the graph.json that hybridpar graph CONFIG.toml writes"
        ) from error


def read_workload(path: str | Path) -> Workload:
    """Read a workload in the paper's format.

    Raises:
        DataError: The file is not JSON.
        ConfigError: Fields are wrong.
    """
    return make_workload(read_document(path))


def write_workload(workload: Workload, path: str | Path) -> None:
    """Write a file for `read_workload`, with all fields that the workload was made from."""
    write_text(Path(path), json.dumps(workload_document(workload), indent=1) + "\n")


def make_workload(document: object) -> Workload:
    """Return the workload of a document in the paper's format (a dict, as `json.load` returns it).

    Raises:
        ConfigError: Lists the first 10 wrong fields: missing, not a number, negative, NaN, a
            duplicate or unknown id, a cycle, an edge from a backward to a forward node, no
            accelerator, no memory.
    """
    check = Checker()
    top = check.mapping(document, "workload")
    check.finish()
    memory = check.number(top, "maxSizePerFPGA", "", positive=True)
    num_accelerators = check.integer(top, "maxFPGAs", "", 1, MAX_DEVICES, "1")
    num_cpus = check.integer(top, "maxCPUs", "", 0, MAX_DEVICES, "0")
    nodes = [
        check.mapping(x, f"nodes[{i}]")
        for i, x in enumerate(check.items(top.get("nodes"), "nodes"))
    ]
    edges = [
        check.mapping(x, f"edges[{i}]")
        for i, x in enumerate(check.items(top.get("edges"), "edges"))
    ]
    if not nodes and not check.problems:
        check.add("nodes", [], "must hold at least one node", '[{"id": 0, ...}]')
    check.finish()
    columns, position = _nodes(check, nodes)
    check.finish()
    pairs, transfer_time = _edges(check, edges, position)
    check.finish()
    _check_order(check, list(position), pairs, columns["backward"])
    check.finish()
    return Workload(
        ids=tuple(position),
        edges=np.array(pairs, np.int64).reshape(-1, 2),
        transfer_time=transfer_time,
        memory=memory,
        num_accelerators=num_accelerators,
        num_cpus=num_cpus,
        node_extra=tuple({k: x[k] for k in x if k not in NODE_KEYS} for x in nodes),
        edge_extra=tuple({k: x[k] for k in x if k not in EDGE_KEYS} for x in edges),
        **columns,
    )


def _nodes(
    check: Checker, nodes: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[int, int]]:
    position: dict[int, int] = {}
    rows: list[tuple[float, float, float, bool, bool]] = []
    colours: list[int | None] = []
    for i, node in enumerate(nodes):
        where = f"nodes[{i}]."
        known = len(check.problems)
        node_id = check.integer(node, "id", where, -MAX_INT, MAX_INT, str(i))
        if node_id in position and len(check.problems) == known:
            check.add(
                f"{where}id",
                node_id,
                f"is the id of nodes[{position[node_id]}] too; ids must differ",
                str(max(position) + 1),
            )
        position.setdefault(node_id, i)
        rows.append(
            (
                check.number(node, "cpuLatency", where),
                check.number(node, "fpgaLatency", where),
                check.number(node, "size", where, 0.0),
                check.flag(node, "supportedOnFpga", where),
                check.flag(node, "isBackwardNode", where),
            )
        )
        colours.append(
            check.integer(node, "colorClass", where, -MAX_INT, MAX_INT, "1")
            if "colorClass" in node
            else None
        )
    used = {c for c in colours if c is not None}
    fresh = max(used, default=0) + 1  # nodes without a class get a class each
    for i, colour in enumerate(colours):
        if colour is None:
            colours[i] = fresh
            fresh = fresh + 1
    cpu, accelerator, size, supported, backward = zip(*rows, strict=True)
    return {
        "cpu_time": np.array(cpu),
        "accelerator_time": np.array(accelerator),
        "size": np.array(size),
        "supported": np.array(supported),
        "backward": np.array(backward),
        "colour": np.array(colours, np.int64),
    }, position


def _edges(
    check: Checker, edges: Sequence[Mapping[str, Any]], position: Mapping[int, int]
) -> tuple[list[tuple[int, int]], Floats]:
    pairs: list[tuple[int, int]] = []
    costs = np.full(len(position), math.nan)
    for i, edge in enumerate(edges):
        ends = check.ends(edge, i, position)
        cost = check.number(edge, "cost", f"edges[{i}].")
        if ends is None:
            continue
        u, v = ends
        pairs.append((u, v))
        if abs(costs[u] - cost) > COST_TOLERANCE:  # false while no cost is known, which is NaN
            check.add(
                f"edges[{i}].cost",
                cost,
                f"another edge from node {edge['sourceId']} costs {costs[u]:g}; one output has one "
                "cost",
                f"{costs[u]:g}",
            )
        elif math.isnan(costs[u]):
            costs[u] = cost
    return pairs, np.nan_to_num(costs, nan=0.0)


def _check_order(
    check: Checker, ids: Sequence[int], pairs: Sequence[tuple[int, int]], backward: Bools
) -> None:
    if around := cycle(len(ids), pairs):
        path = " -> ".join(str(ids[v]) for v in (around + around[:1])[:8]) + (
            " ..." if len(around) > 7 else ""
        )
        check.add(
            "edges",
            path,
            "is a cycle; operators must have an order",
            "the graph without one of these edges",
        )
    for i, (u, v) in enumerate(pairs):
        if backward[u] and not backward[v]:
            check.add(
                f"edges[{i}]",
                f"{ids[u]} -> {ids[v]}",
                "leads from a backward node to a forward node",
                f"isBackwardNode = true for node {ids[v]}",
            )


def workload_document(workload: Workload) -> dict[str, Any]:
    """Return the JSON document of a workload, as `make_workload` takes it."""
    w = workload
    nodes = [
        {
            **w.node_extra[i],
            "id": w.ids[i],
            "supportedOnFpga": bool(w.supported[i]),
            "cpuLatency": float(w.cpu_time[i]),
            "fpgaLatency": float(w.accelerator_time[i]),
            "isBackwardNode": bool(w.backward[i]),
            "size": float(w.size[i]),
        }
        for i in range(w.num_nodes)
    ]
    edges = [
        {**extra, "sourceId": w.ids[u], "destId": w.ids[v], "cost": float(w.transfer_time[u])}
        for (u, v), extra in zip(w.edges.tolist(), w.edge_extra, strict=True)
    ]
    return {
        "maxSizePerFPGA": w.memory,
        "maxFPGAs": w.num_accelerators,
        "maxCPUs": w.num_cpus,
        "nodes": nodes,
        "edges": edges,
    }
