"""The arithmetic that docs/gpu.md states for train.fp8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fp8_estimate import LEAST, RESULT, estimate

DOCUMENT = Path(__file__).parents[2] / "docs" / "gpu.md"


@pytest.mark.parametrize(
    ("name", "micro_batches"), [(n, m) for n in ("low", "cautious", "likely") for m in (1, 2, 16)]
)
def test_the_document_states_the_estimate(name: str, micro_batches: int) -> None:
    found = estimate(json.loads(RESULT.read_text()), name, micro_batches)
    rows = [
        [cell.strip() for cell in line.split("|")] for line in DOCUMENT.read_text().splitlines()
    ]
    (row,) = [row for row in rows if row[1:3] == [name, str(micro_batches)]]
    assert row[3:-1] == [
        f"{x:.1f}"
        for x in (found.bf16, found.saved, found.activations, found.weights, found.launches)
    ] + [f"{found.speed:.3f}"]


def test_fp8_pays_from_two_micro_batches_on() -> None:
    result = json.loads(RESULT.read_text())
    assert [estimate(result, "cautious", m).speed >= LEAST for m in (1, 2, 16)] == [
        False,
        True,
        True,
    ]
