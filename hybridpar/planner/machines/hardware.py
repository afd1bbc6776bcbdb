"""Devices, links and clusters, and how long messages take on them: estimates. What kernels take is
in kernels.py.

Nothing here is measured on the machine at hand. Peaks are the vendors'; shares of them are what
well-tuned kernels and collectives are known to reach, and good for a tenth or two;
`dataclasses.replace` puts in what was measured.

    time of a message    latency + bytes * flows / (bandwidth * share)
    ring all-reduce      2 (n-1) steps of bytes / n each, over the slowest link of the ring

Units: seconds, bytes, bytes/s.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hybridpar.errors import config_error
from hybridpar.schedules.simulate.network import Network, Route

T = TypeVar("T")
GIB = 2**30
GIGABIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `peak_flops`: dense fp16 or bf16 with fp32 sums. Source: the vendor's data
    sheet."""

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    matmul_share: float
    """Share of `peak_flops` that an endless matrix product reaches; others reach less (kernels.py).
    Measured on the H200 (802 TFLOP/s, benchmarks/results/gpu_ops.json), fitted on the V100
    (benchmarks/paper.py), else an estimate."""
    memory_share: float = 0.8
    """Share of `memory_bandwidth` that element-wise kernels reach. Measured on the H200 (AdamW,
    0.81), else an estimate."""
    units: int = 108
    """Multiprocessors, each of which works on a tile of a product at a time."""
    attention_share: float = 0.4
    """Share of `peak_flops` that the forward of fused attention reaches with 128 features a head
    and a long sequence.
    """
    attention_back_share: float = 0.3
    """The same of its backward."""

    def matmul_time(self, flops: float) -> float:
        return flops / (self.peak_flops * self.matmul_share)

    def memory_time(self, num_bytes: float) -> float:
        return num_bytes / (self.memory_bandwidth * self.memory_share)


@dataclass(frozen=True, slots=True)
class Link:
    """What joins devices, or servers. `bandwidth`: one direction, the other being free of it.

    back_bandwidth: from a later device or server to an earlier one; 0: the same.
    """

    name: str
    bandwidth: float
    latency: float
    share: float = 0.8
    """Share of `bandwidth` that a large message reaches. An estimate: protocol and packets cost
    about a fifth."""
    pair_bandwidth: float = 0.0
    """Between two devices alone, where a device's links lead to several others; 0: all of it."""
    call: float = 0.0
    """What a rank takes to issue a message."""
    back_bandwidth: float = 0.0
    half_duplex: bool = False
    """Whether both directions share `bandwidth`."""

    def transfer_time(self, num_bytes: float, flows: float = 1, way: int = 1) -> float:
        """A message to one neighbour, while `flows` equal ones share this link in the same
        direction.

        way: 1 to a later device or server, -1 to an earlier one.
        """
        one_way = self.bandwidth if way > 0 else self.back_bandwidth or self.bandwidth
        return self.latency + num_bytes * flows / (
            min(one_way, self.pair_bandwidth or one_way) * self.share
        )

    def ring_time(self, num_bytes: float, ranks: int, rings: float = 1) -> float:
        """A ring all-reduce over `ranks`, while `rings` of them share this link. Source: Patarasuk
        and Yuan, 2009."""
        if ranks == 1:
            return 0.0
        steps = 2 * (ranks - 1)
        slower = min(self.bandwidth, self.back_bandwidth or self.bandwidth)
        return steps * (self.latency + num_bytes / ranks * rings / (slower * self.share))

    def half_ring(
        self, op: str, num_bytes: float, ranks: int, rings: float = 1
    ) -> tuple[float, float]:
        """A gather or a reduce-scatter, half of an all-reduce each: seconds, and CPU time."""
        return self.ring_time(num_bytes, ranks, rings) / 2, 0.0

    def transfer_work(self, num_bytes: float) -> float:
        """CPU time for a message: none, devices send on their own."""
        return 0.0

    def ring_work(self, num_bytes: float, ranks: int) -> float:
        """CPU time for an all-reduce."""
        return 0.0


DEVICES = {
    device.name: device
    for device in (
        Device("v100-16gb", 125e12, 16 * GIB, 900e9, 0.68, units=80),
        Device("v100-32gb", 125e12, 32 * GIB, 900e9, 0.68, units=80),
        Device(
            "a100-40gb",
            312e12,
            40 * GIB,
            1555e9,
            0.83,
            attention_share=0.65,
            attention_back_share=0.55,
        ),
        Device(
            "a100-80gb",
            312e12,
            80 * GIB,
            2039e9,
            0.83,
            attention_share=0.65,
            attention_back_share=0.55,
        ),
        Device("h100-80gb", 989e12, 80 * GIB, 3350e9, 0.825, 0.8, 132, 0.58, 0.39),
        # attention: measured at 2,048 tokens (benchmarks/results/gpu_single_1.3B.json)
        Device("h200-141gb", 989e12, 141e9, 4800e9, 0.825, 0.8, 132, 0.58, 0.39),
    )
}

LINKS = {
    link.name: link
    for link in (
        # a V100 has 6 links of 25 GB/s, one or two of them to any one neighbour; later ones meet in
        # a switch
        Link("nvlink2", 150e9, 5e-6, pair_bandwidth=25e9),
        Link("nvlink3", 300e9, 5e-6),
        Link("nvlink4", 450e9, 5e-6),
        Link("pcie3", 15.75e9, 10e-6),
        Link("pcie4", 31.5e9, 10e-6),
        Link("pcie5", 63e9, 10e-6),
        Link("infiniband-edr", 100 * GIGABIT, 5e-6, 0.9),
        Link("infiniband-hdr", 200 * GIGABIT, 5e-6, 0.9),
        Link("infiniband-ndr", 400 * GIGABIT, 5e-6, 0.9),
        # TCP through the host's memory
        Link("ethernet-25", 25 * GIGABIT, 30e-6, 0.6),
        Link("ethernet-100", 100 * GIGABIT, 30e-6, 0.6),
    )
}

_FAMILIES = {
    "ib": "infiniband",
    "inf": "infiniband",
    "edr": "infiniband",
    "hdr": "infiniband",
    "ndr": "infiniband",
    "eth": "ethernet",
    "roce": "ethernet",
    "gbe": "ethernet",
    "tcp": "ethernet",
    "nv": "nvlink",
    "pci": "pcie",
}
"""How names of links may begin, and the family that they mean."""
_LIKE = 0.5
"""Likeness from which on a name may have been meant, as difflib counts it."""


def find_device(name: str, field: str = "device", or_else: str = "") -> Device:
    """Return a device of the table. or_else: what else `field` may be.

    Raises: ConfigError, about `field`, if the table has no such device.
    """
    return _find(field, name, DEVICES, nearest_device(name), or_else)


def find_link(name: str, field: str = "link") -> Link:
    """Raises: ConfigError, about `field`, if the table has no such link."""
    return _find(field, name, LINKS, nearest_link(name, field))


def nearest_device(name: str) -> str:
    """Return the known device that `name` probably means: the name begins as its own does, or is
    most like it."""
    return _nearest_name(name, DEVICES) or "a100-80gb"


def nearest_link(name: str, field: str = "link") -> str:
    """Return the known link that `name` probably means: of the same family the one with the nearest
    name, or, where the name has a rate in Gbit/s, the one with the nearest rate. Without a family:
    a usual link of `field`."""
    letters = "".join(c for c in name.lower() if c.isalpha())
    family = next(
        (family for prefix, family in _FAMILIES.items() if letters.startswith(prefix)), ""
    )
    links = {known: link for known, link in LINKS.items() if family and known.startswith(family)}
    rates = [int(number) for number in re.findall(r"\d{2,6}", name)]
    if rates and family in ("infiniband", "ethernet"):
        return min(links, key=lambda known: abs(links[known].bandwidth / GIGABIT - rates[0]))
    usual = (
        "nvlink3" if field == "inner" else "ethernet-25" if field == "outer" else "infiniband-hdr"
    )
    return _nearest_name(name, links or LINKS) or next(iter(links), usual)


def _nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that begins with `name`, or is most like it; empty if none is."""
    wanted = name.lower().replace("_", "-")
    names = list(known)
    begins = [
        one
        for one in names
        if wanted and (one.startswith(wanted) or wanted.startswith(one.split("-")[0]))
    ]
    like = {one: difflib.SequenceMatcher(None, wanted, one).ratio() for one in begins or names}
    best = max(like, key=like.__getitem__)
    return best if begins or like[best] >= _LIKE else ""


def _find(field: str, name: str, known: Mapping[str, T], works: str, or_else: str = "") -> T:
    if name not in known:
        raise config_error(field, name, f"must be one of {', '.join(known)}{or_else}", works)
    return known[name]


@dataclass(frozen=True, slots=True)
class Level:
    """Groups of devices beyond servers, such as racks: `link` joins those of a level, and each
    group has `links`."""

    devices: int
    """Of a group, which follow each other."""
    link: Link
    links: int = 1


class Joined:
    """Devices that are numbered server by server, and what joins them: the one model of a network.

    Those of a server are joined by `inner`. Servers have `outer_links` links `outer` each, groups
    of a level its links; what leaves a group shares these, and what enters it. So a message from
    rack to rack crosses the links of two servers and of two racks.
    """

    __slots__ = ()
    devices_per_server: int
    inner: Any
    outer: Any
    outer_links: int
    levels: tuple[Level, ...]

    @property
    def borders(self) -> list[tuple[int, Any, int]]:
        """Devices of a group, the link that joins such groups, and how many a group has: servers,
        then the levels."""
        return [
            (self.devices_per_server, self.outer, self.outer_links),
            *((level.devices, level.link, level.links) for level in self.levels),
        ]

    def crossed(self, source: int, target: int) -> Iterator[tuple[int, int, int]]:
        """The borders between two devices: number, group that is left, group that is entered."""
        for number, (size, _, _) in enumerate(self.borders):
            if source // size != target // size:
                yield number, source // size, target // size

    def link(self, ranks: Sequence[int]) -> Any:
        """The outermost link among these devices."""
        crossed = [
            link for size, link, _ in self.borders if len({rank // size for rank in ranks}) > 1
        ]
        assert None not in crossed, "a machine of several servers has a link between them"
        return crossed[-1] if crossed else self.inner

    def all_reduce(self, num_bytes: float, ranks: Sequence[int], rings: int = 1) -> float:
        """Seconds of a ring over these devices, while `rings` equal ones pass through the same
        servers."""
        if len(ranks) == 1 or not num_bytes:
            return 0.0
        return max(
            float(link.ring_time(num_bytes, len(ranks), shared))
            for link, shared in self._shared(ranks, rings)
        )

    def half_ring(
        self, op: str, num_bytes: float, ranks: Sequence[int], rings: int = 1
    ) -> tuple[float, float]:
        """Seconds of a gather or a scatter over these devices, likewise, and CPU time of each."""
        if len(ranks) == 1 or not num_bytes:
            return 0.0, 0.0
        return max(
            link.half_ring(op, num_bytes, len(ranks), shared)
            for link, shared in self._shared(ranks, rings)
        )

    def _shared(self, ranks: Sequence[int], rings: int) -> list[tuple[Any, float]]:
        """Each link that a ring crosses (it enters and leaves a group once), and how many share it:
        all that pass through a server, and so through a group as many times as it has servers for
        each that the ring is on; twice as many where what enters and what leaves share it."""
        found = []
        servers = 1
        for size, link, links in self.borders:
            near = (
                isinstance(ranks, range) and 0 < ranks.step <= size
            )  # they are in all groups between the ends'
            groups = (
                1 + ranks[-1] // size - ranks[0] // size
                if near
                else len({rank // size for rank in ranks})
            )
            if size == self.devices_per_server:
                servers = groups
            if groups > 1:
                through = rings * size * groups / (self.devices_per_server * servers)
                found.append((link, max(through / links, 1) * (1 + link.half_duplex)))
        return found or [(self.inner, 1 + self.inner.half_duplex)]

    def network(self, stages: Sequence[Sequence[int]], message_bytes: float) -> Network:
        """The network of a pipeline: `stages[r][i]` is the device of stage r in replica i, which
        sends one message of so many bytes to `stages[r + 1][i]`.

        Devices of one server have a link of their own to each other.
        """
        own = (self.inner.pair_bandwidth or self.inner.bandwidth) * self.inner.share
        bandwidth: dict[Hashable, float] = {}
        routes: dict[int, list[Route]] = {1: [], -1: []}
        for r in range(len(stages) - 1):
            for step, sources, targets in (
                (1, stages[r], stages[r + 1]),
                (-1, stages[r + 1], stages[r]),
            ):
                load: dict[Hashable, float] = {}
                latency = self.inner.latency
                for source, target in zip(sources, targets, strict=True):
                    shared: dict[Hashable, float] = {("inner", source, target): own}
                    for number, left, entered in self.crossed(source, target):
                        _, link, links = self.borders[number]
                        shared = {} if number == 0 else shared
                        ways = ("both", "both") if link.half_duplex else ("out", "in")
                        rate = link.bandwidth * link.share * links
                        latency = max(latency, link.latency)
                        shared |= {
                            (number, group, way): rate
                            for group, way in zip((left, entered), ways, strict=True)
                        }
                    bandwidth |= shared
                    for key in shared:
                        load[key] = load.get(key, 0.0) + message_bytes
                routes[step].append(Route(load, latency))
        return Network(bandwidth, routes[1], routes[-1])


@dataclass(frozen=True, slots=True)
class Cluster(Joined):
    """Servers of equally many devices. `outer_links`: how many `outer` links a server has; its
    devices share them.

    device: of the first servers. others: how many servers of another device follow these, again and
    again; num_servers counts all.
    """

    device: Device
    devices_per_server: int
    num_servers: int
    inner: Link
    outer: Link
    outer_links: int = 1
    levels: tuple[Level, ...] = ()
    price: float = 0.0
    """Of a device and an hour, in any currency; 0: not known."""
    others: tuple[tuple[int, Device], ...] = ()
    stragglers: float = 0.0
    """Mean share by which a device is slower than the fastest."""
    assumed: tuple[str, ...] = ()
    """Keys that the file left out, and whose usual value may be far off."""

    @property
    def num_devices(self) -> int:
        return self.devices_per_server * self.num_servers
