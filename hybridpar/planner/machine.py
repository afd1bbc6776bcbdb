"""What is planned for: the profile of its blocks, its devices and the links between them. Units: seconds, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridpar.planner.profile import Profile


class AnyLink(Protocol):
    """A link, measured or estimated."""

    @property
    def call(self) -> float: ...
    def transfer_time(self, num_bytes: float, flows: float = 1) -> float: ...
    def transfer_work(self, num_bytes: float) -> float: ...
    def ring_time(self, num_bytes: float, ranks: int, rings: float = 1) -> float: ...
    def ring_work(self, num_bytes: float, ranks: int) -> float: ...


@dataclass(frozen=True)
class Machine:
    """What is planned for: the profile of its blocks, and how its devices are joined.

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

    def servers(self, ranks: Sequence[int]) -> int:
        """How many servers these ranks are on."""
        return len({rank // self.devices_per_server for rank in ranks})

    def link(self, ranks: Sequence[int]) -> AnyLink:
        """The slowest link among these ranks."""
        if self.servers(ranks) == 1:
            return self.inner
        assert self.outer is not None, "a machine of several servers has a link between them"
        return self.outer

    def all_reduce(self, num_bytes: float, ranks: Sequence[int], rings: int = 1) -> float:
        """A ring over these ranks, while `rings` equal ones pass through the same servers."""
        if len(ranks) == 1 or not num_bytes:
            return 0.0
        link = self.link(ranks)
        shared = max(rings / self.outer_links, 1) if link is self.outer else 1
        return link.ring_time(num_bytes, len(ranks), shared)
