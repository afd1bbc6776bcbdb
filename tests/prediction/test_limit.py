"""The part of the memory that training may take."""

from __future__ import annotations

import os

import pytest

from hybridpar.prediction.limit import RESERVED, limit_here, memory_limit


def test_processes_share_what_a_host_has() -> None:
    whole = limit_here("cpu", 1)
    assert 0 < whole < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert limit_here("cpu", 4) == pytest.approx(whole / 4)


def test_an_accelerator_keeps_some_for_itself() -> None:
    assert 0.95 * (80e9 - RESERVED) < memory_limit(80e9, is_cpu=False) < 80e9 - RESERVED
