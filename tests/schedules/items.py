"""A rank's state as items, for tests: for each part one of each weight buffer, gradient buffer, and
optimizer state."""

from itertools import count

from hypothesis import strategies as st

from hybridpar.schedules.action import PER_BATCH, Action, Kind
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.passes.residency import Access, Mode, Pool, add_residency
from hybridpar.schedules.passes.rooms import Room
from hybridpar.schedules.passes.segments import Division
from hybridpar.schedules.schedule_table import SCHEDULES, PipelineShape, find_schedule

READ, WRITE, UPDATE, ADD, RENEW = Mode


def text_of(actions):
    return " ".join(map(str, actions))


def training_state(
    schedule, sizes, rank, parts, *, weight=2, gradient=4, optimizer=12, norms=False, shared=False
):
    """(accesses, bytes of each item, items without content at the start) of a rank; parts: of each
    stage. shared: by replicas, who keep shares elsewhere."""
    schedule = find_schedule(schedule)
    stages = sizes.stages_of(rank)
    m = sizes.num_microbatches
    num_versions = schedule.max_live_versions(sizes, rank)
    num_gradients = schedule.num_gradient_buffers
    numbers = count()
    weights = {
        (v, s, j): next(numbers) for v in range(num_versions) for s in stages for j in range(parts)
    }
    gradients = {
        (b, s, j): next(numbers) for b in range(num_gradients) for s in stages for j in range(parts)
    }
    states = {(s, j): next(numbers) for s in stages for j in range(parts)}
    num_bytes = [weight] * len(weights) + [gradient] * len(gradients) + [optimizer] * len(states)

    def accesses(action):
        kind = action.kind
        stage = action.stage
        k = action.microbatch
        version = action.version
        part = action.part
        if shared and kind is Kind.REDUCE:
            return [
                Access(item, RENEW)
                for (buffer, _, _), item in gradients.items()
                if buffer == k % num_gradients
            ]
        if shared and kind is Kind.UPDATE:
            return [
                Access(weights[version % num_versions, stages[part // parts], part % parts], RENEW)
            ]
        if shared and kind is Kind.NORM:
            return []
        if kind is Kind.UPDATE:
            stage = stages[part // parts]
            part = part % parts
            return [
                Access(weights[version % num_versions, stage, part], WRITE),
                Access(gradients[k % num_gradients, stage, part], READ),
                Access(states[stage, part], UPDATE),
            ]
        if kind is Kind.NORM and norms:
            return [Access(gradients[k % num_gradients, stages[part // parts], part % parts], READ)]
        found = []
        if kind in (Kind.F, Kind.B, Kind.I):
            found.append(Access(weights[version % num_versions, stage, part], READ))
        if kind in (Kind.B, Kind.W):
            buffer = gradients[k // m % num_gradients, stage, part]
            found.append(Access(buffer, ADD if shared else WRITE if k % m == 0 else UPDATE))
        return found

    return accesses, num_bytes, frozenset(gradients.values())


def string_of(accesses):
    """Actions and what they touch, from the accesses of each."""
    actions = [Action(Kind.F, 0, number) for number in range(len(accesses))]
    return (
        actions,
        lambda action: accesses[action.microbatch] if action.kind not in PER_BATCH else (),
    )


def with_residency(accesses, num_bytes, budget, **options):
    """The list of moves and actions for a row of accesses, and their pool."""
    actions, accesses = string_of(accesses)
    pool = Pool(accesses, num_bytes, Room(budget))
    return list(add_residency(actions, [pool], **options)), pool


def drawn_sizes(name, p, m):
    """PipelineShape near these that the schedule can run on."""
    if name == "interleaved":
        return PipelineShape(max(p, 2), m, 2)
    return PipelineShape(p, max(m, p - 1))


SPARE = st.integers(0, 60)
"""Bytes above the least budget."""


@st.composite
def plans(draw, spare=SPARE):
    """A schedule, its sizes, a plan of three batches that moves items, and these by rank."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    sizes = drawn_sizes(name, draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    parts = draw(st.integers(1, 4))
    norms = draw(st.booleans())
    split = draw(st.booleans())
    shared = draw(st.booleans())
    ahead = draw(st.integers(0, 8))
    major = sizes.num_ranks == 1 and draw(st.booleans())
    whole = make_plan(
        find_schedule(name).with_options(split=split),
        sizes,
        0,
        3,
        parts=Division(parts, norms=norms, part_major=major),
    )
    room = draw(spare)
    pools = {}
    plan = {}
    for rank, actions in whole.items():
        accesses, num_bytes, void = training_state(
            find_schedule(name), sizes, rank, parts, norms=norms, shared=shared
        )
        least = max(sum(num_bytes[touch.item] for touch in accesses(action)) for action in actions)
        pools[rank] = [Pool(accesses, num_bytes, Room(least + room), void=void)]
        plan[rank] = tuple(add_residency(actions, pools[rank], ahead=ahead))
    return name, sizes, plan, pools
