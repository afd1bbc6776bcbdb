from itertools import combinations, count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules.items import (
    ADD,
    READ,
    RENEW,
    UPDATE,
    WRITE,
    plans,
    string_of,
    training_state,
    with_residency,
)

from hybridpar.errors import ConfigError
from hybridpar.schedules.action import PER_ITEM, Action, Kind, parse_actions
from hybridpar.schedules.passes.fast_tier import FastTiers
from hybridpar.schedules.passes.lowering import lower, make_plan
from hybridpar.schedules.passes.residency import Access, Pool, add_residency
from hybridpar.schedules.passes.rooms import Room
from hybridpar.schedules.proof.check import PlanError, check
from hybridpar.schedules.schedule_table import PipelineShape


def reads(items):
    return [[Access(item, READ)] for item in items]


def text(actions):
    return " ".join(map(str, actions)).replace("@0", "")


def fetches(actions):
    return sum(action.kind is Kind.FETCH for action in actions)


def fewest_fetches(accesses, num_items, capacity):
    """Found by trying all: the least over what may be in the fast tier after each access, which it
    may pick freely."""
    least = {frozenset(): 0}
    for touches in accesses:
        needed = {touch.item for touch in touches}
        following = {}
        for before, cost in least.items():
            now = cost + sum(
                touch.item not in before and touch.mode is not WRITE for touch in touches
            )
            rest = sorted(before - needed)
            for kept in range(min(len(rest), capacity - len(needed)) + 1):
                for chosen in combinations(rest, kept):
                    after = frozenset(needed | set(chosen))
                    following[after] = min(now, following.get(after, now))
        least = following
    return min(least.values())


# -- what moves where


def test_the_one_that_is_touched_last_gives_way():
    sweep = reads([0, 1, 2, 2, 1, 0])
    assert text(with_residency(sweep, [1] * 3, 2)[0]) == (
        "FETCH0 FETCH1 F0 RELEASE0 FETCH2 F1 F2 F3 F4 RELEASE1 FETCH0 F5"
    )
    assert text(with_residency(sweep, [1] * 3, 2, ahead=0)[0]) == (
        "FETCH0 F0 FETCH1 F1 RELEASE0 FETCH2 F2 F3 F4 RELEASE1 FETCH0 F5"
    ), "a release is early all the same"
    assert (
        text(with_residency(sweep, [1] * 3, 3, ahead=9)[0])
        == "FETCH0 FETCH1 FETCH2 F0 F1 F2 F3 F4 F5"
    )


def test_items_overwritten_next_are_dropped_first():
    accesses = [
        [Access(0, WRITE)],
        [Access(0, READ), Access(1, READ)],
        [Access(2, READ)],
        [Access(0, WRITE)],
        [Access(1, READ)],
    ]
    assert (
        text(with_residency(accesses, [1] * 3, 2)[0])
        == "FETCH1 F0 F1 DROP0 FETCH2 F2 RELEASE2 F3 F4"
    )


def test_evicted_items_are_added_to_and_made_again():
    """0: weights of which each rank has a share, 1 and 2: gradients that are summed into shares."""
    accesses = [
        [Access(0, READ)],
        [Access(0, READ), Access(1, ADD)],
        [Access(1, ADD)],
        [Access(2, ADD)],
        [Access(1, RENEW), Access(2, RENEW)],
        [Access(0, RENEW)],
        [Access(0, READ)],
    ]
    moves, pool = with_residency(accesses, [1] * 3, 2)
    assert text(moves) == "FETCH0 F0 F1 RELEASE0 F2 RELEASE1 F3 RELEASE2 F4 F5 FETCH0 F6"
    for fault, missing in (
        ("F4@0: item 2 is still in the fast tier, where it would be out of date", "RELEASE2@0"),
        ("F5@0: item 0 is still in the fast tier, where it would be out of date", "RELEASE0@0"),
    ):
        tier = FastTiers([Pool(pool.accesses, [1] * 3, Room(3))])
        assert fault in [tier.follow(action) for action in moves if str(action) != missing]


def test_clean_items_give_way_among_equals():
    accesses = [
        [Access(0, UPDATE), Access(1, READ)],
        [Access(2, READ)],
        [Access(0, READ), Access(1, READ)],
    ]
    assert "RELEASE1 FETCH2" in text(with_residency(accesses, [1] * 3, 2)[0])
    accesses[0] = [Access(0, READ), Access(1, UPDATE)]
    assert "RELEASE0 FETCH2" in text(with_residency(accesses, [1] * 3, 2)[0])


def test_small_items_stay_where_a_large_one_makes_room_enough():
    accesses = reads([0, 1, 2, 1, 0])  # 0 is touched last, but 1 must go, and does
    assert text(with_residency(accesses, [1, 10, 10], 12, ahead=0)[0]) == (
        "FETCH0 F0 FETCH1 F1 RELEASE1 FETCH2 F2 RELEASE2 FETCH1 F3 F4"
    )


def test_items_resident_at_the_start_and_always():
    actions, touches = string_of(reads([3, 0, 1, 2]))
    pool = Pool(touches, [1] * 4, Room(3), pinned={3}, resident={0: False, 2: True})
    moves = list(add_residency(actions, [pool]))
    assert text(moves) == "F0 F1 RELEASE0 FETCH1 F2 F3"
    assert not any(map(FastTiers([pool]).follow, moves))


def test_too_small_a_budget_is_refused_at_once_with_the_least_that_works():
    actions, touches = string_of([[Access(0, READ)], [Access(1, READ), Access(2, WRITE)]])
    with pytest.raises(ConfigError, match=r"memory\.budget = 49: .*; try 60") as error:
        add_residency(actions, [Pool(touches, [10, 20, 30, 10], Room(49), pinned={3})])
    least = int(error.value.problems[0].suggestion)
    for budget in (least, least - 1):
        pool = Pool(touches, [10, 20, 30, 10], Room(budget), pinned={3})
        if budget < least:
            with pytest.raises(ConfigError):
                add_residency(actions, [pool])
        else:
            assert not any(map(FastTiers([pool]).follow, add_residency(actions, [pool])))


# -- the fewest


@given(st.lists(st.integers(0, 7), max_size=14), st.integers(1, 5), st.integers(0, 6))
def test_no_choice_fetches_less(items, capacity, ahead):
    actions, _ = with_residency(reads(items), [1] * 8, capacity, ahead=ahead)
    assert fetches(actions) == fewest_fetches(reads(items), 8, capacity)


@given(
    st.lists(st.integers(0, 7), max_size=14),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 6),
)
def test_spare_room_leaves_the_fewest_fetches(items, capacity, spare, ahead):
    actions, touches = string_of(reads(items))
    pool = Pool(touches, [1] * 8, Room(capacity + spare), spare=spare)
    moves = list(add_residency(actions, [pool], ahead=ahead))
    assert fetches(moves) == fewest_fetches(reads(items), 8, capacity)
    assert not any(map(FastTiers([pool]).follow, moves))


def test_an_action_that_needs_the_spare_room_has_it():
    actions, touches = string_of(
        [[Access(0, READ)], [Access(1, READ), Access(2, READ)], [Access(0, READ)]]
    )
    moves = list(add_residency(actions, [Pool(touches, [1] * 3, Room(2), spare=1)]))
    assert fetches(moves) == 4
    assert text(moves).startswith("FETCH0 FETCH1 F0 RELEASE0 FETCH2 F1")


TOUCHES = st.lists(
    st.builds(Access, st.integers(0, 4), st.sampled_from([READ, WRITE, UPDATE])),
    min_size=0,
    max_size=2,
    unique_by=lambda touch: touch.item,
)


@given(st.lists(TOUCHES, max_size=12), st.integers(2, 4), st.integers(0, 4))
def test_no_choice_fetches_less_where_items_are_made_and_several_touched(accesses, capacity, ahead):
    actions, _ = with_residency(accesses, [1] * 5, capacity, ahead=ahead)
    assert fetches(actions) == fewest_fetches(accesses, 5, capacity)


@given(
    st.lists(st.permutations(range(5)), min_size=1, max_size=2),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_looking_a_period_ahead_is_as_good_as_knowing_all(orders, capacity, ahead):
    """If every item is touched within each batch, to know two batches is to know which comes
    last."""

    def endless():
        for batch in count():
            for item in orders[batch % len(orders)]:
                yield Action(Kind.F, 0, item)
            yield Action(Kind.UPDATE, 0, batch, batch + 1)

    pool = Pool(
        lambda action: [Access(action.microbatch, READ)] if action.kind is Kind.F else (),
        [1] * 5,
        Room(capacity),
    )
    length = 12 * 6
    known = list(add_residency(islice(endless(), length), [pool], ahead=ahead, batches=1000))
    seen = list(islice(add_residency(endless(), [pool], ahead=ahead, batches=3), 2 * length))
    same = len(known) // 2  # at the end of what is known nothing is touched again
    assert seen[:same] == known[:same]


# -- right, whatever is touched


@given(
    st.lists(TOUCHES, max_size=40),
    st.lists(st.integers(1, 9), min_size=5, max_size=5),
    st.integers(0, 20),
    st.integers(0, 6),
)
def test_moves_are_right_and_stand_where_they_should(accesses, num_bytes, more, ahead):
    least = max(
        (sum(num_bytes[touch.item] for touch in touches) for touches in accesses), default=0
    )
    actions, pool = with_residency(accesses, num_bytes, least + more, ahead=ahead)
    assert [action for action in actions if action.kind not in PER_ITEM] == string_of(accesses)[0]
    tier = FastTiers([pool])
    dropped = set()
    for step, action in enumerate(actions):
        assert not tier.follow(action)
        if action.kind is Kind.FETCH:
            before_use = 0
            for other in actions[step + 1 :]:
                touched = pool.accesses(other) if other.kind not in PER_ITEM else ()
                if any(touch.item == action.microbatch for touch in touched):
                    break
                before_use += bool(touched)
            else:
                pytest.fail(f"{action} is for nothing")
            assert before_use <= ahead
        elif action.kind is Kind.DROP:
            dropped.add(action.microbatch)
        elif action.kind not in PER_ITEM:
            for item, mode in pool.accesses(action):
                assert item not in dropped or mode is WRITE
                dropped.discard(item)


@given(st.lists(TOUCHES, max_size=30), st.integers(2, 4))
def test_eviction_follows_the_last_use(accesses, capacity):
    actions, pool = with_residency(accesses, [1] * 5, capacity, ahead=len(accesses))
    last = None
    for action in actions:
        if action.kind in (Kind.RELEASE, Kind.DROP):
            assert last is not None
            assert action.microbatch in {touch.item for touch in pool.accesses(last)}
        elif action.kind is not Kind.FETCH:
            last = action


def test_an_endless_plan_is_taken_as_it_comes():
    sizes = PipelineShape(2, 4)
    taken = []
    touches, num_bytes, void = training_state("2bw", sizes, 0, 2)

    def watched():
        for action in lower("2bw", sizes, 0, parts=2):
            taken.append(action)
            yield action

    pool = Pool(touches, num_bytes, Room(40), void=void)
    moves = add_residency(watched(), [pool], batches=2)
    assert sum(action.kind is Kind.UPDATE and action.part == 0 for action in taken) == 2
    some = list(islice(moves, 500))
    assert len(taken) < 700
    assert not any(map(FastTiers([pool]).follow, some))


# -- training plans


@given(plans())
def test_plans_that_move_items_are_right(made):
    name, sizes, plan, pools = made
    check(plan, sizes, name, pools=pools)


@given(plans(), st.data())
def test_a_missing_fetch_is_found(made, data):
    name, sizes, plan, pools = made
    step = data.draw(
        st.sampled_from([i for i, action in enumerate(plan[0]) if action.kind is Kind.FETCH])
    )
    faulty = plan | {0: (*plan[0][:step], *plan[0][step + 1 :])}
    with pytest.raises(PlanError, match="is not in the fast tier"):
        check(faulty, sizes, name, pools=pools)


@given(plans(st.just(0)), st.data())
def test_a_release_before_the_last_use_is_found(made, data):
    name, sizes, plan, pools = made
    actions = list(plan[0])
    leaving = [i for i, action in enumerate(actions) if action.kind in (Kind.RELEASE, Kind.DROP)]
    if not leaving:
        return
    move = actions.pop(step := data.draw(st.sampled_from(leaving)))
    use = max(
        i
        for i in range(step)
        if actions[i].kind not in PER_ITEM
        and any(touch.item == move.microbatch for touch in pools[0][0].accesses(actions[i]))
    )
    actions.insert(use, move)
    with pytest.raises(PlanError):
        check(plan | {0: tuple(actions)}, sizes, name, pools=pools)


@given(plans(st.integers(0, 10)))
def test_a_budget_a_byte_smaller_than_what_is_used_is_found(made):
    name, sizes, plan, pools = made
    tier = FastTiers(pools[0])
    most = 0
    for action in plan[0]:
        tier.follow(action)
        most = max(most, tier.tiers[0].num_bytes)

    def with_budget(budget):
        (items,) = pools[0]
        return pools | {0: [Pool(items.accesses, items.num_bytes, Room(budget), void=items.void)]}

    check(plan, sizes, name, pools=with_budget(most))
    with pytest.raises(PlanError, match=f"{most} bytes are in the fast tier, of {most - 1}"):
        check(plan, sizes, name, pools=with_budget(most - 1))


@pytest.mark.parametrize(
    ("faulty", "fault"),
    [
        ("F0@0v0", "F0@0v0: item 0 is not in the fast tier"),
        ("FETCH0@0 FETCH0@0", "FETCH0@0: the item is in the fast tier"),
        ("FETCH2@0", "FETCH2@0: the item has no content"),
        ("FETCH9@0", "FETCH9@0: there is no such item"),
        ("RELEASE0@0", "RELEASE0@0: the item is not in the fast tier"),
        ("RELEASE3@0", "RELEASE3@0: the item always stays"),
        ("FETCH0@0 DROP0@0 FETCH0@0", "FETCH0@0: the item has no content"),
        ("FETCH0@0 F0@0v0 DROP0@0 F1@0v0", "F1@0v0: item 0 has no content"),
        ("FETCH0@0 FETCH1@0 B0@0v0", "B0@0v0: 4 bytes are in the fast tier, of 3"),
    ],
)
def test_items_that_may_not_move(faulty, fault):
    def touches(action):
        return [Access(0, READ)] if action.kind is Kind.F else [Access(2, WRITE)]

    tier = FastTiers([Pool(touches, [1] * 4, Room(3), pinned={3}, void={2})])
    *right, wrong = parse_actions(faulty)
    assert not any(map(tier.follow, right))
    assert tier.follow(wrong).startswith(fault)


def test_moves_are_of_ranks_of_which_something_is_known():
    sizes = PipelineShape(1, 1)
    plan = {0: (*parse_actions("FETCH0@0"), *make_plan("1f1b", sizes)[0])}
    with pytest.raises(PlanError, match="FETCH0@0 is on rank 0, where nothing moves"):
        check(plan, sizes, "1f1b")
    plan = {0: (Action(Kind.FETCH, 1, 0), *plan[0][1:])}
    with pytest.raises(PlanError, match="FETCH0@1 is on rank 0, which does not hold its stage"):
        check(plan, sizes, "1f1b", pools={0: [Pool(lambda _: (), [1], Room(1))]})


@given(plans())
def test_without_moves_the_plan_is_as_it_was(made):
    name, sizes, plan, pools = made
    bare = {
        rank: tuple(action for action in actions if action.kind not in PER_ITEM)
        for rank, actions in plan.items()
    }
    assert check(bare, sizes, name).peaks == check(plan, sizes, name, pools=pools).peaks
    touches = pools[0][0].accesses
    num_bytes = pools[0][0].num_bytes
    roomy = Pool(touches, num_bytes, Room(sum(num_bytes)), pinned=range(len(num_bytes)))
    assert tuple(add_residency(bare[0], [roomy])) == bare[0]
