"""Several operations of a rank wait at once with ZeRO, and the time-out of one of them breaks the
others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train.forked import supervised
from train.runs import write_config

pytestmark = pytest.mark.ranks


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("zero", [2, 3])
def test_gloos_time_out_blames_the_rank_that_hangs(tmp_path: Path, zero: int) -> None:
    """It comes long before the supervisor would notice that a rank hangs."""
    code, out = supervised(
        "train",
        write_config(tmp_path),
        "--ranks",
        "3",
        "--parallel.dp",
        "3",
        "--parallel.zero",
        str(zero),
        "--train.timeout_s",
        "3",
        "--faults.timeout_s",
        "200",
        "--faults.restarts",
        "0",
        "--inject",
        "hang rank 1 at step 4",
    )
    assert code == 1, out
    found = [
        json.loads(line)
        for line in (tmp_path / "runs" / "run" / "failures.jsonl").read_text().splitlines()
    ]
    assert [(one["kind"], one["rank"]) for one in found] == [("hangs", 1)], found
    assert "Traceback" not in out
    assert out.count("lost contact with another rank") == 2
