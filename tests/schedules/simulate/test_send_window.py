"""No plan that the proof accepts can wait for ever in the executor, whatever it sends ahead.

The ranks below are another account of the executor than the simulator's: every send is a
rendezvous, which ends once its receive is posted and the transfers before it, of both ranks on that
axis, are over.
"""

from collections import deque

import pytest
from hypothesis import assume, given, note
from hypothesis import strategies as st

from hybridpar.config import from_mapping
from hybridpar.config.rules import conflicts
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.schedules.action import Action, Kind, Plan
from hybridpar.schedules.kinds import ACTION_SPECS
from hybridpar.schedules.orders.custom_order import format_order
from hybridpar.schedules.passes.lowering import forward_actions, make_plan
from hybridpar.schedules.proof.check import PlanError
from hybridpar.schedules.schedule_table import (
    SCHEDULES,
    WARMUPS,
    PipelineShape,
    drained,
    find_schedule,
    schedule_of,
)
from hybridpar.schedules.simulate.send_window import min_send_window
from hybridpar.verify.run import verify

AHEAD = (
    " ".join([f"F{k}" for k in range(12)] + [f"B{k}" for k in range(12)]),
    " ".join(f"F{k} B{k}" for k in range(12)),
)
"""An order whose first rank runs 12 forwards ahead of its first backward."""
_FEW_ACTIONS = 12_000


class Ranks:
    """Ranks that run a plan, each until it must wait; `window`: number of sends that may be
    unfinished."""

    def __init__(self, plan: Plan, sizes: PipelineShape, window: int):
        self.plan = plan
        self.sizes = sizes
        self.window = window
        self.done = dict.fromkeys(plan, 0)
        self.over: set[tuple[Kind, int, int]] = (
            set()
        )  # transfers, by kind, receiving stage and micro-batch
        self.unfinished: dict[int, deque[tuple[Kind, int, int]]] = {rank: deque() for rank in plan}
        self.queues: dict[tuple[int, int, int], deque[tuple[tuple[Kind, int, int], bool]]] = {}
        self.issued: dict[tuple[Kind, int], set[int]] = {}

    def run(self) -> list[str]:
        """Return the action that each rank waits before when none can continue; empty if all have
        ended."""
        moved = True
        while moved:
            moved = False
            for rank, actions in self.plan.items():
                while self.done[rank] < len(actions) and self.may_start(
                    rank, actions[self.done[rank]]
                ):
                    self.start(rank, actions[self.done[rank]])
                    self.done[rank] += 1
                    moved = True
        return [
            str(actions[self.done[rank]])
            for rank, actions in self.plan.items()
            if self.done[rank] < len(actions)
        ]

    def may_start(self, rank: int, action: Action) -> bool:
        sent = self.unfinished[rank]
        while len(sent) > self.window:
            if sent[0] not in self.over:
                return False
            sent.popleft()
        row = ACTION_SPECS[action.kind]
        if action.kind is Kind.UPDATE:
            kind = Kind.NORM if (Kind.NORM, action.microbatch) in self.issued else Kind.REDUCE
            needed = {rank} if kind is Kind.REDUCE else set(self.plan)
            return needed <= self.issued.get((kind, action.microbatch), set())
        if row.receive is None or self.sizes.peer(action.stage, -row.flow) is None:
            return True
        return (row.receive, action.stage, action.microbatch) in self.over

    def start(self, rank: int, action: Action) -> None:
        row = ACTION_SPECS[action.kind]
        if row.per_batch:
            self.issued.setdefault((action.kind, action.microbatch), set()).add(rank)
        if not row.peer_offset:
            return
        sends = row.matching_recv is not None
        receive = row.matching_recv or action.kind
        transfer = (
            receive,
            action.stage + row.peer_offset if sends else action.stage,
            action.microbatch,
        )
        turn = self.sizes.turn(action.stage)
        self.queues.setdefault((rank, row.flow, turn), deque()).append((transfer, sends))
        if sends:
            self.unfinished[rank].append(transfer)
        self.match(rank, row.flow, turn)

    def match(self, rank: int, flow: int, turn: int) -> None:
        """End the transfers that are first in the queues of both ranks."""
        again = [(rank, turn)]
        while again:
            rank, turn = again.pop()
            queue = self.queues.get((rank, flow, turn))
            if not queue:
                continue
            transfer, sends = queue[0]
            into = transfer[1]
            other, its_turn = (
                (self.sizes.rank_of(into), self.sizes.turn(into))
                if sends
                else (self.sizes.rank_of(into - flow), self.sizes.turn(into - flow))
            )
            its_queue = self.queues.get((other, flow, its_turn))
            if not its_queue or its_queue[0] != (transfer, not sends):
                continue
            queue.popleft()
            its_queue.popleft()
            self.over.add(transfer)
            again += [(rank, turn), (other, its_turn)]


@st.composite
def pipelines(draw):
    """The section [pipeline], and pp, of any schedule but a custom order."""
    pp = draw(st.integers(1, 8))
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    section = {
        "schedule": name,
        "num_microbatches": draw(st.integers(1, 32)),
        "split_backward": draw(st.booleans()),
    }
    if name in ("1f1b", "2bw") and draw(st.booleans()):
        section |= {
            "stage_layout": "v",
            "split_backward": True,
            "activations": draw(st.sampled_from(["full", "full", "half", "min"])),
            "virtual_stages": draw(st.sampled_from([0, 2, 4, 6, 8])),
        }
    else:
        if name in ("interleaved", "2bw"):
            section["virtual_stages"] = draw(st.sampled_from([0, *range(2, 9)]))
        if name in ("1f1b", "interleaved", "2bw"):
            section["warmup"] = draw(st.sampled_from(list(WARMUPS)))
        if name in ("1f1b", "interleaved") and section["split_backward"]:
            section["zero_bubble"] = draw(st.booleans())
        if name == "2bw" and draw(st.booleans()):
            section["early_switch"] = draw(st.integers(0, 32))
    if name == "2bw":
        section["gradient_buffers"] = draw(st.sampled_from([0, 0, 1]))
    if name in ("2bw", "pipedream"):
        section["sync_steps"] = draw(st.sampled_from([0, 0, 3]))
    return pp, section


@st.composite
def orders(draw):
    """A custom order: forwards run ahead as far as they like, and each stage keeps the order of
    micro-batches."""
    pp, chunks, m = (
        draw(st.integers(1, 8)),
        draw(st.sampled_from([1, 1, 2, 3, 4, 8])),
        draw(st.integers(1, 32)),
    )
    stage_layout = (
        draw(st.sampled_from(["loop", "v"])) if chunks > 1 and chunks % 2 == 0 else "loop"
    )
    assume(pp > 1 or chunks == 1)
    sizes = PipelineShape(pp, m, chunks, stage_layout)
    eager = draw(st.lists(st.integers(0, 9), min_size=pp, max_size=pp))
    left = {(kind, stage): 0 for kind in (Kind.F, Kind.B) for stage in range(sizes.num_stages)}
    steps: list[list[tuple[Kind, int, int]]] = [[] for _ in range(pp)]

    def ready(kind: Kind, stage: int) -> bool:
        k = left[kind, stage]
        if k == m:
            return False
        if kind is Kind.F:
            return stage == 0 or left[kind, stage - 1] > k
        return left[Kind.F, stage] > k and (
            stage + 1 == sizes.num_stages or left[kind, stage + 1] > k
        )

    while any(len(each) < 2 * m * chunks for each in steps):
        for rank in range(pp):
            can = [
                (kind, stage)
                for stage in sizes.stages_of(rank)
                for kind in (Kind.F, Kind.B)
                if ready(kind, stage)
            ]
            if not can:
                continue
            ahead = sum(
                left[Kind.F, stage] - left[Kind.B, stage] for stage in sizes.stages_of(rank)
            )
            forward = ahead < 3 * eager[rank] or not any(kind is Kind.B for kind, _ in can)
            kind, stage = next((one for one in can if (one[0] is Kind.F) is forward), can[0])
            steps[rank].append((kind, stage, left[kind, stage]))
            left[kind, stage] += 1
    section = {
        "schedule": "own",
        "num_microbatches": m,
        "stage_layout": stage_layout,
        "split_backward": stage_layout == "v",
        "virtual_stages": chunks if chunks > 1 else 0,
        "order": [format_order(each, sizes, rank) for rank, each in enumerate(steps)],
    }
    return pp, section


def config_of(pp, section):
    return from_mapping(
        {
            "model": {"num_layers": 70},
            "parallel": {"pp": pp, "dp": 1},
            "pipeline": section,
            "train": {"num_steps": 50},
        }
    )


def require_no_deadlock(pp, section):
    """Run all that a run has of a plan that is accepted, with the executor's window: training, and
    evaluation."""
    config = config_of(pp, section)
    try:
        schedule = schedule_of(config)
        sizes = PipelineShape.of(config)
        assume(sizes.num_stages * sizes.num_microbatches < _FEW_ACTIONS // 8)
        assume(not [*conflicts(config)])
        schedule.check_shape(sizes)
        JobPlan(config).prove()
    except ConfigError:
        assume(False)
    except PlanError:
        if section["schedule"] != "own":
            raise  # a schedule of ours, whatever its sizes, has a plan that can run
        assume(False)
    window = JobPlan(config).send_window
    m = sizes.num_microbatches
    note(f"{section}, pp = {pp}: window {window}")
    assert window >= min_send_window(pp)
    plans = [
        make_plan(
            schedule,
            sizes,
            schedule.options.sync_steps,
            2 + 2 * (m < pp and not schedule.flush),
        )
    ]
    if schedule.options.sync_steps:
        plans.append(make_plan(drained(schedule), sizes, 0, 2))
    plans += [
        {rank: tuple(forward_actions(sizes, rank, count)) for rank in range(pp)}
        for count in (m, 2 * m + 1)
    ]
    for plan in plans:
        assert not Ranks(plan, sizes, window).run()


@given(pipelines())
def test_no_schedule_waits_for_its_own_sends(setting):
    require_no_deadlock(*setting)


@pytest.mark.thorough
@given(orders())
def test_no_custom_order_waits_for_its_own_sends(setting):
    require_no_deadlock(*setting)


_PASSES = {
    "clip": [True, False],
    "gather": [False, True],
    "host": [0.0, 0.25, 1.0],
    "feedback": [False, True],
    "offload": [0, 0, 1, 3],
    "parts": [1, 1, 2, 3],
}


@given(
    pipelines(),
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in _PASSES.items()}),
)
def test_state_that_moves_leaves_the_order_of_messages(setting, passes):
    """The host optimizer, parts, ZeRO's gathering, feedback of compressed gradients and offloaded
    activations add actions of one rank, and change no send or receive, so the window of the proof
    holds for them, too."""
    pp, section = setting
    config = config_of(pp, section)
    try:
        schedule = schedule_of(config)
        sizes = PipelineShape.of(config)
        assume(not [*conflicts(config)])
        assume(sizes.num_stages * sizes.num_microbatches < _FEW_ACTIONS // 8)
        schedule.check_shape(sizes)
        num_parts = passes.pop("parts")
        passes["clip"] |= passes["host"] > 0
        plain = {"split": config.pipeline.split_backward}
        plans = [
            make_plan(
                schedule.with_options(**options),
                sizes,
                schedule.options.sync_steps,
                2 + 2 * (sizes.num_microbatches < pp),
                parts,
            )
            for options, parts in ((plain, 1), (plain | passes, num_parts))
        ]
        window = JobPlan(config).send_window
    except (ConfigError, PlanError):
        assume(False)
    without, moved = (
        {
            rank: [action for action in actions if ACTION_SPECS[action.kind].peer_offset]
            for rank, actions in plan.items()
        }
        for plan in plans
    )
    assert without == moved
    note(f"{section}, pp = {pp}, {passes}: window {window}")
    assert not Ranks(plans[1], sizes, window).run()


@pytest.mark.parametrize(
    ("pp", "chunks", "m"), [(3, 4, 4), (2, 6, 5), (2, 8, 9), (4, 4, 7), (8, 4, 12)]
)
def test_a_v_of_several_passes_needs_a_wider_window(pp, chunks, m):
    config = config_of(
        pp,
        {
            "stage_layout": "v",
            "split_backward": True,
            "virtual_stages": chunks,
            "num_microbatches": m,
        },
    )
    sizes = PipelineShape.of(config)
    plan = make_plan(find_schedule(schedule_of(config)).with_options(split=True), sizes, 0, 2)
    assert Ranks(plan, sizes, min_send_window(pp)).run(), (
        "the ranks wait for each other with the smallest window"
    )
    assert (window := JobPlan(config).send_window) > min_send_window(pp)
    assert not Ranks(plan, sizes, window).run()
    assert Ranks(plan, sizes, window - 1).run(), "no wider than the plan needs"


def test_an_order_far_ahead_needs_a_wider_window():
    config = config_of(2, {"schedule": "own", "order": AHEAD, "num_microbatches": 12})
    sizes = PipelineShape.of(config)
    plan = make_plan(schedule_of(config), sizes, 0, 2)
    assert Ranks(plan, sizes, min_send_window(2)).run()
    assert not Ranks(plan, sizes, JobPlan(config).send_window).run()
    (report,) = JobPlan(config).prove()
    assert report.send_window == JobPlan(config).send_window


@given(pipelines())
def test_a_schedule_in_step_has_the_smallest_window(setting):
    pp, section = setting
    assume(section.get("virtual_stages", 0) <= 2 or section.get("stage_layout") != "v")
    try:
        config = config_of(pp, section)
        assume(not [*conflicts(config)])
        assert JobPlan(config).send_window == min_send_window(pp)
        assert all(
            report.send_window == min_send_window(report.shape.num_ranks)
            for report in JobPlan(config).prove()
        )
    except ConfigError:
        assume(False)


TINY = {
    "model": {
        "num_layers": 10,
        "hidden_size": 16,
        "num_heads": 2,
        "seq_length": 8,
        "vocab_size": 40,
    },
    "train": {"micro_batch_size": 2, "num_steps": 4},
}


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("pp", "section"),
    [
        (
            3,
            {
                "stage_layout": "v",
                "virtual_stages": 4,
                "split_backward": True,
                "num_microbatches": 4,
            },
        ),
        (
            2,
            {
                "stage_layout": "v",
                "virtual_stages": 6,
                "split_backward": True,
                "num_microbatches": 5,
            },
        ),
        (2, {"schedule": "own", "order": AHEAD, "num_microbatches": 12}),
    ],
)
def test_ranks_that_send_far_ahead_train_the_same(pp, section):
    config = from_mapping({"parallel": {"pp": pp, "dp": 1}, "pipeline": section, **TINY})
    report = verify(config, {"pp": pp}, 2)
    assert report.ok, report.first_divergence
