"""Linux's statements about memory that the state lies in."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hybridpar import cpu
from hybridpar.cpu import host_room, zeros

SMAPS = Path("/proc/self/smaps")
linux = pytest.mark.skipif(
    not (SMAPS.exists() and hasattr(mmap, "MADV_HUGEPAGE")), reason="needs Linux's huge pages"
)


def flags_at(address: int) -> list[str]:
    """The VmFlags of the mapping that holds an address (man 5 proc); 'hg': huge pages were asked
    for."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, stop = (int(edge, 16) for edge in first.split("-"))
            inside = start <= address < stop
        elif inside and first == "VmFlags:":
            return rest
    raise AssertionError(f"no mapping holds {address:#x}")


@linux
def test_large_zeros_ask_for_huge_pages_from_end_to_end() -> None:
    x = zeros((1 << 20, 3), torch.float32)
    if "hg" not in flags_at(x.data_ptr()):
        pytest.skip("this kernel has no transparent huge pages")
    assert "hg" in flags_at(x.data_ptr() + x.nbytes // 2)
    assert "hg" in flags_at(x.data_ptr() + x.nbytes - 1)


@linux
def test_memory_near_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    monkeypatch.setattr(cpu, "_PCI", tmp_path)
    assert cpu.numa_node(torch.device("cpu")) is cpu.numa_node(gpu) is None
    (tmp_path / "0000:1b:00.0").mkdir()
    for said, node in (("1", 1), ("-1", None), ("0", 0)):
        (tmp_path / "0000:1b:00.0" / "numa_node").write_text(f"{said}\n")
        assert cpu.numa_node(gpu) == node
    x = zeros((1 << 20, 3), torch.float32, node=0)
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        pytest.skip("this kernel knows no NUMA")
    start = max(
        found
        for line in maps.read_text().splitlines()
        if (found := int(line.split()[0], 16)) <= x.data_ptr()
    )
    assert f"{start:x} prefer:0" in maps.read_text().replace("=", ":")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", [0, 3, 1 << 20, (1 << 9, 1 << 11)])
def test_zeros_are_those_of_torch(device: str, shape: int | tuple[int, ...]) -> None:
    used: list[Tensor] = [torch.ones(shape) for _ in range(2)]
    del used  # whose memory may be taken again
    for dtype in (torch.float32, torch.bfloat16):
        x = zeros(shape, dtype, device)
        expected = torch.zeros(shape, dtype=dtype, device=device)
        assert (x.shape, x.dtype, x.device) == (expected.shape, expected.dtype, expected.device)
        assert device == "meta" or torch.equal(x, expected)


def test_free_memory_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the machine's memory and of the limits of this control group and those above
    it."""
    proc = tmp_path / "proc"
    groups = tmp_path / "cgroup"
    monkeypatch.setattr(cpu, "_PROC", proc)
    monkeypatch.setattr(cpu, "_CGROUPS", groups)
    assert host_room() > 1 << 60, "not Linux: unknown"

    def write(path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def room() -> int:
        return round(host_room() / 0.9)

    write(proc / "meminfo", "MemTotal:  9000 kB\nMemAvailable:  8000 kB\nHugePages_Total:       0")
    assert room() == 8000 << 10
    write(proc / "self" / "cgroup", "0::/job/step")
    assert room() == 8000 << 10, "a group without files"
    write(groups / "job" / "memory.max", 5000)
    write(groups / "job" / "memory.current", 3000)
    write(groups / "job" / "memory.stat", "anon 2000\ninactive_file 1000")
    write(groups / "job" / "step" / "memory.max", "max")
    assert room() == 3000
    write(groups / "memory.max", 1000)
    write(groups / "memory.current", 3000)
    assert room() == 0
    write(proc / "self" / "cgroup", "9:cpu,cpuacct:/\n4:memory:/not/seen/here\n0::/")
    (groups / "memory.max").unlink()
    write(groups / "memory" / "memory.limit_in_bytes", 4000)
    write(groups / "memory" / "memory.usage_in_bytes", 3000)
    write(groups / "memory" / "memory.stat", "total_inactive_file 500")
    assert room() == 1500
