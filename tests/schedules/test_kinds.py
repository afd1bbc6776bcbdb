"""The table of kinds: that its rows fit together."""

from hybridpar.schedules.kinds import (
    ACTION_SPECS,
    BESIDE,
    COMPUTE,
    INPUTS,
    PER_BATCH,
    PER_ITEM,
    Kind,
)


def test_every_kind_has_a_row_and_is_of_one_sort():
    assert set(ACTION_SPECS) == set(Kind)
    assert set(Kind) == PER_BATCH | BESIDE | COMPUTE
    assert not COMPUTE & (PER_BATCH | BESIDE)
    assert {Kind.REDUCE, Kind.NORM, Kind.HOST, Kind.UPDATE} == PER_BATCH
    assert {Kind.F, Kind.B, Kind.I, Kind.W} == COMPUTE
    assert COMPUTE - {Kind.W} == INPUTS
    assert {Kind.FETCH, Kind.RELEASE, Kind.DROP} == PER_ITEM
    assert BESIDE > PER_ITEM
    assert {kind for kind, row in ACTION_SPECS.items() if row.cut} == COMPUTE | {
        Kind.NORM,
        Kind.HOST,
        Kind.UPDATE,
    }


def test_transfers_have_two_ends():
    for kind, row in ACTION_SPECS.items():
        if row.matching_recv is not None:
            assert ACTION_SPECS[row.matching_recv].peer_offset == -row.peer_offset
            assert [other for other in Kind if ACTION_SPECS[other].send is kind] == list(row.needs)
    assert [kind for kind in Kind if ACTION_SPECS[kind].peer_offset == 1] == [
        Kind.SEND_F,
        Kind.RECV_B,
    ]
    assert [kind for kind in Kind if ACTION_SPECS[kind].peer_offset == -1] == [
        Kind.RECV_F,
        Kind.SEND_B,
    ]
    for kind in INPUTS:
        assert ACTION_SPECS[kind].receive in ACTION_SPECS[kind].needs


def test_parts_of_a_backward_are_one_together():
    parts = [ACTION_SPECS[kind] for kind in (Kind.I, Kind.W)]
    whole = ACTION_SPECS[Kind.B]
    assert all(part.part_of is Kind.B for part in parts)
    assert sum(part.holds for part in parts) == whole.holds == -ACTION_SPECS[Kind.F].holds
    assert (parts[0].receive, parts[0].send, parts[0].needs) == (
        whole.receive,
        whole.send,
        whole.needs,
    )
