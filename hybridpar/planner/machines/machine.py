"""A machine to plan for: the profile of its blocks, its devices and the links between them. Units:
seconds, bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridpar.planner.machines.hardware import Device, Joined, Level, Link
from hybridpar.planner.measuring.links import MeasuredLink
from hybridpar.planner.measuring.profile import Profile
from hybridpar.prediction.limit import memory_limit

AnyLink = Link | MeasuredLink


@dataclass(frozen=True)
class Machine(Joined):
    """A profile of blocks, and how the devices that have it are joined.

    profile: of the first devices; others: of those from a device on, where they are of other kinds.
    stragglers: mean share by which a device is slower than the fastest (stragglers.py).

    `inner` joins the devices of a server, `outer` the servers (None: there is one). outer_links: of
    a server, shared by its devices. levels: beyond servers. memory: bytes of a device. measured:
    `inner` is the link that the profile's waits were measured on.
    """

    profile: Profile
    num_devices: int
    devices_per_server: int
    inner: AnyLink
    outer: AnyLink | None
    memory: float
    outer_links: int = 1
    measured: bool = True
    levels: tuple[Level, ...] = ()
    price: float = 0.0
    """Of a device and an hour; 0: not known."""
    others: tuple[tuple[int, Profile], ...] = ()
    stragglers: float = 0.0
    devices: tuple[Device, ...] = ()
    """Those that were not measured: their blocks are estimated."""
    assumed: tuple[str, ...] = ()
    """Keys that the file of a cluster left out, and whose usual value may be far off."""

    @property
    def memory_limit(self) -> float:
        """Bytes that training may take of a device; of the smallest, where they differ."""
        return min(self.memory_limits(range(self.num_devices)))

    def memory_limits(self, devices: range) -> list[float]:
        """Bytes that training may take of each kind of these devices, which follow each other."""
        is_cpu = self.profile.hardware.cores > 0
        return [
            memory_limit(
                self.memory if kind is self.profile else kind.hardware.memory, is_cpu=is_cpu
            )
            for kind in self.profiles(devices)
        ]

    def profiles(self, devices: range) -> list[Profile]:
        """Profiles of the kinds of these devices, which follow each other."""
        kinds = [(0, self.profile), *self.others]
        ends = [*(start for start, _ in self.others), self.num_devices]
        return [
            kind
            for (start, kind), end in zip(kinds, ends, strict=True)
            if start <= devices[-1] and devices[0] < end
        ]

    @property
    def device(self) -> torch.device:
        """The kind of device, which need not be on this machine."""
        return torch.device(self.profile.hardware.device_type)
