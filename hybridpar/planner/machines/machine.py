"""A machine to plan for: the profile of its blocks, its devices and the links between them.

Units: seconds, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridpar.planner.machines.hardware import Device, Joined, Level, Link
from hybridpar.planner.measuring.links import MeasuredLink
from hybridpar.planner.measuring.profile import Profile
from hybridpar.prediction.limit import memory_limit
from hybridpar.train.reporting.peak import data_sheet

AnyLink = Link | MeasuredLink


@dataclass(frozen=True)
class Machine(Joined):
    """A profile of blocks, and the links between the devices that it holds for.

    Args:
        profile: Profile of the first devices.
        inner: Link between the devices of a server.
        outer: Link between servers; None for a single server.
        outer_links: Number of `outer` links of a server, shared by its devices.
        levels: Levels of the network above servers.
        memory: Bytes of a device.
        measured: Whether `inner` is the link on which the profile's waits were measured.
        others: Profiles of other kinds of devices, each with the number of its first device.
        stragglers: Mean share by which a device is slower than the fastest (stragglers.py).
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
    """Price of a device per hour; 0 if unknown."""
    others: tuple[tuple[int, Profile], ...] = ()
    stragglers: float = 0.0
    devices: tuple[Device, ...] = ()
    """Devices that were not measured, whose blocks are estimated."""
    assumed: tuple[str, ...] = ()
    """Keys that the cluster file omits and whose default may be far off."""

    @property
    def memory_limit(self) -> float:
        """Bytes that training may use on a device; on the smallest if they differ."""
        return min(self.memory_limits(range(self.num_devices)))

    def memory_limits(self, devices: range) -> list[float]:
        """Return the bytes that training may use on each kind among these consecutive devices."""
        is_cpu = self.profile.hardware.cores > 0
        return [
            memory_limit(
                self.memory if kind is self.profile else kind.hardware.memory, is_cpu=is_cpu
            )
            for kind in self.profiles(devices)
        ]

    def profiles(self, devices: range) -> list[Profile]:
        """Return the profiles of the kinds among these consecutive devices."""
        kinds = [(0, self.profile), *self.others]
        ends = [*(start for start, _ in self.others), self.num_devices]
        return [
            kind
            for (start, kind), end in zip(kinds, ends, strict=True)
            if start <= devices[-1] and devices[0] < end
        ]

    @property
    def peak_flops(self) -> float:
        """FLOP/s of all devices in 16-bit matrix products, by their data sheets; 0 if one of them
        is not known."""
        kinds = [(0, self.profile), *self.others]
        ends = [*(start for start, _ in self.others), self.num_devices]
        total = 0.0
        for (start, kind), end in zip(kinds, ends, strict=True):
            number = max(0, min(end, self.num_devices) - start)
            sheet = self._sheet(kind)
            if number and not sheet:
                return 0.0
            total += number * sheet
        return total

    def _sheet(self, kind: Profile) -> float:
        """Return the peak FLOP/s of a device, 0 if it is not known."""
        hardware = kind.hardware
        if hardware.cores or kind.settings.get("train", {}).get("dtype") not in ("bf16", "fp16"):
            return 0.0
        named = {device.name: device.peak_flops for device in self.devices}
        if hardware.name in named:
            return named[hardware.name]
        found = data_sheet(hardware.name)
        return found[1] if found else 0.0

    @property
    def device(self) -> torch.device:
        """The device type, which need not exist on this machine."""
        return torch.device(self.profile.hardware.device_type)
