"""Every snippet of the documentation runs, but for those that say they take minutes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SNIPPETS = [
    (language, body) for name in ("README.md", "CONTRIBUTING.md", "docs/slow_links.md", "docs/own_models.md")
    for language, body in re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
]
PYTHON = [body for language, body in SNIPPETS if language == "python"]
COMMANDS = [line for language, body in SNIPPETS if language == "bash" and "not run here" not in body
            for line in body.splitlines() if line.startswith("hybridpar ")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("body", PYTHON, ids=range(len(PYTHON)))
@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.ranks)])
def test_python_snippets(body: str, num_ranks: int, tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(body)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    launcher = launcher if num_ranks > 1 else []
    out = subprocess.run([sys.executable, *launcher, "snippet.py"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True,
                         text=True, timeout=120, check=False)
    assert out.returncode == 0, out.stderr
    sums = set(re.findall(r"sum (-?[\d.]+)", out.stdout))
    assert len(sums) <= 1, out.stdout


def test_the_layer_example_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(PYTHON[0])
    sums = []  # on 3 ranks some keys and values are on two
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]):
        out = subprocess.run([sys.executable, *launcher, "snippet.py"], cwd=tmp_path, env=ENVIRONMENT,
                             capture_output=True, text=True, timeout=120, check=False)
        assert out.returncode == 0, out.stderr[-5000:]
        sums.append(float(re.findall(r"sum (-?[\d.]+)", out.stdout)[0]))
    assert sums[0] == pytest.approx(sums[1], abs=1e-3)  # float32 sums of 3072 elements, in another order


@pytest.mark.ranks
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str) -> None:
    out = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, env=ENVIRONMENT, capture_output=True,
                         text=True, timeout=120, check=False)
    assert out.returncode == 0, out.stdout + out.stderr


def test_every_file_that_is_named_exists() -> None:
    text = "".join(body for _, body in SNIPPETS) + (ROOT / "README.md").read_text()
    named = set(re.findall(r"\b(?:scripts|docs|benchmarks)/[\w/.]*\w", text))
    assert named
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, missing


@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/*.s*")), ids=lambda p: p.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
