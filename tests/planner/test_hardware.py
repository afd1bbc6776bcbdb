"""Tables of hardware, and what blocks and messages cost on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.config import ModelConfig
from hybridpar.errors import ConfigError
from hybridpar.models.cost import forward_flops_per_token
from hybridpar.planner.hardware import (
    DEVICES,
    LINKS,
    Link,
    activation_bytes,
    block_times,
    find_device,
    find_link,
)

MODEL = ModelConfig(num_layers=6, hidden_size=1024, num_heads=16, seq_length=512, vocab_size=32000)
V100 = DEVICES["v100-16gb"]


def test_tables_hold_what_their_keys_say() -> None:
    for table in (DEVICES, LINKS):
        for name, entry in table.items():
            assert entry.name == name
    for device in DEVICES.values():
        assert 0 < device.matmul_share < 1
        assert 0 < device.memory_share < 1
    assert find_device("h200-141gb").memory_bytes > find_device("h100-80gb").memory_bytes
    assert find_link("infiniband-ndr").bandwidth == 50e9


@pytest.mark.parametrize(("find", "field"), [(find_device, "device"), (find_link, "link")])
def test_unknown_names(find, field) -> None:
    with pytest.raises(ConfigError, match=rf"{field} = 'tpu'.*must be one of"):
        find("tpu")


def test_without_memory_traffic_a_block_takes_its_operations() -> None:
    device = replace(V100, memory_bandwidth=float("inf"))
    for flops, time in zip(forward_flops_per_token(MODEL), block_times(MODEL, 4, device), strict=True):
        forward = 4 * 512 * flops / (125e12 * device.matmul_share)
        assert time == (pytest.approx(forward), pytest.approx(2 * forward))


def test_memory_traffic_of_a_layer() -> None:
    """Two norms and two residual sums of 10 h bytes and 4 f + 4 h + 4 s n bytes that tp divides; no dropout here."""
    device = replace(V100, peak_flops=float("inf"))
    h, s, n, f = 1024, 512, 16, 4096
    for tp in (1, 4):
        num_bytes = 2 * 10 * h + (4 * f + 4 * h + 4 * s * n) / tp
        assert block_times(MODEL, 2, device, tp)[1].forward == pytest.approx(2 * s * num_bytes / (900e9 * 0.8))


@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8]))
def test_tensor_parallelism_speeds_up_by_less_than_its_size(b: int, tp: int) -> None:
    whole, part = block_times(MODEL, b, V100)[1], block_times(MODEL, b, V100, tp)[1]
    for one, other in zip(whole, part, strict=True):
        assert one / tp <= other <= one


def test_a_ring_moves_everything_twice_but_for_its_own_share() -> None:
    link = Link("wire", 1e9, 0.0, share=0.5)
    assert link.ring_time(4e9, 4) == pytest.approx(2 * 3 * 1e9 / 0.5e9)
    assert link.ring_time(4e9, 1) == 0
    assert link.ring_time(4e9, 4, rings=8) == pytest.approx(8 * link.ring_time(4e9, 4))


def test_flows_share_the_card_of_a_server() -> None:
    card = LINKS["ethernet-25"]
    one, eight = (card.transfer_time(1e8, flows) for flows in (1, 8))
    assert eight - card.latency == pytest.approx(8 * (one - card.latency))
    assert LINKS["nvlink2"].transfer_time(1e8) < one  # within the server


def test_messages() -> None:
    assert activation_bytes(MODEL, 8) == 2 * 8 * 512 * 1024
