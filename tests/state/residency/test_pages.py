"""Pages that regions hand on: they are the same pages, never more than there were, and nobody's
that are in use."""

from __future__ import annotations

import random

import pytest
from train.test_tiers import resident_bytes

from hybridpar.state.residency import pages
from hybridpar.state.residency.pages import HUGE_PAGE, Region, SparePages
from hybridpar.state.residency.store import PAGE

SIZES = (HUGE_PAGE + 3 * PAGE, HUGE_PAGE + 3 * PAGE, 2 * HUGE_PAGE, 3 * PAGE, 1)


def filled(size: int, value: int) -> Region:
    region = Region(size)
    region.tensor.fill_(value)
    return region


def test_pages_go_from_region_to_region() -> None:
    first = filled(SIZES[0], 7)
    second = Region(SIZES[1])
    spare = SparePages()
    spare.add(first)
    assert spare.num_bytes == resident_bytes(first) == len(first.view)
    spare.hand_to(second)
    assert (spare.num_bytes, resident_bytes(first)) == (0, 0)
    assert bool((second.tensor == 7).all()), "what nobody has cleared"
    assert int(first.tensor.max()) == 0


def test_a_region_gets_its_own_pages_back() -> None:
    first = filled(SIZES[0], 1)
    second = filled(SIZES[1], 2)
    spare = SparePages()
    for region in (first, second):
        spare.add(region)
    for region, value in ((first, 1), (second, 2)):
        spare.hand_to(region)
        assert bool((region.tensor == value).all())


@pytest.mark.parametrize(
    "moves", [True, False], ids=["handed on", "by a kernel that does not move pages"]
)
def test_pages_in_use_stay(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of several sizes are taken and given up at random, beside a limit."""
    if not moves:
        monkeypatch.setattr(pages, "_DONTUNMAP", 1 << 10)  # no such flag
    draw, regions, spare = random.Random(0), [Region(size) for size in SIZES], SparePages()
    used: dict[int, int] = {}
    for step in range(200):
        number = draw.randrange(len(regions))
        region = regions[number]
        if number in used:
            assert bool((region.tensor == used.pop(number)).all())
            spare.add(region)
        else:
            spare.hand_to(region)
            used[number] = step % 251
            region.tensor.fill_(used[number])
        spare.shrink_to(draw.choice((0, HUGE_PAGE, 1 << 30)))
        in_use = sum(len(regions[one].view) for one in used)
        assert sum(map(resident_bytes, regions)) <= in_use + spare.num_bytes
