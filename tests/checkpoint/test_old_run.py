"""The folder of a run that an older version trained: it resumes, and trains as it did there.

old_run.tar.xz holds the folder, its configuration and its text: four steps of 2BW on four ranks
(pp = 2, dp = 2, ZeRO-1), without the last checkpoint. Its configuration has keys that were removed
or renamed since.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from train.runs import metrics, run_job, steps

pytestmark = pytest.mark.ranks

ARCHIVE = Path(__file__).parent / "old_run.tar.xz"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "old"


def losses(folder: Path) -> dict[int, float]:
    return {step: loss for step, loss, _ in steps(metrics(folder))}


@pytest.mark.parametrize("grid", [(), ("--parallel.pp", "1")])
def test_an_old_run_resumes_and_trains_as_it_did(folder: Path, grid: tuple[str, ...]) -> None:
    then = losses(folder)
    assert list(then) == [1, 2, 3, 4]
    (folder / "metrics.jsonl").unlink()
    said = run_job(2 if grid else 4, "train", "old.toml", *grid)
    assert "resuming after step 2" in said
    now = losses(folder)
    assert list(now) == [3, 4]
    assert now == {step: pytest.approx(then[step], rel=1e-5) for step in now}


@pytest.mark.thorough
def test_it_generates_without_its_text(folder: Path) -> None:
    (folder.parent.parent / "text.txt").unlink()
    command = [sys.executable, "-m", "hybridpar", "generate", "--checkpoint", str(folder)]
    options = ["--prompt", "The", "--max_tokens", "4"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The")
