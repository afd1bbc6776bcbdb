"""Devices, links and clusters, and the time of messages on them: estimates. kernel_times.py
estimates kernels.

Nothing here is measured on the machine at hand. Peaks are the vendors'. The shares of a peak are
typical for well-tuned kernels and collectives, and accurate to 10 or 20 %. `dataclasses.replace`
substitutes measured values.

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
    """One accelerator. `peak_flops`: dense fp16 or bf16 with fp32 accumulation. Source: the
    vendor's data sheet."""

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    matmul_share: float
    """Share of `peak_flops` that an infinitely large matrix product reaches; smaller ones reach
    less (kernel_times.py). Measured on the H200 (802 TFLOP/s, benchmarks/results/gpu_ops.json),
    fitted on the V100 (benchmarks/paper.py), else an estimate."""
    memory_share: float = 0.8
    """Share of `memory_bandwidth` that element-wise kernels reach. Measured on the H200 (AdamW,
    0.81), else an estimate."""
    units: int = 108
    """Number of streaming multiprocessors, each of which computes one tile of a product at a
    time."""
    attention_share: float = 0.4
    """Share of `peak_flops` that the forward of fused attention reaches with 128 features per head
    and a long sequence."""
    attention_back_share: float = 0.3
    """Share of `peak_flops` that the backward of fused attention reaches under the same
    conditions."""
    launch: float = 57e-6
    """CPU seconds to launch a kernel of a layer, with its Python, autograd and allocation, on the
    servers that carry the device. Measured beside the H200: GPT 345M without CUDA graphs takes 75
    ms a step, in which the device waits for 1,310 launches (benchmarks/results:
    gpu_single_before.json, launches in gpu_single_1.3B.json). On the V100's servers, whose CPUs are
    of 2016, read off PipeDream-2BW's figures 8 and 12 (benchmarks/paper_points.py). Else an
    estimate."""
    capability: tuple[int, int] = (8, 0)
    """Compute capability, which decides the kernels that can run."""

    def matmul_time(self, flops: float) -> float:
        return flops / (self.peak_flops * self.matmul_share)

    def memory_time(self, num_bytes: float) -> float:
        return num_bytes / (self.memory_bandwidth * self.memory_share)


@dataclass(frozen=True, slots=True)
class Link:
    """A link between devices or between servers.

    Args:
        bandwidth: Bytes/s in one direction, while the other direction is idle.
        back_bandwidth: Bytes/s from a later device or server to an earlier one; 0 for the same.
    """

    name: str
    bandwidth: float
    latency: float
    share: float = 0.8
    """Share of `bandwidth` that a large message reaches. An estimate: protocol and packets cost
    about a fifth."""
    pair_bandwidth: float = 0.0
    """Bytes/s between two devices alone, if a device has separate links to several others; 0:
    `bandwidth`."""
    call: float = 0.0
    """Seconds of a rank's time to issue a message."""
    back_bandwidth: float = 0.0
    half_duplex: bool = False
    """Whether both directions share `bandwidth`."""

    def transfer_time(self, num_bytes: float, flows: float = 1, way: int = 1) -> float:
        """Return the seconds of a message to one neighbour, while `flows` equal ones share this
        link in the same direction.

        Args:
            num_bytes: Size of the message.
            flows: Number of messages that share the link.
            way: 1 to a later device or server, -1 to an earlier one.
        """
        one_way = self.bandwidth if way > 0 else self.back_bandwidth or self.bandwidth
        return self.latency + num_bytes * flows / (
            min(one_way, self.pair_bandwidth or one_way) * self.share
        )

    def ring_time(self, num_bytes: float, ranks: int, rings: float = 1) -> float:
        """Return the seconds of a ring all-reduce over `ranks`, while `rings` of them share this
        link.

        Source: Patarasuk and Yuan, 2009.
        """
        if ranks == 1:
            return 0.0
        steps = 2 * (ranks - 1)
        slower = min(self.bandwidth, self.back_bandwidth or self.bandwidth)
        return steps * (self.latency + num_bytes / ranks * rings / (slower * self.share))

    def half_ring(
        self, op: str, num_bytes: float, ranks: int, rings: float = 1
    ) -> tuple[float, float]:
        """Return seconds and CPU time of an all-gather or a reduce-scatter, each half of an
        all-reduce."""
        return self.ring_time(num_bytes, ranks, rings) / 2, 0.0

    def transfer_work(self, num_bytes: float) -> float:
        """Return the CPU time of a message: zero, because devices send without the CPU."""
        return 0.0

    def ring_work(self, num_bytes: float, ranks: int) -> float:
        """Return the CPU time of an all-reduce."""
        return 0.0


DEVICES = {
    device.name: device
    for device in (
        Device(
            "v100-16gb", 125e12, 16 * GIB, 900e9, 0.68, launch=70e-6, units=80, capability=(7, 0)
        ),
        Device(
            "v100-32gb", 125e12, 32 * GIB, 900e9, 0.68, launch=70e-6, units=80, capability=(7, 0)
        ),
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
        # a V100 has 6 links of 25 GB/s, one or two of them to each neighbour; later devices use a
        # switch
        Link("nvlink2", 150e9, 5e-6, pair_bandwidth=25e9),
        Link("nvlink3", 300e9, 5e-6),
        Link("nvlink4", 450e9, 5e-6),
        Link("pcie3", 15.75e9, 10e-6),
        Link("pcie4", 31.5e9, 10e-6),
        Link("pcie5", 63e9, 10e-6),
        Link("infiniband-edr", 100 * GIGABIT, 5e-6, 0.9),
        Link("infiniband-hdr", 200 * GIGABIT, 5e-6, 0.9),
        Link("infiniband-ndr", 400 * GIGABIT, 5e-6, 0.9),
        # TCP through host memory
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
"""Beginnings of link names, and the family that each one means."""
_SAME_SHEET = 0.1
"""Largest difference of the numbers of two data sheets of one card, such as its PCIe and SXM
versions."""
_LIKE = 0.5
"""Smallest similarity, as difflib computes it, at which a name may have been meant."""


def find_device(name: str, field: str = "device", or_else: str = "") -> Device:
    """Return a device of the table.

    Args:
        name: Name of the device.
        field: The configuration key, for the error message.
        or_else: Other values that the key accepts, for the error message.

    Raises:
        ConfigError: The table has no such device.
    """
    return _find(field, name, DEVICES, nearest_device(name), or_else)


def device_like(device: Device) -> Device | None:
    """Return the device of the table that another one's data sheet describes, or None: the most
    similar one whose peak and memory bandwidth differ by less than a tenth."""

    def distance(known: Device) -> float:
        return max(
            abs(1 - device.peak_flops / known.peak_flops),
            abs(1 - device.memory_bandwidth / known.memory_bandwidth),
        )

    def more_memory(known: Device) -> float:
        return abs(known.memory_bytes - device.memory_bytes)

    best = min(DEVICES.values(), key=lambda known: (distance(known), more_memory(known)))
    return best if distance(best) < _SAME_SHEET else None


def find_link(name: str, field: str = "link") -> Link:
    """Return a link of the table. Raises: ConfigError about `field` if the table has no such
    link."""
    return _find(field, name, LINKS, nearest_link(name, field))


def nearest_device(name: str) -> str:
    """Return the known device that `name` probably means: the longest common beginning, else the
    most similar name."""
    return _nearest_name(name, DEVICES) or "a100-80gb"


def nearest_link(name: str, field: str = "link") -> str:
    """Return the known link that `name` probably means.

    In a family of links this is the most similar name or, if the name has a rate in Gbit/s, the
    nearest rate. Without a family it is a usual link for `field`.
    """
    letters = "".join(c for c in name.lower() if c.isalpha())
    family = next(
        (family for prefix, family in _FAMILIES.items() if letters.startswith(prefix)), ""
    )
    links = {known: link for known, link in LINKS.items() if family and known.startswith(family)}
    rates = [int(number) for number in re.findall(r"\d{2,6}", name)]
    if rates and family in ("infiniband", "ethernet"):
        return min(links, key=lambda known: abs(links[known].bandwidth / GIGABIT - rates[0]))
    usual = {"inner": "nvlink3", "outer": "ethernet-25"}.get(field, "infiniband-hdr")
    return _nearest_name(name, links or LINKS) or next(iter(links), usual)


def _nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that begins with `name` or is most similar to it, or "" if none is."""
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
    """A level of the network above servers, such as racks.

    Args:
        link: The link between groups of this level.
        links: Number of such links of each group.
    """

    devices: int
    """Number of consecutive devices in a group."""
    link: Link
    links: int = 1


class Joined:
    """Devices that are numbered server by server, and the links between them: the only model of a
    network.

    `inner` joins the devices of a server. Each server has `outer_links` links `outer`, and each
    group of a level has its own links. All traffic that leaves or enters a group shares these
    links, so a message between racks crosses the links of two servers and of two racks.
    """

    __slots__ = ()
    devices_per_server: int
    inner: Any
    outer: Any
    outer_links: int
    levels: tuple[Level, ...]

    @property
    def borders(self) -> list[tuple[int, Any, int]]:
        """The levels of the network from servers outwards: devices of a group, the link between
        groups, and its number per group."""
        return [
            (self.devices_per_server, self.outer, self.outer_links),
            *((level.devices, level.link, level.links) for level in self.levels),
        ]

    def crossed(self, source: int, target: int) -> Iterator[tuple[int, int, int]]:
        """Yield the group boundaries between two devices: number of the level, group that the
        message leaves, group that it enters."""
        for number, (size, _, _) in enumerate(self.borders):
            if source // size != target // size:
                yield number, source // size, target // size

    def link(self, ranks: Sequence[int]) -> Any:
        """Return the outermost link among these devices."""
        crossed = [
            link for size, link, _ in self.borders if len({rank // size for rank in ranks}) > 1
        ]
        assert None not in crossed, "a machine of several servers has a link between them"
        return crossed[-1] if crossed else self.inner

    def all_reduce(self, num_bytes: float, ranks: Sequence[int], rings: int = 1) -> float:
        """Return the seconds of a ring all-reduce over these devices, while `rings` equal ones
        cross the same servers."""
        if len(ranks) == 1 or not num_bytes:
            return 0.0
        return max(
            float(link.ring_time(num_bytes, len(ranks), shared))
            for link, shared in self._shared(ranks, rings)
        )

    def half_ring(
        self, op: str, num_bytes: float, ranks: Sequence[int], rings: int = 1
    ) -> tuple[float, float]:
        """Return seconds and CPU time of an all-gather or a reduce-scatter over these devices, as
        in `all_reduce`."""
        if len(ranks) == 1 or not num_bytes:
            return 0.0, 0.0
        return max(
            link.half_ring(op, num_bytes, len(ranks), shared)
            for link, shared in self._shared(ranks, rings)
        )

    def _shared(self, ranks: Sequence[int], rings: int) -> list[tuple[Any, float]]:
        """Return each link that a ring crosses, and the number of rings that share it.

        A ring enters and leaves each of its groups once. All rings through a server share its link,
        so a group's link is shared by its number of servers per group that the ring visits, and
        twice that if both directions share the link.
        """
        found = []
        servers = 1
        for size, link, links in self.borders:
            near = (
                isinstance(ranks, range) and 0 < ranks.step <= size
            )  # such rings are in all groups between the groups of their ends
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
        """Return the network of a pipeline.

        Devices of one server have a separate link to each other.

        Args:
            stages: `stages[r][i]` is the device of stage r in replica i; it sends one message to
                `stages[r + 1][i]`.
            message_bytes: Bytes of each message.
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
    """Servers with equal numbers of devices.

    Args:
        outer_links: Number of `outer` links of a server, shared by its devices.
        device: Device of the first servers.
        others: Device and number of the servers that follow, repeatedly; num_servers counts all
            servers.
    """

    device: Device
    devices_per_server: int
    num_servers: int
    inner: Link
    outer: Link
    outer_links: int = 1
    levels: tuple[Level, ...] = ()
    price: float = 0.0
    """Price of a device per hour, in any currency; 0 if unknown."""
    others: tuple[tuple[int, Device], ...] = ()
    stragglers: float = 0.0
    """Mean share by which a device is slower than the fastest."""
    assumed: tuple[str, ...] = ()
    """Keys that the file omits and whose default may be far off."""

    @property
    def num_devices(self) -> int:
        return self.devices_per_server * self.num_servers
