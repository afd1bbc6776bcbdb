"""Tables of hardware, and what messages cost on it."""

from __future__ import annotations

import pytest

from hybridpar.errors import ConfigError
from hybridpar.planner.machines.hardware import DEVICES, LINKS, Link, find_device, find_link


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
