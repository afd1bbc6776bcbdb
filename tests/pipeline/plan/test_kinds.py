"""The table of kinds: that its rows fit together."""

from hybridpar.pipeline.plan.kinds import BESIDE, COMPUTE, INPUTS, PER_BATCH, PER_ITEM, ROWS, Kind


def test_every_kind_has_a_row_and_is_of_one_sort():
    assert set(ROWS) == set(Kind)
    assert set(Kind) == PER_BATCH | BESIDE | COMPUTE
    assert not COMPUTE & (PER_BATCH | BESIDE)
    assert {Kind.REDUCE, Kind.NORM, Kind.HOST, Kind.UPDATE} == PER_BATCH
    assert {Kind.F, Kind.B, Kind.I, Kind.W} == COMPUTE
    assert COMPUTE - {Kind.W} == INPUTS
    assert {Kind.FETCH, Kind.RELEASE, Kind.DROP} == PER_ITEM
    assert BESIDE > PER_ITEM
    assert {kind for kind, row in ROWS.items() if row.cut} == COMPUTE | {Kind.NORM, Kind.UPDATE}


def test_transfers_have_two_ends():
    for kind, row in ROWS.items():
        if row.met_by is not None:
            assert ROWS[row.met_by].side == -row.side
            assert [other for other in Kind if ROWS[other].send is kind] == list(row.needs)
    assert [kind for kind in Kind if ROWS[kind].side == 1] == [Kind.SEND_F, Kind.RECV_B]
    assert [kind for kind in Kind if ROWS[kind].side == -1] == [Kind.RECV_F, Kind.SEND_B]
    for kind in INPUTS:
        assert ROWS[kind].receive in ROWS[kind].needs


def test_parts_of_a_backward_are_one_together():
    parts = [ROWS[kind] for kind in (Kind.I, Kind.W)]
    whole = ROWS[Kind.B]
    assert all(part.part_of is Kind.B for part in parts)
    assert sum(part.holds for part in parts) == whole.holds == -ROWS[Kind.F].holds
    assert (parts[0].receive, parts[0].send, parts[0].needs) == (
        whole.receive,
        whole.send,
        whole.needs,
    )
