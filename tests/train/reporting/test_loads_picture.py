"""Loads of experts, added up over steps and drawn."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from hybridpar.config.capabilities import RoutedExperts
from hybridpar.train.batches.expert_loads import loads_by_block, max_violation
from hybridpar.train.reporting.loads_picture import LoadCounter, draw_loads, size_of


def test_max_violation_is_the_largest_excess_over_a_blocks_mean() -> None:
    assert max_violation({2: [4, 4, 4], 3: [1, 2, 6]}) == pytest.approx(1.0)
    assert max_violation({2: [4, 4, 4]}) == 0
    assert max_violation({2: [0, 0], 3: [3, 1]}) == 0.5, "a block without tokens has none"
    assert max_violation({2: [0, 0]}) is None
    assert max_violation({}) is None


def test_counts_are_assigned_to_blocks() -> None:
    experts = RoutedExperts(3, blocks=(2, 4))
    assert loads_by_block(experts, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == {2: [1, 2, 3], 4: [4, 5, 6]}
    assert loads_by_block(RoutedExperts(3), []) == {}


def test_loads_of_steps_add_up_until_they_are_taken() -> None:
    counter = LoadCounter()
    counter.add({2: [1, 2], 4: [0, 3]})
    counter.add({2: [5, 0], 4: [1, 1]})
    assert counter.take() == {2: [6, 2], 4: [1, 4]}
    assert counter.take() == {}


def test_every_expert_is_a_box_whose_colour_is_its_load() -> None:
    loads = {2: [10, 10], 5: [0, 20]}
    drawn = draw_loads(loads, 70)
    ElementTree.fromstring(drawn)
    tips = {tip: colour for colour, tip in re.findall(r'fill="(#\w+)"><title>([^<]*)', drawn)}
    assert size_of(loads) == len(tips) == 4
    assert tips["block 2, expert 0: 10 tokens, 1.00 of the mean"] == "#6fa3dc"
    assert tips["block 5, expert 0: 0 tokens, 0.00 of the mean"] == "#ffffff"
    assert tips["block 5, expert 1: 20 tokens, 2.00 of the mean"] == "#c7680f"
    assert "MaxVio 1.00" in drawn
