"""Codecs of messages in the planner: bytes each way, times by stage against sums, and speeds that
are measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planner import made

from hybridpar.config import Config, from_mapping
from hybridpar.grid import Axis
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.codec_costs import measure_codecs
from hybridpar.planner.measuring.profile import CodecSpeeds
from hybridpar.planner.measuring.profile_file import read_profile, write_profile
from hybridpar.planner.searching.links_report import link_needs

SPEEDS = CodecSpeeds(1e3, 2e3, 4e3, 8e3)


def with_codec(config: Config, name: str, **others: object) -> Config:
    return from_mapping({"compression": {"messages": name, **others}}, config)


@pytest.mark.parametrize(
    ("tp", "name", "gradients"), [(1, "int4", 1), (2, "int4", 1), (2, "dct", 2)]
)
def test_stages_encode_what_they_send_and_decode_what_they_get(
    tp: int, name: str, gradients: int
) -> None:
    """Slices of tp are encoded; decoded are whole messages, but for gradients of features that were
    sent."""
    plain = made.config(tp=tp, pp=3, m=4, b=1, split=(3, 3, 2), recompute="stage")
    config = with_codec(plain, name)
    profile = made.profile(config)
    fast, slow = (
        StepCost(config, made.machine(config, 3 * tp, made=replace(profile, codecs=codecs)))
        for codecs in ({}, {name: SPEEDS})
    )
    n = slow.message_bytes
    first, middle, last = (
        (b.forward - a.forward, b.backward - a.backward)
        for a, b in zip(fast.stages, slow.stages, strict=True)
    )
    sends = n / tp / 1e3, n / gradients / 8e3  # an activation, and its gradient comes
    gets = n / 2e3, n / tp / 4e3 + n / 2e3  # recomputed, its input is decoded again
    assert first == pytest.approx(sends)
    assert middle == pytest.approx((sends[0] + gets[0], sends[1] + gets[1]))
    assert last == pytest.approx(gets)


def test_each_way_has_its_own_bytes_and_a_head_alone_exact_messages() -> None:
    outer = made.link(latency=0.001, bandwidth=1e6)
    config = with_codec(made.config(pp=3, m=4, b=1, split=(4, 3, 1)), "dct")
    cost = StepCost(config, made.machine(config, 3, per_server=1, outer=outer))
    tokens = config.model.seq_length
    hidden = config.model.hidden_size
    kept = round(0.1 * hidden)
    forth = tokens * (4 * kept + hidden // 8)
    back = tokens * 4 * kept
    assert sum(cost.links[0]) == pytest.approx(outer.transfer_time(forth))
    assert cost.links_back[0][0] == pytest.approx(
        outer.transfer_time(back) - outer.transfer_time(1), rel=1e-3
    )
    assert sum(cost.links[1]) == pytest.approx(outer.transfer_time(cost.message_bytes))


def test_a_link_is_told_what_its_codec_leaves_and_a_smaller_one_named() -> None:
    plain = made.config(pp=2, m=8, b=1, split=(4, 4), tie_embeddings=False)
    outer = made.link(bandwidth=1e3)
    needs = {}
    for name in ("none", "int8", "int4"):
        config = with_codec(plain, name)
        (needs[name],) = link_needs(
            StepCost(config, made.machine(config, 2, per_server=1, inner=outer, outer=outer))
        )
        assert needs[name].gives == pytest.approx(1e3, rel=0.2)
    assert needs["int8"].needs / needs["none"].needs == pytest.approx(66 / 256)
    assert replace(needs["int8"], gives=needs["int8"].needs / 1.5).codec == "int4"
    assert replace(needs["int4"], gives=needs["int4"].needs / 1.5).codec == ""


def test_speeds_are_measured_of_codecs_that_save_and_kept_in_the_file(tmp_path: Path) -> None:
    config = made.config(b=1)
    found = measure_codecs(with_codec(config, "none", messages_kept=0.2), Axis("world"))
    assert list(found) == ["bf16", "int8", "int4", "dct"]
    assert all(
        speed > 0
        for one in found.values()
        for speed in (one.encoded, one.decoded, one.gradients_encoded, one.gradients_decoded)
    )
    assert "dct" not in measure_codecs(with_codec(config, "none", messages_kept=1.0), Axis("world"))
    profile = replace(made.profile(config), codecs={"dct": SPEEDS})
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json").codecs == {"dct": SPEEDS}
