"""The peak that MFU is a share of."""

from __future__ import annotations

import pytest
import torch

from hybridpar.config import Config, TrainConfig
from hybridpar.grid import Axis
from hybridpar.train.reporting import peak
from hybridpar.train.reporting.peak import Peak

pytestmark = pytest.mark.full_report


def test_steps_that_pass_the_peak_raise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(peak, "peak_flops", lambda config, device, world: (100e9, "measured"))
    mine = Peak(Config(), torch.device("cpu"), Axis("world"), said.append)
    assert [mine.share(90e9) for _ in range(4)] == [0.9] * 4
    assert mine.share(150e9) == 1.0, "a share of the peak, even if one step seems short"
    assert mine.flops == 100e9, "one step that seems short proves nothing"
    shares = [mine.share(134e9) for _ in range(9)]
    assert max(shares) == 1.0
    assert len(said) == 1
    assert "steps reach 105 GFLOP/s" in said[0], "the last five steps together"
    assert mine.flops == pytest.approx(5 / (1 / 150e9 + 4 / 134e9))


def test_the_probe_finds_the_speed_of_a_core_that_others_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another program takes the core for 4 ms after each 4 ms of work."""
    work = 0.0

    def product(a: torch.Tensor, b: torch.Tensor) -> None:
        nonlocal work
        work += 2 * len(a) ** 3 / 100e9

    monkeypatch.setattr(peak.matmul, "linear", product)
    monkeypatch.setattr(peak.time, "perf_counter", lambda: work + 4e-3 * (work // 4e-3))
    assert peak._probe(torch.float32, torch.device("cpu")) == pytest.approx(100e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "capability", "known"),
    [
        ("NVIDIA H200", (9, 0), "H200"),
        ("NVIDIA H200 NVL", (9, 0), "H200 NVL"),
        ("NVIDIA GH200 480GB", (9, 0), "GH200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "H100"),
        ("NVIDIA H100 PCIe", (9, 0), "H100 PCIe"),
        ("NVIDIA H800", (9, 0), "H800"),
        ("NVIDIA B200", (10, 0), "B200"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "A100"),
        ("NVIDIA A800 80GB PCIe", (8, 0), "A800"),
        ("NVIDIA L40S", (8, 9), "L40S"),
        ("NVIDIA L4", (8, 9), "L4"),
        ("NVIDIA A10G", (8, 6), "A10G"),
        ("Tesla V100-SXM2-16GB", (7, 0), None),
        ("Tesla T4", (7, 5), None),
        ("NVIDIA RTX A4000", (8, 6), None),
        ("NVIDIA RTX A1000", (8, 6), None),
        ("NVIDIA H20", (9, 0), None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), None),
        ("NVIDIA GeForce RTX 5090", (12, 0), None),
        ("NVIDIA of the future", (13, 1), None),
        ("AMD Instinct MI300X", (9, 4), None),
    ],
)
def test_the_peak_of_a_gpu_is_its_own_or_measured(
    name: str, capability: tuple[int, int], known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card whose name only begins alike, a slice of a GPU, and one older than bfloat16 are
    measured."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(peak, "_probe", lambda dtype, device: 7e12)
    monkeypatch.setattr(peak, "all_reduce", lambda total, axis: total)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, device, **kwargs: tensor(*args, **kwargs))
    config = Config(train=TrainConfig(dtype="bf16"))
    flops, source = peak.peak_flops(config, torch.device("cuda"), Axis("world"))
    if known is None:
        assert (flops, source) == (7e12, "bf16 matrix products, measured on 1 process")
    else:
        assert (flops, source) == (dict(peak._GPU_PEAKS)[known], f"{known} data sheet x 1")
