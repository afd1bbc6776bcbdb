"""An instance of Piper's planning problem, layers with ways to run each, and its JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridpar.placement.fields import Checker
from hybridpar.placement.workload import MAX_DEVICES, MAX_INT, cycle, read_document

RECOMPUTED = "activation recomp"
PLAIN = "vanilla"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a layer on some number of devices ("TMPC" in the paper). Units: s, bytes.

    A device needs `memory_a` bytes for each micro-batch in flight, and `memory_b` once.
    `sync_forward[u]` and `sync_backward[w]` are bytes that the group exchanges if the preceding
    layer u, or the following layer w, is in another stage.
    """

    name: str
    time: float
    weights: float
    memory_a: float
    memory_b: float
    sync_forward: Mapping[int, float]
    sync_backward: Mapping[int, float]


@dataclass(frozen=True, eq=False, slots=True)
class Instance:
    """n layers, by position in the file, and the devices for them. `make_instance` creates and
    checks it."""

    ids: tuple[int, ...]
    names: tuple[str, ...]
    ways: tuple[Mapping[int, tuple[Way, ...]], ...]
    """Ways to run each layer, by tensor-parallel degree."""
    edges: tuple[tuple[int, int, float], ...]
    """Edges (source, destination, bytes), by position."""
    memory: float
    """Bytes of a device."""
    num_devices: int
    bandwidth: float
    """Bytes per second from a device to the others."""
    num_microbatches: int
    """Micro-batches of a batch, over all replicas."""

    @property
    def num_layers(self) -> int:
        return len(self.ids)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees for which some layer has a way."""
        return tuple(sorted({t for ways in self.ways for t in ways}))

    def with_devices(
        self,
        *,
        num_devices: int | None = None,
        memory: float | None = None,
        bandwidth: float | None = None,
        num_microbatches: int | None = None,
    ) -> Instance:
        """Return this instance on other devices. Raises: ConfigError if they are not valid."""
        given = {
            "maxDevices": num_devices,
            "maxMemoryPerDevice": memory,
            "bandwidth": bandwidth,
            "mbsInBatch": num_microbatches,
        }
        own = {
            "maxDevices": self.num_devices,
            "maxMemoryPerDevice": self.memory,
            "bandwidth": self.bandwidth,
            "mbsInBatch": self.num_microbatches,
        }
        check = Checker()
        values = _devices(check, own | {k: v for k, v in given.items() if v is not None})
        check.finish()
        return replace(self, **values)


def is_instance(document: object) -> bool:
    """Return whether a document is meant to be in Piper's format, valid or not."""
    return isinstance(document, Mapping) and not {"maxDevices", "mbsInBatch"}.isdisjoint(document)


def read_instance(path: str | Path) -> Instance:
    """Read an instance from a file.

    Raises:
        DataError: The file is not JSON.
        ConfigError: The file is not an instance.
    """
    return make_instance(read_document(path))


def make_instance(document: object) -> Instance:
    """Return the instance of a document in Piper's format (a dict).

    Raises:
        ConfigError: Lists the first 10 errors.
    """
    check = Checker()
    top = check.mapping(document, "instance")
    check.finish()
    devices = _devices(check, top)
    nodes = [
        check.mapping(x, f"nodes[{i}]")
        for i, x in enumerate(check.items(top.get("nodes"), "nodes"))
    ]
    edges = [
        check.mapping(x, f"edges[{i}]")
        for i, x in enumerate(check.items(top.get("edges"), "edges"))
    ]
    if not nodes:
        check.add("nodes", [], "must hold at least one layer", '[{"id": 0, ...}]')
    check.finish()
    position: dict[int, int] = {}
    for i, node in enumerate(nodes):
        node_id = check.integer(node, "id", f"nodes[{i}].", -MAX_INT, MAX_INT, str(i))
        if node_id in position:
            check.add(
                f"nodes[{i}].id",
                node_id,
                f"is the id of nodes[{position[node_id]}] too; ids must differ",
                str(max(position) + 1),
            )
        position.setdefault(node_id, i)
    check.finish()
    links = _links(check, edges, position)
    check.finish()
    ways = tuple(_ways(check, node, i, links, position) for i, node in enumerate(nodes))
    check.finish()
    return Instance(
        tuple(position),
        tuple(str(x.get("name", "")) for x in nodes),
        ways,
        tuple((u, v, cost) for (u, v), cost in links.items()),
        **devices,
    )


def _devices(check: Checker, top: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "memory": check.number(top, "maxMemoryPerDevice", "", positive=True),
        "num_devices": check.integer(top, "maxDevices", "", 1, MAX_DEVICES, "8"),
        "bandwidth": check.number(top, "bandwidth", "", positive=True),
        "num_microbatches": check.integer(top, "mbsInBatch", "", 1, 10**9, "512"),
    }


def _links(
    check: Checker, edges: list[Mapping[str, Any]], position: Mapping[int, int]
) -> dict[tuple[int, int], float]:
    links: dict[tuple[int, int], float] = {}
    for i, edge in enumerate(edges):
        ends = check.ends(edge, i, position)
        cost = check.number(edge, "communicationCost", f"edges[{i}].")
        if ends is not None:
            if ends in links:
                check.add(
                    f"edges[{i}]",
                    f"{edge['sourceId']} -> {edge['destId']}",
                    "is there twice",
                    "one of them",
                )
            links[ends] = cost
    if around := cycle(len(position), links):
        ids = list(position)
        check.add(
            "edges",
            " -> ".join(str(ids[v]) for v in around + around[:1]),
            "is a cycle; layers must have an order",
            "the graph without one of these edges",
        )
    return links


def _ways(
    check: Checker,
    node: Mapping[str, Any],
    i: int,
    links: Mapping[tuple[int, int], float],
    position: Mapping[int, int],
) -> dict[int, tuple[Way, ...]]:
    found: dict[int, tuple[Way, ...]] = {}
    before = {u for u, v in links if v == i}
    after = {v for u, v in links if u == i}
    for key, entries in check.mapping(node.get("TMPCs"), f"nodes[{i}].TMPCs").items():
        where = f"nodes[{i}].TMPCs[{key!r}]"
        if not (
            isinstance(key, str)
            and key.isascii()
            and key.isdigit()
            and 1 <= int(key[:9]) <= MAX_DEVICES
            and len(key) < 9
        ):
            check.add(
                where, key, f"the degree of tensor parallelism must be 1 to {MAX_DEVICES}", '"1"'
            )
            continue
        ways: list[Way] = []
        for j, entry in enumerate(check.items(entries, where)):
            at = f"{where}[{j}]."
            entry = check.mapping(entry, at)
            name = entry.get("id")
            if not isinstance(name, str) or not name or name in [way.name for way in ways]:
                check.add(
                    f"{at}id",
                    name,
                    "must be a name that no other way of the layer at this degree has",
                    PLAIN,
                )
                name = ""
            ways.append(
                Way(
                    name,
                    check.number(entry, "timePerSample", at),
                    check.number(entry, "parameterSize", at),
                    check.number(entry, "memoryUsageA", at),
                    check.number(entry, "memoryUsageB", at),
                    _sync(check, entry, "syncTimeFw", at, before, position),
                    _sync(check, entry, "syncTimeBw", at, after, position),
                )
            )
        if ways:
            found[int(key)] = tuple(ways)
    if not found:
        check.add(
            f"nodes[{i}].TMPCs",
            node.get("TMPCs"),
            "must hold a way to run the layer",
            '{"1": [{...}]}',
        )
    return found


def _sync(
    check: Checker,
    entry: Mapping[str, Any],
    key: str,
    where: str,
    neighbours: set[int],
    position: Mapping[int, int],
) -> dict[int, float]:
    """Return bytes by neighbour, and check that there is exactly one for each edge."""
    given = check.mapping(entry.get(key), f"{where}{key}")
    ids = {str(node): i for node, i in position.items()}
    for name in given:
        if ids.get(name) not in neighbours:
            check.add(
                f"{where}{key}",
                name,
                "there is no edge between the layer and this one",
                "the ids at its edges",
            )
    found = {}
    for name, i in ids.items():
        if i in neighbours:
            found[i] = check.number(given, name, f"{where}{key}.")
    return found
