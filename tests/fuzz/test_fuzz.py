"""Readers on mutated files; python -m tests.fuzz runs more of the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.harness import Tally, mutated, run_one
from fuzz.target import Target
from fuzz.targets import TARGETS


@pytest.mark.thorough(keep=7)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_valid_files_are_read(target: Target, tmp_path: Path) -> None:
    for i, files in enumerate(target.seeds):
        folder = tmp_path / str(i)
        folder.mkdir()
        tally = Tally()
        run_one(target, files, folder, tally, 0)
        assert (tally.failures, tally.rejected) == ([], 0)


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@settings(suppress_health_check=list(HealthCheck), database=None)
@given(st.randoms(use_true_random=False))
def test_mutated_files_are_read_or_refused(target: Target, random: Random) -> None:
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        run_one(target, mutated(target, random), Path(folder), tally, 0)
    assert not tally.failures
