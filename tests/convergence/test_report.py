"""The report's arithmetic, against numbers worked out by hand or by scipy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from convergence.made import made

from benchmarks.convergence import report, results
from benchmarks.convergence.report import BEGIN, END, Gap, by_variant, gap, gap_text, worth


def test_gap_is_paired_by_seed() -> None:
    found = gap({1: 4.04, 2: 5.10, 3: 9.0}, {1: 4.0, 2: 5.0})
    assert found is not None
    assert found.percent == pytest.approx(1.5)  # of 1 % and 2 %
    assert found.loss == pytest.approx(0.07)
    assert found.interval == pytest.approx(12.706 * math.sqrt(0.5) / math.sqrt(2))
    assert not found.significant
    assert gap({1: 4.0}, {2: 4.0}) is None
    alone = gap({1: 4.04}, {1: 4.0})
    assert alone is not None
    assert alone.interval is None


def test_interval_is_students() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees, quantile in report._T.items():
        assert quantile == pytest.approx(stats.t.ppf(0.975, degrees), abs=1e-3)


def test_worth_inverts_the_budget_curve() -> None:
    budgets = {1.0: 0.0, 0.9: 0.05, 0.8: 0.12}
    for share, loss in budgets.items():
        assert worth(loss, budgets) == pytest.approx(share)
    assert worth(0.025, budgets) == pytest.approx(math.sqrt(0.9))  # half way in the logarithm
    beyond = worth(0.19, budgets)
    better = worth(-0.05, budgets)
    assert beyond == pytest.approx(0.8 * 0.8 / 0.9)
    assert better == pytest.approx(1 / 0.9)
    assert worth(0.1, {1.0: 0.0}) is None


def test_gap_text() -> None:
    assert gap_text(Gap(1.8, 0.3, 0.07)) == "+1.80 % ± 0.30"
    assert gap_text(Gap(0.4, 0.3, 0.01)) == "**+0.40 % ± 0.30**"
    assert gap_text(Gap(0.2, 0.3, 0.01)) == "**+0.20 % ± 0.30** (within seed noise)"
    assert gap_text(Gap(-0.2, None, 0.01)) == "**-0.20 %**"


def test_runs_of_a_seed_must_have_begun_alike() -> None:
    alike = made("sync", 1, 3.0)
    other = made("2bw", 1, 3.1)
    assert by_variant([alike, other]) == {"sync": {1: alike}, "2bw": {1: other}}
    elsewhere = replace(other, val_loss=[(0, 5.1), (20, 3.0)])
    with pytest.raises(ValueError, match="2bw begins with validation loss"):
        by_variant([alike, elsewhere])
    by_variant([alike, replace(elsewhere, seed=2)])


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder of results for GPT whose gaps are known, and a README with markers."""
    for seed in (1, 2, 3):
        results.write(made("muon-sync", seed, 3.0 + seed / 100), tmp_path)
        results.write(made("muon-2bw", seed, 1.02 * (3.0 + seed / 100)), tmp_path)
        results.write(made("muon-sync-90", seed, 3.0 + seed / 100 + 0.03, num_steps=18), tmp_path)
    rate = min(lr for lr in report.SWEEPS["muon-"] if lr != report.MUON_RATES["gpt"])
    results.write(made(f"muon-sync{report.rate_suffix(rate)}", 1, 3.5), tmp_path)
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    return tmp_path


def test_report(written: Path) -> None:
    pytest.importorskip("matplotlib")
    report.write_report(written, written / "README.md")
    text = (written / "README.md").read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| muon-2bw: ")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    share = 0.9 ** (0.02 * 3.02 / 0.03)
    assert cells[2:] == ["3.0804 ± 0.0102", "+2.00 % ± 0.00", f"{100 * share:.0f} %"]
    assert "90 % of the tokens: +0.0300" in text
    assert "3.5000" in text
    assert "### BERT\n\nNo results yet." in text
    first = {p.name: p.read_bytes() for p in (written / "plots").iterdir()}
    assert first.keys() == {"gpt_curves.svg", "gpt_final.svg"}
    report.write_report(written, written / "README.md")
    assert (written / "README.md").read_text() == text
    assert {p.name: p.read_bytes() for p in (written / "plots").iterdir()} == first


def test_report_wants_its_markers(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(ValueError, match="needs the lines"):
        report.write_report(tmp_path, tmp_path / "README.md")
