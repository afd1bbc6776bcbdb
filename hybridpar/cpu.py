"""This machine's CPU and memory, as Linux describes them, and memory allocation on huge pages, near
a GPU.
"""

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

_LARGE = 1 << 20  # bytes from which page size matters
_LEFT_TO_OTHERS = 0.1  # share of the available memory
_PCI = Path("/sys/bus/pci/devices")
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = {
    True: ("memory.max", "memory.current", "inactive_file"),
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files by whether the control group is version 2: its limit, its usage, and the part of the usage
that is cache."""
# system call numbers of mbind (man 2 mbind)
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1


@cache
def cpu_fields() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo, such as 'vendor_id', 'model name',
    'flags'; {} on other systems.
    """
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return {}
    first = info.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_name() -> str:
    """Return the CPU's name by its vendor, or else its architecture."""
    return cpu_fields().get("model name") or platform.processor() or platform.machine()


def host_room() -> int:
    """Return how many bytes of the host's memory may still be allocated, minus a tenth.

    Linux kills a process that exceeds the limit of its control group, as it does when the machine
    has no memory left, so both limits count.
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
    """Return the bytes left in a control group and its parents. In a container only the root may be
    visible.
    """
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
    """Return the NUMA node whose memory is nearest to a GPU; None if the system does not say, or
    has one node.
    """
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
    """Allocate zeros for memory that is read and written again and again: on huge pages, if it is
    host memory and Linux has any.

    One page lookup then covers 512 pages. Measured: AdamW over 91M parameters, two threads, takes 2
    to 5 % less time. node: NUMA node whose memory is preferred; None: the system's choice.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.nbytes >= _LARGE:
        # all pages, including partial ones at both ends; a refusal changes nothing
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
