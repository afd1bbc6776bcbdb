"""Transfers that share links: as ever where nothing is shared, and slower by the right amount where
it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpar.planner.machines.hardware import DEVICES, Cluster, Level, Link
from hybridpar.schedules.action import parse_actions
from hybridpar.schedules.passes.lowering import make_plan
from hybridpar.schedules.schedule_table import PipelineShape, find_schedule
from hybridpar.schedules.simulate.network import Network, Route
from hybridpar.schedules.simulate.simulator import Costs, StuckError, simulate

seconds = st.floats(0, 3)


def simulate_on(network: Network, plan, costs: Costs):
    return simulate(plan, replace(costs, network=network))


def links_of_their_own(p: int, transfer: float, latency: float = 0.0) -> Network:
    return Network(
        {(r, step): 1.0 for r in range(p - 1) for step in (1, -1)},
        [Route({(r, 1): transfer}, latency) for r in range(p - 1)],
        [Route({(r, -1): transfer}, latency) for r in range(p - 1)],
    )


def two_by_two(bandwidth: float = 1.0, **changes: int) -> Cluster:
    """Two servers of two devices; messages inside take next to no time, 1 byte between servers 1
    second."""
    inner = Link("inner", 1e9, 0.0, 1.0)
    outer = Link("outer", bandwidth, 0.0, 1.0)
    return Cluster(DEVICES["v100-16gb"], 2, 2, inner, outer, **changes)


@given(
    st.sampled_from(["naive", "gpipe", "1f1b", "2bw", "pipedream"]),
    st.integers(1, 6),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_same_as_simulate_where_no_link_is_shared(name, p, extra, clip, tied, data) -> None:
    draw = lambda: data.draw(st.lists(seconds, min_size=p, max_size=p))  # noqa: E731
    transfer = data.draw(st.floats(0.01, 3))
    latency = data.draw(seconds)
    costs = Costs(
        draw(),
        draw(),
        update=draw(),
        reduce=[data.draw(seconds)] * p,
        norm=data.draw(seconds),
        transfer=transfer,
        latency=latency,
        tied=tied,
    )
    ahead = 0 if name == "pipedream" else data.draw(st.integers(0, 1))
    plan = make_plan(
        replace(find_schedule(name).with_options(clip=clip), receive_ahead=ahead),
        PipelineShape(p, p + extra),
        0,
        3,
    )
    expected = simulate(plan, costs)
    timeline = simulate_on(links_of_their_own(p, transfer, latency), plan, costs)
    for rank in plan:
        assert timeline.starts[rank] == pytest.approx(expected.starts[rank], abs=1e-9)
        assert timeline.ends[rank] == pytest.approx(expected.ends[rank], abs=1e-9)
    assert timeline.makespan == pytest.approx(expected.makespan)


def test_transfers_share_a_card() -> None:
    """Half the rate while both directions are under way on one card."""
    plan = {
        0: parse_actions("F0@0v0 SEND_F0@0 F1@0v0 SEND_F1@0"),
        1: parse_actions("RECV_F0@1 RECV_F1@1 F0@1v0 F1@1v0"),
    }
    alone = Network({"card": 1.0}, [Route({"card": 2.0})], [Route({"card": 2.0})])
    assert simulate_on(alone, plan, Costs(1.0)).starts[1][2:] == [
        3.0,
        5.0,
    ]  # one at a time on a channel

    both_ways = Network({"card": 1.0}, [Route({"card": 4.0})], [Route({"card": 4.0})])
    plan = {
        0: parse_actions("RECV_B0@0 F0@0v0 SEND_F0@0 B0@0v0"),
        1: parse_actions("B0@1v0 SEND_B0@1 RECV_F0@1 F0@1v0"),
    }
    timeline = simulate_on(both_ways, plan, Costs(2.0, 1.0))
    # back: 1 s alone until t=2, then half the rate: 1 + 1 + 6 = 8; forward: 3 of 4 done by then, 1
    # more alone
    assert timeline.starts[0][3] == pytest.approx(8.0)
    assert timeline.starts[1][3] == pytest.approx(9.0)


def test_replicas_of_a_stage_share_the_card_of_their_server() -> None:
    network = two_by_two().network([[0, 1], [2, 3]], 3.0)
    assert network.forward[0].load == {(0, 0, "out"): 6.0, (0, 1, "in"): 6.0}
    assert network.backward[0].load == {(0, 1, "out"): 6.0, (0, 0, "in"): 6.0}
    assert network.bandwidth[0, 0, "out"] == 1.0
    assert two_by_two(outer_links=2).network([[0, 1], [2, 3]], 3.0).bandwidth[0, 0, "out"] == 2.0


def test_half_duplex_cards_and_links_inside_a_server() -> None:
    cluster = two_by_two()
    cluster = replace(cluster, outer=replace(cluster.outer, half_duplex=True))
    network = cluster.network([[0], [1], [2], [3]], 3.0)
    assert network.forward[1].load == {(0, 0, "both"): 3.0, (0, 1, "both"): 3.0}
    assert network.backward[1].load == network.forward[1].load
    inside = [
        network.forward[0].load,
        network.backward[0].load,
        network.forward[2].load,
        network.backward[2].load,
    ]
    assert len(set().union(*inside)) == 4  # none shared


def test_endless_flows_are_said() -> None:
    plan = {0: parse_actions("F0@0v0"), 1: parse_actions("RECV_F0@1 F0@1v0")}
    with pytest.raises(StuckError, match="rank 1, step 1: F0@1v0"):
        simulate_on(links_of_their_own(2, 1.0), plan, Costs())


def racks() -> Cluster:
    """Two racks of two servers of two devices: 4 bytes a second out of a server, 2 out of a
    rack."""
    inner, outer, between = (
        Link(name, rate, latency, 1.0)
        for name, rate, latency in (("inner", 1e9, 0.0), ("outer", 4.0, 0.5), ("between", 1.0, 2.0))
    )
    return Cluster(DEVICES["v100-16gb"], 2, 4, inner, outer, levels=(Level(4, between, 2),))


def test_a_message_from_rack_to_rack_crosses_two_servers_and_two_racks() -> None:
    network = racks().network([[2, 3], [4, 5]], 3.0)
    assert network.forward[0].load == {
        (0, 1, "out"): 6.0,
        (0, 2, "in"): 6.0,
        (1, 0, "out"): 6.0,
        (1, 1, "in"): 6.0,
    }
    assert network.forward[0].latency == 2.0
    assert (network.bandwidth[0, 1, "out"], network.bandwidth[1, 0, "out"]) == (4.0, 2.0)
    plan = {0: parse_actions("F0@0v0 SEND_F0@0"), 1: parse_actions("RECV_F0@1 F0@1v0")}
    start = simulate_on(network, plan, Costs(1.0)).starts[1][1]
    assert start == pytest.approx(2 + 6 / 2 + 2)  # word of the receive, then the message


def test_rings_from_rack_to_rack_share_what_a_rack_has() -> None:
    cluster = racks()
    assert cluster.link(range(2)).name == "inner"
    assert cluster.link(range(4)).name == "outer"
    assert cluster.link(range(3, 5)).name == "between"
    # one device a server: the other's ring passes the same cards and both links of a rack, so each
    # has one
    assert cluster.all_reduce(4.0, range(0, 8, 2), rings=2) == pytest.approx(6 * (2 + 1 / 1))
    # of every other server: two rings a server, four a rack
    assert cluster.all_reduce(4.0, [0, 4], rings=2) == pytest.approx(2 * (2 + 2 * 2 / 1))
