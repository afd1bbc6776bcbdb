"""Speeds that others published, and our own on a GPU, as the planner estimates them."""

import pytest

from benchmarks.estimates import MEASURED, MEGATRON, megatron, ours


@pytest.mark.parametrize("name", MEASURED)
def test_our_h200(name):
    assert abs(ours(name)["error"]) < 0.1


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("row", MEGATRON[::3], ids=lambda row: f"{row[0]}B")
def test_megatron_lm(row):
    assert abs(megatron(row)["error"]) < 0.15
