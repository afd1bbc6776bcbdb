"""profile.json: what is written is read back; what is damaged, foreign or of another version is
said to be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planner import made

from hybridpar.errors import ConfigError, DataError
from hybridpar.planner.measuring.links import Curve, MeasuredLink, rising
from hybridpar.planner.measuring.profile import StateSpeeds, check_settings
from hybridpar.planner.measuring.profile_file import read_profile, write_profile
from hybridpar.planner.searching.plan_report import profile_lines


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    profile = made.profile(made.config(), wait=0.25, cores=2)
    write_profile(profile, tmp_path / "deep" / "profile.json")
    assert read_profile(tmp_path / "deep" / "profile.json") == profile


def test_a_link_that_is_slower_one_way_reads_back_and_an_older_file_has_none(
    tmp_path: Path,
) -> None:
    even = made.profile(made.config())
    uneven = replace(even, links={"local": replace(even.links["local"], there=1.4)})
    write_profile(uneven, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json").links["local"].there == 1.4
    document = json.loads((tmp_path / "p.json").read_text())
    document["links"]["local"].pop("there")
    (tmp_path / "p.json").write_text(json.dumps(document))
    assert read_profile(tmp_path / "p.json").links["local"].there == 1.0
    document["links"]["local"]["there"] = 2.0
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match="there"):
        read_profile(tmp_path / "p.json")


def test_gathers_sums_and_what_moves_state_are_kept(tmp_path: Path) -> None:
    profile = made.profile(made.config(), cores=2)
    twice, work = ({2: Curve(((1.0, factor), (101.0, 2 * factor)))} for factor in (2.0, 0.5))
    link = replace(profile.links["local"], scatter=twice, scatter_work=work)
    profile = replace(profile, links={"local": link}, state=StateSpeeds(1e6, 2e6, 3e6, 4e6))
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    assert link.half_ring("scatter", 101, 2) == (4.0, 1.0)
    assert link.half_ring("gather", 101, 2) == (
        link.ring_time(101, 2) / 2,
        0.0,
    )  # which was not measured
    assert link.half_ring("scatter", 101, 1) == (0.0, 0.0)


def test_sizes_between_measured_ones_lie_on_the_line() -> None:
    profile = made.profile(made.config(), layer=3.0, sizes=(2, 8))
    assert profile.block("layer", 1, 4).forward == pytest.approx(12.0)
    assert profile.block("layer", 1, 1).backward == pytest.approx(6.0)  # beyond the smallest
    assert profile.block("layer", 2, 16).forward == pytest.approx(24.0)  # beyond the largest
    assert profile.block("layer", 2, 4).forward_messages == (4096, 4096)
    assert made.profile(made.config(), sizes=(4,)).block("layer", 1, 2).forward == pytest.approx(
        2.0
    )


def test_a_degree_that_was_not_measured() -> None:
    with pytest.raises(
        ConfigError, match=r"parallel.tp = 4: the profile has only the tp degrees 1, 2"
    ):
        made.profile(made.config()).block("layer", 4, 1)


def test_another_model_needs_another_profile() -> None:
    profile = made.profile(made.config())
    check_settings(profile, replace(made.config(pp=2, m=4)))
    older = {name: dict(table) for name, table in profile.settings.items()}
    del older["model"]["parallel_residual"]
    check_settings(replace(profile, settings=older), made.config(pp=2, m=4))
    with pytest.raises(
        ConfigError,
        match=r"model.parallel_residual = True: does not match the profile, which was made with "
        r"False",
    ):
        check_settings(replace(profile, settings=older), made.config(parallel_residual=True))
    with pytest.raises(
        ConfigError,
        match=r"model.hidden_size = 128: does not match the profile, which was made with 64; "
        r"try 64",
    ):
        check_settings(profile, made.config(hidden_size=128))


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "version": (
        lambda d: d.update(format="hybridpar profile 0"),
        "format is 'hybridpar profile 0', not",
    ),
    "negative": (lambda d: d["blocks"][1].update(forward=-1.0), r"blocks\[1\].forward is -1.0"),
    "not a number": (lambda d: d["blocks"][0].update(update="fast"), "update is 'fast'"),
    "missing": (lambda d: d["blocks"][0].pop("norm"), "'norm' is missing"),
    "a kind": (lambda d: d["blocks"].pop(0), "blocks must have embedding, layer, head"),
    "no link": (lambda d: d.pop("links"), "'links' is missing"),
    "falling sizes": (lambda d: d["links"]["local"]["send"].reverse(), "sizes of a curve rise"),
    "no memory": (lambda d: d["hardware"].update(memory=0), "hardware.memory is 0"),
    "half a host": (
        lambda d: d["hardware"].update(hosts=1.5),
        "hardware.hosts is 1.5, which must be of type int",
    ),
    "infinite": (lambda d: d["hardware"].update(memory=float("inf")), "hardware.memory is inf"),
    "huge": (
        lambda d: d["blocks"][0].update(tp=1e400),
        r"blocks\[0\].tp is inf, which must be of type int",
    ),
    "lists": (lambda d: d["blocks"][0].update(forward=[]), r"forward is \[\]"),
    "messages": (
        lambda d: d["blocks"][-1].update(forward_messages=[1]),
        "the same number of messages",
    ),
    "no all-reduce": (
        lambda d: d["links"]["local"].update(reduce={}),
        "links.local.reduce must hold",
    ),
    "alone": (
        lambda d: d["links"]["local"]["reduce"].update({"1": [[1, 1]]}),
        "all-reduces over 2 ranks or more",
    ),
    "settings": (
        lambda d: d.update(settings={"model": 3}),
        "settings.model is 3, which must be of type dict",
    ),
    "a speed": (lambda d: d["state"].update(read=-1.0), "state.read is -1.0"),
    "no speeds": (lambda d: d.pop("state"), "'state' is missing"),
    "unknown": (lambda d: d["hardware"].update(speed=1), "speed"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(made.profile(made.config()), path)
    document = json.loads(path.read_text())
    damage, message = DAMAGE[name]
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="profile.json: .*" + message.replace("(", r"\(")):
        read_profile(path)


def test_files_that_are_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; try hybridpar profile CONFIG"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"format": ')
    with pytest.raises(DataError, match="is not a profile as `hybridpar profile` writes it"):
        read_profile(tmp_path / "half.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="is not a profile as `hybridpar profile` writes it"):
        read_profile(tmp_path / "deep.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DataError, match="must be of type dict"):
        read_profile(tmp_path / "list.json")


def test_a_curve_goes_on_as_it_ends() -> None:
    curve = Curve(((10.0, 1.0), (20.0, 2.0), (40.0, 3.0)))
    assert [curve(x) for x in (1, 10, 15, 30, 80)] == pytest.approx([1.0, 1.0, 1.5, 2.5, 5.0])
    assert (curve.latency, curve.bandwidth) == (1.0, 20.0)


def test_a_size_that_something_held_up_does_not_make_a_link_fast() -> None:
    assert rising([(1.0, 1.0), (10.0, 4.0), (20.0, 3.0), (40.0, 3.0)]) == ((1.0, 1.0), (40.0, 3.0))
    assert rising([(1.0, 9.0), (10.0, 4.0)]) == ((10.0, 4.0),)
    assert rising([(1.0, 1.0), (10.0, 2.0)]) == ((1.0, 1.0), (10.0, 2.0))


def test_a_measured_link_shares_and_scales_like_a_ring() -> None:
    link = MeasuredLink(
        "x", Curve(((1.0, 1.0), (101.0, 2.0))), {2: Curve(((1.0, 1.0), (101.0, 2.0)))}
    )
    assert link.transfer_time(101, flows=3) == pytest.approx(1 + 3)
    assert link.ring_time(101, 1) == 0
    assert link.ring_time(101, 2) == pytest.approx(2.0)
    # of 4 ranks: 3 steps for 1, and 2 * 3/4 of the bytes for 2 * 1/2
    assert link.ring_time(101, 4) == pytest.approx(3 * 1.0 + 1.5 * 1.0)
    assert link.ring_work(101, 4) == 0


@pytest.mark.parametrize(("bandwidth", "shown"), [(1.19e6, "1.19 MB/s"), (2143e6, "2,143 MB/s")])
def test_rates_of_slow_links_have_three_digits(bandwidth: float, shown: str) -> None:
    found = replace(
        made.profile(made.config()), links={"network": made.link(bandwidth=bandwidth, ranks=(2,))}
    )
    assert profile_lines(found)[-1] == f"network: 0 us, {shown}; all-reduce over 2 {shown}"
