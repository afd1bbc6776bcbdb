"""PatrickStar's choices, by a small reference of it, against those that a plan makes."""

import pytest
from schedules.items import READ, with_residency
from schedules.passes.patrickstar import (
    Ranks,
    TensorState,
    best_capacity,
    chunk_state,
    layout,
    next_use,
    victim,
    waste,
)

from hybridpar.schedules.action import Kind
from hybridpar.schedules.passes.residency import Access


def test_a_chunk_is_in_the_least_settled_state_of_its_tensors():
    compute, hold, forward, backward, free = (
        TensorState[name]
        for name in ("COMPUTE", "HOLD", "HOLD_AFTER_FWD", "HOLD_AFTER_BWD", "FREE")
    )
    assert chunk_state([free, free]) is free
    assert chunk_state([hold, compute, free]) is compute
    assert chunk_state([forward, hold, backward]) is hold
    assert chunk_state([forward, backward, free]) is forward
    assert chunk_state([backward, free]) is backward
    assert chunk_state([hold], has_payload=False) is None


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_messages_between_ranks(p):
    """Weights of two bytes: 6 (p-1)/p bytes a parameter with chunks gathered, 10 (p-1)/p with each
    broadcast."""
    params = 1000 * p
    for broadcast, factor in ((False, 6), (True, 10)):
        ranks = Ranks(p, 2 * params / p, broadcast=broadcast)
        ranks.step()
        assert (ranks.gathers, ranks.scatters) == ((2, 1) if p > 1 else (0, 1))
        assert ranks.bytes == pytest.approx(factor * (p - 1) / p * params)


def test_the_authors_case_of_eviction():
    moments = {0: [0], 1: [1]}
    assert [victim(moments, now, 2) for now in (0, 1)] == [0, 1]
    assert next_use([1], 1, 2) == 3
    # the plan's choice in the same place: after 0 and 1, one of them gives way to 2
    for last, gives_way in ((1, 0), (0, 1)):  # which is touched next
        moves, _ = with_residency([[Access(item, READ)] for item in (0, 1, 2, last)], [1] * 3, 2)
        assert (
            next(action.microbatch for action in moves if action.kind is Kind.RELEASE) == gives_way
        )


def test_a_repeating_batch_has_equal_choices():
    batch = [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0, 0, 1, 2, 3, 4, 5]
    accesses = batch * 4
    capacity = 3
    moments = {item: [i for i, other in enumerate(batch) if other == item] for item in batch}
    here = set()
    left = []
    for now, item in enumerate(accesses[: 3 * len(batch)]):
        if item not in here and len(here) == capacity:
            at = now % len(batch) - 1  # of all that are here none is touched now
            left.append(victim({chunk: moments[chunk] for chunk in here}, at, len(batch)))
            here.remove(left[-1])
        here.add(item)
    moves, _ = with_residency([[Access(item, READ)] for item in accesses], [1] * 6, capacity)
    released = [action.microbatch for action in moves if action.kind is Kind.RELEASE]
    assert len(left) > 20
    assert sorted(released[: len(left)]) == sorted(left)


def test_the_chunk_size_is_that_which_wastes_least():
    modules = [30, 30, 30, 50, 50, 10]
    assert layout(modules, 60) == [60, 30, 50, 60]
    assert layout(modules, 49) is None
    assert [waste(modules, capacity) for capacity in (50, 60, 90, 100, 110)] == [
        100,
        40,
        70,
        100,
        20,
    ]
    assert best_capacity(modules, range(40, 111, 10)) == 110
    assert best_capacity(modules, range(40, 101, 10)) == 60
