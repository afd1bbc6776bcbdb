"""Who failed, from what all ranks noted and how they ended."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from hybridpar.flight import FAILED, LOST, REFUSED, Record
from hybridpar.grid import lines_of, place_of
from hybridpar.train.faults.diagnose import Seen, diagnose, find_stall

SIZES = {"pp": 2, "dp": 2, "tp": 1}


def record(rank: int, **changes: object) -> Record:
    """A rank of a grid of 4 in the middle of micro-batch 7 forward, waiting for nobody."""
    place = place_of(rank, SIZES)
    stage = place["pp"]
    axes = {name: line for name, lines in lines_of(SIZES).items() for line in lines if rank in line}
    who = {
        "rank": rank,
        "stage": stage,
        "stages": [stage],
        "place": place,
        "num_microbatches": 2,
        "axes": axes,
    }
    return replace(Record(10, 100.0 + rank, "training", 5.0, "F", stage, 7, 3, who=who), **changes)


def waiting(
    rank: int, operation: str = "all_reduce", axis: str = "world", peer: int = -1, **changes: object
) -> Record:
    return record(rank, operation=operation, axis=axis, peer=peer, **changes)


def saver(rank: int, idle_s: float, **changes: object) -> Seen:
    """A rank's thread that saves beside training."""
    wrote = record(rank, phase="writing the checkpoint of step 3", kind="", **changes)
    return Seen(rank, wrote, None, idle_s)


def test_the_killed_rank_is_named_not_those_that_lost_it() -> None:
    found = diagnose(
        [
            Seen(
                0, waiting(0, "recv", "pp_reverse", 2, phase=LOST, error="rank 0 lost contact"), 1
            ),
            Seen(1, waiting(1, axis="dp")),
            Seen(2, record(2), -9),
            Seen(3, waiting(3)),
        ]
    )
    assert (found.kind, found.rank, found.exit_code, found.is_final) == ("died", 2, -9, False)
    assert found.text == (
        "rank 2 (stage 1, replica 0, tensor part 0) was ended by SIGKILL in step 4 during F7@1v3 "
        "(micro-batch 7)"
    )
    assert found.victims[0] == (
        "rank 0 (stage 0, replica 0, tensor part 0) in step 4 during F7@0v3, waiting for recv over "
        "pp_reverse with "
        "rank 2 (micro-batch 7)"
    )
    assert [text[:6] for text in found.victims] == ["rank 0", "rank 1", "rank 3"]
    plain = found.as_json()
    assert (plain["step"], plain["stage"], plain["action"], plain["microbatch"]) == (
        4,
        1,
        "F7@1v3",
        7,
    )


def test_a_rank_that_was_killed_while_it_waited_is_named_too() -> None:
    ranks = [Seen(0, waiting(0), -signal.SIGKILL), Seen(1, waiting(1, phase=LOST), 1)]
    assert (diagnose(ranks).kind, diagnose(ranks).rank) == ("died", 0)


def test_a_rank_that_aborts_at_the_rendezvous_is_named() -> None:
    codes = None, -signal.SIGABRT
    found = diagnose(
        [Seen(rank, waiting(rank, "rendezvous", kind=""), code) for rank, code in enumerate(codes)]
    )
    assert (found.kind, found.rank) == ("died", 1)


def test_whoever_was_ended_comes_before_those_that_failed_of_it() -> None:
    ranks = [
        Seen(0, record(0, phase=FAILED, error="a"), 1),
        Seen(1, record(1, time=200.0), -signal.SIGSEGV),
    ]
    assert diagnose(ranks).rank == 1


def test_nccls_watchdog_ends_victims() -> None:
    ranks = [Seen(0, waiting(0), -signal.SIGABRT, 9.0), Seen(1, record(1), None, 9.0)]
    assert (diagnose(ranks).kind, diagnose(ranks).rank) == ("hangs", 1)


@pytest.mark.parametrize("ended", [False, True])
def test_the_rank_that_waits_for_nobody_hangs(ended: bool) -> None:
    """Whether faults.timeout_s or Gloo's own time-out came first."""
    code, phase = (1, LOST) if ended else (None, "training")
    ranks = [Seen(rank, waiting(rank, phase=phase), code, 8.0) for rank in range(3)] + [
        Seen(3, record(3), None, 9.0)
    ]
    found = diagnose(ranks)
    assert (found.kind, found.rank) == ("hangs", 3)
    assert "nothing for 9.0 s in step 4 during F7@1v3" in found.text


def test_a_rank_that_has_lost_another_does_not_hang() -> None:
    ranks = [
        Seen(0, record(0, phase=LOST), None, 9.0),
        Seen(1, waiting(1, "recv", "pp", 3), None, 8.0),
    ]
    assert (diagnose(ranks).kind, diagnose(ranks).rank) == ("link", 1)


def test_plan_and_link_are_suspects_if_ranks_wait_for_each_other() -> None:
    ranks = [
        Seen(0, waiting(0, "recv", "pp_reverse", 2), None, 7.0),
        Seen(1, waiting(1), None, 7.0),
        Seen(2, waiting(2, "recv", "pp", 0, time=50.0), None, 9.0),
        Seen(3, waiting(3), None, 7.0),
    ]
    found = diagnose(ranks)
    assert (found.kind, found.rank) == ("circle", 2)
    assert found.text.startswith("ranks 2, 0 wait for each other in a circle: rank 2 (stage 1")
    assert found.as_json()["peers"] == [0]


def test_a_circle_names_each_message_and_both_causes() -> None:
    """Rank 0 has too many unfinished sends; rank 2 waits for the gradient that rank 0 would send
    next."""
    ranks = [
        Seen(0, waiting(0, "send", "pp", 2, kind="SEND_F", microbatch=0), None, 9.0),
        Seen(2, waiting(2, "send", "pp_reverse", 0, kind="SEND_B", microbatch=3), None, 8.0),
    ]
    text = diagnose(ranks).text
    assert (
        "waiting for send over pp with rank 2 (micro-batch 0), for RECV_F0@1 to take the "
        "activation; rank 2" in text
    )
    assert (
        "waiting for send over pp_reverse with rank 0 (micro-batch 3), for RECV_B3@0 to take the "
        "gradient. " in text
    )
    assert "Either the plan" in text
    assert "or a link between these ranks is lost" in text
    assert "`hybridpar check`" in text


def test_a_circle_of_receives_names_the_messages_that_have_not_come() -> None:
    ranks = [
        Seen(0, waiting(0, "recv", "pp_reverse", 2, kind="B", microbatch=0), None, 9.0),
        Seen(2, waiting(2, "recv", "pp", 0, microbatch=12), None, 8.0),
    ]
    found = diagnose(ranks)
    assert found.kind == "circle"
    assert "(micro-batch 0), for the gradient of RECV_B0@0; rank 2" in found.text
    assert "(micro-batch 12), for the activation of RECV_F12@1. Either" in found.text


def test_a_circle_of_three_names_all_in_the_order_in_which_they_wait() -> None:
    ranks = [
        Seen(rank, waiting(rank, "recv", "pp", (rank + 2) % 3), None, 9.0) for rank in range(3)
    ]
    found = diagnose([*ranks, Seen(3, waiting(3), None, 9.0)])
    assert (found.kind, found.rank) == ("circle", 0)
    assert found.text.startswith("ranks 0, 2, 1 wait for each other in a circle")
    assert [text[:6] for text in found.victims] == ["rank 1", "rank 2", "rank 3"]


def test_a_tensor_part_that_waits_for_anothers_slice_is_not_to_blame() -> None:
    """Rank 1 has its slice and waits for that of rank 0 over tp, which a lost link keeps from
    it."""
    axes = {"pp": [0, 2], "tp": [0, 1]}

    def over(rank: int, *where: object, **changes: object) -> Seen:
        seen = waiting(rank, *where, **changes)  # type: ignore[arg-type]
        return Seen(
            rank, replace(seen, who=seen.who | {"axes": seen.who["axes"] | axes}), None, 9.0
        )

    found = diagnose(
        [
            over(0, "recv", "pp", 2, time=60.0),
            over(1, "all_gather", "tp", time=50.0),
            Seen(2, waiting(2, "recv", "pp_reverse", 0, time=70.0), None, 9.0),
            Seen(3, waiting(3), None, 9.0),
        ]
    )
    assert (found.kind, found.rank) == ("circle", 0)
    assert found.text.startswith("ranks 0, 2 wait")
    assert (
        "rank 1 (stage 0, replica 1, tensor part 0) in step 4 during F7@0v3, waiting for "
        "all_gather over tp" in (found.victims[0])
    )


def test_whoever_waits_for_the_ends_of_a_lost_link_may_have_begun_before() -> None:
    """Both ends of the message have begun, so no order of the plan explains the wait."""
    ranks = [
        Seen(0, waiting(0, "send", "pp", 2, kind="SEND_F"), None, 7.0),
        Seen(1, waiting(1, "reduce", "dp", time=1.0), None, 9.0),
        Seen(2, waiting(2, "recv", "pp", 0), None, 7.0),
        Seen(3, waiting(3, "all_reduce", "dp"), None, 7.0),
    ]
    assert diagnose(ranks).text.startswith("the link between rank 0 and rank 2 is lost: rank 0")


def test_a_collective_that_does_not_end_has_lost_a_link() -> None:
    ranks = [Seen(rank, waiting(rank), None, 7.0) for rank in range(4)]
    assert diagnose(ranks).text.startswith("the link between rank 0 and rank 1, 2, 3 is lost")


def test_a_rank_that_is_stopped_while_it_waits_is_to_blame() -> None:
    ranks = [
        Seen(0, waiting(0), None, 9.1),
        Seen(1, waiting(1), None, 9.0, stopped=True),
        Seen(2, waiting(2)),
        Seen(3, waiting(3)),
    ]
    found = diagnose(ranks)
    assert find_stall(ranks)
    assert (found.kind, found.rank) == ("hangs", 1)
    assert "is stopped, and hangs: nothing for 9.0 s" in found.text


def test_who_waits_for_others_is_late_only_when_patience_is_over() -> None:
    late = [Seen(0, waiting(0), None, 9.0, None, patience).is_late for patience in (0.0, 8.0, 20.0)]
    assert late == [True, True, False]
    assert Seen(0, record(0), None, 9.0, None, 20.0).hangs, "patience is for links, not for ranks"


def test_a_save_that_hangs_beside_training_is_named() -> None:
    """Whatever the other threads do meanwhile; and a save that goes on does not hide who does
    hang."""
    ranks = [
        Seen(0, waiting(0), None, 3.0),
        Seen(1, record(1), None, 4.0, saver(1, 9.0)),
        Seen(2, record(2)),
    ]
    found = diagnose(ranks)
    assert (found.kind, found.rank) == ("hangs", 1)
    assert found.text.endswith("hangs: nothing for 9.0 s while writing the checkpoint of step 3")
    assert (
        diagnose(
            [Seen(0, record(0), None, 9.0), Seen(1, waiting(1), None, 9.0, saver(1, 4.0))]
        ).rank
        == 0
    )
    ranks = [Seen(rank, waiting(rank), None, 9.0, saver(rank, 0.1)) for rank in range(2)]
    assert diagnose(ranks).kind == "link"


def test_a_phase_with_a_longer_limit_is_not_to_blame() -> None:
    ranks = [
        Seen(0, record(0, phase="settling", limit_s=60.0, kind=""), None, 20.0),
        Seen(1, record(1), None, 9.0),
    ]
    assert (diagnose(ranks).kind, diagnose(ranks).rank) == ("hangs", 1)


def test_an_action_of_an_evaluation_is_in_no_step() -> None:
    found = diagnose(
        [Seen(0, record(0, phase="evaluating"), None, 9.0), Seen(1, waiting(1), None, 9.0)]
    )
    assert found.text.endswith("nothing for 9.0 s in an evaluation during F7@0v3 (micro-batch 7)")


def test_nobody_is_blamed_for_an_agreed_stop() -> None:
    text = "rank 1 cannot write the checkpoint\nand more"
    ranks = [
        Seen(rank, record(rank, phase=FAILED, error=text), 1 if rank else None) for rank in range(4)
    ]
    found = diagnose(ranks)
    assert (found.kind, found.rank) == ("gave up", -1)
    assert found.text == "all ranks gave up: rank 1 cannot write the checkpoint"
    stopped = diagnose(
        [replace(seen, record=record(seen.rank, phase=REFUSED, error=text)) for seen in ranks]
    )
    assert (stopped.kind, stopped.rank, stopped.is_final) == ("refused", -1, True)
    assert stopped.text == "all ranks stopped: rank 1 cannot write the checkpoint"


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        ([Seen(0, None, 1), Seen(1, None, 1)], "refused"),
        (
            [Seen(0, record(0, phase=REFUSED), 1), Seen(1, record(1, phase=REFUSED), None)],
            "refused",
        ),
        ([Seen(0, record(0), 130), Seen(1, record(1), 130)], "stopped"),
    ],
)
def test_there_is_no_use_in_starting_again(ranks: list[Seen], kind: str) -> None:
    assert diagnose(ranks).kind == kind
    assert diagnose(ranks).is_final


def test_lowest_rank_that_said_its_refusal_counts() -> None:
    """Also where another one has left no record, as if it had been silent for longer."""
    assert diagnose([Seen(0, record(0, phase=REFUSED), 1), Seen(1, None, 1)]).rank == 0
    assert diagnose([Seen(0, None), Seen(1, None, 1)]).rank == 1


def test_a_rank_that_dies_before_it_begins_may_start_again() -> None:
    found = diagnose([Seen(0, None, -9), Seen(1, None)])
    assert (found.kind, found.rank, found.text) == (
        "died",
        0,
        "rank 0 was ended by SIGKILL before it had begun",
    )


@pytest.mark.parametrize(
    ("ranks", "stalls"),
    [
        ([Seen(0, record(0), None, 9.0), Seen(1, waiting(1), None, 1.0)], True),
        ([Seen(0, record(0), None, 4.0), Seen(1, waiting(1), None, 9.0)], False),  # still at it
        (
            [Seen(0, record(0, limit_s=0.0), None, 9.0), Seen(1, waiting(1), None, 9.0)],
            False,
        ),  # without a limit
        (
            [Seen(0, record(0, limit_s=60.0), None, 9.0), Seen(1, waiting(1), None, 9.0)],
            False,
        ),  # with a longer one
        ([Seen(0, record(0), None, 1.0, saver(0, 9.0)), Seen(1, record(1), None, 1.0)], True),
        ([Seen(0, record(0), None, 1.0, saver(0, 4.0)), Seen(1, record(1), None, 1.0)], False),
        # its first rank waits for files that another one cannot write, which comes out at the next
        # mark
        (
            [
                Seen(0, record(0), None, 1.0, saver(0, 9.0, operation="files", axis="world")),
                Seen(1, record(1)),
            ],
            False,
        ),
        ([Seen(0, waiting(0), None, 9.0), Seen(1, waiting(1), None, 9.0)], True),
        ([Seen(0, waiting(0), None, 9.0), Seen(1, waiting(1), None, 4.0)], False),
        ([Seen(0, None, None, 9.0), Seen(1, None, None, 9.0)], False),
    ],
)
def test_recognition_of_a_stall(ranks: list[Seen], stalls: bool) -> None:
    assert find_stall(ranks) == stalls
