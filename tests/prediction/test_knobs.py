"""Knobs: which are offered, that their savings are those of prediction.predict, and that a report's
numbers add up."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from memory_behaviour.pipeline_trace import HEADER, KIB, trace

from hybridpar.config import Config, from_mapping
from hybridpar.job import JobPlan
from hybridpar.memory_behaviour.analysis.account import Account, examine, offloading
from hybridpar.memory_behaviour.analysis.behaviour import analyse
from hybridpar.memory_behaviour.events import Category
from hybridpar.memory_behaviour.pictures.sections import (
    Section,
    action_notes,
    as_json,
    as_text,
    ranks_section,
    report,
)
from hybridpar.prediction.knobs import Saving, knobs, savings
from hybridpar.prediction.memory_report import shares, short_form
from hybridpar.prediction.predict import predict
from hybridpar.prediction.walk import StageMemory

CPU = torch.device("cpu")
STAGE = StageMemory(
    weights=100,
    master=200,
    gradients=100,
    optimizer=400,
    checkpoint=50,
    activations=700,
    communication=10,
    transient=90,
    in_flight=2,
    during="B3@0",
)


def make(**sections: dict[str, Any]) -> Config:
    base = {
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "seq_length": 64,
            "vocab_size": 512,
        },
        "parallel": {"tp": 1, "pp": 1, "dp": 1},
        "pipeline": {"num_microbatches": 4},
        "train": {"micro_batch_size": 4, "num_steps": 4, "device": "cpu"},
    }
    return from_mapping(
        {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}
    )


def offered(**sections: dict[str, Any]) -> list[str]:
    return [str(knob) for knob in knobs(make(**sections), 0, STAGE)]


HALVED = "train.micro_batch_size = 2, pipeline.num_microbatches = 8"


@pytest.mark.thorough(keep=5)
@pytest.mark.parametrize(
    ("sections", "there", "absent"),
    [
        (
            {},
            [
                HALVED,
                'pipeline.recompute = "all"',
                'pipeline.recompute = "stage"',
                "model.logits_chunk = 64",
                "checkpoint.asynchronous = false",
            ],
            ["parallel.zero = 1", "parallel.sequence = true", "pipeline.split_backward = false"],
        ),
        ({"train": {"micro_batch_size": 3}}, [], ["micro_batch_size"]),
        (
            {"pipeline": {"recompute": "all"}},
            ['pipeline.recompute = "stage"'],
            ['pipeline.recompute = "all"'],
        ),
        (
            {"pipeline": {"recompute": "stage"}},
            ['pipeline.recompute = "all"'],
            ['pipeline.recompute = "stage"'],
        ),
        ({"parallel": {"dp": 2}}, [f"parallel.zero = {zero}" for zero in (1, 2, 3)], []),
        (
            {"parallel": {"dp": 2, "zero": 2}},
            ["parallel.zero = 3"],
            ["parallel.zero = 1", "parallel.zero = 2"],
        ),
        ({"parallel": {"dp": 2, "zero": 3}}, [], ["parallel.zero"]),
        ({"parallel": {"tp": 2}}, ["parallel.sequence = true"], []),
        ({"parallel": {"tp": 2, "sequence": True}}, [], ["parallel.sequence"]),
        ({"model": {"logits_chunk": 8}}, [], ["model.logits_chunk"]),
        (
            {"parallel": {"pp": 3}, "pipeline": {"split_backward": True, "zero_bubble": True}},
            [
                "pipeline.zero_bubble = false",
                "pipeline.split_backward = false, pipeline.zero_bubble = false",
            ],
            [],
        ),
        (
            {"pipeline": {"schedule": "2bw", "split_backward": True}},
            ["pipeline.gradient_buffers = 1", "pipeline.split_backward = false"],
            [],
        ),
        ({"checkpoint": {"asynchronous": False}}, [], ["checkpoint.asynchronous"]),
    ],
)
def test_knobs_that_change_something_are_offered(
    sections: dict[str, dict[str, Any]], there: list[str], absent: list[str]
) -> None:
    found = offered(**sections)
    assert set(there) <= set(found)
    assert not [text for text in found for part in absent if part in text]


def test_a_knob_that_is_not_valid_is_not_offered() -> None:
    """A micro-batch of one sample cannot be halved, and whatever leaves other settings wrong is
    none."""
    assert not any("micro_batch_size" in text for text in offered(train={"micro_batch_size": 1}))
    broken = replace(make(), train=replace(make().train, num_steps=0))
    assert not knobs(broken, 0, STAGE)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("rank", "sections"),
    [
        (0, {"parallel": {"pp": 2, "dp": 2}, "train": {"save_interval": 2}}),
        (1, {"parallel": {"pp": 2, "dp": 2}, "model": {"vocab_size": 4096}}),
    ],
)
def test_savings_are_differences_of_predicted_peaks_on_that_rank(
    rank: int, sections: dict[str, Any]
) -> None:
    config = make(**sections)
    memory = predict(JobPlan(config), device=CPU)[rank]
    assert predict(JobPlan(config), device=CPU, ranks=[rank]) == [memory]
    offered = knobs(config, rank, memory)
    found = {saving.knob: saving for saving in savings(config, rank, memory, offered, CPU)}
    assert HALVED in found
    assert "parallel.zero = 1" in found
    assert ("model.logits_chunk = 64" in found) == (rank == 1), "the head is on the last stage"
    for knob in offered:
        after = predict(JobPlan(from_mapping(knob.changes, config)), device=CPU)[rank].total
        saved = memory.total - after
        assert (str(knob) in found) == (saved > 0)
        if saved > 0:
            assert found[str(knob)] == Saving(str(knob), saved, after)
    amounts = [saving.saves for saving in found.values()]
    assert amounts == sorted(amounts, reverse=True)


def test_offloading_moves_the_peak() -> None:
    """Without activations the peak is where the temporaries are, and not at the old place."""
    w = Category.WEIGHTS
    a = Category.ACTIVATIONS
    t = Category.TEMPORARIES
    levels = [(0.0, {w: 10}), (1.0, {w: 10, a: 50}), (2.0, {w: 10, a: 10, t: 30}), (3.0, {w: 10})]
    assert offloading(levels) == [Saving("activations", 20, 40), Saving("weights", 10, 50)]
    assert offloading([]) == []


@pytest.mark.parametrize(
    "parts",
    [
        {"a": 1, "b": 1, "c": 1},
        {"a": 2, "b": 1},
        {"a": 7},
        {str(i): 1 for i in range(7)},
        {"a": 10**12, "b": 1},
        {str(i): i**3 for i in range(40)},
    ],
)
def test_shares_add_up_to_100(parts: dict[str, int]) -> None:
    found, total = shares(parts), sum(parts.values())
    assert round(10 * sum(found.values())) == 1000
    assert all(abs(found[key] - 100 * part / total) <= 0.1 for key, part in parts.items())


# -- the report


@pytest.fixture(scope="module")
def account() -> Account:
    spans = trace(3, unit=1024 * KIB)
    return examine(HEADER, analyse(spans), lambda: spans)


def sections_of(account: Account, *found: Saving) -> dict[str, Section]:
    return {section.title: section for section in report(account, STAGE, found)}


def test_the_numbers_of_a_report_add_up(account: Account) -> None:
    found = sections_of(account)
    for title in (next(iter(found)), "its activations, by the model's block that made them"):
        *parts, (_, total, percent) = found[title].rows[1:]
        assert percent == "100.0"
        assert sum(float(row[2]) for row in parts) == pytest.approx(100, abs=1e-9)
        assert sum(float(row[1].replace(",", "")) for row in parts) == pytest.approx(
            float(total.replace(",", "")), abs=0.006 * len(parts)
        )
    peak = account.behaviour.peak
    assert next(iter(found)).startswith(
        f"rank 1 (pp=1 dp=0 tp=0): a peak of 57 MiB in {peak.action} of step 2"
    )
    blocks = found["its largest blocks"].rows[1:]
    assert [row[-1] for row in blocks[:3]] == ["24.00", "12.00", "12.00"]
    lifetimes = found["lifetimes and access intervals"].rows[1:]
    assert {row[0]: row[1] for row in lifetimes} == {
        "weights": "1",
        "gradients": "1",
        "optimizer": "1",
        "activations": "36",
        "temporaries": "72",
    }
    offloaded = found["categories, by what the peak loses if they are offloaded"].rows[1:]
    assert all(float(saves) + float(leaves) == pytest.approx(57) for _, saves, leaves in offloaded)
    assert {row[0]: row[1] for row in offloaded}["optimizer"] == "24.00"
    fragments = {row[0]: row[1:] for row in found["fragmentation"].rows}
    assert fragments["largest living set"] == ["57.00", "1.000"]
    assert float(fragments["planned arena"][0]) >= 57
    assert float(fragments["modelled caching allocator"][0]) >= 57
    assert found["stability"].notes == ["Steps 2 to 3 do the same, event by event (of 3)."]


def test_the_report_says_what_can_leave_and_what_knobs_save(account: Account) -> None:
    found = sections_of(account, Saving("model.logits_chunk = 64", 2**20, 3 * 2**20))
    links = found["what could leave over a link and be back without costing time"].rows
    assert [row[0] for row in links] == ["link", *(swap.link for swap in account.swaps)]
    assert all(int(row[1].replace(",", "")) <= int(row[2].replace(",", "")) for row in links[1:])
    section = found["settings, by what they save of the predicted peak of 0.00 MiB"]
    assert section.rows[1] == ["model.logits_chunk = 64", "1.00", "3.00"]
    assert "checkpoint" in section.notes[0]
    assert not any(title.startswith("settings") for title in sections_of(account))


def test_the_report_explains_actions_and_categories(account: Account) -> None:
    assert action_notes("I111@47v1") == [
        "I111@47v1: backward to the input of micro-batch 111 on stage 47, with weight version 1 "
        "(numbers count from 0)."
    ]
    assert action_notes("NORM3@0") == ["NORM3@0: norm of step 3 on stage 0 (numbers count from 0)."]
    assert action_notes("") == action_notes("evaluation") == action_notes("FETCH2@0") == []
    peak = next(iter(sections_of(account).values()))
    assert "optimizer: its moments" in peak.notes[-1]
    assert "messages" not in peak.notes[-1], "one rank sends none"
    spans = list(account.spans)
    untimed = examine(replace(HEADER, predicted=True), analyse(spans), lambda: spans, timed=False)
    assert "no time is known" in as_text(report(untimed, STAGE, []))
    assert not untimed.swaps
    once = trace(1)
    alone = examine(HEADER, analyse(once), lambda: once)
    assert sections_of(alone)["stability"].notes == [
        "One step only: nothing to compare it with (of 1)."
    ]


def test_a_report_as_json(account: Account) -> None:
    plain = json.loads(json.dumps(as_json(account, [Saving("x", 1, 2)])))
    assert plain["ok"]
    assert (
        sum(plain["peak"]["by_category"].values())
        == plain["peak"]["bytes"]
        == account.behaviour.peak.num_bytes
    )
    assert plain["knobs"] == [{"knob": "x", "saves": 1, "peak": 2}]
    assert plain["fragmentation"]["largest_live"] == plain["peak"]["bytes"]
    assert (plain["rank"], plain["num_steps"]) == (1, 3)


def test_ranks_side_by_side(account: Account) -> None:
    section = ranks_section(
        [(HEADER, account.behaviour), (replace(HEADER, rank=3), account.behaviour)]
    )
    assert [row[0] for row in section.rows[1:]] == ["1", "3"]
    assert {row[-1] for row in section.rows[1:]} == {"57.00"}
    assert {row[3] for row in section.rows[1:]} == {"optimizer"}


def test_the_short_form_names_the_fullest_its_owners_and_a_knob() -> None:
    small = replace(STAGE, activations=0)
    saving = Saving('pipeline.recompute = "all"', 3 * 2**20, 1)
    lines = short_form([small, STAGE], "stage", saving)
    assert lines[0].startswith("stage 1 takes the most, ")
    assert (
        "in B3@0: activations 42 %, optimizer 24 %, master 12 %, weights 6 %, gradients 6 %"
        in lines[0]
    )
    assert lines[1].startswith('pipeline.recompute = "all" would save 3.0 MiB of it')
    assert len(short_form([STAGE], "rank", None)) == 1
    assert re.match("rank 0 ", short_form([STAGE], "rank", None)[0])
