"""Two tiers: content follows its item wherever it goes, within the budget, in any order of
moves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.state.residency.pages import Region, SparePages
from hybridpar.state.residency.store import PAGE
from hybridpar.state.residency.tiers import Tiers

NUM_ITEMS = 6


class SlowStore:
    """A store in memory whose moves take random times. `fail`: from then on moves raise it."""

    def __init__(self, seed: int = 0):
        self.content: dict[int, bytes] = {}
        self.fail: Exception | None = None
        self._random = random.Random(seed)

    def _pass_time(self) -> None:
        time.sleep(self._random.choice((0.0, 0.0, 0.0005)))
        if self.fail is not None:
            raise self.fail

    def read(self, item: int, into: memoryview) -> None:
        self._pass_time()
        into[:] = self.content[item]

    def write(self, item: int, content: memoryview) -> None:
        self._pass_time()
        self.content[item] = bytes(content)

    def close(self) -> None:
        pass


def tiers_of(budget_pages: int, store: SlowStore, pinned: frozenset[int] = frozenset()) -> Tiers:
    return Tiers([Region(PAGE) for _ in range(NUM_ITEMS)], pinned, budget_pages * PAGE, store)


class User:
    """Moves items as a plan does, and remembers what each must hold."""

    def __init__(self, tiers: Tiers):
        self.tiers, self.expected, self.counter = tiers, dict.fromkeys(range(NUM_ITEMS), 0), 0

    def check(self, item: int) -> None:
        view = self.tiers.items[item].region.view
        assert view[0] == view[-1] == self.expected[item], f"item {item}"

    def change(self, item: int) -> None:
        self.counter += 1
        self.expected[item] = self.counter % 251 + 1
        self.tiers.items[item].region.view[:] = bytes([self.expected[item]]) * PAGE

    def here(self) -> list[int]:
        return [
            i
            for i, item in enumerate(self.tiers.items)
            if not item.pinned and self.tiers.is_here(i)
        ]


@given(st.integers(0, 2**32), st.integers(1, NUM_ITEMS))
def test_content_follows_its_item(seed: int, budget: int) -> None:
    draw = random.Random(seed)
    tiers = tiers_of(budget, SlowStore(seed))
    user = User(tiers)
    fetched = set[int]()
    for _ in range(40):
        item = draw.randrange(NUM_ITEMS)
        if item in fetched:
            changing = draw.random() < 0.5
            tiers.await_item(item, changing=changing)
            user.check(item)
            if changing:
                user.change(item)
            if draw.random() < 0.5:
                continue
            fetched.discard(item)
            if draw.random() < 0.2:
                tiers.drop(item)
                user.expected[item] = -1
            else:
                tiers.release(item)
        elif user.expected[item] < 0:  # void
            if len(fetched) < budget:
                tiers.create(item)
                tiers.await_item(item, changing=True)
                user.change(item)
                fetched.add(item)
        elif len(fetched) < budget:
            tiers.fetch(item)
            fetched.add(item)
    assert tiers.traffic.peak <= tiers.budget
    for item, value in user.expected.items():
        assert value < 0 or tiers.content(item)[0] == value
    tiers.close()


def test_unchanged_items_are_not_written() -> None:
    tiers = tiers_of(2, store := SlowStore())
    user = User(tiers)
    for changing in (True, False, False):
        tiers.fetch(0)
        tiers.await_item(0, changing=changing)
        if changing:
            user.change(0)
        tiers.release(0)
    tiers.settle()
    assert (tiers.traffic.written, tiers.traffic.read) == (PAGE, 2 * PAGE), (
        "zeros were not read the first time"
    )
    assert store.content[0][0] == user.expected[0]
    tiers.close()


class Held:
    """Work that is done once someone says so."""

    def __init__(self) -> None:
        self.over = self.waited_for = False

    def is_done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.waited_for = True


@pytest.mark.parametrize("drops", [False, True])
def test_an_item_that_is_held_leaves_when_it_may_and_nobody_waits_for_that(drops: bool) -> None:
    tiers = tiers_of(1, SlowStore())
    held = Held()
    tiers.fetch(0)
    tiers.await_item(0, changing=True)
    tiers.hold(0, held)
    (tiers.drop if drops else tiers.release)(0)
    tiers.fetch(1)
    time.sleep(0.01)
    assert tiers.is_absent(0)
    assert not tiers.is_here(1)
    held.over = True
    tiers.await_item(1)
    assert not held.waited_for
    assert tiers.traffic.written == (0 if drops else PAGE)
    tiers.close()


def test_beside_a_plan_the_oldest_make_room() -> None:
    tiers = tiers_of(3, SlowStore(), pinned=frozenset({5}))
    user = User(tiers)
    for item in (0, 1, 0, 2, 3, 0):
        with tiers.changing([item]):
            user.check(item)
            user.change(item)
    assert user.here() == [0, 3]
    assert tiers.is_here(5)
    assert tiers.traffic.peak <= tiers.budget
    assert [int(tiers.content(item)[0]) for item in range(4)] == [
        user.expected[item] for item in range(4)
    ]
    tiers.close()


@pytest.mark.parametrize(
    "then",
    [
        lambda tiers: tiers.await_item(1),
        lambda tiers: tiers.settle(),
        lambda tiers: tiers.create(2),
    ],
    ids=["await", "settle", "create"],
)
def test_an_error_of_the_store_is_raised_by_what_comes_next(
    then: Callable[[Tiers], object],
) -> None:
    tiers = tiers_of(1, store := SlowStore())
    tiers.fetch(0)
    tiers.await_item(0, changing=True)
    store.fail = OSError("the disk is gone")
    tiers.fetch(1)
    tiers.release(0)
    with pytest.raises(OSError, match="the disk is gone"):
        then(tiers)
    tiers.close()


class NoPages(SparePages):
    """Pages, of which there are none for items that arrive once `fail` is set."""

    fail = False

    def hand_to(self, region: Region) -> None:
        if self.fail:
            raise MemoryError("no pages")
        super().hand_to(region)


def test_no_memory_for_what_arrives_is_raised_too() -> None:
    pages = NoPages()
    tiers = Tiers([Region(PAGE)], frozenset(), PAGE, SlowStore(), pages)
    pages.fail = True
    tiers.fetch(0)
    with pytest.raises(MemoryError, match="no pages"):
        tiers.await_item(0)
    tiers.close()
