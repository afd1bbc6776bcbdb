"""This machine's CPU and memory, as Linux describes them, and memory on its huge pages, near a
GPU."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_LARGE = 1 << 20  # bytes from which pages matter
_LEFT_TO_OTHERS = 0.1  # of the memory that can be had
_PCI = Path("/sys/bus/pci/devices")
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = {
    True: ("memory.max", "memory.current", "inactive_file"),
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By whether it is version 2: the limit of a control group, what it uses, and what of that is
cache."""
# man 2 mbind
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1


@cache
def cpu_fields() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo, such as 'vendor_id', 'model name',
    'flags'; {} elsewhere."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return {}
    first = info.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_name() -> str:
    """The CPU's name by its maker, or else its architecture."""
    return cpu_fields().get("model name") or platform.processor() or platform.machine()


def host_room() -> int:
    """Return how many bytes of the host's memory this process and others may still take, a tenth
    left out.

    Linux ends a process that takes more than its control group may have, as it does when the
    machine has no memory left, so both count.
    """
    if not (_PROC / "meminfo").exists():
        return sys.maxsize
    fields = dict(line.split(":") for line in (_PROC / "meminfo").read_text().splitlines())
    left = 1024 * int(fields["MemAvailable"].split()[0])
    for line in _lines_of(_PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            left = min(left, _left_in_group(_CGROUPS, path, *_CGROUP_FILES[True]))
        elif "memory" in controllers.split(","):
            left = min(left, _left_in_group(_CGROUPS / "memory", path, *_CGROUP_FILES[False]))
    return int(max(0, left) * (1 - _LEFT_TO_OTHERS))


def _left_in_group(root: Path, path: str, limit: str, used: str, cache: str) -> int:
    """Return what a control group and those that it is in have left; in a container only the root
    may be there."""
    left = sys.maxsize
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        found = _lines_of(folder / limit)
        if found and found[0].isdigit():
            stat = dict(line.split(" ", 1) for line in _lines_of(folder / "memory.stat"))
            taken = int(_lines_of(folder / used)[0]) - int(stat.get(cache, 0))
            left = min(left, int(found[0]) - taken)
        if folder == root:
            break
    return left


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def numa_node(device: torch.device) -> int | None:
    """The node of NUMA whose memory is nearest to a GPU; None where the system does not say, or has
    one node."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    domain, bus, number = (
        getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")
    )
    file = _PCI / f"{domain:04x}:{bus:02x}:{number:02x}.0" / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return node if node >= 0 else None


def zeros(
    shape: int | Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    *,
    node: int | None = None,
) -> Tensor:
    """Zeros that passes go over again and again: in the host's memory on huge pages, where Linux
    gives any.

    A pass then looks up one page for 512. Measured: AdamW over 91M parameters, two threads, takes 2
    to 5 % less time. node: of NUMA, whose memory is taken if there is enough; None: as the system
    has it.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.nbytes >= _LARGE:
        # all pages, those at the ends included; to be refused changes nothing
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        pages = ctypes.c_void_p(start), ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - start)
        if (advice := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
            ctypes.CDLL(None).madvise(*pages, advice)
        if node is not None and (mbind := _MBIND.get(platform.machine())) is not None:
            nodes = (ctypes.c_ulong * (node // 64 + 1))()
            nodes[-1] = 1 << node % 64
            ctypes.CDLL(None).syscall(
                mbind, *pages, _PREFERRED, nodes, ctypes.c_ulong(64 * len(nodes) + 1), 0
            )
    return tensor.zero_()
