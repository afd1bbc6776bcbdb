"""Links' needs and gains: against the closed form, and against the simulated step on both sides of
the bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from planner.made import config, link, machine, profile

from hybridpar.config import Config
from hybridpar.grid import Axis
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.hardware import Link
from hybridpar.planner.measuring import links
from hybridpar.planner.measuring.links import Curve, MeasuredLink
from hybridpar.planner.searching.links_report import LinkNeed, link_lines, link_needs

RATE = 1e9


def cost(
    layers: int = 8,
    pp: int = 2,
    bandwidth: float = 1e12,
    there: float = 1.0,
    m: int = 8,
    **other: object,
) -> StepCost:
    """Stages of equal layers, whose products take all of their time at RATE operations a second."""
    model = {"num_layers": layers, "tie_embeddings": False} | other
    base = config(pp=pp, b=2, m=m, split=_even(layers, pp), **model)  # type: ignore[arg-type]
    forward = (
        24 * base.model.hidden_size**2 * base.model.seq_length / RATE
    )  # of a sample; backward twice that
    made = profile(base, layer=forward, head=0.0)
    outer = replace(link(bandwidth=bandwidth), there=there)
    return StepCost(
        base,
        machine(base, pp * base.parallel.dp, made=made, per_server=1, inner=outer, outer=outer),
    )


def _even(layers: int, pp: int) -> tuple[int, ...]:
    if pp == 1:
        return (layers + 2,)
    each = layers // pp
    return (each + 1, *[each] * (pp - 2), each + 1)


@pytest.mark.parametrize(("layers", "pp"), [(8, 2), (12, 3)])
def test_a_stage_link_needs_what_the_formula_says(layers: int, pp: int) -> None:
    """R / (36 h L/p) bytes/s in 16 bits, twice that in fp32. Source: 2 bytes h against 72 h^2 L/p
    operations."""
    (need,) = link_needs(cost(layers, pp))
    hidden = config().model.hidden_size
    assert need.needs == pytest.approx(2 * RATE / (36 * hidden * layers / pp))
    assert need.gives == pytest.approx(1e12, rel=1e-3)
    assert (need.is_bound, need.ratio, need.more_layers, need.layers) == (
        False,
        1.0,
        0,
        layers // pp,
    )


def test_a_stage_of_the_head_alone_has_a_stage_link() -> None:
    one = cost()
    pipeline = replace(one.config.pipeline, split=(9, 1))
    (need,) = link_needs(StepCost(replace(one.config, pipeline=pipeline), one.machine))
    assert need.layers == 1


@pytest.mark.parametrize(("there", "slower"), [(1.0, 1.0), (1.5, 1.5), (0.4, 1.6)])
def test_the_slower_way_counts(there: float, slower: float) -> None:
    (need,) = link_needs(cost(bandwidth=1e5, there=there))
    assert need.gives == pytest.approx(1e5 / slower, rel=1e-3)  # a byte counts as latency


@pytest.mark.parametrize("factor", [1.3, 2.6, 6.0])
def test_said_number_of_layers_is_the_least_that_is_compute_bound(
    factor: float,
) -> None:
    needs = link_needs(cost())[0].needs
    (need,) = link_needs(cost(bandwidth=needs / factor))
    assert need.factor == pytest.approx(factor, rel=1e-3)
    for more, bound in ((need.more_layers, False), (need.more_layers - 1, True)):
        (then,) = link_needs(cost(8 + 2 * more, bandwidth=0.95 * needs / factor))
        assert then.is_bound == bound
    assert need.deepest == 0, "8 layers are too few for two stages of that many"


def test_a_deep_model_is_told_on_how_many_stages_it_would_be_compute_bound() -> None:
    needs = link_needs(cost(24, 6))[0].needs
    (need,) = link_needs(cost(24, 6, bandwidth=needs / 1.9))
    assert (need.layers, need.more_layers, need.deepest) == (4, 4, 3)
    (then,) = link_needs(cost(24, need.deepest, bandwidth=needs / 1.9))
    assert not then.is_bound


def test_messages_as_much_smaller_as_it_says_make_the_step_that_of_computing_alone() -> None:
    """Judged by the simulated step of 2bw with warm-up for slow links; without them it is longer by
    the factor."""
    settings = {"schedule": "2bw", "m": 8}

    def step(bandwidth: float) -> float:
        one = cost(bandwidth=bandwidth, **settings)
        pipeline = replace(one.config.pipeline, warmup="bandwidth")
        return StepCost(replace(one.config, pipeline=pipeline), one.machine).step_time

    free = step(1e12)
    needs = link_needs(cost(**settings))[0].needs
    (need,) = link_needs(cost(bandwidth=needs / 3, **settings))
    assert step(needs / 3) == pytest.approx(3 * free, rel=0.05)
    assert step(need.ratio * needs / 3) == pytest.approx(free, rel=0.05)


@pytest.mark.parametrize(
    ("item", "factor", "codec"),
    [
        (4, 1.5, "bf16"),
        (4, 3.0, "int8"),
        (2, 1.5, "int8"),
        (2, 3.0, "int4"),
        (4, 7.0, "int4"),
        (2, 5.0, ""),
        (2, 0.5, ""),
    ],
)
def test_the_most_exact_codec_that_does(item: int, factor: float, codec: str) -> None:
    need = LinkNeed("stages 0 - 1", factor * 1e6, 1e6, item, 3, 2, 1)
    assert need.codec == codec
    assert need.as_json()["factor"] == pytest.approx(factor)
    assert ("link-bound" in str(need)) == (factor > 1)


def test_text_for_people() -> None:
    assert str(LinkNeed("stages 0 - 1", 6e6, 1e6, 4, 3, 2, 4, 7)) == (
        "stages 0 - 1: 48 Mbit/s needed, 8 Mbit/s available: link-bound by 6: messages 6.3 times "
        "smaller "
        '(compression.messages = "int4"), '
        "or 2 more layers a stage (3 now; parallel.pp = 4 instead of 7 for this model)"
    )
    assert str(LinkNeed("replicas of stage 0", 2e9, 1e9, 4)) == (
        "replicas of stage 0: 16 Gbit/s needed, 8 Gbit/s available: link-bound by 2: gradients 2.1 "
        "times smaller, "
        "or 2.1 times as many tokens in a batch"
    )
    assert str(LinkNeed("stages 0 - 1", 1e6, 4e6, 4)).endswith(
        "compute-bound, 4 times what it needs"
    )
    assert str(LinkNeed("stages 0 - 1", 1e6, 4e9, 4)).endswith(
        "compute-bound, over a hundred times what it needs"
    )


def test_replicas_need_less_the_longer_a_batch_is() -> None:
    short, long = (link_needs(cost(pp=1, dp=2, m=m, bandwidth=1e6))[0] for m in (4, 12))
    assert short.needs == pytest.approx(3 * long.needs, rel=1e-3)
    assert (short.name, short.item, short.layers) == ("replicas of stage 0", 4, 0)


def test_tied_embeddings_are_reduced_between_both_ends() -> None:
    one, tied = (link_needs(cost(bandwidth=1e4, tie_embeddings=tie)) for tie in (False, True))
    assert [need.name for need in one] == ["stages 0 - 1"]
    assert [need.name for need in tied] == ["stages 0 - 1", "tied embeddings"]
    assert "model.tie_embeddings = false" in str(tied[1])
    assert tied[1].gives == pytest.approx(1e4, rel=1e-2)


def test_one_that_waits_for_links_that_are_fast_enough_is_told_which_order_hides_them() -> None:
    needs = link_needs(cost())[0].needs
    slow = cost(bandwidth=3 * needs, m=8)
    *_, line = link_lines(slow)
    assert line.startswith('pipeline.schedule = "2bw", pipeline.warmup = "latency"'), line
    assert not [
        line
        for line in link_lines(cost(bandwidth=3 * needs, schedule="2bw"))
        if "interleaved" in line
    ]
    assert len(link_lines(cost(bandwidth=needs / 3))) == 1, "no order helps"
    assert len(link_lines(cost(bandwidth=3 * needs, m=1))) == 1, (
        "2bw does not run on one micro-batch"
    )


@pytest.mark.parametrize(
    "between",
    [
        MeasuredLink("network", link(bandwidth=1e6).send, {2: link(bandwidth=1e6).send}, there=1.5),
        Link("network", 1e6 / 1.5, 0.0, share=1.0, back_bandwidth=2e6),
    ],
)
def test_a_link_may_be_slower_one_way(between: Link | MeasuredLink) -> None:
    there, back = (between.transfer_time(3e5, way=way) for way in (1, -1))
    assert (there, back) == (pytest.approx(0.45, rel=1e-5), pytest.approx(0.15, rel=1e-5))


@pytest.mark.parametrize(
    ("rates", "there"),
    [
        ((2e6, 10e6), 5 / 3),
        ((10e6, 2e6), 1 / 3),
        ((2e6, 2.2e6), 1.0),
        ((1e12, 2e5), 0.01),
        ((2e5, 1e12), 1.99),
    ],
)
def test_both_ways_are_measured(
    rates: tuple[float, float], there: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of round trips over a link of these rates, there and back, with a latency of 15 ms."""

    def half_trip(size: float, back: float) -> float:
        return 0.015 + (size / rates[0] + back / rates[1]) / 2

    monkeypatch.setattr(
        links, "_ping", lambda n, repeats, pair, world, device, back: (half_trip(n, back), 0.0, 0.0)
    )
    send = Curve(tuple((float(n), half_trip(n, n)) for n in (1 << 10, 1 << 21)))
    found = links._there(send, (0, 1), Axis("dp"), torch.device("cpu"))
    assert found == pytest.approx(there, rel=1e-3)  # the smallest message's bytes count as latency
    if 0.1 < abs(there - 1) < 0.9:
        assert MeasuredLink("network", send, {}, there=found).rates == pytest.approx(
            rates, rel=1e-3
        )


def test_the_last_stage_sends_to_the_first_against_the_way() -> None:
    """Interleaved stages are on a ring: its last link leads from the last server to the first."""
    base = config(pp=2, m=4, num_layers=4, schedule="interleaved")
    outer = replace(link(bandwidth=1e6), there=1.5)
    ring = StepCost(_with_chunks(base), machine(base, 2, per_server=1, inner=outer, outer=outer))
    (forth, last), (back, last_back) = (
        [taken for taken, _, _ in links] for links in (ring.links, ring.links_back)
    )
    assert forth == pytest.approx(3 * back)
    assert (last, last_back) == (back, forth)
    assert ring.costs.transfer_back == [back, forth]
    assert math.isfinite(ring.step_time)


def _with_chunks(base: Config) -> Config:
    return replace(base, pipeline=replace(base.pipeline, virtual_stages=2))
