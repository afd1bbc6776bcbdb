"""A plan in words."""

from __future__ import annotations

import pytest

from hybridpar.config import from_mapping
from hybridpar.planner.searching.plan_report import describe


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ([4, 3, 3, 4], "blocks 4+3+3+4"),
        ([7, *[6] * 14, 5], "blocks 7+14x6+5"),
        ([2, 2, *[1] * 7, 3, 3], "blocks 2x2+7x1+2x3"),
    ],
)
def test_blocks_of_many_stages_are_joined(split: list[int], said: str) -> None:
    config = from_mapping(
        {
            "model": {"num_layers": sum(split) - 2},
            "parallel": {"pp": len(split), "dp": 1},
            "pipeline": {"split": split, "num_microbatches": 8},
        }
    )
    assert f", {said}" in f"{describe(config)},"
