"""Compressed gradients cost their bytes, all of which go to all; codecs are candidates where they
are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner import made

from hybridpar.config import CompressionConfig, Config
from hybridpar.planner.costs.compressed import loss_of_codecs
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.measuring.profile import CodecSpeeds
from hybridpar.planner.searching.candidates import Request
from hybridpar.planner.searching.links_report import link_needs
from hybridpar.planner.searching.search import search


def with_codecs(config: Config, **compression: object) -> Config:
    return replace(config, compression=CompressionConfig(**compression))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("compression", "share"),
    [
        ({"gradients": "int8"}, 66 / 64 / 4),
        ({"gradients": "bf16"}, 1 / 2),
        (
            {"gradients": "dct", "gradients_kept": 0.01},
            1.5 * 0.04 / 4 + (1.5 * 0.01 + 1 / 255) / 4,
        ),
        (
            {"gradients": "powersgd", "gradients_rank": 1, "gradients_values": "int4"},
            34 / 64 / 4 / 48,
        ),
    ],
    ids=str,
)
def test_replicas_get_all_compressed_messages(compression: dict[str, object], share: float) -> None:
    plain = made.config(dp=2)
    config = with_codecs(plain, **compression)
    slow = made.link(bandwidth=1e3)
    on = made.machine(config, 2, made=made.profile(config), inner=slow)
    cost = StepCost(config, on)
    seconds, _ = cost.reduction(cost.ranks[0], 0)
    num_bytes = cost.gradient_bytes * cost.ranks[0].parameters
    expected, _ = on.half_ring("gather", 2 * share * num_bytes, range(2))
    assert seconds == pytest.approx(expected)
    assert seconds < StepCost(plain, on).reduction(cost.ranks[0], 0)[0]
    assert link_needs(cost)[-1].item == pytest.approx(share * cost.gradient_bytes)
    coded = replace(
        on, profile=replace(on.profile, codecs={"int8": CodecSpeeds(2e6, 4e6, 1.0, 1.0)})
    )
    more = StepCost(config, coded).reduction(cost.ranks[0], 0)[0] - seconds
    assert more == pytest.approx(
        num_bytes / 2e6 + 2 * num_bytes / 4e6 if compression["gradients"] == "int8" else 0
    )


def test_loss_cost_of_a_codec_is_said() -> None:
    config = with_codecs(made.config(pp=2), messages="int4", gradients="dct")
    assert loss_of_codecs(config).startswith(
        "changes training: loss +0.5 % by int4 messages, +23 % by dct gradients"
    )


@pytest.mark.thorough
def test_codecs_are_candidates_where_they_are_asked_for_and_it_is_said_what_they_do() -> None:
    config = made.config(pp=2, m=8, b=1)
    slow = made.link(bandwidth=2e3)
    on = made.machine(config, 2, made=made.profile(config, sizes=(1,)), inner=slow, memory=1e11)
    request = Request(keep={"pp": 2}, top=3, split_backward=False)
    assert all(
        one.config.compression == CompressionConfig() for one in search(config, on, request).ranked
    )
    found = search(config, on, replace(request, compression=True)).ranked
    assert found[0].config.compression.messages != "none"
    assert found[0].because == loss_of_codecs(found[0].config)
    fast = made.machine(config, 2, made=made.profile(config, sizes=(1,)), memory=1e11)
    assert all(
        one.config.compression == CompressionConfig()
        for one in search(config, fast, replace(request, compression=True)).ranked
    ), "nothing is gained"
