"""A machine to plan for: the profile of its blocks, its devices and the links between them. Units: seconds, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridpar.memory.limit import memory_limit
from hybridpar.planner.hardware import Link
from hybridpar.planner.links import MeasuredLink
from hybridpar.planner.profile import Profile

AnyLink = Link | MeasuredLink

@dataclass(frozen=True)
class Machine:
    """A profile of blocks, and how the devices that have it are joined.

    `inner` joins the devices of a server, `outer` the servers (None: there is one). outer_links: of a server, shared by
    its devices. memory: bytes of a device. measured: `inner` is the link that the profile's waits were measured on.
    """

    profile: Profile
    num_devices: int
    devices_per_server: int
    inner: AnyLink
    outer: AnyLink | None
    memory: float
    outer_links: int = 1
    measured: bool = True

    @property
    def memory_limit(self) -> float:
        """Bytes that training may take of a device."""
        return memory_limit(self.memory, is_cpu=self.profile.hardware.cores > 0)

    @property
    def device(self) -> torch.device:
        """The kind of device, which need not be on this machine."""
        return torch.device(self.profile.hardware.device_type)

    def servers(self, ranks: Sequence[int]) -> int:
        """Number of servers that these ranks are on."""
        return len({rank // self.devices_per_server for rank in ranks})

    def link(self, ranks: Sequence[int]) -> AnyLink:
        """The slowest link among these ranks."""
        if self.servers(ranks) == 1:
            return self.inner
        assert self.outer is not None, "a machine of several servers has a link between them"
        return self.outer

    def all_reduce(self, num_bytes: float, ranks: Sequence[int], rings: int = 1) -> float:
        """Seconds of a ring over these ranks, while `rings` equal ones pass through the same servers."""
        if len(ranks) == 1 or not num_bytes:
            return 0.0
        return self.link(ranks).ring_time(num_bytes, len(ranks), self._shared(ranks, rings))

    def half_ring(self, op: str, num_bytes: float, ranks: Sequence[int], rings: int = 1) -> tuple[float, float]:
        """Seconds of a gather or a scatter over these ranks, likewise, and CPU time of each rank."""
        if len(ranks) == 1 or not num_bytes:
            return 0.0, 0.0
        return self.link(ranks).half_ring(op, num_bytes, len(ranks), self._shared(ranks, rings))

    def _shared(self, ranks: Sequence[int], rings: int) -> float:
        """How many of `rings` equal ones share a link."""
        return max(rings / self.outer_links, 1) if self.link(ranks) is self.outer else 1
