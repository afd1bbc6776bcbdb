"""Results: what becomes one, what does not, and that a file is a whole result or none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from convergence.made import CONFIG, metrics_lines

from benchmarks.convergence import results
from benchmarks.convergence.results import Result


def harvested() -> Result:
    return results.harvest(metrics_lines(), CONFIG, {"a.b": 1}, {"cpu": "a"}, "sync")


def test_harvest() -> None:
    result = harvested()
    assert (result.model, result.variant, result.seed) == ("gpt", "sync", 1234)
    assert result.final_val_loss == 3.0
    assert result.val_loss == [(0, 5.0), (10, 4.0), (20, 3.0)]
    assert result.train_loss == [(10, 4.45), (20, 3.45)]
    assert (result.seconds, result.tokens, result.eval_tokens) == (
        10.0,
        20 * 4 * 4 * 128,
        4 * 4 * 4 * 128,
    )


LAST_IS_NAN = [*metrics_lines()[:-1], {"step": 20, "val_loss": None}]


@pytest.mark.parametrize(
    "rows", [metrics_lines()[:-2], metrics_lines(19), metrics_lines()[:-1], LAST_IS_NAN, []]
)
def test_a_run_that_is_not_complete_is_no_result(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="sync"):
        results.harvest(rows, CONFIG, {}, {}, "sync")


def test_bins_hold_every_step_once() -> None:
    assert results.binned([1.0] * 10 + [2.0] * 10 + [3.0, 5.0]) == [(10, 1.0), (20, 2.0), (22, 4.0)]
    assert results.binned([1.0, None, 3.0]) == [(3, 2.0)]


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = results.write(harvested(), tmp_path)
    assert path == tmp_path / "gpt" / "sync-s1234.json"
    assert results.read_all(tmp_path, "gpt") == [harvested()]
    assert results.read_all(tmp_path, "bert") == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"val_loss": [], "train_loss": []}'])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        results.read(path)


def test_a_result_is_of_its_configuration_whatever_the_folders() -> None:
    result = harvested()
    assert results.is_of(
        result, replace(CONFIG, train=replace(CONFIG.train, threads=3, save_interval=7))
    )
    assert not results.is_of(result, replace(CONFIG, train=replace(CONFIG.train, seed=5)))
    assert not results.is_of(replace(result, config={"model": {"no_such": 1}}), CONFIG)
